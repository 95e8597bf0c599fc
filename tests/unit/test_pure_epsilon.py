"""Releases with a pure ε: no answer exceeds it, and it is not below the truth."""

from __future__ import annotations

import math

import pytest
from mpmath import mp, mpf

from accountant_service import mechanisms
from accountant_service.accounting import calculator, release_laws
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import Question
from accountant_service.errors import MethodNotApplicableError, NoFiniteEpsilonError
from accountant_service.ledger.filters import ReferenceFilter
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.numerics.laws.dominating_pair import LaplacePair, Release, total_variation
from tests.support.kinds import (
    ADDED,
    REPLACED,
    Json,
    approximate_dp,
    composed,
    discrete_laplace,
    epsilon_at,
    exponential,
    fixed_size,
    gaussian,
    kinds_of,
    laplace,
    parallel,
    permute_and_flip,
    poisson,
    privacy_profile,
    proved_delta,
    randomized_response,
    repeated,
    shuffled_reports,
    truncated_laplace,
    zcdp,
)

LAPLACE, EXPONENTIAL = laplace(1.0), exponential(0.5)
DISCRETE = discrete_laplace(8, 2)


def pure_epsilon(described: Json, relation: NeighbouringRelation = ADDED) -> float:
    form = mechanisms.canonical_form(mechanisms.from_json(described))
    cost = release_laws.simple_cost(Question(form, relation).release_groups, relation)
    return cost.epsilon if cost.is_pure else math.inf


@pytest.mark.spread(first=5)
@pytest.mark.parametrize(
    ("described", "relation", "pure", "deltas"),
    [
        (LAPLACE, ADDED, 1.0, [1e-5]),
        (LAPLACE, REPLACED, 2.0, [1e-12, 1e-200]),
        (repeated(3, LAPLACE), ADDED, 3.0, [1e-5, 1e-60]),
        (composed(LAPLACE, DISCRETE, repeated(2, EXPONENTIAL)), ADDED, 2.25, [1e-12]),
        (DISCRETE, ADDED, 0.25, [1e-5, 1e-60]),
        (EXPONENTIAL, ADDED, 0.5, [1e-5, 1e-200]),
        (repeated(30, EXPONENTIAL), REPLACED, 15.0, [1e-12]),
        (repeated(30, permute_and_flip(0.5)), ADDED, 15.0, [1e-60]),
        (repeated(30, approximate_dp(0.5, 0)), ADDED, 15.0, [1e-200]),
        (repeated(3, privacy_profile([0, 1], [0.2, 0])), ADDED, 3.0, [1e-12]),
    ],
)
def test_no_epsilon_exceeds_the_sum_of_pure_ones(
    described: Json, relation: NeighbouringRelation, pure: float, deltas: list[float]
) -> None:
    assert pure_epsilon(described, relation) == pure
    for delta in deltas:
        assert epsilon_at(described, delta, relation).epsilon <= pure
    assert proved_delta(described, pure, relation).upper <= 1e-300


@pytest.mark.parametrize("rate", [1e-9, 0.1, 0.9])
@pytest.mark.parametrize(("inner", "epsilon"), [(LAPLACE, 1.0), (EXPONENTIAL, 0.5)])
def test_the_pure_epsilon_of_a_poisson_sample_is_amplified(
    rate: float, inner: Json, epsilon: float
) -> None:
    """If a record is changed in place, who is sampled may be visible, but not in one noisy sum."""
    run = repeated(5, poisson(rate, inner))
    with mp.workdps(40):
        truth = mp.log(1 + mpf(str(rate)) * (mp.exp(epsilon) - 1))
        found = mpf(str(pure_epsilon(run)))
        assert 5 * truth <= found <= 5 * truth * (1 + mpf(1e-15))
    assert epsilon_at(run, 1e-200).epsilon <= float(found)
    with mp.workdps(40):
        # a replaced number moves by 2/b, 1/b from its absence
        ends = [1 - mpf(str(rate)) + mpf(str(rate)) * mp.exp(each) for each in (epsilon, -epsilon)]
        replaced = mp.log(ends[0] / ends[1]) if inner is LAPLACE else mpf(epsilon)
        assert (
            replaced
            <= mpf(pure_epsilon(poisson(rate, inner), REPLACED))
            <= replaced * (1 + mpf(1e-9))
        )


@pytest.mark.parametrize("categories", [2, 10, 10**6])
@pytest.mark.parametrize("flip", [1e-6, 0.3, 1 - 1e-12])
def test_the_pure_epsilon_of_randomized_response_is_not_below_the_truth(
    categories: int, flip: float
) -> None:
    """A logarithm of a number near 1 lost digits, and the ε of shuffled reports was too small."""
    response = randomized_response(categories, flip)
    with mp.workdps(40):
        flips = (mpf(flip), mpf(str(flip)))  # near 1 their 1 − f differ
        truth = max(mp.log1p((1 - each) * categories / each) for each in flips)
        assert truth <= mpf(str(pure_epsilon(response))) <= truth * (1 + mpf(1e-15))
    shuffled = pure_epsilon(shuffled_reports(1, response))
    assert shuffled == pytest.approx(pure_epsilon(response), rel=1e-4)


def test_other_releases_have_no_pure_epsilon() -> None:
    for described in (
        gaussian(1.0),
        composed(LAPLACE, gaussian(1.0)),
        approximate_dp(0.5, 1e-9),
        privacy_profile([0, 1], [0.2, 1e-9]),
        truncated_laplace(1.0, 3.0, 1.0),
        zcdp(0.1),
    ):
        assert math.isinf(pure_epsilon(described)), described


@pytest.mark.parametrize(("rate", "count"), [(0.3, 10), (1e-9, 10**9), (1e-3, 1)])
def test_delta_is_at_most_the_probability_that_the_record_is_ever_sampled(
    rate: float, count: int
) -> None:
    """A release that reveals everything has a total variation distance of 1."""
    found = total_variation([(Release(LaplacePair(1e4), rate), count)])
    with mp.workdps(40):
        truth = 1 - (1 - mpf(rate)) ** count
        assert truth <= mpf(found) <= truth * (1 + mpf(1e-9))


def test_the_cap_of_delta_is_used() -> None:
    """The sum of the distances would be 3."""
    found = proved_delta(repeated(10, poisson(0.3, laplace(0.05))), 0.0)
    assert found.lower <= found.upper <= (1 - 0.7**10) * (1 + 1e-9)


# ------------------------------------------------------- a mechanism asked at its own δ

OWN = approximate_dp(1.0, 1e-6)
CUT = (math.exp(-9) - math.exp(-10)) / 2 / -math.expm1(-10)  # of Laplace noise on [−10, 10]
TENTHS = [approximate_dp(1, 0.1), approximate_dp(2, 0.2)]


@pytest.mark.parametrize(
    ("described", "relation", "delta", "truth"),
    [
        (OWN, ADDED, 1e-6, 1.0),
        (OWN, ADDED, 1.00000000001e-6, 1.0),  # a mass that is rounded up is above it
        (repeated(2, OWN), ADDED, 1.999999e-6, 2.0),
        (composed(*TENTHS), ADDED, 0.28, 3.0),
        (composed(*TENTHS), REPLACED, 0.28, 3.0),
        (
            poisson(0.25, approximate_dp(1.2, 1e-5)),
            ADDED,
            2.5e-6,
            math.log1p(0.25 * math.expm1(1.2)),
        ),
        (poisson(0.1, approximate_dp(1.2, 0.3)), ADDED, 0.03, math.log1p(0.1 * math.expm1(1.2))),
        (poisson(0.1, approximate_dp(1.2, 0.3)), REPLACED, 0.03, 1.2),
        (
            fixed_size(3, 1, approximate_dp(1.2, 0.3)),
            REPLACED,
            0.1,
            math.log1p(math.expm1(1.2) / 3),
        ),
        (privacy_profile([0, 1, 2], [0.3, 0.01, 0.001]), ADDED, 0.001, 2.0),
        (composed(LAPLACE, OWN), ADDED, 1e-6, 2.0),
        (parallel(OWN, approximate_dp(0.5, 1e-9)), ADDED, 1e-6, 1.0),
        (approximate_dp(0.0, 0.25), ADDED, 0.25, 0.0),
        (truncated_laplace(1.0, 10.0, 1.0), ADDED, CUT * (1 + 1e-15), 1.0),
        (repeated(3, truncated_laplace(1.0, 10.0, 1.0)), ADDED, 1 - (1 - CUT) ** 3 + 1e-16, 3.0),
    ],
)
def test_a_mechanism_at_its_own_delta_costs_its_largest_finite_loss(
    described: Json, relation: NeighbouringRelation, delta: float, truth: float
) -> None:
    """Equality is decided on the numbers as written: 0.1 · 0.3 is 0.03."""
    found = epsilon_at(described, delta, relation)
    assert found.certified is not None
    assert found.certified.lower <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= found.epsilon <= truth * (1 + 1e-6)
    if "fixed_size_sampled" not in kinds_of(described):
        assert found.certified.lower >= truth * (1 - 1e-3)
        assert found.warnings == ()
    assert found.delta == delta
    assert proved_delta(described, found.epsilon, relation).upper <= delta


@pytest.mark.parametrize(
    ("described", "delta", "own", "truth"),
    [
        (composed(*TENTHS), 1 - 0.9 * 0.8, 0.28, 3.0),
        (
            poisson(0.7, approximate_dp(1.2, 1e-5)),
            6.999999999999999e-06,
            7e-6,
            math.log1p(0.7 * math.expm1(1.2)),
        ),
        (repeated(2, OWN), 1.99999899999999e-06, 1.999999e-6, 2.0),
        (truncated_laplace(1.0, 10.0, 1.0), CUT * (1 - 1e-15), 3.900670806390372e-05, 1.0),
    ],
)
def test_an_own_delta_computed_in_floating_point_is_answered_at_the_exact_one(
    described: Json, delta: float, own: float, truth: float
) -> None:
    """The δ asked is below the probability of an infinite loss: the answer names its own δ."""
    found = epsilon_at(described, delta)
    assert found.delta == own > delta
    assert found.epsilon == pytest.approx(truth, rel=1e-9)
    (warning,) = found.warnings
    assert repr(own) in warning


@pytest.mark.spread(first=3)
@pytest.mark.parametrize(
    ("described", "delta", "words"),
    [
        (OWN, 9.999999999999997e-07, "no finite ε holds at δ = 9.999999999999997e-07"),
        (composed(OWN, gaussian(1.0)), 1e-6, "no finite ε holds at δ = 1e-06"),
        (gaussian(1.0), 0.0, "no finite ε holds at δ = 0"),
        (poisson(0.1, gaussian(1.0)), 0.0, "no finite ε holds at δ = 0"),
        (approximate_dp(1.0, 1.0), 0.5, "no finite ε holds at δ = 0.5"),
        (repeated(10**9, approximate_dp(0.1, 1e-3)), 0.5, "no finite ε holds at δ = 0.5"),
        (zcdp(0.1), 0.0, "pld proves no finite ε at δ = 0"),
        (truncated_laplace(1.0, 10.0, 1.0), CUT * (1 - 1e-12), "no finite ε holds at δ = 3.9"),
    ],
)
def test_that_no_finite_epsilon_holds_is_said_if_it_is_proved(
    described: Json, delta: float, words: str
) -> None:
    with pytest.raises(NoFiniteEpsilonError) as refused:
        epsilon_at(described, delta)
    assert refused.value.detail.startswith(words)


def test_above_its_own_delta_a_release_beside_unbounded_noise_has_a_finite_epsilon() -> None:
    """Whatever is above the probability of an infinite loss is for the rest of the releases."""
    both = composed(approximate_dp(0.5, 0.25), gaussian(2.0))
    alone = epsilon_at(gaussian(2.0), 1e-12).epsilon
    found = epsilon_at(both, 0.25 + 0.75e-12)
    assert alone * (1 - 1e-3) <= found.epsilon <= 0.5 + alone * (1 + 1e-3)


@pytest.mark.parametrize(
    ("described", "epsilon", "delta", "share", "steps"),
    [
        (OWN, 1.0, 1e-6, 0.0, 1),
        (OWN, 1.0, 1.1e-6, 1e-3, 1),
        (repeated(2, OWN), 2.0, 2e-6, 1e-7, 2),
        (repeated(2, OWN), 2.0, 1.999999e-6, 0.0, 2),
        (repeated(2, OWN), 2.0, 1.99999e-6, 1e-3, 1),
        (composed(*TENTHS), 3.0, 0.28, 0.0, 1),
        (laplace(10), 1.0, 1e-6, 1e-3, 10),
        (truncated_laplace(1.0, 10.0, 1.0), 1.0, CUT * (1 + 1e-15), 0.0, 1),
    ],
)
def test_a_mechanism_fits_a_budget_of_its_own_delta(
    described: Json, epsilon: float, delta: float, share: float, steps: int
) -> None:
    """A part of δ that is set aside for exchanges kept it out."""
    plan = StepPlan.of(mechanisms.from_json(described))
    empty = ReferenceFilter(epsilon, delta, ADDED)
    found = empty.after_reserving(plan, empty.nothing)
    assert isinstance(found, ReferenceFilter)
    assert (found.slack_share, found.steps) == (share, steps)
    fits = found.admits(found.compute_charge(plan, found.nothing).reserved)
    assert fits == empty.fits(plan, empty.nothing) == (steps >= plan.steps)
    assert found.is_sound()


# ------------------------------------------------------------------------------- δ = 0


@pytest.mark.parametrize(
    ("described", "relation", "truth"),
    [
        (repeated(3, laplace(10)), ADDED, 0.3),
        (repeated(7, laplace(0.7)), ADDED, 10.0),
        (laplace(0.3), REPLACED, 6.666666666666667),
        (repeated(3, exponential(0.1)), ADDED, 0.3),
        (composed(laplace(10), discrete_laplace(5, 1)), ADDED, 0.3),
        (repeated(10**9, approximate_dp(1e-9, 0)), ADDED, 1.0),
        (randomized_response(2, 0.5), ADDED, math.log(3)),
        (poisson(0.1, laplace(1.0)), ADDED, math.log1p(0.1 * math.expm1(1.0))),
        (
            poisson(0.1, laplace(1.0)),
            REPLACED,
            math.log((0.9 + 0.1 * math.e) / (0.9 + 0.1 / math.e)),
        ),
        (fixed_size(10, 1, laplace(1.0)), REPLACED, math.log1p(0.1 * math.expm1(2.0))),
        (repeated(0, gaussian(1.0)), ADDED, 0.0),
        (repeated(1000, laplace(100)), ADDED, 10.0),
    ],
)
def test_a_delta_of_zero_is_a_question_like_any_other(
    described: Json, relation: NeighbouringRelation, truth: float
) -> None:
    found = epsilon_at(described, 0.0, relation)
    assert found.delta == 0.0
    if round(truth, 10) == truth:  # sums of decimals are exact
        assert found.epsilon == truth
    assert truth * (1 - 1e-15) <= found.epsilon <= truth * (1 + 1e-9)
    assert found.certified is not None
    if not kinds_of(described) & {"exponential", "fixed_size_sampled"}:
        assert found.certified.lower >= truth * (1 - 1e-9)
    assert (
        calculator.delta(mechanisms.from_json(described), found.epsilon, relation=relation).delta
        == 0.0
    )


# ------------------------------------------------------- releases that reveal everything


REVEALING = [approximate_dp(1.0, 1.0), privacy_profile([0], [1]), privacy_profile([0, 2], [1, 1])]


@pytest.mark.parametrize("described", REVEALING)
def test_a_release_that_reveals_everything_has_a_delta_of_one(described: Json) -> None:
    """The logarithm of 0, and an empty list of losses, ended in a 500."""
    for relation in (ADDED, REPLACED):
        for mechanism, least in (
            (described, 1.0),
            (composed(described, gaussian(1.0)), 1.0),
            (poisson(0.5, described), 0.5),
            (repeated(2, poisson(0.5, described)), 0.75),
            (composed(poisson(0.5, described), poisson(0.1, gaussian(1.0))), 0.5),
        ):
            found = proved_delta(mechanism, 1.0, relation)
            assert least * (1 - 1e-5) <= found.lower <= found.upper <= max(least * 1.1, 1.0)
            with pytest.raises(NoFiniteEpsilonError, match="no finite ε holds at δ = 1e-06"):
                epsilon_at(mechanism, 1e-6, relation)


def test_lower_bounds_of_delta_below_the_normal_doubles_are_zero() -> None:
    """A double below 1e-307 has lost digits: rounded down it may still be above the truth."""
    for mechanism, epsilon in ((gaussian(0.5), 76.0), (poisson(0.01, gaussian(0.5)), 72.0)):
        for step in range(40):
            found = proved_delta(mechanism, epsilon + step / 20)
            assert found.lower == 0.0 or found.lower >= 1e-307
    assert proved_delta(gaussian(0.5), 76.9).upper >= 1e-300


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_a_run_without_a_common_pair_does_not_fit_and_is_refused(delta: float) -> None:
    policy = ReferenceFilter(1.0, delta, ADDED)
    mixture = StepPlan.of(mechanisms.from_json(poisson(0.1, composed(gaussian(1.0), LAPLACE))))
    with pytest.raises(MethodNotApplicableError):
        policy.fits(mixture, policy.nothing)
    if delta:
        parts = StepPlan.of(mechanisms.from_json(parallel(approximate_dp(1.0, delta), LAPLACE)))
        with pytest.raises(MethodNotApplicableError):
            policy.fits(parts, policy.nothing)


@pytest.mark.parametrize("epsilon", [5e-324, 1e-310, 1e-300])
def test_a_tiny_budget_of_pure_epsilon_admits_no_more_than_it_is(epsilon: float) -> None:
    plan = StepPlan.of(mechanisms.from_json(LAPLACE))
    policy = ReferenceFilter(epsilon, 0.0, ADDED).after_reserving(plan, (0, 0))
    assert not policy.fits(plan, policy.nothing)
    assert policy.steps * 1e-300 <= epsilon
