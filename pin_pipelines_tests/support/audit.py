"""Which cards a run wrote, how often and in which order: noted by the database itself, with the batch that commits."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from pin_pipelines.catalog.tables import SNAPSHOTS, CardKind
from pin_pipelines_tests.support.catalogue import Catalogue

Card = tuple[CardKind, UUID]


def start_audit(catalogue: Catalogue) -> None:
    """From now on note every write of a snapshot; what was noted is forgotten."""
    catalogue.execute(
        "DROP TABLE IF EXISTS catalog.audit;"
        "CREATE TABLE catalog.audit (n serial, card_kind text, card_id uuid, pid int);"
        "CREATE OR REPLACE FUNCTION catalog.audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN "
        "INSERT INTO catalog.audit (card_kind, card_id, pid) VALUES (NEW.card_kind, NEW.card_id, pg_backend_pid()); "
        "RETURN NULL; END $$;"
        f"CREATE OR REPLACE TRIGGER audit AFTER INSERT OR UPDATE ON {SNAPSHOTS} "
        "FOR EACH ROW EXECUTE FUNCTION catalog.audit()"
    )


def written_in_order(catalogue: Catalogue) -> list[Card]:
    """The cards, in the order in which they were written."""
    rows = catalogue.execute("SELECT card_kind, card_id FROM catalog.audit ORDER BY n")
    return [(CardKind(kind), card) for kind, card in rows]


def times_written(catalogue: Catalogue) -> Counter[Card]:
    """How often each card was written."""
    return Counter(written_in_order(catalogue))
