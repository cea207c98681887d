"""Feature flags, on a real table."""

from __future__ import annotations

from functools import partial

import psycopg
import pytest
from openfeature.exception import ErrorCode
from openfeature.flag_evaluation import Reason

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.resources.feature_flags import (
    KNOWN_FLAGS,
    PRICE_BACKFILL,
    Evaluation,
    FeatureFlagError,
    PostgresFlagProvider,
    evaluate,
    list_flags,
    set_flag,
)

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


# Through OpenFeature


def evaluated(url: str, name: str = PRICE_BACKFILL) -> Evaluation:
    return evaluate(partial(psycopg.connect, url, connect_timeout=5), name)


def test_evaluated_flag_that_was_never_set_is_off(database_url: str) -> None:
    assert evaluated(database_url) == Evaluation(enabled=False, switched_at=None, problem=None)


def test_evaluation_sees_each_flip_at_once_and_says_when_it_was(database_url: str) -> None:
    seen = []
    for enabled in (True, False, True):
        with psycopg.connect(database_url) as connection:
            set_flag(connection, PRICE_BACKFILL, enabled)
        seen.append(evaluated(database_url))
        with psycopg.connect(database_url) as connection:
            (stored,) = (flag.updated_at for flag in list_flags(connection) if flag.name == PRICE_BACKFILL)
        assert seen[-1] == Evaluation(enabled=enabled, switched_at=stored)
    assert not evaluated(database_url, RANKING).enabled


def test_flag_that_is_not_known_is_off_and_says_so(database_url: str) -> None:
    assert evaluated(database_url, "news.rank") == Evaluation(enabled=False, problem="there is no flag 'news.rank'")


def test_flag_of_a_database_without_the_table_is_off_and_names_the_command(postgres: EmbeddedPostgres) -> None:
    flag = evaluated(postgres.url("postgres"))
    assert not flag.enabled
    assert "pin-pipelines migrate" in (flag.problem or "")


def test_flag_is_off_while_the_server_is_down_and_says_why_without_the_password() -> None:
    flag = evaluated("postgresql://pin:s3cret@127.0.0.1:1/pin")
    assert not flag.enabled
    assert "port 1 failed" in (flag.problem or "")
    assert "s3cret" not in (flag.problem or "")


def test_flag_of_a_url_that_cannot_be_read_is_off_without_showing_it() -> None:
    assert evaluated("s3cret").problem == "ProgrammingError"


def test_provider_refuses_to_make_a_text_or_number_of_a_flag(database_url: str) -> None:
    provider = PostgresFlagProvider(partial(psycopg.connect, database_url))
    for details in (
        provider.resolve_string_details(PRICE_BACKFILL, "on"),
        provider.resolve_integer_details(PRICE_BACKFILL, 1),
        provider.resolve_float_details(PRICE_BACKFILL, 1.0),
        provider.resolve_object_details(PRICE_BACKFILL, {"on": True}),
    ):
        assert (details.error_code, details.reason) == (ErrorCode.TYPE_MISMATCH, Reason.ERROR)
        assert details.value in ("on", 1, 1.0, {"on": True})
