"""The production set-up in ``docker/``: proxy, roles, alerts, and secrets that stay where they are."""
