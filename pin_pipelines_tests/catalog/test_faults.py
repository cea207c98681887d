"""Faults on real processes and a real server: whatever stops, holds up or spoils a run, what is stored stays right.

Runs are paused at named points (``brakes``), since a fault that hits at random proves nothing.
"""

import logging
import random
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from pin_pipelines.catalog import recompute as engine
from pin_pipelines.catalog import statements
from pin_pipelines.catalog.decay import reference_score
from pin_pipelines.catalog.ledger import RunAlreadyAliveError, RunKind
from pin_pipelines.catalog.recompute import Parameters, Progress, StopReason, Summary, TooManyItemErrorsError
from pin_pipelines.catalog.tables import LEDGER, SNAPSHOTS, CardKind
from pin_pipelines.local.postgres import EmbeddedPostgres, StopMode
from pin_pipelines.local.stand_ins import create_stand_ins
from pin_pipelines.migrations import migrate
from pin_pipelines_tests.support.audit import Card, start_audit, times_written, written_in_order
from pin_pipelines_tests.support.brakes import (
    BEFORE_RETENTION,
    Point,
    before_commit,
    before_snapshot,
    brake,
    locked_cards,
    nothing_is_held,
)
from pin_pipelines_tests.support.catalogue import FLAT, PROJECT, TODAY, Catalogue, card_id, night
from pin_pipelines_tests.support.processes import background, run_process
from pin_pipelines_tests.support.roles import apply_roles
from pin_pipelines_tests.support.waiting import until

FLATS, PROJECTS = [card_id(n) for n in range(1, 13)], [card_id(n) for n in range(1, 5)]
BATCH = 4
IN_FOURS = Parameters(batch_size=BATCH)


def furnish(catalogue: Catalogue) -> None:
    """Three batches of objects and one of projects, each with growth today, history, and something to prune."""
    for kind, number in ((FLAT, len(FLATS)), (PROJECT, len(PROJECTS))):
        for n, card in enumerate(catalogue.add_many(number, kind=kind, views=100)):
            catalogue.store(card, {night(-33): 0, night(-3): 10, night(-2): 40 + n, night(-1): 90 - n}, kind=kind)


@pytest.fixture
def furnished(catalogue: Catalogue) -> Catalogue:
    furnish(catalogue)
    return catalogue


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run waits for before it goes on without: here it never comes, so each wait is a tenth of the real one."""
    monkeypatch.setattr(engine, "STOP_GRACE_SECONDS", engine.STOP_GRACE_SECONDS / 10)
    for name, real, short in (("WORKER_SESSION", "'5s'", "'500ms'"), ("WAIT_A_LITTLE", "'2s'", "'200ms'")):
        statement: str = getattr(statements, name)
        assert statement.count(f"'lock_timeout', {real}") == 1
        monkeypatch.setattr(statements, name, statement.replace(f"'lock_timeout', {real}", f"'lock_timeout', {short}"))


@pytest.fixture
def twin_of(postgres: EmbeddedPostgres, new_database: Callable[[str], str]) -> Callable[[Catalogue], Catalogue]:
    """A second database with all that the first one holds."""

    def copy(catalogue: Catalogue) -> Catalogue:
        catalogue.leave()
        name = psycopg.conninfo.conninfo_to_dict(catalogue.url)["dbname"]
        return Catalogue(postgres.url(new_database(str(name))))

    return copy


def wait_until_free(catalogue: Catalogue) -> None:
    until(lambda: nothing_is_held(catalogue), "all locks to be free")


def wait_until_blocked(catalogue: Catalogue, application: str) -> None:
    """Until a session of this name waits for a lock."""
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE %s"
    in_this = " AND datname = current_database()"
    until(lambda: catalogue.execute(waiting + in_this, application), f"a session {application} to wait for a lock")


def once_each(flats: list[UUID], projects: list[UUID]) -> dict[Card, int]:
    return {**{(FLAT, card): 1 for card in flats}, **{(PROJECT, card): 1 for card in projects}}


def assert_scores_follow_from_what_is_stored(catalogue: Catalogue) -> None:
    for kind in CardKind:
        for card, score in catalogue.scores(kind=kind).items():
            snapshots = catalogue.snapshots(card, kind=kind)
            assert score == reference_score(snapshots, max(snapshots), 30, 7), (kind, card, snapshots)


def assert_the_ledger_tells_what_is_stored(catalogue: Catalogue, row: dict[str, Any]) -> None:
    stored = catalogue.snapshot_counts()
    assert row["property_object_cards_processed"] == stored.get(FLAT, 0)
    assert row["project_cards_processed"] == stored.get(PROJECT, 0)
    assert row["snapshots_written"] == sum(stored.values())


# Killed and terminated

KILL_POINTS = {
    "a first batch is locked": before_snapshot(f"NEW.card_kind = 'PropertyObject' AND NEW.card_id = '{FLATS[1]}'"),
    "the scores of a later batch are written": Point(
        f"AFTER UPDATE ON {FLAT.table}",
        f"NEW.id = '{FLATS[6]}' AND NEW.popularity_score <> OLD.popularity_score",
    ),
    "a batch is being committed": before_commit(f"NEW.property_object_stop_id = '{FLATS[7]}'"),
    "the projects have begun": before_snapshot("NEW.card_kind = 'Project'"),
    "old snapshots are being removed": BEFORE_RETENTION,
}


@pytest.mark.slow
@pytest.mark.parametrize("counters", ["move", "stand still"])
@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_that_is_ended_leaves_no_lock_and_the_next_one_gives_the_rows_of_an_undisturbed_run(
    furnished: Catalogue,
    twin_of: Callable[[Catalogue], Catalogue],
    ended_by: signal.Signals,
    point: str,
    counters: str,
) -> None:
    twin = twin_of(furnished)
    with brake(furnished, KILL_POINTS[point]) as held, run_process(furnished, batch_size=BATCH) as process:
        held.wait()
        process.send_signal(ended_by)
        process.wait()
        if ended_by is signal.SIGKILL:
            # The statement in hand runs on in the server, without a client; the brake would hold it for ever.
            held.release()
        wait_until_free(furnished)
    (cut,) = furnished.ledger()
    assert_the_ledger_tells_what_is_stored(furnished, cut)
    if counters == "move":
        for n, card in enumerate(FLATS):
            furnished.view(card, n)
            twin.view(card, n)

    furnished.run(parameters=IN_FOURS)
    twin.run(parameters=IN_FOURS)

    assert furnished.stored() == twin.stored()
    closed, completed = furnished.ledger()
    expected = ("Failed", "died") if ended_by is signal.SIGKILL else ("Stopped", "interrupted")
    assert (closed["status"], closed["stopped_reason"]) == expected
    assert completed["status"] == "Completed"


@pytest.mark.slow
def test_a_terminated_run_with_four_workers_takes_all_their_batches_back(furnished: Catalogue) -> None:
    with (
        brake(furnished, before_snapshot()) as held,
        run_process(furnished, batch_size=3, workers=4) as process,
    ):
        held.wait(4)
        process.terminate()
        process.wait()
        wait_until_free(furnished)
    assert furnished.snapshot_counts() == {}
    (row,) = furnished.ledger()
    assert (row["status"], row["stopped_reason"], row["snapshots_written"]) == ("Stopped", "interrupted", 0)


def test_the_next_run_closes_a_dead_run_in_the_ledger_and_leaves_a_live_one_alone(furnished: Catalogue) -> None:
    point = before_snapshot(f"NEW.run_date = '{night(-1)}'")
    furnished.execute(
        f"INSERT INTO {LEDGER} (run_id, run_date, run_kind, handled_since, batch_size) "
        "VALUES ('dead', %s, 'Full', now(), 1)",
        night(-2),
    )
    with (
        brake(furnished, point) as held,
        background(partial(furnished.run, night(-1), parameters=IN_FOURS)) as (alive,),
    ):
        held.wait()
        furnished.run(parameters=IN_FOURS, run_kind=RunKind.REBUILD, card_ids=[FLATS[11]])
        status = {row["run_date"]: (row["status"], row["stopped_reason"]) for row in furnished.ledger()}
        held.release()
        alive.result()
    assert status == {night(-2): ("Failed", "died"), night(-1): ("Running", None), TODAY: ("Completed", "completed")}


# Stopped inside a batch


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_stop_signal_inside_a_transaction_takes_it_back_whole_and_frees_its_locks(
    furnished: Catalogue, point: str
) -> None:
    stop = threading.Event()
    with (
        brake(furnished, KILL_POINTS[point]) as held,
        background(partial(furnished.run, parameters=IN_FOURS, stop=stop)) as (run,),
    ):
        held.wait()
        stop.set()
        summary = run.result()
        wait_until_free(furnished)
    handled_before = {
        "a first batch is locked": 0,
        "the projects have begun": 12,
        "old snapshots are being removed": 16,
    }.get(point, BATCH)
    assert summary.stopped_reason is StopReason.STOP_SIGNAL
    assert (summary.snapshots_written, summary.cards_remaining) == (handled_before, 16 - handled_before)
    assert summary.snapshots_pruned == 0
    (row,) = furnished.ledger()
    assert (row["status"], row["stopped_reason"]) == ("Stopped", "stop_signal")
    assert_the_ledger_tells_what_is_stored(furnished, row)
    touched = [card for card, score in furnished.scores().items() if score]
    assert len(touched) == min(handled_before, len(FLATS))
    assert furnished.snapshot_counts(night(-33)) == {FLAT: len(FLATS), PROJECT: len(PROJECTS)}


# The server goes


@pytest.fixture(scope="module")
def fragile_server() -> Iterator[EmbeddedPostgres]:
    """A server that a test may stop: the session's is shared."""
    folder = Path(tempfile.mkdtemp(prefix="pin-tests-fragile-"))
    try:
        with EmbeddedPostgres(folder / "postgres") as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_of_postgresql_fails_the_run_keeps_what_was_committed_and_the_next_run_completes(
    fragile_server: EmbeddedPostgres, mode: StopMode
) -> None:
    fragile_server.ensure_database(mode)
    catalogue = Catalogue(fragile_server.url(mode))
    migrate(catalogue.url)
    with psycopg.connect(catalogue.url) as connection:
        create_stand_ins(connection)
    apply_roles(catalogue.url)
    furnish(catalogue)
    with (
        brake(catalogue, KILL_POINTS["the scores of a later batch are written"]) as held,
        background(partial(catalogue.run, parameters=IN_FOURS)) as (run,),
    ):
        held.wait()
        # A crash takes back the last commits (synchronous_commit is off), unless another one goes to the disk.
        catalogue.execute("CREATE TABLE catalog.on_disk ()")
        fragile_server.restart(mode)
        catalogue.leave()
        with pytest.raises(psycopg.OperationalError):
            run.result()

    assert catalogue.snapshot_counts() == {FLAT: BATCH}
    assert_the_ledger_tells_what_is_stored(catalogue, catalogue.ledger()[0])
    summary = catalogue.run(parameters=IN_FOURS)
    assert (summary.stopped_reason, summary.snapshots_written) == (StopReason.COMPLETED, 16)
    assert [row["status"] for row in catalogue.ledger()] == ["Failed", "Completed"]
    assert_scores_follow_from_what_is_stored(catalogue)


def test_a_worker_that_loses_its_connection_fails_the_run_and_the_others_finish_their_batches(
    furnished: Catalogue,
) -> None:
    with (
        brake(furnished, before_snapshot(f"NEW.card_id = '{FLATS[5]}'")) as held,
        background(partial(furnished.run, parameters=Parameters(batch_size=BATCH, workers=2))) as (run,),
    ):
        held.wait()
        furnished.execute("SELECT pg_terminate_backend(%s)", held.paused()[0])
        with pytest.raises(psycopg.OperationalError):
            run.result()
        wait_until_free(furnished)
    (row,) = furnished.ledger()
    assert row["status"] == "Failed"
    assert_the_ledger_tells_what_is_stored(furnished, row)
    assert not furnished.snapshots(FLATS[5]).keys() & {TODAY}


# Beside a consumer, and beside each other


@pytest.mark.slow
def test_a_consumer_at_full_speed_loses_no_increment(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(200)
    catalogue.run(night(-1))
    done, counted = threading.Event(), Counter[UUID]()

    def consume() -> None:
        chance = random.Random(1)
        with psycopg.connect(catalogue.url, autocommit=True) as connection:
            while not done.is_set():
                card = chance.choice(cards)
                connection.execute(
                    f"UPDATE {FLAT.table} SET popularity_views = popularity_views + 1 WHERE id = %s", [card]
                )
                counted[card] += 1

    with background(consume) as (consumer,):
        try:
            for workers in (1, 2, 4):
                catalogue.run(parameters=Parameters(batch_size=20, workers=workers))
                come_along = counted.total() + 100
                until(partial(lambda aim: counted.total() > aim, come_along), "the consumer to come along")
        finally:
            done.set()
        consumer.result()

    counters = dict(catalogue.execute(f"SELECT id, popularity_views FROM {FLAT.table} WHERE popularity_views > 0"))
    assert counters == dict(counted)
    assert all(catalogue.snapshots(card)[TODAY] <= counted[card] for card in cards)
    assert_scores_follow_from_what_is_stored(catalogue)
    catalogue.run()
    assert catalogue.scores() == {card: counted[card] for card in cards}


def test_a_run_holds_the_cards_of_one_batch_at_a_time_and_none_between_batches(furnished: Catalogue) -> None:
    between: list[list[UUID]] = []
    with (
        brake(furnished, before_snapshot(f"NEW.card_id = '{FLATS[1]}'")) as first,
        brake(furnished, KILL_POINTS["the scores of a later batch are written"]) as second,
        brake(furnished, before_commit(f"NEW.property_object_stop_id = '{FLATS[11]}'")) as third,
        background(
            partial(furnished.run, parameters=IN_FOURS, on_progress=lambda _: between.append(locked_cards(furnished)))
        ) as (run,),
    ):
        for n, held in enumerate((first, second, third)):
            held.wait()
            assert locked_cards(furnished) == FLATS[n * BATCH : (n + 1) * BATCH]
            held.release()
        run.result()
    assert between == [[]] * 4


def test_four_workers_hold_four_batches_at_the_most_and_handle_every_card_once(catalogue: Catalogue) -> None:
    flats, projects = catalogue.add_many(200, views=9), catalogue.add_many(30, kind=PROJECT, views=9)
    start_audit(catalogue)
    with (
        brake(catalogue, before_snapshot()) as held,
        background(partial(catalogue.run, parameters=Parameters(batch_size=10, workers=4))) as (run,),
    ):
        held.wait(4)
        assert locked_cards(catalogue) == flats[:40]
        held.release()
        summary = run.result()
    assert times_written(catalogue) == once_each(flats, projects)
    assert (summary.property_object_cards_processed, summary.project_cards_processed) == (200, 30)
    assert catalogue.execute("SELECT count(DISTINCT pid) FROM catalog.audit") == [(4,)]


def test_four_overlapping_instances_handle_every_card_once(catalogue: Catalogue) -> None:
    flats, projects = catalogue.add_many(200, views=9), catalogue.add_many(30, kind=PROJECT, views=9)
    start_audit(catalogue)
    with (
        brake(catalogue, before_snapshot()) as held,
        background(*[partial(catalogue.run, parameters=Parameters(batch_size=10))] * 4) as instances,
    ):
        held.wait(4)
        held.release()
        summaries = [instance.result() for instance in instances]
    assert times_written(catalogue) == once_each(flats, projects)
    assert sum(summary.snapshots_written for summary in summaries) == 230
    assert all(summary.stopped_reason is StopReason.COMPLETED for summary in summaries)
    assert sum(summary.cards_left_locked for summary in summaries) == 0
    rows = catalogue.ledger()
    assert len({row["handled_since"] for row in rows}) == 1
    assert sum(row["snapshots_written"] for row in rows) == 230


@pytest.mark.slow
def test_when_one_of_four_instances_is_killed_the_others_handle_every_card_once(catalogue: Catalogue) -> None:
    flats, projects = catalogue.add_many(200, views=9), catalogue.add_many(30, kind=PROJECT, views=9)
    start_audit(catalogue)
    with brake(catalogue, before_snapshot()) as held, run_process(catalogue, batch_size=10) as doomed:
        held.wait()
        with background(*[partial(catalogue.run, parameters=Parameters(batch_size=10))] * 3) as instances:
            held.wait(4)
            doomed.kill()
            doomed.wait()
            held.release()
            summaries = [instance.result() for instance in instances]
    assert times_written(catalogue) == once_each(flats, projects)
    assert sum(summary.snapshots_written for summary in summaries) == 230
    assert sum(summary.cards_left_locked for summary in summaries) == 0
    catalogue.run()
    assert Counter(row["status"] for row in catalogue.ledger()) == {"Failed": 1, "Completed": 4}


def test_an_instance_that_starts_later_leaves_out_what_the_first_has_handled(furnished: Catalogue) -> None:
    start_audit(furnished)
    point = before_snapshot(f"NEW.card_id = '{FLATS[5]}'")
    with (
        brake(furnished, point) as held,
        background(partial(furnished.run, parameters=IN_FOURS)) as (first,),
    ):
        held.wait()
        with background(partial(furnished.run, parameters=IN_FOURS)) as (second,):
            wait_until_blocked(furnished, "popularity %")  # the second has all but the first's batch, and sweeps
            held.release()
            summaries = first.result(), second.result()
    assert times_written(furnished) == once_each(FLATS, PROJECTS)
    assert [summary.snapshots_written for summary in summaries] == [8, 8]
    assert [summary.cards_left_locked for summary in summaries] == [0, 0]


def test_an_instance_that_is_slow_to_begin_finds_all_handled_and_does_nothing(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(300, views=9)
    start_audit(catalogue)
    others_are_done, connections = threading.Event(), Counter[str]()

    def connect() -> psycopg.Connection[Any]:
        # The first connection is the ledger's, the next one a worker's.
        if connections.total():
            others_are_done.wait()
        connections["opened"] += 1
        return catalogue.connect()

    slow_run = partial(engine.recompute, connect, run_id="slow", run_date=TODAY)
    with background(slow_run) as (slow,):
        until(lambda: catalogue.ledger(), "the slow instance to begin")
        quick = catalogue.run()
        others_are_done.set()
        late = slow.result()
    assert times_written(catalogue) == once_each(cards, [])
    assert (quick.snapshots_written, late.snapshots_written) == (300, 0)
    assert (late.stopped_reason, late.cards_left_locked) == (StopReason.COMPLETED, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
def test_instances_that_end_together_wait_for_each_other_to_prune(furnished: Catalogue) -> None:
    removed = Point(f"AFTER DELETE ON {SNAPSHOTS}")
    run = partial(furnished.run, parameters=IN_FOURS)
    with brake(furnished, removed) as held, background(run) as (first,):
        held.wait()
        with background(run) as (second,):
            wait_until_blocked(furnished, "popularity %")
            # Longer than a batch may wait for a lock.
            assert wait([second], timeout=0.8).not_done
            held.release()
            summaries = first.result(), second.result()
    assert [summary.snapshots_pruned for summary in summaries] == [16, 0]
    assert [row["status"] for row in furnished.ledger()] == ["Completed", "Completed"]


def test_a_vacuum_of_the_snapshots_does_not_fail_a_run_that_is_done(furnished: Catalogue) -> None:
    with furnished.connect() as vacuum:
        vacuum.execute(f"LOCK TABLE {SNAPSHOTS} IN SHARE UPDATE EXCLUSIVE MODE")  # the lock of VACUUM and ANALYZE
        summary = furnished.run(parameters=IN_FOURS)
    assert (summary.stopped_reason, summary.snapshots_written) == (StopReason.COMPLETED, 16)


# Cards that another writer holds


@pytest.fixture
def writer(furnished: Catalogue) -> Iterator[psycopg.Connection[Any]]:
    """Another writer, who holds a card of the first batch, one of the last, and a project."""
    with furnished.connect() as connection:
        for kind, cards in ((FLAT, [FLATS[1], FLATS[11]]), (PROJECT, [PROJECTS[0]])):
            connection.execute(f"SELECT id FROM {kind.table} WHERE id = ANY(%s) FOR UPDATE", [cards])
        yield connection
        connection.rollback()


@pytest.mark.parametrize("run_kind", RunKind)
def test_cards_held_during_the_pass_are_picked_up_by_the_sweep_when_they_are_released(
    furnished: Catalogue, writer: psycopg.Connection[Any], run_kind: RunKind
) -> None:
    run = partial(furnished.run, run_kind=run_kind, capture=True, card_ids=FLATS + PROJECTS, parameters=IN_FOURS)
    with background(run) as (running,):
        wait_until_blocked(furnished, "popularity %")
        writer.rollback()
        summary = running.result()
    assert (summary.snapshots_written, summary.cards_left_locked) == (16, 0)
    assert summary.stopped_reason is StopReason.COMPLETED
    assert_scores_follow_from_what_is_stored(furnished)


@pytest.mark.usefixtures("short_waits")
def test_cards_held_to_the_end_are_counted_and_the_run_completes_without_them(
    furnished: Catalogue, writer: psycopg.Connection[Any]
) -> None:
    summary = furnished.run(parameters=IN_FOURS)
    writer.rollback()
    assert (summary.snapshots_written, summary.cards_left_locked) == (13, 3)
    assert summary.stopped_reason is StopReason.COMPLETED
    assert furnished.ledger()[0]["cards_left_locked"] == 3
    furnished.run(parameters=IN_FOURS)
    assert furnished.snapshot_counts() == {FLAT: 12, PROJECT: 4}


# Poison


def poison(catalogue: Catalogue, cards: list[UUID], kind: CardKind = FLAT) -> None:
    """Every other card gets a negative counter, the rest a delta that no score can hold."""
    for n, card in enumerate(cards):
        catalogue.set_views(card, -1 if n % 2 else 10**12, kind=kind)


def test_poison_cards_in_the_first_and_the_last_batch_cost_only_themselves(
    furnished: Catalogue, twin_of: Callable[[Catalogue], Catalogue], caplog: pytest.LogCaptureFixture
) -> None:
    bad_flats, bad_projects = [FLATS[0], FLATS[3], FLATS[11]], PROJECTS[2:]
    twin = twin_of(furnished)
    for cards, kind in ((bad_flats, FLAT), (bad_projects, PROJECT)):
        poison(furnished, cards, kind)
        for card in cards:
            twin.set_status(card, "Delisted", kind=kind)

    summary = furnished.run(parameters=IN_FOURS)

    twin.run(parameters=IN_FOURS)
    assert furnished.stored() == twin.stored()
    assert (summary.item_errors, summary.snapshots_written) == (5, 11)
    assert (summary.stopped_reason, summary.cards_left_locked) == (StopReason.COMPLETED, 0)
    (row,) = furnished.ledger()
    assert (row["item_errors"], row["status"]) == (5, "Completed")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    named = {(FLAT, card) for card in bad_flats} | {(PROJECT, card) for card in bad_projects}
    assert len(errors) == len(named)
    for kind, card in named:
        assert any(f"CardKind={kind} CardId={card} " in error for error in errors)


def test_fifty_poison_cards_in_one_batch_cost_only_themselves(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(300, views=5)
    catalogue.store_many({card: {night(-1): 0} for card in cards})
    bad = random.Random(2).sample(cards, 50)
    poison(catalogue, bad)
    start_audit(catalogue)

    summary = catalogue.run(parameters=Parameters(batch_size=300))

    assert (summary.item_errors, summary.snapshots_written) == (50, 250)
    assert {card for card, score in catalogue.scores().items() if score == 5} == set(cards) - set(bad)
    assert times_written(catalogue) == once_each([card for card in cards if card not in bad], [])


def test_the_locks_of_a_batch_hold_while_its_poison_is_sought_and_until_it_commits(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(8)
    # One at each end: in whatever order the batch is written, it has failed as a whole before the card between.
    for card in (cards[0], cards[7]):
        catalogue.set_views(card, -1)
    with (
        brake(catalogue, before_snapshot(f"NEW.card_id = '{cards[4]}'")) as seeking,
        brake(catalogue, before_commit()) as committing,
        background(catalogue.run) as (run,),
    ):
        for held in (seeking, committing):
            held.wait()
            assert locked_cards(catalogue) == cards
            held.release()
        assert run.result().item_errors == 2
    wait_until_free(catalogue)


def test_poison_cards_stay_out_of_the_sweep(furnished: Catalogue, writer: psycopg.Connection[Any]) -> None:
    furnished.set_views(FLATS[5], -1)
    with background(partial(furnished.run, parameters=IN_FOURS)) as (running,):
        wait_until_blocked(furnished, "popularity %")
        writer.rollback()
        summary = running.result()
    assert (summary.item_errors, summary.snapshots_written, summary.cards_left_locked) == (1, 15, 0)


@pytest.mark.slow
def test_more_than_1000_poison_cards_fail_the_run_and_what_was_committed_stays(
    catalogue: Catalogue, caplog: pytest.LogCaptureFixture
) -> None:
    good = catalogue.add_many(250)
    catalogue.add_many(1250, first=1000, views=-1)

    with pytest.raises(TooManyItemErrorsError, match="more than 1000 cards failed"):
        catalogue.run(parameters=Parameters(batch_size=250))

    assert catalogue.snapshot_counts() == {FLAT: 250}
    assert all(catalogue.snapshots(card) for card in good[::50])
    (row,) = catalogue.ledger()
    assert (row["status"], row["item_errors"], row["snapshots_written"]) == ("Failed", 1000, 250)
    assert "TooManyItemErrorsError" in row["error"]
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1000


@pytest.mark.slow
def test_exactly_1000_poison_cards_are_borne(catalogue: Catalogue) -> None:
    catalogue.add_many(1000, views=-1)
    catalogue.add_many(10, first=2000)
    summary = catalogue.run(parameters=Parameters(batch_size=505))
    assert (summary.item_errors, summary.snapshots_written) == (1000, 10)


# Nights that are cut short


def run_cut_by_the_clock(catalogue: Catalogue, run_date: Any, batches: int) -> Summary:
    """The clock of the run counts its batches."""
    done: list[Progress] = []
    parameters = Parameters(batch_size=BATCH, max_run_duration_seconds=batches)
    return catalogue.run(run_date, parameters=parameters, on_progress=done.append, clock=lambda: float(len(done)))


def run_cut_by_the_stop_signal(catalogue: Catalogue, run_date: Any, batches: int) -> Summary:
    stop, done = threading.Event(), list[Progress]()

    def count(progress: Progress) -> None:
        done.append(progress)
        if len(done) == batches:
            stop.set()

    return catalogue.run(run_date, parameters=IN_FOURS, on_progress=count, stop=stop)


@pytest.mark.parametrize("cut", [run_cut_by_the_clock, run_cut_by_the_stop_signal])
def test_two_nights_cut_short_in_a_row_reach_every_card_and_every_project_and_the_third_wraps_round(
    furnished: Catalogue, cut: Callable[..., Summary]
) -> None:
    start_audit(furnished)
    everything = [(FLAT, card) for card in FLATS] + [(PROJECT, card) for card in PROJECTS]

    first, second = cut(furnished, TODAY, 2), cut(furnished, night(1), 2)

    assert written_in_order(furnished) == everything
    assert [summary.cards_remaining for summary in (first, second)] == [8, 8]
    start_audit(furnished)
    third = cut(furnished, night(2), 1)
    assert written_in_order(furnished) == everything[:BATCH]
    assert third.cards_remaining == 12
    start_audit(furnished)
    furnished.run(night(3), parameters=IN_FOURS)
    assert written_in_order(furnished) == everything[BATCH:] + everything[:BATCH]
    assert_scores_follow_from_what_is_stored(furnished)
    start_audit(furnished)
    furnished.run(night(4), parameters=IN_FOURS)
    assert written_in_order(furnished) == everything


def test_a_night_cut_in_its_wrapped_part_goes_on_from_there(furnished: Catalogue) -> None:
    start_audit(furnished)
    run_cut_by_the_clock(furnished, TODAY, 3)  # three batches of objects
    run_cut_by_the_clock(furnished, night(1), 2)  # the projects, then the first batch of objects
    start_audit(furnished)
    run_cut_by_the_clock(furnished, night(2), 2)
    assert written_in_order(furnished) == [(FLAT, card) for card in FLATS[4:]]


# Two nights at once


@pytest.mark.parametrize("first", [night(-1), TODAY], ids=["yesterday first", "today first"])
def test_runs_of_two_nights_that_overlap_never_put_an_older_score_over_a_newer_one(
    catalogue: Catalogue, first: Any
) -> None:
    cards = catalogue.add_many(12, views=50)
    catalogue.store_many({card: {night(-2): 10} for card in cards})
    second = TODAY if first == night(-1) else night(-1)
    point = before_snapshot(f"NEW.card_id = '{cards[5]}' AND NEW.run_date = '{first}'")
    with (
        brake(catalogue, point) as held,
        background(partial(catalogue.run, first, parameters=IN_FOURS)) as (one,),
    ):
        held.wait()
        for card in (cards[0], cards[11]):
            catalogue.view(card, 7)
        with background(partial(catalogue.run, second, parameters=IN_FOURS)) as (other,):
            wait_until_blocked(catalogue, "popularity %")
            held.release()
            one.result()
            other.result()

    assert catalogue.snapshot_counts(TODAY) == {FLAT: 12}
    assert_scores_follow_from_what_is_stored(catalogue)


# Retries


@pytest.fixture
def failing(furnished: Catalogue) -> Callable[[int], None]:
    """Makes the second batch end in a serialization failure so many times."""

    def fail(times: int) -> None:
        furnished.execute(
            "CREATE SEQUENCE catalog.failures;"
            "CREATE FUNCTION catalog.fail() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN "
            f"IF nextval('catalog.failures') <= {times} THEN "
            "RAISE EXCEPTION 'in the way' USING ERRCODE = 'serialization_failure'; END IF; RETURN NEW; END $$;"
            f"CREATE TRIGGER fail BEFORE INSERT ON {SNAPSHOTS} FOR EACH ROW WHEN (NEW.card_id = '{FLATS[5]}') "
            "EXECUTE FUNCTION catalog.fail()"
        )

    return fail


def test_a_batch_that_fails_to_serialize_is_read_again_and_counted(
    furnished: Catalogue, failing: Callable[[int], None], twin_of: Callable[[Catalogue], Catalogue]
) -> None:
    twin = twin_of(furnished)
    failing(engine.MAX_ATTEMPTS - 1)
    summary = furnished.run(parameters=IN_FOURS)
    twin.run(parameters=IN_FOURS)
    assert furnished.stored() == twin.stored()
    assert (summary.retries, summary.snapshots_written) == (4, 16)
    assert furnished.ledger()[0]["retries"] == 4


def test_a_batch_that_is_read_again_leaves_a_card_that_another_writer_took_meanwhile_to_the_sweep(
    furnished: Catalogue, failing: Callable[[int], None]
) -> None:
    failing(3)
    with (
        brake(furnished, before_snapshot(f"NEW.card_id = '{FLATS[5]}'")) as held,
        background(partial(furnished.run, parameters=IN_FOURS)) as (run,),
        psycopg.connect(furnished.url) as other,
    ):
        held.wait()
        other.execute("SET application_name = 'other'")
        take = f"UPDATE {FLAT.table} SET popularity_views = popularity_views + 5 WHERE id = %s"
        with background(partial(other.execute, take, [FLATS[7]])) as (taking,):
            wait_until_blocked(furnished, "other")
            held.release()
            taking.result()
        wait_until_blocked(furnished, "popularity %")
        assert furnished.snapshot_counts() == {FLAT: 11, PROJECT: 4}
        other.commit()
        summary = run.result()
    assert (summary.retries, summary.snapshots_written, summary.cards_left_locked) == (3, 16, 0)
    assert furnished.snapshots(FLATS[7])[TODAY] == 105
    assert_scores_follow_from_what_is_stored(furnished)


def test_a_batch_that_never_serializes_fails_the_run_after_a_bounded_number_of_attempts(
    furnished: Catalogue, failing: Callable[[int], None]
) -> None:
    failing(10**6)
    with pytest.raises(psycopg.errors.SerializationFailure):
        furnished.run(parameters=IN_FOURS)
    (row,) = furnished.ledger()
    assert (row["status"], row["retries"]) == ("Failed", engine.MAX_ATTEMPTS - 1)
    assert_the_ledger_tells_what_is_stored(furnished, row)
    wait_until_free(furnished)


def test_a_run_whose_time_is_up_between_two_attempts_at_a_batch_ends_in_order(
    furnished: Catalogue, failing: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    failing(10**6)

    def clock() -> float:
        return float(sum("read again" in record.getMessage() for record in caplog.records))

    summary = furnished.run(parameters=Parameters(batch_size=BATCH, max_run_duration_seconds=2), clock=clock)
    assert (summary.stopped_reason, summary.snapshots_written) == (StopReason.MAX_DURATION, BATCH)
    assert summary.cards_remaining == 12
    assert furnished.ledger()[0]["status"] == "Stopped"


@pytest.mark.usefixtures("short_waits")
def test_a_lock_time_out_is_tried_again(furnished: Catalogue, caplog: pytest.LogCaptureFixture) -> None:
    with furnished.connect() as other:
        other.execute(f"LOCK TABLE {SNAPSHOTS} IN ACCESS EXCLUSIVE MODE")
        with background(partial(furnished.run, parameters=IN_FOURS)) as (run,):
            until(lambda: "read again (attempt 2): LockNotAvailable" in caplog.text, "the lock time-out")
            other.rollback()
            summary = run.result()
    assert summary.retries >= 1
    assert summary.snapshots_written == 16


@pytest.mark.slow
def test_the_victim_of_a_deadlock_reads_its_batch_again(furnished: Catalogue) -> None:
    with (
        brake(furnished, before_snapshot(f"NEW.card_id = '{FLATS[5]}'")) as held,
        background(partial(furnished.run, parameters=IN_FOURS)) as (run,),
        psycopg.connect(furnished.url) as other,
    ):
        held.wait()
        other.execute("SET deadlock_timeout = '1min'")  # so that it is the run that finds the deadlock
        other.execute("SET application_name = 'other'")
        other.execute(f"SELECT run_id FROM {LEDGER} FOR UPDATE")
        cross = f"UPDATE {FLAT.table} SET popularity_views = popularity_views + 5 WHERE id = %s"
        with background(partial(other.execute, cross, [FLATS[6]])) as (crossing,):
            wait_until_blocked(furnished, "other")
            held.release()
            crossing.result()
            other.commit()
        summary = run.result()
    assert summary.retries >= 1
    assert (summary.snapshots_written, summary.cards_left_locked) == (16, 0)
    assert furnished.snapshots(FLATS[6])[TODAY] == 105
    assert_scores_follow_from_what_is_stored(furnished)


# One at a time


def test_under_single_flight_the_second_instance_ends_as_a_no_op(furnished: Catalogue) -> None:
    alone = Parameters(batch_size=BATCH, single_flight=True)
    with (
        brake(furnished, before_snapshot(f"NEW.card_id = '{FLATS[1]}'")) as held,
        background(partial(furnished.run, parameters=alone)) as (first,),
    ):
        held.wait()
        second = furnished.run(parameters=alone)
        assert (second.stopped_reason, second.snapshots_written) == (StopReason.SINGLE_FLIGHT, 0)
        held.release()
        assert first.result().snapshots_written == 16
    assert len(furnished.ledger()) == 1
    wait_until_free(furnished)
    assert furnished.run(parameters=alone).stopped_reason is StopReason.COMPLETED


def test_a_run_id_that_is_alive_is_refused(furnished: Catalogue) -> None:
    run = partial(engine.recompute, furnished.connect, run_id="same", run_date=TODAY, parameters=IN_FOURS)
    with (
        brake(furnished, before_snapshot(f"NEW.card_id = '{FLATS[1]}'")) as held,
        background(run) as (first,),
    ):
        held.wait()
        with pytest.raises(RunAlreadyAliveError, match="run same is alive already"):
            run()
        held.release()
        assert first.result().snapshots_written == 16
    assert [row["status"] for row in furnished.ledger()] == ["Completed"]


def test_batches_read_committed_whatever_the_database_prefers(furnished: Catalogue) -> None:
    name = psycopg.conninfo.conninfo_to_dict(furnished.url)["dbname"]
    furnished.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    furnished.execute(
        "CREATE TABLE catalog.seen (isolation text);"
        "CREATE FUNCTION catalog.see() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN "
        "INSERT INTO catalog.seen VALUES (current_setting('transaction_isolation')); RETURN NULL; END $$;"
        f"CREATE TRIGGER see AFTER INSERT ON {SNAPSHOTS} FOR EACH STATEMENT EXECUTE FUNCTION catalog.see()"
    )
    furnished.run(parameters=IN_FOURS)
    assert set(furnished.execute("SELECT isolation FROM catalog.seen")) == {("read committed",)}
