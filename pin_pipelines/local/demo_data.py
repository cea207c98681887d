"""A catalogue to show things with: property objects and projects, and views that grow day by day.

Everything about a card follows from its id by hashing, so the same catalogue comes out each time; and all of it
is made by the database, in one statement a table. The engine treats the cards like any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import psycopg

from pin_pipelines.catalog.tables import CardKind

PROJECTS = 500

_CARDS = CardKind.PROPERTY_OBJECT.table
_PROJECT_CARDS = CardKind.PROJECT.table

_MADE_BY = """
CREATE SCHEMA IF NOT EXISTS pin_local;
CREATE TABLE pin_local.demo_catalogue (
    made_on date NOT NULL,
    property_objects bigint NOT NULL,
    views_until date
)"""


def _chance(*key: str) -> str:
    """SQL: a number in (0, 1] that looks random and follows from the key alone."""
    text = " || '/' || ".join(key)
    return f"((hashtextextended({text}, 0) & 2147483647) + 1) / 2147483648::float8"


def _pick(words: tuple[str, ...], index: str) -> str:
    """SQL: one of the words, counted from 0, round and round."""
    quoted = ", ".join(f"'{word}'" for word in words)
    return f"(ARRAY[{quoted}])[mod({index}, {len(words)}) + 1]"


# Twenty times twenty-five: as many names as there are projects.
_FIRST_WORDS = (
    *("Riverside", "Harbour", "Linden", "Northern", "Old Mill", "Amber", "Silver", "Garden", "Central", "Maple"),
    *("Sunset", "Lakeside", "Royal", "Birch", "Falcon", "Granite", "Meadow", "Orchard", "Crystal", "Pine"),
)
_LAST_WORDS = (
    *("Quarter", "Park", "Heights", "Gardens", "Residence", "Towers", "Court", "Village", "Place", "Terrace"),
    *("Embankment", "Hill", "Square", "Lofts", "Yard", "Point", "Grove", "House", "Lane", "Plaza"),
    *("Estate", "Bay", "Avenue", "Gate", "Crescent"),
)
_PROJECT_NAME = f"{_pick(_FIRST_WORDS, 'n')} || ' ' || {_pick(_LAST_WORDS, f'n / {len(_FIRST_WORDS)}')}"

# Most cards are on sale; a few are hidden from the lists, and some were sold and are out of the catalogue.
_STATUS = f"""CASE
    WHEN {_chance("id::text", "'status'")} <= 0.03 THEN 'Delisted'
    WHEN {_chance("id::text", "'status'")} <= 0.08 THEN 'Hidden'
    ELSE 'Published'
END"""

# Zipf-like: with n cards in the order of their luck, the k-th has about (n / k) ^ 0.9 times the views of the last.
# Luck has a limit, or one card in a million would outshine the rest of the catalogue together.
_FAME = "power(greatest({}, 0.00002), -0.9)".format(_chance("id::text", "'fame'"))

_INSERT_PROJECTS = f"""
INSERT INTO {_PROJECT_CARDS} (id, title, status)
SELECT id, {_PROJECT_NAME}, {_STATUS}
FROM (SELECT n, md5('project ' || n)::uuid AS id FROM generate_series(0, %(projects)s - 1) n) numbered"""

# Large projects have many objects, small ones a few.
_INSERT_CARDS = f"""
INSERT INTO {_CARDS} (id, project_id, title, status, popularity_views)
SELECT drawn.id, md5('project ' || n)::uuid,
       CASE rooms WHEN 0 THEN 'Studio' ELSE rooms || '-room flat' END || ', ' || area || ' m², ' || {_PROJECT_NAME},
       {_STATUS}, floor(8 * {_FAME})
FROM (
    SELECT id, rooms,
           22 + 17 * rooms + floor(14 * {_chance("id::text", "'area'")})::int AS area,
           floor(%(projects)s * power({_chance("id::text", "'project'")}, 1.5) * 0.999999)::int AS n
    FROM (
        SELECT id, floor(4.99 * {_chance("id::text", "'rooms'")})::int AS rooms
        FROM (SELECT md5('property object ' || n)::uuid AS id FROM generate_series(1, %(cards)s) n) numbered
    ) roomy
) drawn"""

_SUM_UP_PROJECTS = f"""
UPDATE {_PROJECT_CARDS} p SET popularity_views = objects.views
FROM (SELECT project_id, sum(popularity_views) AS views FROM {_CARDS} GROUP BY project_id) objects
WHERE p.id = objects.project_id"""

# What a card gets on one day: its share by fame, its trend since the catalogue was made, and the day's luck. Nobody
# looks at a card that is out of the catalogue, and few at a hidden one. A fraction of a view is a view with that
# probability.
_TREND = _chance("id::text", "'trend'")
_ADVANCE = f"""
WITH expected AS (
    SELECT id, project_id, %(share)s * 0.25 * {_FAME}
        * CASE status WHEN 'Published' THEN 1 WHEN 'Hidden' THEN 0.1 ELSE 0 END
        * CASE
              WHEN {_TREND} <= 0.15 THEN exp(0.06 * least(%(age)s, 30))
              WHEN {_TREND} <= 0.35 THEN exp(-0.06 * least(%(age)s, 60))
              WHEN {_TREND} <= 0.70 THEN CASE WHEN {_chance("id::text", "%(day)s", "'visit'")} <= 0.1 THEN 2 ELSE 0 END
              ELSE 1
          END
        * (0.4 + 1.2 * {_chance("id::text", "%(day)s", "'luck'")})
        * CASE WHEN extract(isodow FROM %(date)s::date) >= 6 THEN 1.4 ELSE 1 END AS views
    FROM {_CARDS}
)
, grown AS (
    SELECT id, project_id, floor(views + 1 - {_chance("id::text", "%(day)s", "'fraction'")})::bigint AS views
    FROM expected
)
, moved AS (
    UPDATE {_CARDS} c SET popularity_views = popularity_views + grown.views
    FROM grown WHERE c.id = grown.id AND grown.views > 0
)
UPDATE {_PROJECT_CARDS} p SET popularity_views = popularity_views + objects.views
FROM (SELECT project_id, sum(views) AS views FROM grown GROUP BY project_id HAVING sum(views) > 0) objects
WHERE p.id = objects.project_id"""


@dataclass(frozen=True)
class Catalogue:
    """What is known of a demo catalogue."""

    made_on: date
    property_objects: int
    views_until: date | None
    """The last day whose views are counted in."""


def find_catalogue(connection: psycopg.Connection[Any]) -> Catalogue | None:
    """The demo catalogue of this database, if there is one."""
    row = connection.execute("SELECT to_regclass('pin_local.demo_catalogue') IS NOT NULL").fetchone()
    if row is None or not row[0]:
        return None
    found = connection.execute("SELECT made_on, property_objects, views_until FROM pin_local.demo_catalogue").fetchone()
    return Catalogue(*found) if found else None


def make_catalogue(connection: psycopg.Connection[Any], property_objects: int, today: date) -> Catalogue:
    """Make the catalogue, with the counters as they stood before the first day of its history; the caller commits."""
    connection.execute(_MADE_BY)
    connection.execute(_INSERT_PROJECTS, {"projects": PROJECTS})
    connection.execute(_INSERT_CARDS, {"projects": PROJECTS, "cards": property_objects})
    connection.execute(_SUM_UP_PROJECTS)
    connection.execute(
        "INSERT INTO pin_local.demo_catalogue (made_on, property_objects) VALUES (%s, %s)", [today, property_objects]
    )
    connection.execute(f"ANALYZE {_CARDS}, {_PROJECT_CARDS}")
    return Catalogue(today, property_objects, None)


def advance_to(connection: psycopg.Connection[Any], catalogue: Catalogue, day: date) -> None:
    """Add a day's views, unless they are counted in already; the caller commits."""
    if catalogue.views_until is not None and day <= catalogue.views_until:
        return
    _advance(connection, catalogue, day, key=day.isoformat(), share=1.0)
    connection.execute("UPDATE pin_local.demo_catalogue SET views_until = %s", [day])


def advance_a_little(connection: psycopg.Connection[Any], catalogue: Catalogue, day: date, key: str) -> None:
    """Add a twentieth of a day's views, as if some time had passed; the caller commits.

    Args:
        connection: to the marketplace's database.
        catalogue: the catalogue.
        day: which day it is.
        key: what tells this addition from others of the same day.
    """
    _advance(connection, catalogue, day, key=f"{day} {key}", share=0.05)


def _advance(connection: psycopg.Connection[Any], catalogue: Catalogue, day: date, *, key: str, share: float) -> None:
    age = (day - catalogue.made_on).days
    connection.execute(_ADVANCE, {"date": day, "day": key, "age": age, "share": share})
