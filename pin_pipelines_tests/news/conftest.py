"""The newsroom while the ranking is deferred."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from pin_pipelines.local.news_stand_ins import create_news_stand_ins
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.migrations import migrate
from pin_pipelines_tests.support.news import News


@pytest.fixture(scope="session")
def plain_news_template(postgres: EmbeddedPostgres) -> str:
    """The other services' tables alone: what there is while the ranking is deferred."""
    postgres.ensure_database("template_news_plain")
    url = postgres.url("template_news_plain")
    with psycopg.connect(url) as connection:
        create_news_stand_ins(connection)
    migrate(url)
    return "template_news_plain"


@pytest.fixture
def plain_news(postgres: EmbeddedPostgres, plain_news_template: str, new_database: Callable[[str], str]) -> News:
    """A database without the branch of the ranking."""
    return News(postgres.url(new_database(plain_news_template)))
