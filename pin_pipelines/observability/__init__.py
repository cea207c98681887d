"""What tells people outside of Dagster how the pipelines are: metrics for Prometheus."""
