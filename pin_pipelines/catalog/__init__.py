"""Popularity of catalogue cards: the engine of the nightly recompute, and its Dagster face in ``defs``."""
