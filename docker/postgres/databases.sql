-- The first start of compose.yaml's PostgreSQL: Dagster's database with its owner, and the marketplace's.
-- Passwords come by environment, so that they are in no command line.
\getenv dagster_password DAGSTER_PASSWORD

CREATE ROLE dagster LOGIN PASSWORD :'dagster_password';
CREATE DATABASE dagster OWNER dagster;
CREATE DATABASE pin;
REVOKE CONNECT, TEMPORARY ON DATABASE dagster, pin FROM PUBLIC;
