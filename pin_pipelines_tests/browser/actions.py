"""What people do in the UI, by what they see there."""

from __future__ import annotations

import re
from datetime import date
from uuid import UUID

import psycopg
import requests
from playwright.sync_api import Page, expect

from pin_pipelines.local.backfill_demo import switch_on
from pin_pipelines.local.talent import PATH
from pin_pipelines_tests.browser.stack import LOCATION, Served


def launch_partition(page: Page, run_date: date | None = None) -> None:
    """From the job's page, the newest partition or this one; the run's page is open then."""
    page.goto(f"{LOCATION}/jobs/popularity_recompute")
    page.get_by_role("button", name="Materialize all…").click()
    dialog = page.get_by_role("dialog")
    if run_date is None:
        dialog.get_by_role("button", name="Latest", exact=True).click()
    else:
        dialog.get_by_role("textbox").first.fill(str(run_date))
        dialog.get_by_role("textbox").first.press("Tab")
    dialog.get_by_role("button", name="Launch 1 run").click()
    view_launched(page)


def fill_launchpad(page: Page, job: str, config: str, partition: date | None = None) -> None:
    """The job's Launchpad with this config; what it prefills is replaced, since that is not the op's."""
    page.goto(f"{LOCATION}/jobs/{job}/playground")
    editor = page.locator(".CodeMirror")
    expect(editor).to_contain_text("PIN_POSTGRES_URL")
    if partition is not None:
        page.get_by_placeholder("Partition").fill(str(partition))
        page.get_by_role("menuitem", name=str(partition)).click()
    editor.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(config)


def launch_with_config(page: Page, job: str, config: str, partition: date | None = None) -> None:
    """From the job's Launchpad; the run's page is open then."""
    fill_launchpad(page, job, config, partition)
    page.get_by_role("button", name="Launch Run").click()
    expect_run_page(page)


def view_launched(page: Page) -> None:
    """Follow the message that says which run was launched."""
    page.get_by_role("link", name="View", exact=True).click()
    expect_run_page(page)


def expect_run_page(page: Page) -> None:
    """A run's page is open."""
    expect(page).to_have_url(re.compile(r"/runs/[0-9a-f-]{36}"))


def run_id(page: Page) -> str:
    """Of the run whose page is open."""
    return page.url.split("/runs/")[1][:36]


def re_execute(page: Page) -> None:
    """Run the whole run again whose page is open; the new one's is open then."""
    again, first = page.get_by_role("button", name="Re-execute all (*)"), page.url
    again.click()
    expect(page).not_to_have_url(first)
    expect_run_page(page)


def expect_logged(page: Page, text: str) -> None:
    """The log of the run's page shows it, once it is there."""
    expect(page.get_by_text(text).first).to_be_visible()


def expect_status(page: Page, status: str) -> None:
    """The run's page shows this status."""
    expect(page.get_by_text(status, exact=True).first).to_be_visible()


def view_requested(page: Page) -> None:
    """From the sensor's page, by the tick that asked for a run; the run's page is open then."""
    page.get_by_role("button", name="1 run requested").first.click()
    page.get_by_role("dialog").locator("a[href*='/runs/']").first.click()
    expect_run_page(page)


def turn_flag_on(stack: Served) -> None:
    """As `pin-pipelines flags set` does."""
    switch_on(lambda: psycopg.connect(stack.stack.postgres_url))


def first_objects(stack: Served, count: int) -> list[UUID]:
    """Of the source, in its order."""
    talent = stack.stack.talent
    answer = requests.get(
        f"{talent.url}{PATH}",
        params={"take": count},
        headers={"Authorization": f"Bearer {talent.token}"},
        timeout=10,
    )
    return [UUID(item["propertyObjectId"]) for item in answer.json()["items"]]


def range_config(lower: UUID, upper: UUID, batch_size: int) -> str:
    """Run config of the backfill."""
    return (
        "ops:\n  load_price_history:\n    config:\n"
        f"      from_property_object_id: {lower}\n      to_property_object_id: {upper}\n"
        f"      batch_size: {batch_size}\n"
    )
