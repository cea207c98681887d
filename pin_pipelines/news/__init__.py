"""News: the order of the feed by popularity, reactions to posts, and recommendations.

The model is deferred (post-ranking-signals): nothing here is used until the flag ``news.ranking.enabled`` is on, and
its tables come by a branch of migrations of their own.
"""
