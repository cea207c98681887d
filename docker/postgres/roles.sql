-- The roles of the pipelines in the marketplace's PostgreSQL (15 or newer), and what each may do.
--
--   pin_pipeline    runs the pipelines: reads of the cards what a score needs, locks them, and updates two of their
--                   columns; owns the pipelines' tables, for ANALYZE passes over what is another's.
--   pin_migrations  runs `pin-pipelines migrate`. What it makes it hands over to the role of its setting
--                   `pin_pipelines.owner`, so that who runs the pipelines needs no right to make anything.
--   pin_reader      the exporter and the analysts: reads.
--
-- With psql, by a superuser, in the marketplace's database. Run it before the first `migrate`, and again when tables
-- have come that it grants on: it takes nothing away. Passwords come from the environment, where it has them;
-- `\password pin_pipeline` in psql sets one that no log sees.
\set ON_ERROR_STOP on
\getenv pipeline_password PIPELINE_PASSWORD
\getenv migrations_password MIGRATIONS_PASSWORD
\getenv reader_password READER_PASSWORD

BEGIN;

DO $$
DECLARE
    role_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['pin_pipeline', 'pin_migrations', 'pin_reader'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
            EXECUTE format('CREATE ROLE %I LOGIN', role_name);
        END IF;
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), role_name);
    END LOOP;
    -- `migrate` makes the schemas that are not there.
    EXECUTE format('GRANT CREATE ON DATABASE %I TO pin_migrations', current_database());
END $$;

\if :{?pipeline_password}
ALTER ROLE pin_pipeline PASSWORD :'pipeline_password';
\endif
\if :{?migrations_password}
ALTER ROLE pin_migrations PASSWORD :'migrations_password';
\endif
\if :{?reader_password}
ALTER ROLE pin_reader PASSWORD :'reader_password';
\endif

-- Migrations change tables that the pipeline's role owns.
GRANT pin_pipeline TO pin_migrations;
ALTER ROLE pin_migrations SET pin_pipelines.owner = 'pin_pipeline';
ALTER ROLE pin_reader SET default_transaction_read_only = on;

CREATE SCHEMA IF NOT EXISTS catalog AUTHORIZATION pin_migrations;
CREATE SCHEMA IF NOT EXISTS invest_analytics AUTHORIZATION pin_migrations;
CREATE SCHEMA IF NOT EXISTS pin_pipelines AUTHORIZATION pin_migrations;

-- With the option, so that `migrate` may let the new owner in for the moment of the hand-over.
GRANT USAGE, CREATE ON SCHEMA catalog, invest_analytics, pin_pipelines TO pin_migrations WITH GRANT OPTION;
GRANT USAGE ON SCHEMA catalog, invest_analytics, pin_pipelines TO pin_pipeline, pin_reader;
ALTER DEFAULT PRIVILEGES FOR ROLE pin_migrations IN SCHEMA catalog, invest_analytics, pin_pipelines
    GRANT SELECT ON TABLES TO pin_reader;

DO $$
DECLARE
    wanted text;
BEGIN
    -- The catalog service's. A row's lock needs UPDATE on a column, whichever.
    FOREACH wanted IN ARRAY ARRAY['catalog.property_object_cards', 'catalog.project_cards'] LOOP
        IF to_regclass(wanted) IS NULL THEN
            RAISE NOTICE '% is not there yet: run this again when it is', wanted;
        ELSE
            EXECUTE format('GRANT SELECT (ctid, id, status, popularity_views, popularity_score, updated_at), '
                           'UPDATE (popularity_score, updated_at) ON %s TO pin_pipeline', wanted);
            EXECUTE format('GRANT SELECT (id, status, popularity_views, popularity_score, updated_at) '
                           'ON %s TO pin_reader', wanted);
        END IF;
    END LOOP;
    -- The pipelines' own, where another role migrated before there were these.
    FOREACH wanted IN ARRAY ARRAY[
        'catalog.popularity_daily_views', 'catalog.popularity_runs', 'invest_analytics.price_backfill_checkpoints',
        'invest_analytics.price_backfill_rejects', 'pin_pipelines.feature_flags'
    ] LOOP
        IF to_regclass(wanted) IS NOT NULL THEN
            EXECUTE format('ALTER TABLE %s OWNER TO pin_pipeline', wanted);
            EXECUTE format('GRANT SELECT ON %s TO pin_reader', wanted);
        END IF;
    END LOOP;
    IF to_regclass('pin_pipelines.alembic_version') IS NOT NULL THEN
        ALTER TABLE pin_pipelines.alembic_version OWNER TO pin_migrations;
    END IF;
END $$;

COMMIT;
