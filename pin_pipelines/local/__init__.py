"""The embedded default: PostgreSQL in a wheel, stand-ins for tables of other services, demo data, the local stack."""
