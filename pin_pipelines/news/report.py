"""What people look at after a run: the top of the list, and how the scores are spread."""

from __future__ import annotations

import pandas as pd

from pin_pipelines.database import Connection
from pin_pipelines.news import statements
from pin_pipelines.news.tables import ranking_tables_needed
from pin_pipelines.reporting import score_histogram

TOP_SIZE = 10


def top_posts(connection: Connection) -> pd.DataFrame:
    """The ten posts on show with the highest scores, the first first.

    Columns: rank, post_id, title, views_30d, likes, score (exact decimals, as stored).

    Raises:
        RankingTablesMissingError: the branch of migrations was not applied.
    """
    with ranking_tables_needed():
        rows = connection.execute(statements.TOP_POSTS, {"size": TOP_SIZE}).fetchall()
    top = pd.DataFrame(rows, columns=["post_id", "title", "views_30d", "likes", "score"], dtype=object)
    top.insert(0, "rank", range(1, len(top) + 1))
    return top


def distribution_picture(connection: Connection) -> str:
    """A histogram of the scores, a column for each half decade, as a markdown image.

    Raises:
        RankingTablesMissingError: the branch of migrations was not applied.
    """
    with ranking_tables_needed():
        counts = dict(connection.execute(statements.SCORE_DISTRIBUTION).fetchall())
    return score_histogram(counts, title="Posts: how the scores are spread", score="ranking score", counted="posts")
