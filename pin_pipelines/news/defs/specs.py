"""What the graph shows: the signals, what they are made from, and what is checked."""

import dagster as dg

from pin_pipelines.news.tables import POST_DAILY_VIEWS, POSTS, REACTIONS, SIGNALS
from pin_pipelines.resources.feature_flags import NEWS_RANKING

GROUP = "news_ranking"
OWNER = "team:news-squad"
RECOMPUTE_JOB = "ranking_recompute"

POST_SIGNALS = dg.AssetKey(["news", "post_ranking_signals"])

_POSTS = dg.AssetKey(["news", "posts"])
_REACTIONS = dg.AssetKey(["news", "post_reactions"])
_PROMOTION_BOOST = dg.AssetKey(["news", "post_promotion_boost"])
_VIEWS = dg.AssetKey(["user_activity", "post_views"])

DEFERRED = (
    f"Deferred: nothing reads or writes it before the flag `{NEWS_RANKING}` is on (`pin-pipelines flags set "
    f"{NEWS_RANKING} on`) and its tables are there (`pin-pipelines migrate --with-news-ranking`)."
)

SIGNALS_SPEC = dg.AssetSpec(
    POST_SIGNALS,
    deps=[_POSTS, _REACTIONS, _PROMOTION_BOOST, _VIEWS],
    group_name=GROUP,
    owners=[OWNER],
    kinds={"postgres", "python"},
    tags={"deferred": ""},
    description=f"What each post is ranked by (`{SIGNALS}`): one row a post, with views, likes, comments, freshness, "
    "what the post is about, and the score that the feed is sorted by as «recommended» and recommendations are made "
    f"from. {DEFERRED} Until then «recommended» is the order by date.",
    metadata={
        "dagster/column_schema": dg.TableSchema(
            [
                dg.TableColumn("id", "uuid", "The post."),
                dg.TableColumn("views_7d", "bigint", "Views of 7 days, the day of the recompute the last."),
                dg.TableColumn("views_30d", "bigint", "Views of 30 days."),
                dg.TableColumn("likes", "integer", "The post's counter of likes, as it stood at the recompute."),
                dg.TableColumn("comments_rate", "numeric(8,4)", "Comments a view of 30 days."),
                dg.TableColumn("recency_decay", "numeric(6,5)", "Freshness: 1 on the day of publication, then less."),
                dg.TableColumn("score", "numeric(14,6)", "The weighted sum; the order of «recommended»."),
                dg.TableColumn("affinity_inputs", "jsonb", "What the post is about (ContractVersion 1)."),
                dg.TableColumn("recomputed_at", "timestamptz", "When the row was last written."),
            ]
        ),
        "dagster/table_name": SIGNALS,
    },
)

EXTERNAL = (
    dg.AssetSpec(
        _POSTS,
        group_name=GROUP,
        owners=[OWNER],
        kinds={"postgres"},
        tags={"deferred": ""},
        description=f"Posts (`{POSTS}`), owned by the news service: publication, author, category, blocks, projects "
        f"and the count of comments. The ranking reads them; a like moves `likes_count` along. {DEFERRED}",
    ),
    dg.AssetSpec(
        _REACTIONS,
        deps=[_POSTS],
        group_name=GROUP,
        owners=[OWNER],
        kinds={"postgres"},
        tags={"deferred": ""},
        description=f"Likes (`{REACTIONS}`): one row a user and post. They come one by one, from readers; no run makes "
        f"them. `likes_count` of the post moves in the same transaction. {DEFERRED}",
    ),
    dg.AssetSpec(
        _PROMOTION_BOOST,
        group_name=GROUP,
        owners=[OWNER],
        kinds={"kafka"},
        tags={"deferred": ""},
        description="Paid promotion: the news service's consumer `promotion-boost` adds up the weights of active "
        f"purchases in `promotion_boost` of `{POSTS}`. {DEFERRED}",
    ),
    dg.AssetSpec(
        _VIEWS,
        group_name=GROUP,
        owners=[OWNER],
        kinds={"postgres"},
        tags={"deferred": ""},
        description=f"Views of posts by day (`{POST_DAILY_VIEWS}`), and of each user, owned by user-activity. How it "
        f"will hand them over is an assumption; one adapter reads them (`news/views.py`). {DEFERRED}",
    ),
)

COMPLETE = dg.AssetCheckSpec(
    "one_row_per_post",
    asset=POST_SIGNALS,
    description="Every post has its row. WARN: no more are missing than came since the last run began; the next one "
    f"takes them up. ERROR: rows are missing that the run should have made; launch the job `{RECOMPUTE_JOB}`.",
)
EXACT = dg.AssetCheckSpec(
    "scores_equal_reference",
    asset=POST_SIGNALS,
    description="The scores of a sample of posts, others each day, equal the plain reference to the last digit, as of "
    "the day of the last run. ERROR: somebody else writes scores, or weights, a boost or a day of publication were "
    f"changed since; launch the job `{RECOMPUTE_JOB}`.",
)
CHECKS = (COMPLETE, EXACT)
