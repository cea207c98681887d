"""The price history backfill: mapping, claim, engine, and what operators meet in Dagster."""
