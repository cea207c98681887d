"""The tables of the popularity recompute: what exists, under which name, and who owns it.

The cards belong to the catalog service; the pipeline reads them and writes ``popularity_score`` and
``updated_at`` alone. The daily snapshots and the run ledger are the pipeline's own (``migrations``).
Only names belong here; the statements are in ``statements``.
"""

from __future__ import annotations

from enum import StrEnum

SNAPSHOTS = "catalog.popularity_daily_views"
LEDGER = "catalog.popularity_runs"


class CardKind(StrEnum):
    """PopularityCardKind of the spec, stored as text. The order is that of the passes of a run."""

    PROPERTY_OBJECT = "PropertyObject"
    PROJECT = "Project"

    @property
    def table(self) -> str:
        """The card table of this kind."""
        return _CARD_TABLES[self]

    @property
    def prefix(self) -> str:
        """What the columns of the ledger and the figures of a summary start with."""
        return _PREFIXES[self]


_CARD_TABLES = {
    CardKind.PROPERTY_OBJECT: "catalog.property_object_cards",
    CardKind.PROJECT: "catalog.project_cards",
}
_PREFIXES = {
    CardKind.PROPERTY_OBJECT: "property_object",
    CardKind.PROJECT: "project",
}

# Cards of any other status are passed over (spec, step 2; a positive list, since a status may be added).
SCORED_STATUSES = ("Published", "Hidden")
