"""What people look at after a run: the top of the list, and how the scores are spread."""

from __future__ import annotations

import base64
from io import BytesIO

import pandas as pd
from matplotlib.figure import Figure

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connection

TOP_SIZE = 10


def top_cards(connection: Connection, kind: CardKind) -> pd.DataFrame:
    """The ten most popular cards on show, the first first.

    Columns: rank, card_id, popularity_views, popularity_score (exact decimals, as stored).
    """
    rows = connection.execute(statements.top_cards(kind), {"size": TOP_SIZE}).fetchall()
    top = pd.DataFrame(rows, columns=["card_id", "popularity_views", "popularity_score"], dtype=object)
    top.insert(0, "rank", range(1, len(top) + 1))
    return top


def as_markdown(table: pd.DataFrame) -> str:
    """A table for the UI; values are written as they are, never through floats."""
    return str(table.astype(str).to_markdown(index=False, disable_numparse=True))


def distribution_picture(connection: Connection, kind: CardKind) -> str:
    """A histogram of the scores, a column for each half decade, as a markdown image."""
    counts = dict(connection.execute(statements.score_distribution(kind)).fetchall())
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    buckets = sorted(bucket for bucket in counts if bucket is not None)
    columns = range(buckets[0], buckets[-1] + 1) if buckets else range(0)
    heights = [counts.get(None, 0), *(counts.get(bucket, 0) for bucket in columns)]
    labels = ["0", *(_label(10 ** (bucket / 2)) for bucket in columns)]
    bars = axes.bar(range(len(heights)), heights, color=["#9aa5b1", *["#3b6fb5"] * len(columns)])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=45)
    axes.set_xlabel("popularity score")
    axes.set_ylabel("cards")
    axes.set_title(f"{kind}: how the scores are spread", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return f"![score distribution](data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()})"


def _label(at_least: float) -> str:
    return f"{at_least:,.0f}+" if at_least >= 100 else f"{at_least:.3g}+"
