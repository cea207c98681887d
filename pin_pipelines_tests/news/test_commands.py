"""The commands of the post ranking, as a user gives them: real processes, a real database."""

from __future__ import annotations

import pytest

from pin_pipelines_tests.news.test_migration import RANKING_TABLES
from pin_pipelines_tests.support.command_line import command
from pin_pipelines_tests.support.news import News

pytestmark = pytest.mark.slow

# Migrations


def test_migrate_without_the_option_makes_neither_of_the_tables(plain_news: News) -> None:
    assert command("migrate", url=plain_news.url).returncode == 0
    assert not plain_news.tables() & RANKING_TABLES


def test_migrate_with_news_ranking_makes_them_and_can_be_given_again(plain_news: News) -> None:
    for _ in range(2):
        done = command("migrate", "--with-news-ranking", url=plain_news.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [
            "The database is up to date.",
            "The tables of the post ranking are up to date.",
        ]
        assert plain_news.tables() >= RANKING_TABLES
