"""The data pipelines of a real-estate marketplace, on Dagster."""
