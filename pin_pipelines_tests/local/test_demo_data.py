"""The demo's catalogue: the same each time, and counters that only grow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

import psycopg

from pin_pipelines.local.demo_data import advance_a_little, advance_to, find_catalogue, make_catalogue
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines_tests.support.databases import query

CARDS = 200


def test_the_demo_catalogue_comes_out_the_same_each_time(
    postgres: EmbeddedPostgres, template: str, new_database: Callable[[str], str]
) -> None:
    def make() -> list[tuple[Any, ...]]:
        url = postgres.url(new_database(template))
        with psycopg.connect(url) as connection:
            catalogue = make_catalogue(connection, CARDS, date(2026, 11, 30))
            advance_to(connection, catalogue, date(2026, 10, 30))
        return query(url, "SELECT id, project_id, title, status, popularity_views FROM catalog.property_object_cards")

    first = make()
    assert len(first) == CARDS
    assert sorted(first) == sorted(make())
    assert {status for _, _, _, status, _ in first} == {"Published", "Hidden", "Delisted"}


def test_demo_counters_only_grow_and_a_project_counts_what_its_objects_count(database_url: str) -> None:
    counters = "SELECT id, popularity_views FROM catalog.property_object_cards"
    with psycopg.connect(database_url) as connection:
        made = make_catalogue(connection, CARDS, date(2026, 11, 30))
    seen = dict(query(database_url, counters))
    for day in (date(2026, 11, 29), date(2026, 11, 30)):
        with psycopg.connect(database_url) as connection:
            advance_to(connection, made, day)
        now = dict(query(database_url, counters))
        assert all(now[card] >= views for card, views in seen.items())
        assert sum(now.values()) > sum(seen.values())
        seen = now
    with psycopg.connect(database_url) as connection:
        counted = find_catalogue(connection)
        assert counted is not None
        advance_to(connection, counted, date(2026, 11, 30))
        assert dict(connection.execute(counters).fetchall()) == seen, "a day was counted twice"
        advance_a_little(connection, counted, date(2026, 11, 30), "noon")
    assert sum(dict(query(database_url, counters)).values()) > sum(seen.values())
    assert query(
        database_url,
        "SELECT count(*) FROM catalog.project_cards p WHERE popularity_views <> (SELECT coalesce(sum(popularity_views),"
        " 0) FROM catalog.property_object_cards WHERE project_id = p.id)",
    ) == [(0,)]
