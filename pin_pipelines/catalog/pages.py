"""Where the next batch of a run comes from.

All workers of a run take their pages from one source, one at a time (a page is locked in milliseconds and scored
in tens of them), so they never look at the same card. A source is bound to no connection: the page is locked in
the transaction of the worker that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar
from uuid import UUID

import psycopg

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.ledger import StopPoint
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connection, fetch_one


@dataclass(frozen=True)
class Page:
    """Cards of one kind, locked by the transaction that took the page."""

    kind: CardKind
    ids: Sequence[UUID]
    stop_id: UUID | None
    """Where a run that is cut after this page goes on next time; None where there is no such place."""


@dataclass(frozen=True)
class Segment:
    """A stretch of one card table by id: after (excluded) … upto (included); None is the table's end."""

    kind: CardKind
    after: UUID | None = None
    upto: UUID | None = None


class PageSource(Protocol):
    """Hands out each card once; calls are serialised by the run."""

    def take(self, connection: Connection) -> Page | None:
        """Lock the next page, or None when there is none; raises psycopg's errors and can be called again."""

    def pass_over(self, kind: CardKind, ids: Collection[UUID]) -> None:
        """Cards of a page that could not be locked again."""

    def mark_shared(self) -> None:
        """Another instance was seen at work."""

    def sweep(self) -> PageSource | None:
        """What to try once more, or None when nothing was passed over."""

    @property
    def left_locked(self) -> int:
        """Cards passed over since another writer held them."""


def circle(start: StopPoint | None) -> list[Segment]:
    """The passes of a full run: property objects, then projects; from a stop point on, and round to it again."""
    kinds = list(CardKind)
    if start is None:
        return [Segment(kind) for kind in kinds]
    first = kinds.index(start.kind)
    others = kinds[first + 1 :] + kinds[:first]
    return [
        Segment(start.kind, after=start.card_id),
        *(Segment(kind) for kind in others),
        Segment(start.kind, upto=start.card_id),
    ]


T = TypeVar("T")


class _Patience:
    """Waits for held cards as long as nothing stays held: one stuck card must not cost its wait on every page."""

    def __init__(self, *, wait: bool) -> None:
        self.waits = wait

    def lock(self, connection: Connection, lock: Callable[[bool], T]) -> T:
        """Call ``lock`` with True to wait, or with False to pass over."""
        if self.waits:
            try:
                with connection.transaction():
                    connection.execute(statements.WAIT_A_LITTLE)
                    return lock(True)
            except psycopg.errors.LockNotAvailable:
                self.waits = False
        return lock(False)


class CatalogueScan:
    """The pages of a full run: a keyset scan of both tables."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        run_date: date,
        handled_since: datetime,
        batch_size: int,
        left_out: Mapping[CardKind, Collection[UUID]],
        shared: bool,
        sweeping: bool = False,
    ) -> None:
        """Scan ``segments`` in order.

        Args:
            segments: what to scan.
            run_date: D.
            handled_since: a card whose snapshot of D is at least as new is handled.
            batch_size: cards in a page, at the most.
            left_out: poison cards; the run adds to it.
            shared: other instances are at work, so handled cards must be asked for.
            sweeping: wait a little for cards that are held, instead of passing over them.
        """
        self._segments = list(segments)
        self._after = self._segments[0].after
        self._run_date = run_date
        self._handled_since = handled_since
        self._batch_size = batch_size
        self._left_out = left_out
        self._shared = shared
        self._sweeping = sweeping
        self._patience = _Patience(wait=sweeping)
        self.left_locked = 0

    def pass_over(self, kind: CardKind, ids: Collection[UUID]) -> None:  # noqa: ARG002 - the sweep finds both kinds
        """See ``PageSource``; the sweep finds them by what is handled."""
        self.left_locked += len(ids)

    def mark_shared(self) -> None:
        """See ``PageSource``; from now on leave out what the other handled."""
        self._shared = True

    def take(self, connection: Connection) -> Page | None:
        """See ``PageSource``."""
        while self._segments:
            segment = self._segments[0]
            ids, passed_over = self._patience.lock(connection, partial(self._lock_page, connection, segment))
            self.left_locked += passed_over
            if ids:
                self._after = ids[-1]
                return Page(segment.kind, ids, None if self._sweeping else ids[-1])
            self._segments.pop(0)
            self._after = self._segments[0].after if self._segments else None
        return None

    def sweep(self) -> CatalogueScan | None:
        """See ``PageSource``."""
        if not self.left_locked:
            return None
        return CatalogueScan(
            circle(None),
            run_date=self._run_date,
            handled_since=self._handled_since,
            batch_size=self._batch_size,
            left_out=self._left_out,
            shared=True,
            sweeping=True,
        )

    def _lock_page(self, connection: Connection, segment: Segment, wait: bool) -> tuple[list[UUID], int]:
        statement = statements.lock_page(
            segment.kind,
            after=self._after is not None,
            upto=segment.upto is not None,
            unhandled=self._shared,
            wait=wait,
        )
        parameters = {
            "card_kind": segment.kind,
            "run_date": self._run_date,
            "handled_since": self._handled_since,
            "left_out": list(self._left_out[segment.kind]),
            "after": self._after,
            "upto": segment.upto,
            "batch_size": self._batch_size,
        }
        ids, passed_over = fetch_one(connection, statement, parameters, binary=True)
        return ids, passed_over


class CardList:
    """The pages of a recompute or a rebuild: cards that are known by id."""

    def __init__(self, cards: Mapping[CardKind, Iterable[UUID]], batch_size: int, *, sweeping: bool = False) -> None:
        """Go through ``cards``, kind by kind, ``batch_size`` at a time; ``sweeping`` waits for cards held."""
        self._chunks = _chunks(cards, batch_size)
        self._chunk = next(self._chunks, None)
        self._batch_size = batch_size
        self._patience = _Patience(wait=sweeping)
        self._passed_over: dict[CardKind, list[UUID]] = {kind: [] for kind in CardKind}

    def take(self, connection: Connection) -> Page | None:
        """See ``PageSource``."""
        while self._chunk is not None:
            kind, chunk = self._chunk
            ids = self._patience.lock(connection, partial(lock_cards, connection, kind, chunk))
            if not self._patience.waits:
                self.pass_over(kind, set(chunk) - set(ids))
            # Else nothing was held: what is missing is no longer on show.
            self._chunk = next(self._chunks, None)
            if ids:
                return Page(kind, ids, None)
        return None

    def pass_over(self, kind: CardKind, ids: Collection[UUID]) -> None:
        """See ``PageSource``."""
        self._passed_over[kind].extend(sorted(ids))

    def mark_shared(self) -> None:
        """See ``PageSource``; a list is gone through whatever others do."""

    def sweep(self) -> CardList | None:
        """See ``PageSource``."""
        return CardList(self._passed_over, self._batch_size, sweeping=True) if self.left_locked else None

    @property
    def left_locked(self) -> int:
        """See ``PageSource``."""
        return sum(map(len, self._passed_over.values()))


def lock_cards(connection: Connection, kind: CardKind, ids: Sequence[UUID], wait: bool = False) -> list[UUID]:
    """Lock the given cards, as far as they are free (or, waiting, all of them)."""
    rows = connection.execute(statements.lock_cards(kind, wait=wait), {"ids": list(ids)})
    return [card_id for (card_id,) in rows]


def _chunks(cards: Mapping[CardKind, Iterable[UUID]], size: int) -> Iterator[tuple[CardKind, list[UUID]]]:
    for kind in CardKind:
        ids = iter(cards.get(kind, ()))
        while chunk := list(islice(ids, size)):
            yield kind, chunk
