"""The popularity formula (spec, «Формула сглаживания и затухания»): exact decimals, rounded once.

    score = round( sum over i = 0 … W−1 of Δ(D−i) · λ^i , 4 )        λ = round(2^(−1/H), 4)

D is the run date, i counts calendar days, W is the window and H the half-life. Δ of a run date is what the
counter grew by since the previous snapshot that exists in the window read (run dates D−W … D), never below 0; the
first snapshot read is a base line and has Δ = 0.

PostgreSQL evaluates the same formula for every card (``statements.SCORE``) with the weights made here;
``reference_score`` is the plain version that tests and the drift check hold it against.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, Inexact

# λ has four decimals. The spec's worked example and its acceptance test give 30.5073 for Δ = [10, 0, 25], H = 7;
# that is 30.50731225 with λ = 0.9057, while the unrounded base would give 30.5084.
DECAY_BASE_QUANTUM = Decimal("0.0001")
SCORE_QUANTUM = Decimal("0.0001")

_DECAY_BASE_CONTEXT = Context(prec=50, rounding=ROUND_HALF_UP)


def decay_base(half_life_days: int) -> Decimal:
    """λ: what a day takes off a view's weight, quantised to four decimals, half away from zero."""
    base = _DECAY_BASE_CONTEXT.power(Decimal(2), _DECAY_BASE_CONTEXT.divide(Decimal(-1), Decimal(half_life_days)))
    return base.quantize(DECAY_BASE_QUANTUM, rounding=ROUND_HALF_UP)


def decay_weights(window_days: int, half_life_days: int) -> list[Decimal]:
    """λ^0 … λ^(W−1), exact.

    λ^29 alone has 116 decimals, more than Python's default context or PostgreSQL's ``power`` keep; so the weights
    are repeated products in a context that is wide enough and would raise rather than round.
    """
    context = Context(prec=4 * window_days + 1, traps=[Inexact])
    base = decay_base(half_life_days)
    weights = [Decimal(1)]
    for _ in range(window_days - 1):
        weights.append(context.multiply(weights[-1], base))
    return weights


def reference_score(snapshots: Mapping[date, int], as_of: date, window_days: int, half_life_days: int) -> Decimal:
    """The score of one card, the plain way: the oracle of the tests and of the drift check.

    Args:
        snapshots: counter (S) by run date; dates outside the window are ignored.
        as_of: the run date D.
        window_days: W.
        half_life_days: H.

    Returns:
        The score with four decimals, rounded half away from zero.
    """
    oldest_read = as_of - timedelta(days=window_days)
    weights = decay_weights(window_days, half_life_days)
    # Wide enough for any sum of int8 deltas over the window's weights: nothing rounds before the end.
    context = Context(prec=4 * window_days + 40, traps=[Inexact])
    score = Decimal(0)
    previous: int | None = None
    for run_date in sorted(day for day in snapshots if oldest_read <= day <= as_of):
        views = snapshots[run_date]
        if previous is not None:
            delta = max(0, views - previous)
            score = context.add(score, context.multiply(Decimal(delta), weights[(as_of - run_date).days]))
        previous = views
    return score.quantize(SCORE_QUANTUM, rounding=ROUND_HALF_UP, context=Context(prec=4 * window_days + 40))
