"""Every SQL statement of the ranking, by name.

None of those for the feed by date mentions reactions or signals: while the flag is off these tables need not exist.
"""

from __future__ import annotations

from pin_pipelines.news.affinity import CONTRACT_VERSION, MAX_BLOCK_KINDS, MAX_PROJECT_IDS
from pin_pipelines.news.ranking import MAX_RATE, MAX_SCORE, MAX_VIEWS
from pin_pipelines.news.tables import (
    POST_BLOCKS,
    POST_DAILY_VIEWS,
    POST_PROJECT_REFS,
    POSTS,
    REACTIONS,
    SIGNALS,
    USER_POST_DAILY_VIEWS,
)

# A post is on show from the moment of its publication.
_ON_SHOW = "p.published_at <= now()"

# The recompute

# A statement of a batch takes milliseconds; one that hangs must not hold its locks for longer than a reader of the feed
# can bear. Each statement has to see what was committed before it began, and to be planned for the page that it is
# given. A batch that a crash of the server takes back is computed again by the next run, so it need not wait for the
# disk.
WORKER_SESSION = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', false)"
    for name, value in {
        "application_name": "ranking recompute",
        "default_transaction_isolation": "read committed",
        "idle_in_transaction_session_timeout": "60s",
        "jit": "off",
        "lock_timeout": "5s",
        "plan_cache_mode": "force_custom_plan",
        "statement_timeout": "60s",
        "synchronous_commit": "off",
        "timezone": "UTC",
    }.items()
)

COUNT_POSTS = f"SELECT count(*) FROM {POSTS}"

# Posts, and the optimistic tokens of their signals; of a post without signals the token is NULL.
_READ_POSTS = f"SELECT p.id, (SELECT s.xmin::text FROM {SIGNALS} s WHERE s.id = p.id) FROM {POSTS} p"

# The first posts by id. Parameters: size. Returns a row a post: id, token.
FIRST_PAGE = f"{_READ_POSTS} ORDER BY p.id LIMIT %(size)s"
# The next posts by id. Parameters: after, size. Returns as above.
NEXT_PAGE = f"{_READ_POSTS} WHERE p.id > %(after)s ORDER BY p.id LIMIT %(size)s"
# The given posts, as far as they exist. Parameters: ids. Returns as above.
THESE_POSTS = f"{_READ_POSTS} WHERE p.id = ANY(%(ids)s) ORDER BY p.id"

# Views in both windows, of those of the given posts that were viewed at all.
# Parameters: post_ids, as_of, first_of_short, first_of_long. Returns a row a post: post_id, views_7d, views_30d.
VIEW_TOTALS = f"""
    SELECT v.post_id,
           least(coalesce(sum(v.views) FILTER (WHERE v.day >= %(first_of_short)s), 0), {MAX_VIEWS})::bigint,
           least(sum(v.views), {MAX_VIEWS})::bigint
    FROM {POST_DAILY_VIEWS} v
    WHERE v.post_id = ANY(%(post_ids)b) AND v.day BETWEEN %(first_of_long)s AND %(as_of)s AND v.views > 0
    GROUP BY v.post_id"""

# What a post's signals are, from the formula's parameters (``ranking``) and views that were read before. The arguments
# of `ln` and of the quotients have the decimals that their results are to have: PostgreSQL's own choice would be
# fewer than 16 for a logarithm above 10. ``greatest`` and ``least`` pass over NULL.
_SIGNALS_OF_PAGE = f"""
    SELECT read.id, read.views_7d, read.views_30d, counted.likes, rate.comments_rate, decay.recency_decay,
           least(round(
               CASE WHEN decay.recency_decay > 0
                    THEN %(w1)s * ln(round(read.views_30d::numeric + 1, 20)) * decay.recency_decay ELSE 0 END
               + %(w2)s * counted.likes + %(w3)s * rate.comments_rate
               + round(%(w4)s * least(greatest(p.promotion_boost, 0), %(full_boost)s), 30) / %(full_boost)s
               + %(w4)s * coalesce(trusted.trust, 0), 6), {MAX_SCORE}) AS score,
           jsonb_build_object(
               'ContractVersion', {CONTRACT_VERSION},
               'CategoryId', p.category_id,
               'BlockKinds', coalesce((
                   SELECT to_jsonb((array_agg(DISTINCT b.kind ORDER BY b.kind))[:{MAX_BLOCK_KINDS}])
                   FROM (SELECT kind COLLATE "C" FROM {POST_BLOCKS} WHERE post_id = p.id) b), '[]'),
               'ProjectIds', to_jsonb(ARRAY(
                   SELECT r.project_id FROM {POST_PROJECT_REFS} r WHERE r.post_id = p.id ORDER BY r.project_id
                   LIMIT {MAX_PROJECT_IDS})),
               'AuthorType', p.author_type) AS affinity_inputs
    FROM read
    JOIN {POSTS} p ON p.id = read.id
    LEFT JOIN unnest(%(trusted_types)s::text[], %(trusts)s::numeric[]) AS trusted (author_type, trust)
         ON trusted.author_type = p.author_type
    CROSS JOIN LATERAL (SELECT greatest(p.likes_count, 0) AS likes) counted
    CROSS JOIN LATERAL (
        SELECT least(round(round(greatest(p.comments_count, 0), 30) / greatest(read.views_30d, 1), 4), {MAX_RATE})
               AS comments_rate
    ) rate
    CROSS JOIN LATERAL (SELECT %(as_of)s::date - (p.published_at AT TIME ZONE 'UTC')::date AS days) age
    CROSS JOIN LATERAL (
        SELECT round(coalesce((%(decays)s::int[])[CASE WHEN age.days < 0 THEN 0 ELSE age.days END + 1], 0) * 0.00001, 5)
               AS recency_decay
    ) decay"""

# The full upsert of a page. A row that somebody wrote since its token was read is left as it is. Rows are written in
# the order of their ids, so that two runs do not wait for each other in a circle. The page travels in binary: as text
# it would cost more than the views of a run take to be summed up.
# Parameters: ids, tokens, views_7d, views_30d (of the same length); as_of, decays (in hundred-thousandths, by age), w1,
# w2, w3, w4, full_boost, trusted_types, trusts.
# Returns one row: posts that were written, those of them that had no signals before, ids of those that were not.
RANK_PAGE = f"""
    WITH read AS MATERIALIZED (
        SELECT * FROM unnest(%(ids)b::uuid[], %(tokens)b::text[], %(views_7d)b::bigint[], %(views_30d)b::bigint[])
             AS read (id, token, views_7d, views_30d)
    )
    , written AS (
        INSERT INTO {SIGNALS} AS s (id, views_7d, views_30d, likes, comments_rate, recency_decay, score,
                                    affinity_inputs, recomputed_at)
        SELECT signals.*, clock_timestamp() FROM ({_SIGNALS_OF_PAGE}) signals ORDER BY signals.id
        ON CONFLICT (id) DO UPDATE SET
            views_7d = excluded.views_7d, views_30d = excluded.views_30d, likes = excluded.likes,
            comments_rate = excluded.comments_rate, recency_decay = excluded.recency_decay, score = excluded.score,
            affinity_inputs = excluded.affinity_inputs, recomputed_at = excluded.recomputed_at
        WHERE (s.id, s.xmin::text) IN (SELECT read.id, read.token FROM read)
        RETURNING s.id
    )
    SELECT count(written.id), count(written.id) FILTER (WHERE read.token IS NULL),
           coalesce(array_agg(read.id) FILTER (WHERE written.id IS NULL), '{{}}')
    FROM read LEFT JOIN written ON written.id = read.id"""

# Until the next autovacuum the feed by score would be planned for the table as it was before its first run.
ANALYZE = f"ANALYZE (SKIP_LOCKED) {SIGNALS}"

# Reactions

# The post comes first: who reacts to it, and who deletes it, wait for each other here and never in a circle.
# Parameters: post_id. Returns a row if there is such a post.
LOCK_POST = f"SELECT FROM {POSTS} WHERE id = %(post_id)s FOR NO KEY UPDATE"
# Parameters: id, post_id, user_id, kind.
ADD_REACTION = f"""
    INSERT INTO {REACTIONS} (id, post_id, user_id, kind) VALUES (%(id)s, %(post_id)s, %(user_id)s, %(kind)s)"""
# The same, but nothing happens where the user has a reaction to the post, of whatever kind.
ADD_FIRST_REACTION = f"{ADD_REACTION} ON CONFLICT (post_id, user_id) DO NOTHING"
# Parameters: post_id, user_id, kind.
REMOVE_REACTION = f"DELETE FROM {REACTIONS} WHERE post_id = %(post_id)s AND user_id = %(user_id)s AND kind = %(kind)s"
# Parameters: post_id, delta.
MOVE_LIKES_COUNT = f"UPDATE {POSTS} SET likes_count = likes_count + %(delta)s WHERE id = %(post_id)s"
# Parameters: post_id. Returns one row: likes_count.
LIKES_COUNT = f"SELECT likes_count FROM {POSTS} WHERE id = %(post_id)s"
# Parameters: user_id. Returns a row a reaction, the newest first: id, post_id, kind, created_at.
REACTIONS_OF_USER = f"""
    SELECT id, post_id, kind, created_at FROM {REACTIONS} WHERE user_id = %(user_id)s
    ORDER BY created_at DESC, id DESC"""

# The feed

_ITEM = "p.id, p.title, p.category_id, p.author_type, p.published_at, p.comments_count"
_BY_DATE = f"SELECT {_ITEM} FROM {POSTS} p WHERE {_ON_SHOW}"
_DATE_ORDER = "ORDER BY p.published_at DESC, p.id DESC LIMIT %(size)s"
_BY_SCORE = f"SELECT {_ITEM}, p.likes_count, s.score FROM {SIGNALS} s JOIN {POSTS} p ON p.id = s.id WHERE {_ON_SHOW}"
_SCORE_ORDER = "ORDER BY s.score DESC, s.id DESC LIMIT %(size)s"

# Parameters: size; key and post_id, of the last item before the page. Returns a row a post: the columns of an item, by
# score with likes_count and score behind them.
FEED_BY_DATE = f"{_BY_DATE} {_DATE_ORDER}"
FEED_BY_DATE_AFTER = f"{_BY_DATE} AND (p.published_at, p.id) < (%(key)s, %(post_id)s) {_DATE_ORDER}"
FEED_BY_SCORE = f"{_BY_SCORE} {_SCORE_ORDER}"
FEED_BY_SCORE_AFTER = f"{_BY_SCORE} AND (s.score, s.id) < (%(key)s, %(post_id)s) {_SCORE_ORDER}"

# Recommendations

# How often a user viewed which posts. Parameters: user_id, first_day, last_day. Returns a row a post: post_id, views.
VIEWS_OF_USER = f"""
    SELECT v.post_id, sum(v.views)::bigint FROM {USER_POST_DAILY_VIEWS} v
    WHERE v.user_id = %(user_id)s AND v.day BETWEEN %(first_day)s AND %(last_day)s AND v.views > 0
    GROUP BY v.post_id"""

# Parameters: ids. Returns a row a post: affinity_inputs, id.
AFFINITY_INPUTS = f"SELECT s.affinity_inputs, s.id FROM {SIGNALS} s WHERE s.id = ANY(%(ids)s) ORDER BY s.id"

# Fresh posts that a user has not viewed. Of one author in one category no more are needed than the bounds let through,
# and those are the freshest: whatever the user's interests are, these rank before the others of the same pair.
# Parameters: first_day, viewed (ids), depth. Returns a row a post: affinity_inputs, recency_decay, author_id, the
# columns of an item, likes_count, score.
CANDIDATES = f"""
    SELECT p.affinity_inputs, p.recency_decay, p.author_id, {_ITEM}, p.likes_count, p.score
    FROM (
        SELECT p.*, s.score, s.affinity_inputs, s.recency_decay,
               row_number() OVER (PARTITION BY p.category_id, p.author_type, p.author_id
                                  ORDER BY s.recency_decay DESC, s.score DESC, p.id DESC) AS place
        FROM {POSTS} p
        JOIN {SIGNALS} s ON s.id = p.id
        WHERE {_ON_SHOW} AND p.published_at >= %(first_day)s::date::timestamp AT TIME ZONE 'UTC'
          AND p.id <> ALL(%(viewed)s)
    ) p
    WHERE p.place <= %(depth)s"""

# What people and checks ask of the signals

# Returns one row: posts, posts without signals.
COUNT_MISSING = f"""
    SELECT count(*), count(*) FILTER (WHERE s.id IS NULL) FROM {POSTS} p LEFT JOIN {SIGNALS} s ON s.id = p.id"""

# Posts chosen by a seed. Parameters: seed, size. Returns a row a post: id, published_at, promotion_boost, and of its
# signals views_30d, likes, comments_rate, score, affinity_inputs.
SAMPLE_SIGNALS = f"""
    SELECT p.id, p.published_at, p.promotion_boost,
           s.views_30d, s.likes, s.comments_rate, s.score, s.affinity_inputs
    FROM {SIGNALS} s JOIN {POSTS} p ON p.id = s.id
    ORDER BY hashtextextended(s.id::text, %(seed)s) LIMIT %(size)s"""

# Parameters: size. Returns a row a post, the first first: id, title, views_30d, likes, score.
TOP_POSTS = f"""
    SELECT p.id, p.title, s.views_30d, s.likes, s.score FROM {SIGNALS} s JOIN {POSTS} p ON p.id = s.id
    WHERE {_ON_SHOW} ORDER BY s.score DESC, s.id DESC LIMIT %(size)s"""

# How many posts have a score of 0, and in each half decade above: bucket (NULL for 0), posts.
SCORE_DISTRIBUTION = f"""
    SELECT CASE WHEN s.score > 0 THEN floor(2 * log(s.score))::int END AS bucket, count(*)
    FROM {SIGNALS} s GROUP BY bucket ORDER BY bucket NULLS FIRST"""
