"""The engine on a real database: the spec's table «Тесты» row by row, and what the rows leave unsaid."""

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import partial
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.decay import decay_weights
from pin_pipelines.catalog.ledger import RunKind
from pin_pipelines.catalog.partitions import History, RunDateRefusedError, Work, decide
from pin_pipelines.catalog.recompute import NoKnownCardsError, Parameters, Progress, StopReason, Summary, recompute
from pin_pipelines.catalog.tables import SNAPSHOTS, CardKind
from pin_pipelines_tests.support.audit import start_audit, written_in_order
from pin_pipelines_tests.support.brakes import before_snapshot, brake, nothing_is_held
from pin_pipelines_tests.support.catalogue import FLAT, PROJECT, TODAY, Catalogue, card_id, counters, night
from pin_pipelines_tests.support.processes import background
from pin_pipelines_tests.support.waiting import until

LAMBDA = Decimal("0.9057")
STRANGER = UUID("00000000-0000-4000-8000-00000000dead")


def decayed(views: int, days: int) -> Decimal:
    """views · λ^days with four decimals, for H = 7; worked out without the engine's weights."""
    context = Context(prec=200, rounding=ROUND_HALF_UP)
    exact = context.multiply(Decimal(views), context.power(LAMBDA, days))
    return exact.quantize(Decimal("0.0001"), context=context)


def versions(catalogue: Catalogue, kind: CardKind = FLAT) -> dict[UUID, tuple[Any, ...]]:
    """What changes whenever a card's row is written."""
    return {row[0]: row[1:] for row in catalogue.execute(f"SELECT id, xmin::text, updated_at FROM {kind.table}")}


def figures(of: Summary | dict[str, Any]) -> dict[str, int]:
    """The figures that a summary and a ledger row have in common."""
    row = asdict(of) if isinstance(of, Summary) else of
    counts = "cards_processed", "cards_updated"
    names = [f"{kind.prefix}_{count}" for kind in CardKind for count in counts]
    names += ["snapshots_written", "snapshots_pruned", "item_errors", "cards_left_locked", "cards_remaining"]
    return {name: row[name] for name in [*names, "retries", "duration_ms"]}


# The spec's table «Тесты»


def test_empty_without_cards_the_run_is_a_successful_no_op(catalogue: Catalogue) -> None:
    summary = catalogue.run()
    assert summary.stopped_reason is StopReason.COMPLETED
    assert not any({**figures(summary), "duration_ms": 0}.values())
    assert catalogue.stored() == []


def test_empty_counters_get_snapshots_and_leave_the_cards_alone(catalogue: Catalogue) -> None:
    flats, projects = catalogue.add_many(3), catalogue.add_many(2, kind=PROJECT)
    before = versions(catalogue), versions(catalogue, PROJECT)

    summary = catalogue.run()

    assert (summary.snapshots_written, summary.property_object_cards_updated, summary.project_cards_updated) == (
        5,
        0,
        0,
    )
    assert catalogue.snapshot_counts() == {FLAT: len(flats), PROJECT: len(projects)}
    assert (versions(catalogue), versions(catalogue, PROJECT)) == before


@pytest.mark.parametrize("kind", CardKind)
def test_exponential_decay_of_deltas_10_0_25_gives_30_5073(catalogue: Catalogue, kind: CardKind) -> None:
    card = catalogue.add(kind=kind)
    catalogue.play(card, counters(night(-3), [100, 125, 125, 135]), kind=kind)
    assert catalogue.score(card, kind=kind) == Decimal("30.5073")


def test_without_new_views_the_score_decays_by_lambda_night_after_night_to_0_beyond_the_window(
    catalogue: Catalogue,
) -> None:
    card, scores = catalogue.add(), []
    catalogue.play(card, counters(night(-1), [0, 1000]))
    for nights in range(32):
        catalogue.run(night(nights))
        scores.append(catalogue.score(card))
    # The day of the views is in the window of 30 days on the nights 0 … 29 after it.
    assert scores == [*(decayed(1000, nights) for nights in range(30)), 0, 0]
    assert scores[:31] == sorted(set(scores), reverse=True)


def test_a_second_run_of_the_same_date_changes_nothing_and_stores_no_second_snapshot(catalogue: Catalogue) -> None:
    card = catalogue.add()
    catalogue.play(card, {night(-1): 100, TODAY: 130})
    first, written = catalogue.stored(), versions(catalogue)
    assert catalogue.score(card) == 30

    again = catalogue.run()

    assert catalogue.stored() == first
    assert versions(catalogue) == written
    assert catalogue.snapshots(card) == {night(-1): 100, TODAY: 130}
    assert (again.snapshots_written, again.property_object_cards_updated) == (1, 0)


def test_a_second_run_of_the_same_date_replaces_its_snapshot_by_the_counter_of_now(catalogue: Catalogue) -> None:
    card = catalogue.add()
    catalogue.play(card, {night(-1): 100, TODAY: 130})
    catalogue.view(card, 7)
    catalogue.run()
    assert catalogue.snapshots(card) == {night(-1): 100, TODAY: 137}
    assert catalogue.score(card) == 37


def test_parallel_instances_recompute_each_card_once(catalogue: Catalogue) -> None:
    cards, projects = catalogue.add_many(100, views=5), catalogue.add_many(20, kind=PROJECT, views=5)
    catalogue.store_many({card: {night(-1): 0} for card in cards})
    parameters = Parameters(batch_size=10)
    # Nobody goes on until both instances hold a batch.
    with (
        brake(catalogue, before_snapshot()) as held,
        background(*[partial(catalogue.run, parameters=parameters)] * 2) as instances,
    ):
        held.wait(2)
        held.release()
        one, other = (instance.result() for instance in instances)

    assert min(one.property_object_cards_processed, other.property_object_cards_processed) >= 10
    assert one.property_object_cards_processed + other.property_object_cards_processed == len(cards)
    assert one.project_cards_processed + other.project_cards_processed == len(projects)
    assert one.snapshots_written + other.snapshots_written == 120
    assert one.property_object_cards_updated + other.property_object_cards_updated == len(cards)
    assert set(catalogue.scores().values()) == {5}


def test_race_with_the_consumer_an_increment_before_the_lock_counts_and_one_behind_it_is_kept_for_tomorrow(
    catalogue: Catalogue,
) -> None:
    early, held_card, late = catalogue.add_many(3)
    catalogue.run(night(-1))
    point = before_snapshot(f"NEW.card_id = '{held_card}'")
    with (
        brake(catalogue, point) as held,
        background(partial(catalogue.run, parameters=Parameters(batch_size=1))) as (run,),
    ):
        held.wait()
        catalogue.view(early, 5)
        catalogue.view(late, 7)
        with background(partial(catalogue.view, held_card, 3)) as (increment,):
            blocked = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
            until(lambda: catalogue.execute(blocked, "%popularity_views +%"), "the increment at the card's lock")
            held.release()
            run.result()
            increment.result()

    assert catalogue.execute(f"SELECT popularity_views FROM {FLAT.table} ORDER BY id") == [(5,), (3,), (7,)]
    cards = early, held_card, late
    assert [catalogue.score(card) for card in cards] == [0, 0, 7]
    catalogue.run(night(1))
    assert [catalogue.score(card) for card in cards] == [5, 3, decayed(7, 1)]


def test_retention_removes_what_is_older_than_the_window_and_two_days_and_keeps_the_boundary(
    catalogue: Catalogue,
) -> None:
    card, gone = catalogue.add(50), STRANGER
    catalogue.store_many({each: dict.fromkeys(map(night, (-34, -33, -32, -31, -30)), 1) for each in (card, gone)})

    summary = catalogue.run()

    assert list(catalogue.snapshots(card)) == [*map(night, (-32, -31, -30)), TODAY]
    assert list(catalogue.snapshots(gone)) == [*map(night, (-32, -31, -30))]
    assert summary.snapshots_pruned == 4


def test_retention_follows_the_window(catalogue: Catalogue) -> None:
    card = catalogue.add()
    catalogue.store(card, dict.fromkeys(map(night, (-5, -4, -3)), 0))
    catalogue.run(parameters=Parameters(window_days=2))
    assert list(catalogue.snapshots(card)) == [night(-4), night(-3), TODAY]


def test_delisted_cards_are_not_recomputed(catalogue: Catalogue) -> None:
    card = catalogue.add()
    catalogue.play(card, {night(-2): 0, night(-1): 40})
    catalogue.set_status(card, "Delisted")
    catalogue.view(card, 5)
    before = catalogue.stored(), versions(catalogue)

    summary = catalogue.run()

    assert (catalogue.stored(), versions(catalogue)) == before
    assert (summary.property_object_cards_processed, summary.snapshots_written) == (0, 0)


def test_stopping_the_worker_commits_the_batch_in_hand_whole_and_frees_all_locks(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(10, views=5)
    stop = threading.Event()

    summary = catalogue.run(parameters=Parameters(batch_size=4), stop=stop, on_progress=lambda _: stop.set())

    assert summary.stopped_reason is StopReason.STOP_SIGNAL
    assert (summary.snapshots_written, summary.cards_remaining) == (4, 6)
    assert [card for card in cards if catalogue.snapshots(card)] == cards[:4]
    until(lambda: nothing_is_held(catalogue), "all locks to be free")


# Which cards, and what is written


def test_published_and_hidden_cards_are_scored_and_any_other_status_is_passed_over(catalogue: Catalogue) -> None:
    catalogue.execute("ALTER TABLE catalog.property_object_cards DROP CONSTRAINT property_object_cards_status_check")
    cards = {
        status: catalogue.add(status=status) for status in ("Published", "Hidden", "Draft", "Delisted", "Archived")
    }
    for card in cards.values():
        catalogue.store(card, {night(-1): 0})
        catalogue.view(card, 9)

    summary = catalogue.run()

    scores = {status: catalogue.score(card) for status, card in cards.items()}
    assert scores == {"Published": 9, "Hidden": 9, "Draft": 0, "Delisted": 0, "Archived": 0}
    assert catalogue.snapshot_counts() == {FLAT: 2}
    assert summary.property_object_cards_processed == 2


def test_a_score_that_did_not_change_is_not_rewritten_while_its_snapshot_is_written(catalogue: Catalogue) -> None:
    still, viewed = catalogue.add(3), catalogue.add(3)
    catalogue.run(night(-1))
    catalogue.view(viewed, 2)
    before = versions(catalogue)

    summary = catalogue.run()

    after = versions(catalogue)
    assert after[still] == before[still]
    assert after[viewed][0] != before[viewed][0]
    assert after[viewed][1] > before[viewed][1]
    assert catalogue.snapshots(still)[TODAY] == 3
    assert (summary.snapshots_written, summary.property_object_cards_updated) == (2, 1)


def test_a_first_snapshot_is_a_base_line_and_not_a_day_of_views(catalogue: Catalogue) -> None:
    old = catalogue.add(1_000_000)
    catalogue.run()
    assert catalogue.score(old) == 0
    catalogue.view(old, 6)
    catalogue.run(night(1))
    assert catalogue.score(old) == 6


def test_a_counter_that_was_reset_counts_0_for_that_night_and_from_its_new_value_on(catalogue: Catalogue) -> None:
    card = catalogue.add()
    catalogue.play(card, counters(night(-3), [100, 110, 4, 9]))
    assert catalogue.score(card) == decayed(10, 2) + 5


def test_the_growth_over_missed_nights_belongs_to_the_first_night_after_the_gap(catalogue: Catalogue) -> None:
    card = catalogue.add()
    catalogue.play(card, {night(-6): 0, night(-5): 10, night(-1): 50, TODAY: 50})
    assert catalogue.score(card) == Decimal("42.3223")  # 10 · 0.9057^5 + 40 · 0.9057


def test_a_gap_as_long_as_the_window_leaves_a_base_line_and_one_longer_a_first_day(catalogue: Catalogue) -> None:
    at_the_edge, beyond = catalogue.add(80), catalogue.add(80)
    catalogue.store(at_the_edge, {night(-30): 20})
    catalogue.store(beyond, {night(-31): 20})
    catalogue.run()
    assert (catalogue.score(at_the_edge), catalogue.score(beyond)) == (60, 0)


def test_a_card_that_comes_back_from_delisted_has_its_growth_of_that_time_on_the_night_of_its_return(
    catalogue: Catalogue,
) -> None:
    card = catalogue.add()
    catalogue.play(card, {night(-4): 0, night(-3): 10})
    catalogue.set_status(card, "Delisted")
    catalogue.play(card, {night(-2): 15, night(-1): 18})
    assert catalogue.score(card) == 10
    catalogue.set_status(card, "Published")
    catalogue.play(card, {TODAY: 30})
    assert catalogue.snapshots(card) == {night(-4): 0, night(-3): 10, TODAY: 30}
    assert catalogue.score(card) == decayed(10, 3) + 20


@pytest.mark.parametrize("batch_size", [1, 3, 7, 8])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_card_is_in_one_batch_whatever_the_batch_size(
    catalogue: Catalogue, batch_size: int, workers: int
) -> None:
    catalogue.add_many(7, views=1)
    catalogue.add_many(4, kind=PROJECT, views=1)
    batches: list[Progress] = []

    summary = catalogue.run(parameters=Parameters(batch_size=batch_size, workers=workers), on_progress=batches.append)

    assert (summary.property_object_cards_processed, summary.project_cards_processed) == (7, 4)
    rows = {kind: sorted(batch.rows for batch in batches if batch.card_kind is kind) for kind in CardKind}
    for kind, cards in {FLAT: 7, PROJECT: 4}.items():
        whole, rest = divmod(cards, batch_size)
        assert rows[kind] == sorted([batch_size] * whole + [rest] * bool(rest))
    assert catalogue.snapshot_counts() == {FLAT: 7, PROJECT: 4}


@pytest.mark.parametrize("batch_size", [1, 2, 1000])
def test_the_first_and_the_last_uuid_are_cards_like_any_other(catalogue: Catalogue, batch_size: int) -> None:
    ids = [UUID(int=0), card_id(1), UUID(int=2**128 - 1)]
    for kind in CardKind:
        for each in ids:
            catalogue.add(4, kind=kind, new=each)
            catalogue.store(each, {night(-1): 1}, kind=kind)
    catalogue.run(parameters=Parameters(batch_size=batch_size))
    for kind in CardKind:
        assert catalogue.scores(kind=kind) == dict.fromkeys(ids, 3)


def test_an_object_and_a_project_with_the_same_id_are_two_cards(catalogue: Catalogue) -> None:
    catalogue.add(10, new=card_id(1))
    catalogue.add(100, new=card_id(1), kind=PROJECT)
    catalogue.store(card_id(1), {night(-1): 4})
    catalogue.store(card_id(1), {night(-1): 40}, kind=PROJECT)
    catalogue.run()
    assert (catalogue.score(card_id(1)), catalogue.score(card_id(1), kind=PROJECT)) == (6, 60)


def test_ids_of_snapshots_are_unique_over_batches_and_workers(catalogue: Catalogue) -> None:
    catalogue.add_many(300)
    catalogue.run(parameters=Parameters(batch_size=7, workers=3))
    assert catalogue.execute("SELECT count(DISTINCT id) FROM catalog.popularity_daily_views") == [(300,)]


# A run that is cut


def run_cut_after(batches: int, catalogue: Catalogue, run_date: date = TODAY, batch_size: int = 2) -> Summary:
    """A run whose time is up after so many batches: its clock counts them."""
    done: list[Progress] = []
    return catalogue.run(
        run_date,
        parameters=Parameters(batch_size=batch_size, max_run_duration_seconds=batches),
        on_progress=done.append,
        clock=lambda: float(len(done)),
    )


def test_a_run_at_its_maximum_duration_ends_in_order_and_still_prunes(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(5)
    catalogue.add_many(3, kind=PROJECT)
    catalogue.store(cards[4], {night(-33): 0, night(-32): 0})

    summary = run_cut_after(2, catalogue)

    assert summary.stopped_reason is StopReason.MAX_DURATION
    assert (summary.snapshots_written, summary.cards_remaining, summary.snapshots_pruned) == (4, 4, 1)
    assert list(catalogue.snapshots(cards[4])) == [night(-32)]
    (row,) = catalogue.ledger()
    assert (row["status"], row["stopped_reason"]) == ("Stopped", "max_duration")
    assert (row["property_object_stop_id"], row["project_stop_id"]) == (cards[3], None)


def test_a_run_without_time_handles_nothing_and_keeps_the_stop_point_before_it(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(5)
    run_cut_after(1, catalogue, night(-1))
    summary = catalogue.run(parameters=Parameters(max_run_duration_seconds=1), clock=iter(range(100)).__next__)
    assert (summary.stopped_reason, summary.snapshots_written, summary.cards_remaining) == ("max_duration", 0, 5)
    assert catalogue.ledger()[-1]["property_object_stop_id"] == cards[1]


@pytest.mark.parametrize("run_kind", [RunKind.RECOMPUTE, RunKind.REBUILD])
def test_recompute_and_rebuild_never_prune(catalogue: Catalogue, run_kind: RunKind) -> None:
    card = catalogue.add()
    catalogue.store(card, {night(-99): 0, night(-1): 0, TODAY: 2})
    summary = catalogue.run(run_kind=run_kind, card_ids=[card])
    assert summary.snapshots_pruned == 0
    assert night(-99) in catalogue.snapshots(card)
    assert catalogue.score(card) == 2


# Recompute and rebuild


def test_recompute_scores_from_what_is_stored_and_captures_nothing(catalogue: Catalogue) -> None:
    captured, missed = catalogue.add(), catalogue.add()
    project = catalogue.add(kind=PROJECT)
    catalogue.store(captured, counters(night(-2), [0, 10, 30]))
    catalogue.store(missed, counters(night(-2), [0, 10]))
    catalogue.store(project, counters(night(-1), [0, 5]), kind=PROJECT)
    for card in (captured, missed):
        catalogue.set_views(card, 999)
    snapshots = catalogue.execute("SELECT * FROM catalog.popularity_daily_views ORDER BY id")

    summary = catalogue.run(run_kind=RunKind.RECOMPUTE)

    assert catalogue.score(captured) == decayed(10, 1) + 20
    assert catalogue.score(missed) == decayed(10, 1)
    assert catalogue.score(project, kind=PROJECT) == 5
    assert catalogue.execute("SELECT * FROM catalog.popularity_daily_views ORDER BY id") == snapshots
    assert (summary.property_object_cards_processed, summary.project_cards_processed) == (2, 1)
    assert (summary.snapshots_written, summary.run_kind) == (0, RunKind.RECOMPUTE)


def test_recompute_of_a_night_leaves_cards_that_have_a_newer_snapshot_alone(catalogue: Catalogue) -> None:
    older, newer = catalogue.add(), catalogue.add()
    catalogue.store_many({card: counters(night(-2), [0, 10]) for card in (older, newer)})
    catalogue.store(newer, {TODAY: 10})
    catalogue.run(night(-1), run_kind=RunKind.RECOMPUTE)
    assert (catalogue.score(older), catalogue.score(newer)) == (10, 0)


def test_rebuild_recomputes_just_the_given_cards_of_both_kinds_and_names_the_others(catalogue: Catalogue) -> None:
    flat, other, delisted = catalogue.add(10), catalogue.add(10), catalogue.add(10, status="Delisted")
    project = catalogue.add(20, kind=PROJECT)
    for kind, card in [(FLAT, flat), (FLAT, other), (FLAT, delisted), (PROJECT, project)]:
        catalogue.store(card, {night(-1): 1}, kind=kind)

    summary = catalogue.run(run_kind=RunKind.REBUILD, capture=True, card_ids=[flat, STRANGER, delisted, project, flat])

    assert (catalogue.score(flat), catalogue.score(project, kind=PROJECT)) == (9, 19)
    assert catalogue.score(other) == catalogue.score(delisted) == 0
    assert catalogue.snapshot_counts() == {FLAT: 1, PROJECT: 1}
    assert summary.unknown_card_ids == (STRANGER,)
    assert summary.passed_over_card_ids == (delisted,)
    assert (summary.property_object_cards_updated, summary.project_cards_updated) == (1, 1)
    assert summary.stopped_reason is StopReason.COMPLETED


def test_rebuild_without_capture_takes_no_snapshot(catalogue: Catalogue) -> None:
    card = catalogue.add(500)
    catalogue.store(card, {night(-2): 0, night(-1): 8})
    catalogue.run(night(-1), run_kind=RunKind.REBUILD, card_ids=[card])
    assert catalogue.score(card) == 8
    assert catalogue.snapshots(card) == {night(-2): 0, night(-1): 8}


def test_rebuild_of_cards_none_of_which_exists_fails_and_names_them(catalogue: Catalogue) -> None:
    catalogue.add()
    with pytest.raises(NoKnownCardsError, match=str(STRANGER)):
        catalogue.run(run_kind=RunKind.REBUILD, card_ids=[STRANGER], capture=True)
    (row,) = catalogue.ledger()
    assert (row["status"], row["run_kind"]) == ("Failed", "Rebuild")
    assert str(STRANGER) in row["error"]


def test_rebuild_of_delisted_cards_alone_does_nothing_and_is_green(catalogue: Catalogue) -> None:
    delisted = catalogue.add(7, status="Delisted")
    summary = catalogue.run(run_kind=RunKind.REBUILD, card_ids=[delisted], capture=True)
    assert (summary.stopped_reason, summary.passed_over_card_ids) == (StopReason.COMPLETED, (delisted,))
    assert catalogue.snapshot_counts() == {}


def test_rebuild_does_a_card_again_that_the_full_run_of_the_day_has_handled(catalogue: Catalogue) -> None:
    card = catalogue.add(5)
    catalogue.play(card, {night(-1): 5, TODAY: 8})
    catalogue.view(card, 4)
    catalogue.run(run_kind=RunKind.REBUILD, card_ids=[card], capture=True)
    assert catalogue.score(card) == 7


def test_rebuild_moves_no_stop_point_of_the_full_runs(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(6)
    run_cut_after(1, catalogue, night(-1))
    catalogue.run(run_kind=RunKind.REBUILD, card_ids=cards, capture=True)
    start_audit(catalogue)
    catalogue.run(parameters=Parameters(batch_size=2))
    assert [card for _, card in written_in_order(catalogue)] == cards[2:] + cards[:2]


# The ledger


def test_the_run_id_is_the_callers(catalogue: Catalogue) -> None:
    run_id = str(uuid4())
    catalogue.add()
    recompute(catalogue.connect, run_id=run_id, run_date=TODAY)
    assert [row["run_id"] for row in catalogue.ledger()] == [run_id]


@pytest.mark.parametrize("run_kind", RunKind)
def test_the_ledger_has_a_closed_row_with_the_figures_of_the_summary(catalogue: Catalogue, run_kind: RunKind) -> None:
    cards = catalogue.add_many(5, views=3)
    catalogue.add_many(2, kind=PROJECT, views=3)
    catalogue.store_many({card: {night(-50): 0, night(-1): 1, TODAY: 2} for card in cards})

    summary = catalogue.run(run_kind=run_kind, card_ids=cards, parameters=Parameters(batch_size=2))

    (row,) = catalogue.ledger()
    assert summary.property_object_cards_updated == 5
    assert figures(row) == figures(summary)
    assert (row["run_id"], row["run_date"], row["run_kind"]) == (summary.run_id, TODAY, run_kind)
    assert (row["status"], row["stopped_reason"], row["error"]) == ("Completed", "completed", None)
    assert (row["batch_size"], row["property_object_stop_id"], row["project_stop_id"]) == (2, None, None)
    assert row["started_at"] <= row["finished_at"]


def test_the_ledger_of_a_run_in_progress_moves_with_each_committed_batch(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(6, views=1)
    point = before_snapshot(f"NEW.card_id = '{cards[4]}'")
    with (
        brake(catalogue, point) as held,
        background(partial(catalogue.run, parameters=Parameters(batch_size=2))) as (run,),
    ):
        held.wait()
        (row,) = catalogue.ledger()
        held.release()
        run.result()
    assert (row["status"], row["finished_at"]) == ("Running", None)
    assert (row["property_object_cards_processed"], row["snapshots_written"]) == (4, 4)
    assert row["property_object_stop_id"] == cards[3]


def test_the_ledger_of_a_failed_run_has_the_error_and_what_was_done(catalogue: Catalogue) -> None:
    catalogue.add_many(4)

    def give_up(progress: Progress) -> None:
        if progress.cards_done == 2:
            raise RuntimeError("the lights went out")

    with pytest.raises(RuntimeError, match="lights"):
        catalogue.run(parameters=Parameters(batch_size=1), on_progress=give_up)
    (row,) = catalogue.ledger()
    assert (row["status"], row["stopped_reason"], row["snapshots_written"]) == ("Failed", "error", 2)
    assert row["error"] == "RuntimeError: the lights went out"
    assert catalogue.snapshot_counts() == {FLAT: 2}


def test_the_stop_point_moves_from_the_objects_to_the_projects(catalogue: Catalogue) -> None:
    catalogue.add_many(4)
    projects = catalogue.add_many(4, kind=PROJECT)
    run_cut_after(3, catalogue)
    (row,) = catalogue.ledger()
    assert (row["property_object_stop_id"], row["project_stop_id"]) == (None, projects[1])


# What it tells while it runs


def test_the_log_has_the_lines_of_the_spec(catalogue: Catalogue, caplog: pytest.LogCaptureFixture) -> None:
    catalogue.add_many(3, views=5)
    poison = catalogue.add(-1)
    catalogue.add(5, kind=PROJECT)
    with caplog.at_level(logging.INFO):
        summary = catalogue.run(parameters=Parameters(window_days=20, decay_half_life_days=5, batch_size=2))

    lines = {record.getMessage(): record.levelno for record in caplog.records}
    expected = [
        (rf"run started: runId={summary.run_id} AsOfDate=2026-11-30 W=20 H=5\b", logging.INFO),
        (r"batch processed: CardKind=PropertyObject rows=2 updated=0\b", logging.INFO),
        (r"batch processed: CardKind=Project rows=1 updated=0\b", logging.INFO),
        (rf"item failed: CardKind=PropertyObject CardId={poison} exception=CheckViolation: \S+", logging.ERROR),
        (r"run completed: PropertyObjectCardsUpdated=0 ProjectCardsUpdated=0 SnapshotsWritten=4 ", logging.INFO),
        (rf".* SnapshotsPruned=0 ItemErrors=1 DurationMs={summary.duration_ms}\b", logging.INFO),
    ]
    for pattern, level in expected:
        assert [found for line, found in lines.items() if re.match(pattern, line)], pattern
        assert {found for line, found in lines.items() if re.match(pattern, line)} == {level}


def test_progress_is_told_after_each_batch_with_what_is_done_and_when_it_will_end(catalogue: Catalogue) -> None:
    catalogue.add_many(5, views=5)
    catalogue.add_many(2, kind=PROJECT)
    began = datetime.now(UTC)
    told: list[Progress] = []
    committed: list[int] = []

    def watch(progress: Progress) -> None:
        told.append(progress)
        committed.append(sum(catalogue.snapshot_counts().values()))

    catalogue.run(parameters=Parameters(batch_size=2), on_progress=watch)

    assert [(each.card_kind, each.rows) for each in told] == [(FLAT, 2), (FLAT, 2), (FLAT, 1), (PROJECT, 2)]
    assert [each.cards_done for each in told] == committed == [2, 4, 5, 7]
    assert {each.cards_total for each in told} == {7}
    assert all(each.cards_per_second > 0 for each in told)
    assert all(each.expected_end > began for each in told)


# Which partition may run


@pytest.fixture
def decision(catalogue: Catalogue) -> Iterator[Any]:
    with catalogue.connect() as connection:
        yield lambda run_date, rebuild=False: decide(connection, run_date, today=TODAY, rebuild=rebuild)


def test_today_is_a_full_run_and_a_rebuild_of_today_captures(decision: Any) -> None:
    assert decision(TODAY) == Work(RunKind.FULL, capture=True)
    assert decision(TODAY, rebuild=True) == Work(RunKind.REBUILD, capture=True)


def test_the_newest_stored_night_is_scored_again_without_a_capture(catalogue: Catalogue, decision: Any) -> None:
    catalogue.store(catalogue.add(), {night(-3): 1, night(-2): 1})
    assert decision(night(-2)) == Work(RunKind.RECOMPUTE, capture=False)
    assert decision(night(-2), rebuild=True) == Work(RunKind.REBUILD, capture=False)


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_night_with_newer_ones_behind_it_is_history(catalogue: Catalogue, decision: Any, rebuild: bool) -> None:
    catalogue.store(catalogue.add(), {night(-5): 1, night(-3): 1})
    catalogue.store(catalogue.add(), {night(-5): 1})
    catalogue.store(catalogue.add(kind=PROJECT), {night(-4): 1, TODAY: 1}, kind=PROJECT)
    assert decision(night(-5), rebuild) == History(superseded_by=TODAY, snapshots={FLAT: 2, PROJECT: 0})
    assert decision(night(-4), rebuild) == History(superseded_by=TODAY, snapshots={FLAT: 0, PROJECT: 1})


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("stored", [[], [-2], [0], [-2, 0]])
def test_a_night_without_snapshots_was_missed(
    catalogue: Catalogue, decision: Any, stored: list[int], rebuild: bool
) -> None:
    catalogue.store(catalogue.add(), {night(offset): 1 for offset in stored})
    with pytest.raises(RunDateRefusedError, match=f"partition {night(-1)} has no snapshots: that night was missed"):
        decision(night(-1), rebuild)


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_night_of_the_future_is_refused(decision: Any, rebuild: bool) -> None:
    with pytest.raises(RunDateRefusedError, match=f"partition {night(1)} lies in the future: today is {TODAY}"):
        decision(night(1), rebuild)


# The plans of the statements that touch the big tables


@pytest.fixture
def nights(catalogue: Catalogue) -> Catalogue:
    """20,000 cards with two analysed nights, and a night captured since that the statistics know nothing of."""
    catalogue.add_many(20_000, views=100)
    capture = (
        f"INSERT INTO {SNAPSHOTS} (id, card_kind, card_id, run_date, cumulative_views, created_at) "
        f"SELECT gen_random_uuid(), 'PropertyObject', id, %s::date - n, 100 - n, now() FROM {FLAT.table}, unnest(%s) n"
    )
    catalogue.execute(f"ALTER TABLE {SNAPSHOTS} SET (autovacuum_enabled = off)")
    catalogue.execute(capture, TODAY, [1, 2])
    with psycopg.connect(catalogue.url, autocommit=True) as connection:
        connection.execute(f"VACUUM (ANALYZE) {SNAPSHOTS}, {FLAT.table}")
    catalogue.execute(capture, TODAY, [0])
    return catalogue


def plans(catalogue: Catalogue, statement: str, parameters: dict[str, Any]) -> Iterator[str]:
    """The nodes of the plan for these values, and of the one that psycopg's prepared statements fall back to."""
    names = sorted(set(re.findall(r"%\((\w+)\)[sb]", statement)))
    numbered = re.sub(r"%\((\w+)\)[sb]", lambda match: f"${names.index(match[1]) + 1}", statement)
    values = ", ".join(f"%({name})s" for name in names)
    for mode in ("force_custom_plan", "force_generic_plan"):
        with psycopg.connect(catalogue.url, cursor_factory=psycopg.ClientCursor) as connection:
            connection.execute(statements.WORKER_SESSION, {"application_name": "plans"})
            connection.execute(f"SET plan_cache_mode = {mode}")
            connection.execute(f"PREPARE it AS {numbered}".encode())
            rows = connection.execute(f"EXPLAIN EXECUTE it({values})", parameters).fetchall()
            yield "\n".join(line for (line,) in rows)


def scanned_whole(plan: str) -> list[str]:
    return re.findall(r"Seq Scan on (\w+)", plan)


PAGE = {
    "card_kind": "PropertyObject",
    "run_date": TODAY,
    "handled_since": TODAY,
    "batch_size": 100,
    "left_out": [],
    "after": card_id(5_000),
    "upto": card_id(15_000),
    "ids": [card_id(n) for n in range(1, 101)],
    "oldest": night(-30),
    "weights": decay_weights(30, 7),
    "snapshot_id_prefix": "0" * 28,
}


@pytest.mark.slow
def test_locking_a_page_never_scans_the_snapshots(nights: Catalogue) -> None:
    for after, upto, unhandled, wait in product([False, True], repeat=4):
        statement = statements.lock_page(FLAT, after=after, upto=upto, unhandled=unhandled, wait=wait)
        for plan in plans(nights, statement, PAGE):
            assert "popularity_daily_views" not in scanned_whole(plan), plan
            assert ("popularity_daily_views" in plan) is unhandled


@pytest.mark.slow
@pytest.mark.parametrize("capture", [False, True])
def test_scoring_a_page_scans_neither_the_snapshots_nor_the_cards(nights: Catalogue, capture: bool) -> None:
    for plan in plans(nights, statements.score_page(FLAT, capture=capture), PAGE):
        assert scanned_whole(plan) == [], plan
