# The first start of compose.yaml's ClickHouse: the pipelines' users. What they may do is in grants.sql.
# The client takes user and password of the administrator from CLICKHOUSE_USER and CLICKHOUSE_PASSWORD, and the statements
# by standard input, so that no password is in a command line.
clickhouse-client --host 127.0.0.1 --multiquery <<SQL
CREATE USER IF NOT EXISTS pin_migrations IDENTIFIED WITH sha256_password BY '${CLICKHOUSE_MIGRATIONS_PASSWORD}';
CREATE USER IF NOT EXISTS pin_pipeline IDENTIFIED WITH sha256_password BY '${CLICKHOUSE_PIPELINE_PASSWORD}';
SQL
