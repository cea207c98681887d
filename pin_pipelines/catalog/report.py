"""What people look at after a run: the top of the list, and how the scores are spread."""

from __future__ import annotations

import pandas as pd

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connection
from pin_pipelines.reporting import score_histogram

TOP_SIZE = 10


def top_cards(connection: Connection, kind: CardKind) -> pd.DataFrame:
    """The ten most popular cards on show, the first first.

    Columns: rank, card_id, popularity_views, popularity_score (exact decimals, as stored).
    """
    rows = connection.execute(statements.top_cards(kind), {"size": TOP_SIZE}).fetchall()
    top = pd.DataFrame(rows, columns=["card_id", "popularity_views", "popularity_score"], dtype=object)
    top.insert(0, "rank", range(1, len(top) + 1))
    return top


def distribution_picture(connection: Connection, kind: CardKind) -> str:
    """A histogram of the scores, a column for each half decade, as a markdown image."""
    counts = dict(connection.execute(statements.score_distribution(kind)).fetchall())
    return score_histogram(
        counts, title=f"{kind}: how the scores are spread", score="popularity score", counted="cards"
    )
