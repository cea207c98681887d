"""The environment variables: defaults, bounds, and messages that name the variable, the value and the way out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pin_pipelines.settings import Settings, SettingsError, load_settings

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


@pytest.mark.parametrize(
    ("name", "maximum"),
    [
        ("PIN_POPULARITY_WINDOW_DAYS", 3650),
        ("PIN_POPULARITY_DECAY_HALF_LIFE_DAYS", 3650),
        ("PIN_POPULARITY_BATCH_SIZE", 10_000),
        ("PIN_POPULARITY_MAX_RUN_DURATION_SECONDS", 86_400),
        ("PIN_POPULARITY_WORKERS", 16),
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
    ],
)
def test_other_bad_value_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert f"{name}: {value!r} is not allowed" in str(refusal.value)
    assert f"it must be {allowed}" in str(refusal.value)


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
    ],
)
def test_url_of_the_wrong_scheme_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert name in str(refusal.value)
    assert "s3cret" not in str(refusal.value)
    assert "s3cret" not in repr(refusal.value.__context__)


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
