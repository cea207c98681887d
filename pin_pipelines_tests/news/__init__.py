"""The ranking of posts: formula, engine, feed, likes, and what operators meet in Dagster."""
