"""The claim behind a real PgBouncer: kept in session mode, refused in transaction mode, never shared unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from uuid import uuid4

import psycopg
import pytest

from pin_pipelines.invest_analytics.checkpoints import Claim, Connection, PooledConnectionError, Range, checkpoint_rows
from pin_pipelines_tests.support.pgbouncer import PGBOUNCER, pgbouncer
from pin_pipelines_tests.support.waiting import until

pytestmark = [
    pytest.mark.system_package,
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed (Debian: apt-get install pgbouncer)"),
]

EVERYTHING = Range()


def claim_on(connect: Callable[[], Connection], price_range: Range = EVERYTHING) -> Claim:
    return Claim(connect, price_range, run_id=uuid4())


def advisory_locks(database_url: str) -> int:
    """Seen past the pooler."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ).fetchone()
    assert row is not None
    return int(row[0])


def checkpoints(database_url: str) -> int:
    with psycopg.connect(database_url) as connection:
        return len(checkpoint_rows(connection))


def warm_up(url: str, server_connections: int) -> None:
    """Let the pool open so many connections to the server, as the traffic of others does."""
    with ExitStack() as stack:
        for _ in range(server_connections):
            stack.enter_context(psycopg.connect(url)).execute("SELECT 1")


@contextmanager
def transaction_pool(database_url: str, *, size: int, in_turn: bool, warm: bool) -> Iterator[str]:
    with pgbouncer(
        database_url, pool_mode="transaction", default_pool_size=size, server_round_robin=int(in_turn)
    ) as url:
        if warm:
            warm_up(url, size)
        yield url


@pytest.mark.parametrize("warm", [False, True], ids=["a pool that is empty", "a pool that is full"])
@pytest.mark.parametrize("in_turn", [False, True], ids=["the last one first", "in turn"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_claim_through_a_pool_in_transaction_mode_is_refused_and_leaves_nothing_behind(
    database_url: str, size: int, in_turn: bool, warm: bool
) -> None:
    with transaction_pool(database_url, size=size, in_turn=in_turn, warm=warm) as url:
        # What chance gave once it need not give again.
        for _ in range(5):
            with (
                claim_on(partial(psycopg.connect, url)) as claim,
                pytest.raises(PooledConnectionError, match="session mode"),
            ):
                claim.take(1000)

        assert advisory_locks(database_url) == 0
        assert checkpoints(database_url) == 0


def test_claim_is_refused_where_poolers_in_transaction_mode_share_an_address(database_url: str) -> None:
    pool = partial(transaction_pool, database_url, size=3, in_turn=False, warm=True)
    with pool() as one, pool() as other:
        addresses = cycle([one, other])

        with claim_on(lambda: psycopg.connect(next(addresses))) as claim, pytest.raises(PooledConnectionError):
            claim.take(1000)

        assert advisory_locks(database_url) == 0
        assert checkpoints(database_url) == 0


def test_claim_through_a_pool_in_session_mode_excludes_others_and_ends_with_its_run(database_url: str) -> None:
    with pgbouncer(database_url, pool_mode="session", default_pool_size=8) as url:
        connect = partial(psycopg.connect, url)
        with claim_on(connect) as first:
            assert first.take(1000)
            with claim_on(connect) as second, claim_on(partial(psycopg.connect, database_url)) as direct:
                assert not second.take(1000)
                assert not direct.take(1000)
            first.complete()

        # PgBouncer resets a session a moment after its client has left.
        until(lambda: advisory_locks(database_url) == 0, "the claim to be free")
        with claim_on(connect) as next_one:
            assert next_one.take(1000)
        until(lambda: advisory_locks(database_url) == 0, "the next claim to be free")


def test_two_connections_of_a_pool_in_session_mode_are_enough_for_a_claim(database_url: str) -> None:
    # Who waits for a third one is told so soon, and not after PgBouncer's two minutes.
    with (
        pgbouncer(database_url, pool_mode="session", default_pool_size=2, query_wait_timeout=2) as url,
        claim_on(partial(psycopg.connect, url)) as claim,
    ):
        assert claim.take(1000)
        claim.complete()


def test_claim_on_a_direct_connection_is_not_taken_for_a_pooled_one(database_url: str) -> None:
    for _ in range(5):
        with claim_on(partial(psycopg.connect, database_url)) as claim:
            assert claim.take(1000)
