"""The formula: worked cases, its Python reference, and the SQL path against the reference."""

from __future__ import annotations

import json
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pin_pipelines.catalog.decay import decay_base, decay_weights, reference_score
from pin_pipelines.catalog.recompute import Parameters
from pin_pipelines_tests.support.catalogue import TODAY, Catalogue, counters, night

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "popularity.json").read_text())


def _snapshots(case: dict[str, Any]) -> dict[date, int]:
    return {date.fromisoformat(day): views for day, views in case["snapshots"].items()}


def _parameters(case: dict[str, Any]) -> Parameters:
    return Parameters(window_days=case["window_days"], decay_half_life_days=case["decay_half_life_days"])


@pytest.mark.parametrize(("half_life", "base"), [(7, "0.9057"), (1, "0.5000"), (2, "0.7071"), (30, "0.9772")])
def test_decay_base_is_two_to_the_minus_one_over_half_life_with_four_decimals(half_life: int, base: str) -> None:
    assert str(decay_base(half_life)) == base


@pytest.mark.parametrize(("window", "half_life"), [(1, 1), (30, 7), (365, 30)])
def test_weights_are_exact_powers_of_the_decay_base(window: int, half_life: int) -> None:
    base = Fraction(decay_base(half_life))
    assert [Fraction(weight) for weight in decay_weights(window, half_life)] == [base**i for i in range(window)]


def test_reference_gives_the_worked_example_of_the_spec() -> None:
    snapshots = counters(night(-3), [0, 25, 25, 35])
    assert reference_score(snapshots, TODAY, 30, 7) == Decimal("30.5073")


def test_reference_rounds_a_tie_away_from_zero() -> None:
    assert reference_score(counters(night(-3), [0, 5000, 5000, 5000]), TODAY, 30, 7) == Decimal("4101.4625")


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{n}: {case['name']}" for n, case in enumerate(GOLDEN)])
def test_reference_agrees_with_golden_case(case: dict[str, Any]) -> None:
    score = reference_score(
        _snapshots(case), date.fromisoformat(case["as_of"]), case["window_days"], case["decay_half_life_days"]
    )
    assert score == Decimal(case["score"])


def test_engine_agrees_with_every_golden_case(catalogue: Catalogue) -> None:
    wrong = {}
    for number, case in enumerate(GOLDEN):
        as_of, stored = date.fromisoformat(case["as_of"]), _snapshots(case)
        card = catalogue.add(stored.pop(as_of, 0))
        catalogue.store(card, stored)
        # Where the case has no snapshot of its own day, the scores come from what is stored.
        catalogue.run(
            as_of, run_kind="Rebuild", card_ids=[card], capture=as_of in _snapshots(case), parameters=_parameters(case)
        )
        if catalogue.score(card) != Decimal(case["score"]):
            wrong[number, case["name"]] = catalogue.score(card), case["score"]
    assert wrong == {}


_histories = st.dictionaries(
    st.integers(min_value=0, max_value=40),
    st.integers(min_value=0, max_value=10**6) | st.integers(min_value=0, max_value=3),
    max_size=41,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    histories=st.lists(_histories, min_size=1, max_size=5),
    window=st.integers(min_value=1, max_value=40),
    half_life=st.integers(min_value=1, max_value=60),
    capture=st.booleans(),
)
def test_engine_equals_the_reference_for_any_window_half_life_gaps_and_resets(
    catalogue: Catalogue, histories: list[dict[int, int]], window: int, half_life: int, capture: bool
) -> None:
    cards = {catalogue.add(history.get(0, 0)): history for history in histories}
    stored = {card: {night(-ago): views for ago, views in history.items() if ago} for card, history in cards.items()}
    today = {card: {TODAY: history.get(0, 0)} for card, history in cards.items()}
    catalogue.store_many(stored)
    if not capture:
        catalogue.store_many(today)

    catalogue.run(
        run_kind="Rebuild",
        card_ids=list(cards),
        capture=capture,
        parameters=Parameters(window_days=window, decay_half_life_days=half_life),
    )

    scores = catalogue.scores()
    for card in cards:
        assert scores[card] == reference_score({**stored[card], **today[card]}, TODAY, window, half_life)


@given(
    views=st.lists(st.integers(min_value=0, max_value=10**9), min_size=2, max_size=31),
    half_life=st.integers(min_value=1, max_value=365),
)
def test_reference_equals_the_sum_of_the_spec_in_exact_fractions(views: list[int], half_life: int) -> None:
    first = TODAY - timedelta(days=len(views) - 1)
    base = Fraction(round(Fraction(decay_base(half_life)) * 10_000), 10_000)
    deltas = [max(0, later - earlier) for earlier, later in pairwise(views)]
    exact = sum((delta * base**i for i, delta in enumerate(reversed(deltas))), Fraction(0))
    # floor(x + 1/2) rounds half up, which is away from zero here: no score is negative.
    rounded = Fraction((exact * 10_000 + Fraction(1, 2)).__floor__(), 10_000)
    assert Fraction(reference_score(counters(first, views), TODAY, 30, half_life)) == rounded


@pytest.mark.parametrize("field", ["window_days", "decay_half_life_days", "batch_size", "max_run_duration_seconds"])
def test_engine_refuses_a_parameter_that_is_not_above_zero(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} = 0 is not allowed; it must be above 0"):
        Parameters(**{field: 0})


def test_engine_refuses_a_batch_that_its_snapshot_ids_cannot_number() -> None:
    with pytest.raises(ValueError, match="batch_size = 65536 is not allowed; it must be at most 65535"):
        Parameters(batch_size=65_536)


def test_window_half_life_and_batch_size_of_one(catalogue: Catalogue) -> None:
    cards = catalogue.add_many(3, views=5)
    parameters = Parameters(window_days=1, decay_half_life_days=1, batch_size=1)
    catalogue.run(night(-1), parameters=parameters)
    catalogue.view(cards[1], 4)

    summary = catalogue.run(parameters=parameters)

    # A window of one day reads the snapshot before it as the base line, and weighs its only delta with 1.
    assert [catalogue.score(card) for card in cards] == [0, 4, 0]
    assert summary.snapshots_written == 3
    catalogue.run(night(1), parameters=parameters)
    assert catalogue.score(cards[1]) == 0


def test_snapshots_have_time_ordered_ids(catalogue: Catalogue) -> None:
    catalogue.add_many(3)
    catalogue.run(night(-1))
    catalogue.run()
    rows = catalogue.execute("SELECT id, run_date FROM catalog.popularity_daily_views ORDER BY id")
    assert [row[0].version for row in rows] == [7] * 6
    assert [row[1] for row in rows] == [night(-1)] * 3 + [TODAY] * 3


def test_a_counter_of_any_bigint_is_poison_and_not_a_crash(catalogue: Catalogue) -> None:
    card = catalogue.add(2**63 - 1)
    catalogue.store(card, {night(-1): 0})
    summary = catalogue.run()
    assert summary.item_errors == 1
