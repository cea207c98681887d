"""Tests on real components: an embedded PostgreSQL, a real Dagster instance, real processes."""
