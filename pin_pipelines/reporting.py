"""What contexts show people alike, as markdown for the UI."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from io import BytesIO

import pandas as pd
from matplotlib.figure import Figure


def as_markdown(table: pd.DataFrame) -> str:
    """A table; values are written as they are, never through floats."""
    return str(table.astype(str).to_markdown(index=False, disable_numparse=True))


def score_histogram(counts: Mapping[int | None, int], *, title: str, score: str, counted: str) -> str:
    """A histogram with a column for each half decade, as an image.

    Args:
        counts: how many have a score of at least 10^(bucket / 2), by bucket; of those with a score of 0 under None.
        title: of the picture.
        score: name of the scores.
        counted: name of what has them.
    """
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    buckets = sorted(bucket for bucket in counts if bucket is not None)
    columns = range(buckets[0], buckets[-1] + 1) if buckets else range(0)
    heights = [counts.get(None, 0), *(counts.get(bucket, 0) for bucket in columns)]
    labels = ["0", *(_label(10 ** (bucket / 2)) for bucket in columns)]
    bars = axes.bar(range(len(heights)), heights, color=["#9aa5b1", *["#3b6fb5"] * len(columns)])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=45)
    axes.set_xlabel(score)
    axes.set_ylabel(counted)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return f"![score distribution](data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()})"


def _label(at_least: float) -> str:
    return f"{at_least:,.0f}+" if at_least >= 100 else f"{at_least:.3g}+"
