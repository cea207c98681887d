-- What the pipelines' users may do in ClickHouse. By an administrator, once both users are there (CREATE USER … with a
-- password of your own); on a cluster, with ON CLUSTER behind each GRANT.

-- Runs the backfill: appends facts and reads them, and looks at the table before it writes.
GRANT INSERT, SELECT ON pin_analytics.property_object_price_history_facts TO pin_pipeline;
GRANT SELECT ON system.tables TO pin_pipeline;
GRANT SELECT ON system.columns TO pin_pipeline;
GRANT SELECT ON system.settings TO pin_pipeline;

-- Runs `pin-pipelines migrate`: makes the table and its chart view, which it replaces when it is run again.
GRANT CREATE DATABASE, CREATE TABLE ON pin_analytics.* TO pin_migrations;
GRANT CREATE VIEW, DROP VIEW ON pin_analytics.property_object_price_daily TO pin_migrations;
GRANT SELECT ON pin_analytics.property_object_price_history_facts TO pin_migrations;
GRANT SELECT ON system.tables TO pin_migrations;
GRANT SELECT ON system.columns TO pin_migrations;
GRANT SELECT ON system.settings TO pin_migrations;
