"""The popularity: formula, engine, and what operators meet in Dagster."""
