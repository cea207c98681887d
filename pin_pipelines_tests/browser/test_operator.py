"""What an operator does in the UI, from finding the graph to ending a run."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
from playwright.sync_api import Page, expect

from pin_pipelines.catalog.tables import LEDGER
from pin_pipelines_tests.browser.actions import (
    expect_logged,
    expect_status,
    launch_partition,
    launch_with_config,
    re_execute,
    run_id,
    view_launched,
)
from pin_pipelines_tests.browser.stack import LOCATION, Served, needs_chromium

pytestmark = needs_chromium


def ledger(stack: Served, run: str) -> tuple[str, str, int]:
    """What the pipeline itself wrote down of a run: its kind, how it ended, and how many cards it scored."""
    with psycopg.connect(stack.stack.postgres_url) as connection:
        row = connection.execute(
            "SELECT run_kind, stopped_reason, property_object_cards_processed + project_cards_processed "
            f"FROM {LEDGER} WHERE run_id = %s",
            [run],
        ).fetchone()
    assert row is not None, "the run left no row in the ledger"
    return row


def test_operator_finds_the_assets_of_the_graph_and_what_they_mean(operator: Page) -> None:
    operator.goto(f"{LOCATION}/asset-groups/catalog_popularity")
    for name in ("popularity_daily_views", "project_popularity", "property_object_popularity", "property_object_cards"):
        expect(operator.get_by_text(name, exact=True).first).to_be_visible()

    operator.goto("/assets/catalog/property_object_popularity")
    expect(operator.get_by_text("a view losing half its weight every 7 days").first).to_be_visible()
    expect(operator.get_by_text("catalog_popularity", exact=True).first).to_be_visible()
    expect(operator.get_by_text("Decayed sum of daily views; 0 beyond the window.").first).to_be_visible()
    expect(operator.get_by_text("catalog-squad").first).to_be_visible()


def test_operator_launches_today_s_partition_watches_it_and_runs_it_again(operator: Page, stack: Served) -> None:
    launch_partition(operator)
    expect_logged(operator, "RUN_SUCCESS")
    expect_status(operator, "Success")
    expect(operator.get_by_text(f"{datetime.now(UTC):%Y-%m-%d}").first).to_be_visible()
    kind, ended, scored = ledger(stack, run_id(operator))
    assert (kind, ended) == ("Full", "completed")

    re_execute(operator)
    expect_logged(operator, "RUN_SUCCESS")
    expect_status(operator, "Success")
    assert ledger(stack, run_id(operator)) == ("Full", "completed", scored)


def test_operator_runs_a_past_partition_again_and_reads_why_nothing_was_written(operator: Page, stack: Served) -> None:
    past = stack.nights[1]
    launch_partition(operator, past)
    expect_logged(operator, f"Nothing was written: partition {past} is history.")
    expect_status(operator, "Success")


def test_operator_rebuilds_one_card(operator: Page, stack: Served) -> None:
    with psycopg.connect(stack.stack.postgres_url) as connection:
        card = connection.execute(
            "SELECT id FROM catalog.property_object_cards WHERE status = 'Published' ORDER BY id LIMIT 1"
        ).fetchone()
    assert card is not None
    launch_with_config(
        operator,
        "popularity_recompute",
        f"ops:\n  recompute_popularity:\n    config:\n      card_ids:\n        - {card[0]}\n",
        partition=datetime.now(UTC).date(),
    )
    expect_logged(operator, "Rebuilt 1 cards by id.")
    expect_status(operator, "Success")
    assert ledger(stack, run_id(operator)) == ("Rebuild", "completed", 1)


def test_operator_sees_that_the_ranking_of_posts_is_deferred_and_is_refused_a_run(operator: Page) -> None:
    operator.goto("/assets/news/post_ranking_signals")
    expect(operator.get_by_text("Deferred: nothing reads or writes it before the flag").first).to_be_visible()
    expect(operator.get_by_text("news.ranking.enabled").first).to_be_visible()
    expect(operator.get_by_text("Never materialized").first).to_be_visible()

    operator.goto(f"{LOCATION}/jobs/ranking_recompute")
    operator.get_by_role("button", name="Materialize").click()
    view_launched(operator)
    expect_logged(operator, "news-ranking-disabled")
    expect_status(operator, "Failure")
