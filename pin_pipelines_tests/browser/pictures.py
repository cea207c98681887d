"""Makes the README's pictures anew: ``python -m pin_pipelines_tests.browser.pictures``, a few minutes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect

from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_JOB, BACKFILL_SENSOR
from pin_pipelines_tests.browser.actions import (
    expect_logged,
    fill_launchpad,
    first_objects,
    launch_partition,
    range_config,
    turn_flag_on,
    view_requested,
)
from pin_pipelines_tests.browser.stack import LOCATION, Served, chromium, opened, served
from pin_pipelines_tests.support import PROJECT_ROOT

DOCS = PROJECT_ROOT / "docs"


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pin-pictures-"))
    try:
        with (
            served(folder, property_objects=5_000, nights=31) as stack,
            chromium() as browser,
            opened(browser, stack.operators) as page,
        ):
            page.set_viewport_size({"width": 1360, "height": 820})
            popularity(page, stack)
            backfill(page, stack)
            ranking(page)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def popularity(page: Page, stack: Served) -> None:
    launch_partition(page)
    expect_logged(page, "RUN_SUCCESS")
    run_picture(page, "RUN_SUCCESS", "run")
    page.goto(f"{LOCATION}/asset-groups/catalog_popularity")
    expect(page.get_by_text("project_cards", exact=True).first).to_be_visible()
    picture(page, "lineage")
    page.goto("/assets/catalog/property_object_popularity?view=checks")
    page.get_by_text("scores_equal_reference").first.click()
    expect(page.get_by_text("sampled scores equal the reference.").first).to_be_visible()
    picture(page, "checks")
    page.goto("/assets/catalog/popularity_daily_views")
    page.get_by_role("button", name="Plots").click()
    expect(page.locator("canvas").last).to_be_visible()
    page.get_by_text("property_object_cards_updated", exact=True).first.scroll_into_view_if_needed()
    picture(page, "plots")
    # Last, since it plans the checks and evaluates none: the UI then shows them as not evaluated.
    launch_partition(page, stack.nights[-5])
    expect_logged(page, "RUN_SUCCESS")
    run_picture(page, "Nothing was written", "history")


def backfill(page: Page, stack: Served) -> None:
    page.goto(f"{LOCATION}/sensors/{BACKFILL_SENSOR}")
    expect(page.get_by_role("button", name="0 runs requested").first).to_be_visible()
    turn_flag_on(stack)
    view_requested(page)
    expect_logged(page, "RUN_SUCCESS")
    run_picture(page, "batch processed", "backfill")
    page.goto(f"{LOCATION}/sensors/{BACKFILL_SENSOR}")
    expect(page.get_by_role("button", name="1 run requested").first).to_be_visible()
    picture(page, "backfill_sensor")
    page.goto(f"{LOCATION}/asset-groups/invest_analytics_prices")
    expect(page.get_by_text("ClickHouse", exact=True).first).to_be_visible()
    picture(page, "backfill_lineage")
    lower, *_, upper = first_objects(stack, 20)
    fill_launchpad(page, BACKFILL_JOB, range_config(lower, upper, batch_size=500))
    expect(page.get_by_role("button", name="Launch Run")).to_be_enabled()
    picture(page, "backfill_launchpad")


def ranking(page: Page) -> None:
    page.goto("/assets/news/post_ranking_signals")
    expect(page.get_by_text("Deferred: nothing reads or writes it before the flag").first).to_be_visible()
    picture(page, "deferred")


def run_picture(page: Page, line: str, name: str) -> None:
    """A run that has ended, with this line of its log."""
    # Without what was still moving when it ended, and the message that it was launched.
    page.reload()
    expect_logged(page, line)
    page.get_by_text(line).first.scroll_into_view_if_needed()
    picture(page, name)


def picture(page: Page, name: str) -> None:
    """What the page shows now, once nothing more comes and nothing moves."""
    page.wait_for_load_state("networkidle")
    page.mouse.move(0, 0)
    page.screenshot(path=DOCS / f"{name}.png", animations="disabled")
    print(DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
