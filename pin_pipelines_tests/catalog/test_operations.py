"""Runs that Dagster launches on the local stack: backfills, a terminated run, a killed one."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from pin_pipelines_tests.support.brakes import before_snapshot, brake, nothing_is_held
from pin_pipelines_tests.support.catalogue import Catalogue
from pin_pipelines_tests.support.roles import apply_roles
from pin_pipelines_tests.support.stack import Up, ask, launch_today, run_status, up
from pin_pipelines_tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("operations")]

TODAY = datetime.now(UTC).date()


@pytest.fixture(scope="module")
def stack() -> Iterator[Up]:
    folder = Path(tempfile.mkdtemp(prefix="pin-operations-"))
    try:
        with up(folder) as started:
            yield started
            started.end(signal.SIGTERM)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def catalogue(stack: Up) -> Catalogue:
    """The stack's own database, emptied."""
    apply_roles(stack.postgres_url)
    catalogue = Catalogue(stack.postgres_url)
    catalogue.execute("TRUNCATE catalog.popularity_daily_views, catalog.popularity_runs")
    catalogue.execute("TRUNCATE catalog.property_object_cards, catalog.project_cards")
    return catalogue


def _process_of(stack: Up, run_id: str) -> psutil.Process:
    query = (
        "query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection "
        "{ events { ... on MessageEvent { message } } } } }"
    )
    events = ask(stack.address, query, id=run_id)["logsForRun"]["events"]
    pids = [re.search(r"Started process for run \(pid: (\d+)\)", event["message"]) for event in events]
    return psutil.Process(next(int(found[1]) for found in pids if found))


def test_backfill_of_past_and_present_partitions_harms_nothing(stack: Up, catalogue: Catalogue) -> None:
    card = catalogue.add(50)
    days = [TODAY - timedelta(days=ago) for ago in (3, 2, 1)]
    catalogue.store(card, dict(zip(days, (10, 20, 40), strict=True)))
    parameters = {
        "assetSelection": [
            {"path": ["catalog", name]}
            for name in ("popularity_daily_views", "property_object_popularity", "project_popularity")
        ],
        "partitionNames": [day.isoformat() for day in (*days, TODAY)],
    }

    launched = ask(
        stack.address,
        "mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) "
        "{ __typename ... on LaunchBackfillSuccess { backfillId } } }",
        p=parameters,
    )["launchPartitionBackfill"]
    query = (
        'query($id: String!) { runsOrError(filter: { tags: [{ key: "dagster/backfill", value: $id }] }) '
        "{ ... on Runs { results { status } } } }"
    )

    def statuses() -> list[str]:
        runs = ask(stack.address, query, id=launched["backfillId"])["runsOrError"]["results"]
        return [run["status"] for run in runs]

    # Not the backfill's own status: Dagster counts a partition that was not materialised as failed, even though its
    # run is green.
    until(lambda: statuses() == ["SUCCESS"] * 4, "four green runs", seconds=180)
    assert catalogue.snapshots(card) == {**dict(zip(days, (10, 20, 40), strict=True)), TODAY: 50}
    # 10 today, 20 yesterday and 10 the day before, by hand: 10 + 20 · 0.9057 + 10 · 0.82029249.
    assert str(catalogue.score(card)) == "36.3169"


def test_terminated_run_frees_all_locks_and_the_next_one_completes(stack: Up, catalogue: Catalogue) -> None:
    cards = catalogue.add_many(20, views=5)
    with brake(catalogue, before_snapshot(f"NEW.card_id = '{cards[10]}'")) as held:
        run_id = launch_today(stack.address)
        held.wait()
        answer = ask(
            stack.address,
            "mutation($id: String!) { terminateRun(runId: $id) { __typename } }",
            id=run_id,
        )["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess"
        until(lambda: run_status(stack.address, run_id) == "CANCELED", "the run to be cancelled")
        until(lambda: not held.paused(), "the statement to be cancelled")

    until(lambda: nothing_is_held(catalogue), "all locks to be free")
    (row,) = catalogue.ledger()
    assert (row["status"], row["stopped_reason"], row["snapshots_written"]) == ("Stopped", "interrupted", 0)
    assert catalogue.snapshot_counts(TODAY) == {}
    again = launch_today(stack.address)
    until(lambda: run_status(stack.address, again) == "SUCCESS", "the next run")
    assert sum(catalogue.snapshot_counts(TODAY).values()) == 20


def test_killed_run_does_not_stay_started(stack: Up, catalogue: Catalogue) -> None:
    cards = catalogue.add_many(20, views=5)
    with brake(catalogue, before_snapshot(f"NEW.card_id = '{cards[10]}'")) as held:
        run_id = launch_today(stack.address)
        held.wait()
        assert run_status(stack.address, run_id) == "STARTED"
        run = _process_of(stack, run_id)
        # With its code server, which would notice the death of its child; a host that is lost takes both.
        for process in (run.parent(), run):
            assert process is not None
            process.kill()
        held.release()
    until(lambda: nothing_is_held(catalogue), "all locks to be free")
    assert run_status(stack.address, run_id) == "STARTED"

    # The daemon does so once a minute; this is the same sensor in the webserver's code server.
    answer = ask(
        stack.address,
        "mutation($s: SensorSelector!) { sensorDryRun(selectorData: $s, cursor: null) "
        "{ __typename ... on PythonError { message } "
        "... on DryRunInstigationTick { evaluationResult { skipReason error { message } } } } }",
        s={
            "repositoryName": "__repository__",
            "repositoryLocationName": "pin_pipelines",
            "sensorName": "popularity_run_watchdog",
        },
    )["sensorDryRun"]
    assert "evaluationResult" in answer, answer
    assert answer["evaluationResult"] == {"skipReason": f"Reported as failed: {run_id}", "error": None}
    assert run_status(stack.address, run_id) == "FAILURE"
    (row,) = catalogue.ledger()
    assert (row["status"], row["stopped_reason"]) == ("Failed", "died")
