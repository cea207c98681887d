"""Feature flags, on a real table."""

from __future__ import annotations

import psycopg
import pytest

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.resources.feature_flags import KNOWN_FLAGS, FeatureFlagError, list_flags, set_flag

RANKING = "news.ranking.enabled"


def stand(url: str) -> dict[str, bool]:
    with psycopg.connect(url) as connection:
        return {flag.name: flag.enabled for flag in list_flags(connection)}


def test_flags_that_were_never_set_are_off(database_url: str) -> None:
    assert stand(database_url) == dict.fromkeys(KNOWN_FLAGS, False)


def test_a_flag_stays_as_it_was_set_last(database_url: str) -> None:
    for enabled in (True, True, False, True):
        with psycopg.connect(database_url) as connection:
            set_flag(connection, RANKING, enabled)
        assert stand(database_url)[RANKING] is enabled


def test_setting_a_flag_moves_its_time(database_url: str) -> None:
    times = []
    for enabled in (True, False):
        with psycopg.connect(database_url) as connection:
            set_flag(connection, RANKING, enabled)
        with psycopg.connect(database_url) as connection:
            times += [flag.updated_at for flag in list_flags(connection) if flag.name == RANKING]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0] < times[1]


def test_a_name_that_is_not_known_is_refused_with_those_that_are(database_url: str) -> None:
    with (
        psycopg.connect(database_url) as connection,
        pytest.raises(FeatureFlagError, match=r"no flag 'news\.rank'.*news\.ranking\.enabled"),
    ):
        set_flag(connection, "news.rank", True)


def test_a_row_of_a_flag_that_is_not_known_any_more_is_passed_over(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO pin_pipelines.feature_flags (name, enabled) VALUES ('old', true)")
    assert "old" not in stand(database_url)


def test_without_the_table_the_message_names_the_command_that_makes_it(postgres: EmbeddedPostgres) -> None:
    with (
        psycopg.connect(postgres.url("postgres")) as connection,
        pytest.raises(FeatureFlagError, match="pin-pipelines migrate"),
    ):
        list_flags(connection)
