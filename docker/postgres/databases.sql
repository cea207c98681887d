-- The first start of compose.yaml's PostgreSQL, in the marketplace's database `pin`: nobody is let in but who is named,
-- and Dagster has a database of its own. The pipelines' roles are in roles.sql.
-- Passwords come by environment, so that they are in no command line.
\getenv dagster_password DAGSTER_PASSWORD

CREATE ROLE dagster LOGIN PASSWORD :'dagster_password';
CREATE DATABASE dagster OWNER dagster;
REVOKE CONNECT, TEMPORARY ON DATABASE dagster, pin FROM PUBLIC;
