"""Traces: one span a run and one a batch, by the engines themselves, and on their way to a collector."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from uuid import UUID, uuid4

import dagster as dg
import pytest
from clickhouse_connect.driver.exceptions import ClickHouseError
from opentelemetry.trace import StatusCode

from pin_pipelines import tracing
from pin_pipelines.catalog.recompute import Parameters, TooManyItemErrorsError, recompute
from pin_pipelines.database import Connection
from pin_pipelines.definitions import build_definitions
from pin_pipelines.invest_analytics.checkpoints import Claim, Range
from pin_pipelines.invest_analytics.snapshots import SourceError
from pin_pipelines.news.views import PostgresPostViews, ViewTotals
from pin_pipelines_tests.support.catalogue import FLAT, PROJECT, TODAY, Catalogue
from pin_pipelines_tests.support.clickhouse_front import ClickHouseFront, refuse
from pin_pipelines_tests.support.daemon import daemon, launch, wait_until_ended
from pin_pipelines_tests.support.news import News
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, Listed, object_id, price, prices
from pin_pipelines_tests.support.spans import (
    Collector,
    Spans,
    attributes,
    collector,
    events,
    named,
    parent_id,
    record,
    span_id,
)
from pin_pipelines_tests.support.waiting import until

POPULARITY = "catalog.popularity_recompute"
BACKFILL = "invest_analytics.price_history_backfill"
RANKING = "news.ranking_recompute"

EXPORT = {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}  # an hour: what is sent is sent since the process ends


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    return record(monkeypatch)


def assert_one_trace(spans: Spans, run: str, batch: str, run_id: str) -> None:
    """One span of the run, the batches its children, and each has the run's id."""
    (parent,) = named(list(spans()), run)
    assert parent.parent is None
    for child in named(list(spans()), batch):
        assert parent_id(child) == span_id(parent)
    assert {span.name for span in spans()} == {run, batch}
    assert {attributes(span)["correlationId"] for span in spans()} == {run_id}


# Popularity


@pytest.mark.parametrize("workers", [1, 3])
def test_popularity_run_has_one_span_and_one_for_each_batch_of_each_worker(
    catalogue: Catalogue, spans: Spans, workers: int
) -> None:
    flats = catalogue.add_many(10)
    catalogue.add_many(3, kind=PROJECT)
    for card in flats[:5]:
        catalogue.store(card, {date(2026, 11, 29): 0})
        catalogue.set_views(card, 7)

    recompute(
        catalogue.connect,
        run_id="run-1",
        run_date=TODAY,
        parameters=Parameters(batch_size=4, workers=workers),
    )

    assert_one_trace(spans, POPULARITY, f"{POPULARITY}.batch", "run-1")
    (run,) = named(list(spans()), POPULARITY)
    assert attributes(run) == {
        "correlationId": "run-1",
        "run_date": "2026-11-30",
        "run_kind": "Full",
        "batch_size": 4,
        "stopped_reason": "completed",
    }
    batches = [attributes(span) for span in named(list(spans()), f"{POPULARITY}.batch")]
    assert sorted((each["card_kind"], each["batch_size"], each["updated_count"]) for each in batches) == [
        ("Project", 3, 0),
        ("PropertyObject", 2, 0),
        ("PropertyObject", 4, 1),
        ("PropertyObject", 4, 4),
    ]


def test_popularity_batch_notes_its_poison_and_that_it_was_read_again(catalogue: Catalogue, spans: Spans) -> None:
    _, bad = catalogue.add_many(2)
    catalogue.set_views(bad, -1)
    deadlocks = ["CREATE SEQUENCE catalog.once", "GRANT USAGE ON SEQUENCE catalog.once TO PUBLIC"]
    catalogue.execute(
        ";".join(deadlocks) + ";"
        "CREATE FUNCTION catalog.deadlock() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF nextval('catalog.once') = 1 THEN RAISE deadlock_detected; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER deadlock BEFORE INSERT ON catalog.popularity_daily_views "
        "FOR EACH ROW EXECUTE FUNCTION catalog.deadlock()"
    )

    catalogue.run()

    (batch,) = named(list(spans()), f"{POPULARITY}.batch")
    assert batch.status.status_code is StatusCode.UNSET
    assert attributes(batch)["item_errors"] == 1
    (again, said), (failed, about) = events(batch)
    assert (again, said) == ("batch is read again", {"exception": "DeadlockDetected"})
    assert failed == "item failed"
    assert (about["card_kind"], about["card_id"]) == (FLAT, str(bad))
    assert about["exception"].startswith("CheckViolation: ")


def test_popularity_run_that_fails_has_the_error_in_its_span_and_in_that_of_its_batch(
    catalogue: Catalogue, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pin_pipelines.catalog.recompute.MAX_ITEM_ERRORS", 1)
    for card in catalogue.add_many(2):
        catalogue.set_views(card, -1)

    with pytest.raises(TooManyItemErrorsError):
        catalogue.run()

    assert [span.name for span in spans()] == [POPULARITY, f"{POPULARITY}.batch"]
    for span in spans():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description is not None
        assert span.status.description.startswith("TooManyItemErrorsError: more than 1 cards failed")
        assert [name for name, _ in events(span)] == ["exception"]
    assert attributes(spans()[0])["stopped_reason"] == "error"


def test_popularity_run_without_cards_has_no_batch(catalogue: Catalogue, spans: Spans) -> None:
    catalogue.run()
    assert [span.name for span in spans()] == [POPULARITY]


def test_run_through_dagster_is_traced_under_its_run_id(
    catalogue: Catalogue, instance: dg.DagsterInstance, spans: Spans
) -> None:
    catalogue.add(1)
    result = (
        build_definitions()
        .resolve_job_def("popularity_recompute")
        .execute_in_process(partition_key=datetime.now(UTC).date().isoformat(), instance=instance)
    )
    assert result.success
    assert_one_trace(spans, POPULARITY, f"{POPULARITY}.batch", result.run_id)


# The price backfill


@pytest.fixture
def backfill(database_url: str, open_folder: str) -> Backfill:
    return Backfill(database_url, open_folder).furnish()


def test_backfill_run_has_one_span_and_one_for_each_page(backfill: Backfill, spans: Spans) -> None:
    run_id = uuid4()
    bad = price(3, currentPrice=-1)
    items = [price(1), price(2), bad, price(4), price(5), price(6)]

    backfill.run(Listed(items), Range(object_id(1), None), run_id=run_id, batch_size=4)

    assert_one_trace(spans, BACKFILL, f"{BACKFILL}.page", str(run_id))
    run, first, second = spans()
    assert attributes(run) == {
        "correlationId": str(run_id),
        "from_property_object_id": str(object_id(1)),
        "batch_size": 4,
        "checkpoint_id": str(run_id),
        "stopped_reason": "completed",
    }
    assert attributes(first) == {
        "correlationId": str(run_id),
        "from_property_object_id": str(object_id(1)),
        "to_property_object_id": str(object_id(4)),
        "batch_size": 4,
        "first_source_event_id": f"backfill:{object_id(1)}:2026-01-15T10:20:30.1234567+03:00",
        "last_source_event_id": f"backfill:{object_id(4)}:2026-01-15T10:20:30.1234567+03:00",
        "ingested_count": 3,
        "rejected_count": 1,
    }
    assert attributes(second)["to_property_object_id"] == str(object_id(6))


def test_source_event_id_of_a_stored_row_leads_to_the_run_that_wrote_it(backfill: Backfill, spans: Spans) -> None:
    runs = {}
    for lower, upper in ((1, 4), (5, 8)):
        run_id = uuid4()
        runs |= dict.fromkeys((object_id(n) for n in range(lower, upper + 1)), str(run_id))
        backfill.run(Listed(prices(8)), Range(object_id(lower), object_id(upper)), run_id=run_id, batch_size=3)

    pages = [attributes(span) for span in named(list(spans()), f"{BACKFILL}.page")]
    for row in backfill.facts():
        (page,) = [
            page
            for page in pages
            if page["first_source_event_id"] <= row["SourceEventId"] <= page["last_source_event_id"]
        ]
        assert page["correlationId"] == runs[row["PropertyObjectId"]]


def test_backfill_page_notes_the_insert_that_was_tried_again(
    fronted: Backfill, front: ClickHouseFront, spans: Spans
) -> None:
    front.fail(refuse(252, "TOO_MANY_PARTS"))
    fronted.run(Listed(prices(4)), sleep=lambda _: None)
    (page,) = named(list(spans()), f"{BACKFILL}.page")
    assert page.status.status_code is StatusCode.UNSET
    assert events(page) == [("insert failed", {"attempt": 1, "exception": "DatabaseError"})]


def test_backfill_run_that_fails_has_the_error_in_its_span_and_in_that_of_its_page(
    fronted: Backfill, front: ClickHouseFront, spans: Spans
) -> None:
    front.fail(*[refuse(252, "TOO_MANY_PARTS")] * 9)
    with pytest.raises(ClickHouseError, match="TOO_MANY_PARTS"):
        fronted.run(Listed(prices(4)), sleep=lambda _: None)
    assert [span.name for span in spans()] == [BACKFILL, f"{BACKFILL}.page"]
    assert [span.status.status_code for span in spans()] == [StatusCode.ERROR] * 2
    assert "TOO_MANY_PARTS" in (spans()[1].status.description or "")


def test_backfill_run_whose_source_fails_has_the_error_in_its_span(backfill: Backfill, spans: Spans) -> None:
    def fail(page: int) -> None:
        if page == 2:
            raise SourceError("the source is down")

    with pytest.raises(SourceError):
        backfill.run(Listed(prices(8), before=fail))
    run, page = spans()
    assert (run.status.status_code, run.status.description) == (StatusCode.ERROR, "SourceError: the source is down")
    assert (page.name, page.status.status_code) == (f"{BACKFILL}.page", StatusCode.UNSET)


def test_backfill_run_that_finds_the_range_taken_says_so(backfill: Backfill, spans: Spans) -> None:
    with Claim(backfill.connect, EVERYTHING, run_id=uuid4()) as claim:
        claim.take(4)
        backfill.run(Listed(prices(4)))
    (run,) = spans()
    assert attributes(run)["stopped_reason"] == "claim_taken"


# The ranking of posts


def test_ranking_run_has_one_span_and_one_for_each_batch(news: News, spans: Spans) -> None:
    news.add_many(5)
    news.run(date(2024, 11, 30), run_id="run-2", batch_size=3)
    assert_one_trace(spans, RANKING, f"{RANKING}.batch", "run-2")
    run, *batches = spans()
    assert attributes(run) == {
        "correlationId": "run-2",
        "as_of": "2024-11-30",
        "batch_size": 3,
        "stopped_reason": "completed",
    }
    assert [(each["batch_size"], each["updated_count"]) for each in map(attributes, batches)] == [(3, 3), (2, 2)]


def test_ranking_run_that_fails_has_the_error_in_its_span_and_in_that_of_its_batch(news: News, spans: Spans) -> None:
    class Broken(PostgresPostViews):
        def totals(self, post_ids: Sequence[UUID], as_of: date) -> Mapping[UUID, ViewTotals]:
            raise ConnectionError("no views today")

    def broken(connection: Connection) -> Broken:
        return Broken(connection)

    news.add()
    with pytest.raises(ConnectionError):
        news.run(open_views=broken)
    assert [(span.name, span.status.description) for span in spans()] == [
        (RANKING, "ConnectionError: no views today"),
        (f"{RANKING}.batch", "ConnectionError: no views today"),
    ]


# Threads


def test_job_in_another_thread_belongs_to_the_span_that_it_was_made_in(spans: Spans) -> None:
    def job() -> None:
        with tracing.span("child", "run"):
            pass

    with tracing.span("parent", "run"):
        thread = threading.Thread(target=tracing.carried(job))
        thread.start()
        thread.join()
    parent, child = spans()
    assert parent_id(child) == span_id(parent)


# Export


@pytest.mark.slow
def test_without_a_collector_nothing_is_set_up_and_the_sdk_is_not_even_loaded() -> None:
    program = (
        "import sys\n"
        "from opentelemetry import trace\n"
        "from pin_pipelines import tracing\n"
        "from pin_pipelines.definitions import build_definitions\n"
        "build_definitions()\n"
        "with tracing.span('run', 'id'):\n"
        "    assert not trace.get_current_span().is_recording()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    done = run_python(program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def receiver() -> Iterator[Collector]:
    with collector() as server:
        yield server


@pytest.mark.slow
def test_run_worker_sends_its_spans_before_it_ends(
    catalogue: Catalogue,
    instance: dg.DagsterInstance,
    receiver: Collector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that Dagster's launcher starts for a run, and that ends with it."""
    catalogue.add(1)
    for name, value in {
        **EXPORT,
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=of-the-collector",
    }.items():
        monkeypatch.setenv(name, value)
    with daemon(tmp_path):
        launch("popularity_recompute", partition=datetime.now(UTC).date().isoformat())
        (run,) = wait_until_ended(instance, 1)
        until(lambda: receiver.requests, "spans")
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert sorted(receiver.spans()) == [(POPULARITY, run.run_id), (f"{POPULARITY}.batch", run.run_id)]
    assert receiver.services() == {"pin-pipelines"}
    assert {headers["api-key"] for headers in receiver.headers} == {"of-the-collector"}


SPAN_PROGRAM = (
    "from pin_pipelines import tracing\n"
    "import logging; logging.basicConfig(format='%(message)s')\n"
    "tracing.export_spans(); tracing.export_spans()\n"
    "with tracing.span('run', 'id'):\n"
    "    pass\n"
)


@pytest.mark.slow
def test_process_ends_in_order_though_the_collector_is_gone() -> None:
    with collector() as gone:
        pass
    done = run_python(SPAN_PROGRAM, OTEL_EXPORTER_OTLP_ENDPOINT=gone.url, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}], ids=lambda off: next(iter(off))
)
def test_export_is_switched_off_by_the_standard_variables(receiver: Collector, off: dict[str, str]) -> None:
    done = run_python(SPAN_PROGRAM, **EXPORT, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, **off)
    assert done.returncode == 0, done.stderr
    assert receiver.requests == []


@pytest.mark.slow
def test_service_is_named_as_the_standard_variables_say(receiver: Collector) -> None:
    url = f"{receiver.url}/v1/traces"
    run_python(SPAN_PROGRAM, **EXPORT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=url, OTEL_SERVICE_NAME="nightly")
    run_python(
        SPAN_PROGRAM,
        **EXPORT,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=url,
        OTEL_RESOURCE_ATTRIBUTES="service.name=daily,deployment.environment.name=test",
    )
    assert receiver.services() == {"nightly", "daily"}


@pytest.mark.slow
def test_protocol_that_is_not_built_in_is_named_and_stops_nobody(receiver: Collector) -> None:
    done = run_python(SPAN_PROGRAM, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert done.returncode == 0
    assert "no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc' and must be http/protobuf" in done.stderr


@pytest.mark.slow
def test_missing_extra_is_named_and_stops_nobody(receiver: Collector) -> None:
    without = "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None\n"
    done = run_python(without + SPAN_PROGRAM, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
    assert done.returncode == 0
    assert "no traces are sent: " in done.stderr
    assert "install with the extra `otel`" in done.stderr


@pytest.mark.slow
def test_export_that_somebody_else_set_up_is_left_as_it_is(receiver: Collector) -> None:
    first = (
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "theirs = TracerProvider(); trace.set_tracer_provider(theirs)\n"
    )
    done = run_python(
        f"{first}{SPAN_PROGRAM}assert trace.get_tracer_provider() is theirs\n",
        **EXPORT,
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
    )
    assert done.returncode == 0, done.stderr
    assert receiver.requests == []


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "PIN_POSTGRES_URL": "postgresql://nobody@/none",
        "PIN_DAGSTER_POSTGRES_URL": "postgresql+psycopg2://nobody@/none",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PIN_"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | settings | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
