"""The environment variables: defaults, bounds, and messages that name the variable, the value and the way out."""

import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from pin_pipelines.settings import Settings, SettingsError, load_clickhouse_settings, load_settings

URLS = {
    "PIN_POSTGRES_URL": "postgresql://pipeline:s3cret@db/pin",
    "PIN_DAGSTER_POSTGRES_URL": "postgresql+psycopg2://dagster:s3cret@db/dagster",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIN_")]:
        monkeypatch.delenv(name)
    for name, url in URLS.items():
        monkeypatch.setenv(name, url)


def test_defaults_are_those_of_the_spec() -> None:
    settings = load_settings()
    assert settings.popularity_window_days == 30
    assert settings.popularity_decay_half_life_days == 7
    assert settings.popularity_batch_size == 1000
    assert settings.popularity_max_run_duration_seconds == 1800
    assert settings.popularity_single_flight is False
    assert settings.popularity_workers == 1
    assert settings.news_ranking_w1 == settings.news_ranking_w3 == 1
    assert (settings.news_ranking_w2, settings.news_ranking_w4) == (Decimal("0.1"), Decimal("0.5"))
    assert (settings.news_ranking_half_life_days, settings.news_ranking_full_boost) == (7, 100)
    assert settings.news_ranking_author_trust == {"Platform": 1, "Developer": Decimal("0.5")}
    assert settings.news_ranking_batch_size == 1000


@pytest.mark.parametrize(
    ("name", "maximum"),
    [
        ("PIN_POPULARITY_WINDOW_DAYS", 3650),
        ("PIN_POPULARITY_DECAY_HALF_LIFE_DAYS", 3650),
        ("PIN_POPULARITY_BATCH_SIZE", 10_000),
        ("PIN_POPULARITY_MAX_RUN_DURATION_SECONDS", 86_400),
        ("PIN_POPULARITY_WORKERS", 16),
        ("PIN_BACKFILL_BATCH_SIZE", 1000),
        ("PIN_NEWS_RANKING_HALF_LIFE_DAYS", 365),
        ("PIN_NEWS_RANKING_BATCH_SIZE", 10_000),
    ],
)
def test_number_that_is_out_of_bounds_or_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, maximum: int
) -> None:
    for value in ("0", "-1", "seven", "1.5", "", str(maximum + 1)):
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError) as refusal:
            load_settings()
        assert f"{name}: {value!r} is not allowed" in str(refusal.value)
        assert f"it must be a whole number from 1 to {maximum}" in str(refusal.value)
    for value in ("1", str(maximum)):
        monkeypatch.setenv(name, value)
        load_settings()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PIN_POPULARITY_SINGLE_FLIGHT", "maybe", "true or false"),
        ("PIN_POPULARITY_FIRST_DATE", "yesterday", "a date such as 2026-01-31, not in the future"),
        ("PIN_POPULARITY_FIRST_DATE", "9999-01-01", "a date such as 2026-01-31, not in the future"),
        ("PIN_CLICKHOUSE_CLUSTER", "x' SYNC", "a cluster's name of letters, digits and any of _ - . { }"),
        ("PIN_TALENT_PATH", "prices", "a path that starts with /, without query or fragment"),
        ("PIN_TALENT_PATH", "/prices?take=1", "a path that starts with /, without query or fragment"),
        ("PIN_TALENT_PATH", "", "a path that starts with /, without query or fragment"),
        ("PIN_RUB_CURRENCY_ID", "RUB", "a UUID"),
        ("PIN_BACKFILL_FROM", "flat 7", "a UUID"),
        ("PIN_BACKFILL_TO", "flat 7", "a UUID that is not below PIN_BACKFILL_FROM"),
    ],
)
def test_other_bad_value_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert f"{name}: {value!r} is not allowed" in str(refusal.value)
    assert f"it must be {allowed}" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "bad", "good", "allowed"),
    [
        *(
            (
                f"PIN_NEWS_RANKING_W{number}",
                ["-0.1", "1000.1", "0.0000001", "NaN", "Infinity", "much", ""],
                ["0", "0.000001", "1000", "1e2"],
                "a number from 0 to 1000 with at most 6 decimals",
            )
            for number in range(1, 5)
        ),
        (
            "PIN_NEWS_RANKING_FULL_BOOST",
            ["0", "-1", "1000000000.1", "0.0000001", "NaN", ""],
            ["0.000001", "1000000000"],
            "a number above 0, up to 1000000000, with at most 6 decimals",
        ),
    ],
)
def test_weight_that_is_out_of_bounds_or_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: list[str], good: list[str], allowed: str
) -> None:
    for value in bad:
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError) as refusal:
            load_settings()
        assert f"{name}: {value!r} is not allowed" in str(refusal.value)
        assert f"it must be {allowed}." in str(refusal.value)
    for value in good:
        monkeypatch.setenv(name, value)
        load_settings()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("Platform=1", "Platform=1"),
        ("", ""),
        ("[1]", "[1]"),
        ("null", "None"),
        ('{"Agency": 1.1}', "1.1"),
        ('{"Agency": -0.1}', "-0.1"),
        ('{"Agency": 0.30000000000000001}', "0.30000000000000001"),
        ('{"Agency": "high"}', "high"),
        ('{"Agency": NaN}', "nan"),
        ('{"Agency": true}', "True"),
    ],
)
def test_trust_that_is_no_json_or_out_of_bounds_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, shown: str
) -> None:
    monkeypatch.setenv("PIN_NEWS_RANKING_AUTHOR_TRUST", value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert f"PIN_NEWS_RANKING_AUTHOR_TRUST: {shown!r} is not allowed" in str(refusal.value)
    assert "it must be a JSON object of numbers from 0 to 1 with at most 6 decimals" in str(refusal.value)


def test_trust_is_read_without_floats_and_may_be_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIN_NEWS_RANKING_AUTHOR_TRUST", '{"Platform": "1", "Agency": 0.000001}')
    assert load_settings().news_ranking_author_trust == {"Platform": Decimal(1), "Agency": Decimal("0.000001")}
    monkeypatch.setenv("PIN_NEWS_RANKING_AUTHOR_TRUST", "{}")
    assert load_settings().news_ranking_author_trust == {}


@pytest.mark.parametrize("name", list(URLS))
def test_missing_url_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match=f"{name} is not set; it must be a URL that starts with postgresql"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("PIN_DAGSTER_POSTGRES_URL", "postgresql://dagster:s3cret@db/dagster"),
        ("PIN_POSTGRES_URL", "postgresql+psycopg2://pipeline:s3cret@db/pin"),
        ("PIN_POSTGRES_URL", "postgresql://pipeline:more@s3cret@db/pin"),
        ("PIN_POSTGRES_URL", "postgresql://pipeline:s3cret@db:port/pin"),
        ("PIN_CLICKHOUSE_URL", "clickhouse://pipeline:s3cret@ch/pin"),
        ("PIN_CLICKHOUSE_URL", "https://:s3cret@"),
        ("PIN_CLICKHOUSE_URL", "https://pipeline:s3cret@ch:port"),
        ("PIN_CLICKHOUSE_URL", "chdb://s3cret"),
        ("PIN_CLICKHOUSE_URL", "chdb:///"),
        ("PIN_TALENT_BASE_URL", "talent.example/s3cret"),
        ("PIN_TALENT_BASE_URL", "ftp://talent.example/s3cret"),
        ("PIN_TALENT_BASE_URL", "https://pipeline:s3cret@talent.example"),
        ("PIN_TALENT_BASE_URL", "https://talent.example/?key=s3cret"),
        ("PIN_TALENT_BASE_URL", "https://talent.example/#s3cret"),
        ("PIN_TALENT_TOKEN", "s3cret\n"),
        ("PIN_TALENT_TOKEN", "s3cret s3cret"),
    ],
)
def test_secret_that_cannot_be_used_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert name in str(refusal.value)
    assert "s3cret" not in str(refusal.value)
    assert "s3cret" not in repr(refusal.value.__context__)


def test_everything_but_the_backfill_needs_none_of_its_variables() -> None:
    settings = load_settings()
    assert settings.talent_path == "/api/v1/property-object-prices"
    assert settings.backfill_batch_size == 1000
    assert (settings.backfill_from, settings.backfill_to) == (None, None)
    with pytest.raises(SettingsError) as refusal:
        settings.for_backfill()
    assert [line.split(" is not set; it must be ")[0] for line in str(refusal.value).splitlines()] == [
        "PIN_CLICKHOUSE_URL",
        "PIN_TALENT_BASE_URL",
        "PIN_TALENT_TOKEN",
        "PIN_RUB_CURRENCY_ID",
    ]


BACKFILL = {
    "PIN_CLICKHOUSE_URL": "https://pipeline:s3cret@ch:8443",
    "PIN_TALENT_BASE_URL": "https://talent.example/gateway",
    "PIN_TALENT_TOKEN": "s3cret",
    "PIN_RUB_CURRENCY_ID": "00000000-0000-4000-8000-000000000643",
}


def test_backfill_has_what_it_needs_when_all_of_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BACKFILL.items():
        monkeypatch.setenv(name, value)
    needed = load_settings().for_backfill()
    assert needed.clickhouse_url.get_secret_value() == "https://pipeline:s3cret@ch:8443"
    assert needed.talent_base_url.get_secret_value() == "https://talent.example/gateway"
    assert needed.talent_token.get_secret_value() == "s3cret"
    assert needed.rub_currency_id == UUID("00000000-0000-4000-8000-000000000643")
    assert "s3cret" not in repr(needed) + repr(load_settings())


@pytest.mark.parametrize("name", list(BACKFILL))
def test_empty_variable_of_the_backfill_counts_as_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each, value in BACKFILL.items():
        monkeypatch.setenv(each, "" if each == name else value)
    with pytest.raises(SettingsError, match=f"^{name} is not set"):
        load_settings().for_backfill()


@pytest.mark.parametrize("url", ["http://ch", "https://pipeline:s3cret@ch:8443/pin", "chdb:///var/lib/pin/clickhouse"])
def test_clickhouse_may_be_a_server_or_a_folder_and_is_read_without_the_rest(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for name in URLS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIN_CLICKHOUSE_URL", url)
    monkeypatch.setenv("PIN_CLICKHOUSE_CLUSTER", "{cluster}")
    settings = load_clickhouse_settings()
    assert settings.clickhouse_url is not None
    assert settings.clickhouse_url.get_secret_value() == url
    assert settings.clickhouse_cluster == "{cluster}"


def test_range_that_ends_before_it_begins_is_refused_with_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lower, upper = "0000000b-0000-4000-8000-000000000000", "0000000A-0000-4000-8000-000000000000"
    monkeypatch.setenv("PIN_BACKFILL_FROM", lower)
    monkeypatch.setenv("PIN_BACKFILL_TO", lower)
    assert load_settings().backfill_to == UUID(lower)
    monkeypatch.setenv("PIN_BACKFILL_TO", upper)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert f"PIN_BACKFILL_TO: '{upper}' is not allowed" in str(refusal.value)
    assert f"it is below PIN_BACKFILL_FROM, {lower}" in str(refusal.value)


def test_all_wrong_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIN_POPULARITY_WINDOW_DAYS", "0")
    monkeypatch.setenv("PIN_POPULARITY_WORKERS", "0")
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert len(str(refusal.value).splitlines()) == 2


def test_every_setting_is_described_and_says_what_it_allows() -> None:
    for field in Settings.model_fields.values():
        assert field.description
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["allowed"]


@pytest.mark.slow
def test_code_location_does_not_load_with_a_bad_setting(tmp_path: Path) -> None:
    loading = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-m", "pin_pipelines.definitions"],
        cwd=tmp_path,
        env={**os.environ, "PIN_POPULARITY_WINDOW_DAYS": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert loading.returncode != 0
    assert "PIN_POPULARITY_WINDOW_DAYS: '0' is not allowed" in loading.stdout + loading.stderr
    assert "s3cret" not in loading.stdout + loading.stderr
