"""Every SQL statement of the popularity recompute, by name.

Two rules of the spec are kept here and nowhere else: which cards a page holds (``lock_page``, step 3), and how a
page becomes snapshots and scores (``score_page``, steps 4 and 5). A page is locked by one statement and scored by
the next one of the same transaction: only a statement that *begins* after the locks are held sees all that other
runs committed for those cards. In a single statement, a snapshot committed between the statement's start and the
lock would be missed, and an older score could be written over a newer one.
"""

from __future__ import annotations

from functools import cache

from pin_pipelines.catalog.tables import LEDGER, SCORED_STATUSES, SNAPSHOTS, CardKind

_SCORED = "c.status IN ({})".format(", ".join(f"'{status}'" for status in SCORED_STATUSES))

# A card is handled when its snapshot of the run date was written since the oldest live instance began. A scalar
# subquery, so that no plan can turn the look-up of one card into a scan of a whole date: until the snapshots are
# analysed, a new run date is estimated as one row.
_UNHANDLED = f"""coalesce((
        SELECT s.created_at FROM {SNAPSHOTS} s
        WHERE s.card_kind = %(card_kind)s AND s.card_id = c.id AND s.run_date = %(run_date)s
    ), '-infinity') < %(handled_since)s"""

_LAST_UUID = "'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid"


@cache
def lock_page(kind: CardKind, *, after: bool, upto: bool, unhandled: bool, wait: bool) -> str:
    """The next cards by id, locked, and how many before the last of them another writer held.

    Args:
        kind: whose table.
        after: begin behind a card (parameter ``after``).
        upto: end at a card (parameter ``upto``), included.
        unhandled: leave out cards that are handled. A lone instance has no need to ask: its cursor passes each
            card once, and the look-up of each card costs a tenth of a run.
        wait: wait for held cards, as long as ``lock_timeout`` allows, instead of passing over them.

    Parameters: left_out (ids), batch_size; card_kind, run_date, handled_since with ``unhandled``.
    Returns one row: ids uuid[], passed_over bigint.
    """
    clauses = [_SCORED, "c.id <> ALL(%(left_out)s)"]
    if after:
        clauses.append("c.id > %(after)s")
    if unhandled:
        clauses.append(_UNHANDLED)
    candidates = f"{kind.table} c WHERE " + " AND ".join(clauses)
    end = "%(upto)s" if upto else _LAST_UUID
    last_locked = "(SELECT id FROM page ORDER BY id DESC LIMIT 1)"
    return f"""
    WITH page AS MATERIALIZED (
        SELECT c.id FROM {candidates} AND c.id <= {end}
        ORDER BY c.id
        LIMIT %(batch_size)s
        FOR UPDATE OF c {"" if wait else "SKIP LOCKED"}
    )
    SELECT array(SELECT id FROM page ORDER BY id),
           (SELECT count(*) FROM {candidates} AND c.id <= coalesce({last_locked}, {end}))
           - (SELECT count(*) FROM page)"""


@cache
def lock_cards(kind: CardKind, *, wait: bool) -> str:
    """The given cards, locked; those that another writer holds are passed over.

    Parameters: ids. Returns a row a card: id.
    """
    return f"""
    SELECT c.id FROM {kind.table} c
    WHERE c.id = ANY(%(ids)s) AND {_SCORED}
    ORDER BY c.id
    FOR UPDATE OF c {"" if wait else "SKIP LOCKED"}"""


@cache
def score_page(kind: CardKind, *, capture: bool) -> str:
    """Snapshots and scores of cards that are locked already, in one statement.

    The counter of a locked card stands still, so it is S of the run date, and the row stays in its place (ctid). A
    card that another instance handled between page and lock is recognised by the conflict on its snapshot, which
    sees the newest row whatever the statement's start: it is neither written nor scored again.

    One scan of the index reads a card's window, and shows whether a newer run date superseded this one; the card is
    then left as it is: an older score must not cover a newer one, and a snapshot slipped in between would change
    what the newer one is made of. The counters go through two arrays, one shifted by a night, which costs less than
    a window function; the later date of a pair is credited with the difference. The weights are exact
    (``decay.decay_weights``). Snapshots are inserted in the order of the index that they go into.

    Args:
        kind: whose table.
        capture: take the counters of now as the snapshots of the run date. Without it the scores come from what
            is stored.

    Parameters: card_kind, ids, run_date, oldest (the oldest run date read), weights; snapshot_id_prefix and
        handled_since with ``capture``.
    Returns one row: processed, snapshots_written, updated.
    """
    # A capture replaces what is stored for the run date. Without one, nothing follows the last snapshot.
    stored = "s.run_date <> %(run_date)s" if capture else "true"
    now_views, now_date = ("page.popularity_views", "%(run_date)s::date") if capture else ("NULL::bigint", "NULL::date")
    snapshot = f"""
    , snapshot AS (
        INSERT INTO {SNAPSHOTS} AS s (id, card_kind, card_id, run_date, cumulative_views, created_at)
        SELECT (%(snapshot_id_prefix)s || lpad(to_hex(n), 4, '0'))::uuid,
               %(card_kind)s, id, %(run_date)s, popularity_views, clock_timestamp()
        FROM page
        ON CONFLICT (card_kind, card_id, run_date) DO UPDATE
            SET cumulative_views = excluded.cumulative_views, created_at = excluded.created_at
            WHERE s.created_at < %(handled_since)s
        RETURNING card_id
    )"""
    return f"""
    WITH page AS MATERIALIZED (
        SELECT c.id, c.popularity_views, c.popularity_score, c.ctid AS place, known.views, known.dates,
               row_number() OVER (ORDER BY c.id) AS n
        FROM {kind.table} c
        CROSS JOIN LATERAL (
            SELECT array_agg(s.cumulative_views ORDER BY s.run_date) AS views,
                   array_agg(s.run_date ORDER BY s.run_date) AS dates,
                   max(s.run_date) AS newest
            FROM {SNAPSHOTS} s
            WHERE s.card_kind = %(card_kind)s AND s.card_id = c.id AND s.run_date >= %(oldest)s AND {stored}
        ) known
        WHERE c.id = ANY(%(ids)b::uuid[]) AND coalesce(known.newest, %(run_date)s) <= %(run_date)s
    )
    {snapshot if capture else ""}
    , scored AS MATERIALIZED (
        SELECT page.place, page.popularity_score AS stored_score, decayed.score
        FROM page
        {"JOIN snapshot ON snapshot.card_id = page.id" if capture else ""}
        CROSS JOIN LATERAL (
            SELECT round(coalesce(sum(
                (day.views - day.views_before) * (%(weights)s::numeric[])[%(run_date)s::date - day.credited_to + 1]
            ) FILTER (WHERE day.views > day.views_before), 0), 4) AS score
            FROM unnest(page.views, page.views[2:] || {now_views}, page.dates[2:] || {now_date})
                 AS day (views_before, views, credited_to)
        ) decayed
    )
    , updated AS (
        UPDATE {kind.table} c SET popularity_score = scored.score, updated_at = clock_timestamp()
        FROM scored
        WHERE c.ctid = scored.place AND scored.score <> scored.stored_score
        RETURNING c.id
    )
    SELECT (SELECT count(*) FROM scored),
           {"(SELECT count(*) FROM snapshot)" if capture else "0::bigint"},
           (SELECT count(*) FROM updated)"""


@cache
def count_scored(kind: CardKind) -> str:
    """How many cards a full run has to handle."""
    return f"SELECT count(*) FROM {kind.table} c WHERE {_SCORED}"


@cache
def count_unhandled(kind: CardKind) -> str:
    """How many cards are left after a run was cut. Parameters: card_kind, run_date, handled_since, left_out."""
    return f"{count_scored(kind)} AND c.id <> ALL(%(left_out)s) AND {_UNHANDLED}"


@cache
def card_ids(kind: CardKind) -> str:
    """Ids of all cards that are scored, ascending."""
    return f"SELECT c.id FROM {kind.table} c WHERE {_SCORED} ORDER BY c.id"


@cache
def find_cards(kind: CardKind) -> str:
    """Which of the given ids are cards of this kind. Parameters: ids. Returns id, whether it is scored."""
    return f"SELECT c.id, {_SCORED} FROM {kind.table} c WHERE c.id = ANY(%(ids)s) ORDER BY c.id"


# Retention (spec, «Индексы … Retention»): one row in thirty-three goes each night, so a scan of the table is the
# plan; no index by date would pay for its upkeep.
PRUNE = f"DELETE FROM {SNAPSHOTS} WHERE run_date < %(keep_from)s"

# Until the next autovacuum the new run date would be estimated as one row, and a report could choose a plan that
# runs for minutes. Where a vacuum is at work on the table, its own ANALYZE follows soon; a run need not wait for it.
ANALYZE = f"ANALYZE (SKIP_LOCKED) {SNAPSHOTS}"

# Both scan the table once; they decide a partition of the past, which is rare (``partitions``).
NEWEST_RUN_DATE = f"SELECT max(run_date) FROM {SNAPSHOTS}"
STORED_FOR = f"SELECT card_kind, count(*) FROM {SNAPSHOTS} WHERE run_date = %(run_date)s GROUP BY card_kind"


def _session(**settings: str) -> str:
    """Settings of a session, with those that every session of the engine has. Parameters: application_name."""
    common = {"default_transaction_isolation": "read committed", "timezone": "UTC"}
    values = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in {**settings, **common}.items())
    return f"SELECT {values}, set_config('application_name', %(application_name)s, false)"


# The session's own limits. A statement of a batch takes milliseconds; one that hangs must not hold its locks for
# longer than a consumer can bear. Each statement has to see what was committed before it began. jit costs more than
# it gains on statements this short. A batch that a crash of the server takes back is computed again by the next run,
# and the row that closes the run in the ledger is flushed with everything before it: so a batch need not wait for
# the disk.
WORKER_SESSION = _session(
    statement_timeout="60s",
    lock_timeout="5s",
    idle_in_transaction_session_timeout="60s",
    synchronous_commit="off",
    jit="off",
)

# How long the sweep waits for a card that another writer holds; for this transaction only.
WAIT_A_LITTLE = "SELECT set_config('lock_timeout', '2s', true)"

# Retention reads the whole table, and instances that end together wait for each other there.
MAINTENANCE_SESSION = "SELECT set_config('statement_timeout', '15min', false), set_config('lock_timeout', '0', false)"

# The liveness lock is worth what its connection is worth: a host that vanished must not hold it for hours.
LIVENESS_SESSION = _session(
    tcp_keepalives_idle="10", tcp_keepalives_interval="5", tcp_keepalives_count="3", statement_timeout="60s"
)

_LIVENESS_KEY = "hashtextextended('Pin:lock:run:catalog-popularity-recompute:' || {}, 0)"

TAKE_LIVENESS = f"SELECT pg_try_advisory_lock({_LIVENESS_KEY.format('%(run_id)s')})"
TAKE_SINGLE_FLIGHT = (
    "SELECT pg_try_advisory_lock(hashtextextended('Pin:lock:job:scheduled:catalog-popularity-recompute', 0))"
)
# Instances register one after the other, so that of two that start together one sees the other.
REGISTER_ONE_BY_ONE = (
    "SELECT pg_advisory_xact_lock(hashtextextended('Pin:lock:ledger:catalog-popularity-recompute', 0))"
)

_ALIVE = f"""EXISTS (
        SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND (l.classid::bigint << 32) | l.objid::bigint = {_LIVENESS_KEY.format("r.run_id")}
    )"""

LIVE_RUNS = f"""
    SELECT r.run_id, r.run_date, r.run_kind, r.started_at, r.handled_since FROM {LEDGER} r
    WHERE r.status = 'Running' AND {_ALIVE}
    ORDER BY r.started_at"""

CLOSE_DEAD_RUNS = f"""
    UPDATE {LEDGER} r
    SET status = 'Failed', stopped_reason = 'died', finished_at = clock_timestamp(),
        error = 'The process of the run died: its liveness lock was free.'
    WHERE r.status = 'Running' AND NOT {_ALIVE}
    RETURNING r.run_id"""

OPEN_RUN = f"""
    INSERT INTO {LEDGER} (run_id, run_date, run_kind, handled_since, batch_size,
                          property_object_stop_id, project_stop_id)
    VALUES (%(run_id)s, %(run_date)s, %(run_kind)s, coalesce(%(handled_since)s, clock_timestamp()), %(batch_size)s,
            %(property_object_stop_id)s, %(project_stop_id)s)
    RETURNING handled_since"""

# Only a run that ended in order stops at a point worth going on from: one that failed may have failed there.
LAST_STOP = f"""
    SELECT property_object_stop_id, project_stop_id FROM {LEDGER}
    WHERE run_kind = 'Full' AND status IN ('Completed', 'Stopped')
    ORDER BY started_at DESC LIMIT 1"""


@cache
def add_batch(kind: CardKind) -> str:
    """Move the figures of a run by those of one batch, in the batch's own transaction."""
    stops = ", ".join(f"{each.prefix}_stop_id = " + ("%(stop_id)s" if each is kind else "NULL") for each in CardKind)
    return f"""
    UPDATE {LEDGER}
    SET {kind.prefix}_cards_processed = {kind.prefix}_cards_processed + %(processed)s,
        {kind.prefix}_cards_updated = {kind.prefix}_cards_updated + %(updated)s,
        snapshots_written = snapshots_written + %(snapshots_written)s,
        item_errors = item_errors + %(item_errors)s,
        {stops}
    WHERE run_id = %(run_id)s"""


# A row is closed once: of a run that was taken for dead and counted as such, nothing later makes another.
CLOSE_RUN = f"""
    UPDATE {LEDGER}
    SET status = %(status)s::text, stopped_reason = %(stopped_reason)s, finished_at = clock_timestamp(),
        snapshots_pruned = %(snapshots_pruned)s, cards_left_locked = %(cards_left_locked)s,
        cards_remaining = %(cards_remaining)s, retries = %(retries)s, duration_ms = %(duration_ms)s, error = %(error)s,
        property_object_stop_id = CASE WHEN %(status)s::text = 'Completed' THEN NULL ELSE property_object_stop_id END,
        project_stop_id = CASE WHEN %(status)s::text = 'Completed' THEN NULL ELSE project_stop_id END
    WHERE run_id = %(run_id)s AND status = 'Running'"""

# What people and checks ask of a finished run

NEWEST_FULL_RUN = f"""
    SELECT run_id, run_date, status, finished_at, item_errors, cards_left_locked, cards_remaining FROM {LEDGER}
    WHERE run_kind = 'Full' AND status <> 'Running'
    ORDER BY started_at DESC LIMIT 1"""

LAST_COMPLETED_FULL_RUN = f"""
    SELECT run_id, started_at, finished_at, clock_timestamp() FROM {LEDGER}
    WHERE run_kind = 'Full' AND status = 'Completed'
    ORDER BY started_at DESC LIMIT 1"""

# Over all runs there ever were. What is summed only grows: the ledger is never pruned, and a row is closed once.
TOTALS = f"""
    SELECT coalesce(sum(property_object_cards_processed), 0)::bigint,
           coalesce(sum(project_cards_processed), 0)::bigint,
           coalesce(sum(snapshots_written), 0)::bigint,
           coalesce(sum(snapshots_pruned), 0)::bigint,
           coalesce(sum(item_errors), 0)::bigint,
           count(*) FILTER (WHERE status = 'Failed' AND stopped_reason IS DISTINCT FROM 'died'),
           count(*) FILTER (WHERE status = 'Failed' AND stopped_reason = 'died')
    FROM {LEDGER}"""

# Runs that went through the catalogue until they were done, or until their time was up: one that failed or was
# stopped early would make the others look fast. Parameters: bounds (seconds). Returns a row a bound: bound, runs that
# took no longer, their seconds together.
DURATIONS = f"""
    SELECT bound, count(r.run_id), coalesce(sum(r.duration_ms), 0) / 1000.0::float
    FROM unnest(%(bounds)s::float[]) AS bound
    LEFT JOIN {LEDGER} r
        ON r.duration_ms <= bound * 1000
        AND r.run_kind <> 'Rebuild' AND r.stopped_reason IN ('completed', 'max_duration')
    GROUP BY bound ORDER BY bound"""

ENDED_RUNS = f"""
    SELECT run_id, extract(epoch FROM clock_timestamp() - finished_at)::float FROM {LEDGER}
    WHERE run_id = ANY(%(run_ids)s) AND status <> 'Running'"""

_SNAPSHOT_OF = f"""(
        SELECT s.cumulative_views FROM {SNAPSHOTS} s
        WHERE s.card_kind = %(card_kind)s AND s.card_id = c.id AND s.run_date = %(run_date)s
    )"""


@cache
def count_missing(kind: CardKind) -> str:
    """Cards without a snapshot of a run date, but for those that changed after its run ended (put on show, say).

    Parameters: card_kind, run_date, finished_at.
    """
    return f"{count_scored(kind)} AND c.updated_at <= %(finished_at)s AND {_SNAPSHOT_OF} IS NULL"


@cache
def sample_scores(kind: CardKind) -> str:
    """Scores of cards chosen by a seed, of those that have a snapshot of the run date.

    Parameters: card_kind, run_date, seed, size. Returns id, popularity_score.
    """
    return f"""
    SELECT c.id, c.popularity_score
    FROM (
        SELECT c.id, c.popularity_score FROM {kind.table} c WHERE {_SCORED}
        ORDER BY hashtextextended(c.id::text, %(seed)s) LIMIT %(size)s
    ) c
    WHERE {_SNAPSHOT_OF} IS NOT NULL"""


SNAPSHOTS_OF_CARDS = f"""
    SELECT card_id, run_date, cumulative_views FROM {SNAPSHOTS}
    WHERE card_kind = %(card_kind)s AND card_id = ANY(%(ids)s)"""


@cache
def top_cards(kind: CardKind) -> str:
    """The shop window's order «by popularity»: read from the popularity index. Parameters: size."""
    return f"""
    SELECT c.id, c.popularity_views, c.popularity_score FROM {kind.table} c
    WHERE {_SCORED} ORDER BY c.popularity_score DESC LIMIT %(size)s"""


@cache
def score_distribution(kind: CardKind) -> str:
    """How many cards have a score of 0, and in each half decade above: bucket (NULL for 0), cards."""
    return f"""
    SELECT CASE WHEN c.popularity_score > 0 THEN floor(2 * log(c.popularity_score))::int END AS bucket, count(*)
    FROM {kind.table} c WHERE {_SCORED} GROUP BY bucket ORDER BY bucket NULLS FIRST"""
