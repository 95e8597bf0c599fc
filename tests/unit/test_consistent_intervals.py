"""Proved intervals of one question agree with each other, at every tolerance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant_service.numerics import certified_interval
from accountant_service.numerics.errors import ContradictionError
from accountant_service.numerics.floats.bounds import Bounds
from accountant_service.numerics.laws.dominating_pair import Composition, GaussianPair, Release
from tests.support.helpers import nightly

TOLERANCES = (1e-3, 1e-6, 1e-7, 1e-8)
ONCE = 1e-9  # relative: the margin that every answer is widened by differs with its tolerance


def log_between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def one(q: float, sigma: float, count: int) -> tuple[Release, int]:
    return Release(GaussianPair(1 / sigma), min(q, 1.0)), count


@st.composite
def rare(draw: Any) -> Composition:
    """About one sampled record in all steps, up to a billion of them."""
    count = int(draw(log_between(1e4, 1e9)))
    return [one(draw(log_between(0.05, 3)) / count, draw(log_between(0.3, 1.2)), count)]


@st.composite
def ordinary(draw: Any) -> Composition:
    count = int(draw(log_between(1, 1e5)))
    return [one(draw(log_between(1e-4, 0.3)), draw(log_between(0.5, 8)), count)]


@st.composite
def mixed(draw: Any) -> Composition:
    parts = draw(st.integers(2, 4))
    return [
        one(
            draw(log_between(1e-4, 0.1)),
            draw(log_between(0.6, 4)),
            int(draw(log_between(1, 3e3))),
        )
        for _ in range(parts)
    ]


def asked(run: Composition, at_delta: bool, value: float) -> list[Bounds]:
    ask = certified_interval.epsilon_bounds if at_delta else certified_interval.delta_bounds
    return [ask(run, value, tolerance) for tolerance in TOLERANCES]


def agree(found: list[Bounds]) -> None:
    """All intersect, and none is looser than one that was asked for more coarsely."""
    assert max(each.lower for each in found) <= min(each.upper for each in found)
    for coarse, fine in itertools.pairwise(found):
        assert fine.lower >= coarse.lower * (1 - ONCE)
        assert fine.upper <= coarse.upper * (1 + ONCE)


QUESTIONS = st.one_of(
    st.tuples(st.just(True), log_between(1e-12, 1e-3)),
    st.tuples(st.just(False), log_between(0.2, 6)),
)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.one_of(ordinary(), mixed()), QUESTIONS)
def test_intervals_of_one_question_agree(run: Composition, question: tuple[bool, float]) -> None:
    agree(asked(run, *question))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=15, deadline=None)
@given(rare(), QUESTIONS)
def test_intervals_of_one_rare_question_agree(
    run: Composition, question: tuple[bool, float]
) -> None:
    agree(asked(run, *question))


# σ, q and T of runs whose δ(ε) a reviewer computed independently, to 6e-8
REVIEWED = [
    (1.1342096603934765e-09, 0.32853076608564774, 658442832, 0.5354761358345997, 3.85519851e-8),
    (2.9200100423769e-09, 0.3771131999883286, 419663979, 0.9330576470978476, 7.355322213e-11),
]


@pytest.mark.parametrize(("q", "sigma", "count", "epsilon", "delta"), REVIEWED)
def test_half_a_billion_rare_steps(
    q: float, sigma: float, count: int, epsilon: float, delta: float
) -> None:
    """The common scale error of the factors of a and b was forgotten: these were disjoint."""
    found = [
        certified_interval.delta_bounds([one(q, sigma, count)], epsilon, t) for t in (1e-6, 1e-7)
    ]
    agree(found)
    for bounds in found:
        assert bounds.lower <= delta * (1 + 6e-8)
        assert bounds.upper >= delta * (1 - 6e-8)
        assert bounds.upper - bounds.lower < 2e-7 * delta


@pytest.mark.slow
def test_more_digits_of_a_tiny_delta_never_loosen_it() -> None:
    """At 1e-7 the upper bound was a million times that at 1e-6."""
    agree(asked([one(1e-9, 0.5, 10**9)], False, 1.5))


def test_a_level_is_never_coarser_than_the_tolerance_asked_for() -> None:
    for tolerance in (0.5, 1e-3, 9e-4, 1e-5, 3e-7, 1e-7, 1e-8):
        levels = certified_interval._target_widths(tolerance)
        assert levels[0] == certified_interval._FIRST_TARGET_WIDTH
        assert levels[-1] <= max(tolerance * (1 + 1e-12), certified_interval._FIRST_TARGET_WIDTH)
        assert levels == tuple(sorted(levels, reverse=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tolerances", [nightly((1e-3, 1e-6, 3e-7, 1e-7)), (1e-7, 3e-7, 1e-6, 1e-3)]
)
@pytest.mark.parametrize(
    ("run", "epsilon"), [([one(1e-8, 0.45, 10**8)], 1.0), ([one(0.01, 1.0, 1000)], 2.0)]
)
def test_an_answer_does_not_depend_on_what_was_asked_before(
    run: Composition, epsilon: float, tolerances: tuple[float, ...]
) -> None:
    """Results of coarser attempts are cached; the cache saves time and changes no answer."""
    fresh = []
    for tolerance in tolerances:
        certified_interval._search_both_directions.cache_clear()
        fresh.append(certified_interval.delta_bounds(run, epsilon, tolerance))
    certified_interval._search_both_directions.cache_clear()
    assert [certified_interval.delta_bounds(run, epsilon, t) for t in tolerances] == fresh
    assert certified_interval._search_both_directions.cache_info().hits > 0


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(
    ("ask", "value"),
    [(certified_interval.delta_bounds, 1.0), (certified_interval.epsilon_bounds, 1e-5)],
)
def test_contradictory_bounds_are_an_error(
    ask: Any, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever direction they come from, even where the other one costs more."""
    genuine = certified_interval._DirectionSearch.narrow_by_line_integrals

    def contradict(side: Any, *rest: Any) -> None:
        genuine(side, *rest)
        if side.saddle.direction == "adding":
            side.lower, side.upper = 1e-9, 0.9e-9

    # private: no question is known whose bounds contradict each other
    monkeypatch.setattr(certified_interval._DirectionSearch, "narrow_by_line_integrals", contradict)
    with pytest.raises(ContradictionError, match="is above the proved upper bound"):
        ask([one(0.01, 1.0, 1000)], value, 1e-3)
