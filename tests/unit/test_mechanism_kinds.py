"""Each kind of mechanism against its definition, and what kinds have in common."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy import stats

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.errors import (
    AccountingError,
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Release,
    distinct_directions,
)
from accountant_service.numerics.laws.gaussian_mixture import several_records
from accountant_service.numerics.laws.profile_pair import largest_total_variation
from accountant_service.numerics.laws.truncated_poisson import binomial_below, binomial_tail
from accountant_service.numerics.privacy_profile import bounds_near
from tests.support import exact_deltas as exact
from tests.support import oracles
from tests.support.helpers import nightly
from tests.support.kind_rows import ALL, ROWS, THREE_BINS, Row, assert_encloses
from tests.support.kinds import (
    ADDED,
    REPLACED,
    ZEROED,
    Json,
    approximate_dp,
    balls_in_bins,
    banded,
    composed,
    discrete_gaussian,
    discrete_laplace,
    dp_sgd,
    epsilon_at,
    exponential,
    factorization,
    fixed_size,
    gaussian,
    gdp,
    hash_of,
    kinds_of,
    laplace,
    parallel,
    permute_and_flip,
    poisson,
    privacy_profile,
    proved_delta,
    proved_epsilon,
    randomized_response,
    rdp,
    repeated,
    selection,
    shuffled_reports,
    tree_aggregation,
    truncated_laplace,
    truncated_poisson,
    user_level,
    zcdp,
)
from tests.support.pairwise import pairwise

KINDS = list(mechanisms.json_schema()["Mechanism"]["discriminator"]["mapping"])
FIRST = {row.mechanism["kind"]: row for row in reversed(ROWS)}  # a kind's first row


def upper_delta(document: Json, epsilon: float) -> float:
    return proved_delta(document, epsilon).upper


@pytest.mark.spread(second=12)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[getattr(pytest.mark, row.tier)] if row.tier else [])
        for row in ROWS
    ],
)
def test_intervals_enclose_the_truth_in_each_relation(row: Row) -> None:
    for relation in row.known:
        assert_encloses(row, relation)
    for relation in row.unproved:
        try:
            found = calculator.delta(mechanisms.from_json(row.mechanism), 0.3, relation=relation)
        except AccountingError:
            continue
        assert found.status is Status.ESTIMATE, (row.name, relation)


def test_every_kind_has_rows_and_every_relation_a_truth_or_no_proof() -> None:
    """`balls_in_bins` and cut Poisson samples have only bounds for a replaced record.

    So have cut and fixed-size samples for a zeroed one: those are compared below.
    """
    assert set().union(*(kinds_of(row.mechanism) for row in ROWS)) == set(KINDS)
    covered: dict[str, set[NeighbouringRelation]] = {}
    for row in ROWS:
        found = covered.setdefault(row.mechanism["kind"], set())
        found |= row.relations | row.unproved
    missing = {kind: ALL - found for kind, found in covered.items() if ALL - found}
    assert missing == {"balls_in_bins": {REPLACED}, "truncated_poisson_sampled": {REPLACED, ZEROED}}
    assert covered.keys() == set(KINDS)


@pytest.mark.nightly
@pytest.mark.parametrize(("sigma", "epsilon", "delta"), THREE_BINS)
def test_the_integrals_of_three_bins(sigma: float, epsilon: float, delta: float) -> None:
    assert float(exact.epoch(epsilon, 3, sigma)) == pytest.approx(delta, rel=1e-12)


# --------------------------------------------------------------------- all kinds, all methods


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_answers_or_names_the_kind_and_the_trade_off_holds_delta_at_zero(
    kind: str,
) -> None:
    document = FIRST[kind].mechanism
    tree = mechanisms.from_json(document)
    compared = calculator.compare(mechanisms.from_json(repeated(3, document)), 0.06)
    assert isinstance(compared.certified, calculator.Guarantee)
    unsound = {
        "adadp_rdp",
        "mma",
        "moments_accountant_closed_form",
        "gdp_clt",
        "moments_accountant",
    }
    for each in compared.answers:
        if not isinstance(each, calculator.Guarantee):
            assert any(name in str(each.error.detail) for name in kinds_of(document)), each
        elif each.method not in unsound:
            assert each.status is Status.PROVEN, each
    try:
        found = calculator.trade_off(tree, 0.5, 11)
    except MethodNotApplicableError:
        assert kind == "parallel"  # different parts have none in common
        return
    at_zero = proved_delta(document, 0.0)
    assert found.advantage.lower <= at_zero.upper
    assert at_zero.lower <= found.advantage.upper <= at_zero.upper * (1 + 5e-3)


def test_sampling_is_refused_where_no_theorem_covers_it() -> None:
    unsampled = ("randomized_response", "discrete_laplace", "discrete_gaussian", "approximate_dp")
    for kind in (*unsampled, "privacy_profile"):
        document = fixed_size(100, 10, FIRST[kind].mechanism)
        for relation in ALL - {REPLACED}:
            with pytest.raises(MethodNotApplicableError) as refused:
                epsilon_at(document, 1e-5, relation)
            assert refused.value.pointer == "", kind


TRUNCATED = truncated_poisson(100, 0.1, 20, gaussian(1.0))


@pytest.mark.parametrize(
    "document",
    [
        user_level(2, laplace(1.0)),
        user_level(2, user_level(2, poisson(0.1, gaussian(1.0)))),
        user_level(2, TRUNCATED),
        TRUNCATED | {"mechanism": gdp(1.0)},
        TRUNCATED | {"mechanism": poisson(0.1, gaussian(1.0))},
        poisson(0.1, TRUNCATED),
        poisson(0.1, repeated(2, zcdp(0.1))),
        selection("poisson", 3, approximate_dp(0.1, 1e-9)),
        selection("poisson", 3, poisson(0.1, composed(gaussian(5.0), gdp(1.0)))),
        *(
            outer | {"mechanism": shuffled_reports(10, approximate_dp(1.0, 0))}
            for outer in (poisson(0.1), fixed_size(100, 10), user_level(2))
        ),
        *(
            outer | {"mechanism": parallel(gaussian(1.0), gaussian(2.0))}
            for outer in (user_level(2), poisson(0.1))
        ),
        selection("poisson", 2, parallel(gaussian(1.0), gaussian(2.0))),
        parallel(*(user_level(3, gaussian(each)) for each in (3.0, 3.5))),
        user_level(2, banded(1.5, [1.0, 0.5], 6, 2, 0.3)),
    ],
    ids=lambda each: str(each)[9:80],
)
def test_combinations_without_a_proof_are_refused(document: Json) -> None:
    """The last but one: a person with 3 records in each part costs both, ε 6.04 and not 4.38."""
    for relation in NeighbouringRelation:
        with pytest.raises(MethodNotApplicableError):
            epsilon_at(document, 1e-5, relation)


RUN = repeated(3, gaussian(2.0))
WIDE, PURE = privacy_profile([0, 8], [0.002, 0.0]), approximate_dp(4, 0)
PARTS = parallel(WIDE, PURE)
EQUAL: list[tuple[Json, Json]] = [
    (user_level(1, poisson(0.1, gaussian(2.0))), poisson(0.1, gaussian(2.0))),
    # each record of a person is sampled by itself
    (
        user_level(2, poisson(0.25, poisson(0.5, gaussian(2.0)))),
        poisson(0.25, user_level(2, poisson(0.5, gaussian(2.0)))),
    ),
    *(
        (poisson(q, user_level(100, gaussian(1.0))), user_level(100, poisson(q, gaussian(1.0))))
        for q in (0.01, 1e-6)
    ),
    # the most records of a person hold for all releases on a sample
    (
        poisson(0.01, composed(user_level(5, gaussian(2.0)), gaussian(2.0))),
        user_level(5, poisson(0.01, composed(gaussian(2.0), gaussian(2.0)))),
    ),
    (user_level(4, gaussian(2.0)), gaussian(0.5)),
    (
        user_level(3, repeated(7, poisson(0.1, gaussian(2.0)))),
        repeated(7, user_level(3, poisson(0.1, gaussian(2.0)))),
    ),
    # a limit that is never reached
    (truncated_poisson(100, 0.1, 100, gaussian(2.0)), poisson(0.1, gaussian(2.0))),
    # four steps, two apart, in a tree of eight: 4·1 + 4·1 + 2·4 + 16 squares
    (
        tree_aggregation(6.0, 8, participations=4, min_separation=2),
        gaussian(6.0 / math.sqrt(4 + 4 + 8 + 16)),
    ),
    (tree_aggregation(6.0, 8), gaussian(6.0 / math.sqrt(4))),
    (balls_in_bins(3, gaussian(1.0), selections=3), repeated(3, gaussian(1.0))),
    # equal parts are one, and their order does not matter
    (parallel(RUN, RUN), parallel(RUN, RUN, RUN)),
    (parallel(RUN), RUN),
    (parallel(parallel(), parallel()), parallel()),
    (parallel(RUN, gaussian(1.0)), parallel(gaussian(1.0), RUN)),
    # a repeated `parallel` is the `parallel` of repeated parts
    (repeated(2, repeated(3, PARTS)), parallel(repeated(6, WIDE), repeated(6, PURE))),
    (repeated(0, PARTS), parallel()),
    (composed(PARTS, PARTS), composed(parallel(PURE, WIDE), PARTS)),
]
DIFFERENT: list[tuple[Json, Json]] = [
    (parallel(RUN, RUN), RUN),
    (parallel(RUN), parallel(RUN, parallel())),
    (parallel(RUN, gaussian(1.0)), RUN),
    (composed(PARTS, PARTS), repeated(2, PARTS)),
    *itertools.combinations(
        [poisson(rate, poisson(1e-9, gaussian(1.0))) for rate in (1e-3, 1e-4, 1e-5, 1e-12)], 2
    ),
]


def test_documents_of_equal_meaning_have_one_form_and_others_do_not() -> None:
    for one, other in EQUAL:
        assert hash_of(one) == hash_of(other), (one, other)
    for one, other in DIFFERENT:
        assert hash_of(one) != hash_of(other), (one, other)


# --------------------------------------------------------------------- infinite losses


def test_no_epsilon_is_finite_below_the_mass_that_reveals_everything() -> None:
    document = repeated(10, approximate_dp(0.1, 1e-6))
    total = -math.expm1(10 * math.log1p(-1e-6))
    with pytest.raises(NoFiniteEpsilonError):
        epsilon_at(document, total * (1 - 1e-6))
    assert epsilon_at(document, total * (1 + 1e-3)).epsilon <= 1.0 + 1e-6
    assert proved_delta(document, 50.0).lower == pytest.approx(total, rel=1e-6)


def test_an_infinite_epsilon_names_the_events_and_the_way_out() -> None:
    profile = privacy_profile([0.5, 1.0], [1e-3, 1e-4])
    both = composed(gaussian(1.0), repeated(2, profile))
    for document, pointer, least in (
        (profile, "", "0.0001"),
        (both, "/mechanisms/1/mechanism", "0.00019999"),
    ):
        with pytest.raises(NoFiniteEpsilonError) as refused:
            epsilon_at(document, 1e-5)
        assert str(refused.value) == (
            "no finite ε holds at δ = 1e-05: as far as is known of privacy_profile, the privacy "
            f"loss may be infinite with a probability of {least}. To get a finite ε, choose a "
            "larger δ, or give the privacy_profile a point with a smaller δ"
        )
        assert refused.value.pointer == pointer


# ----------------------------------------------------------------------- one given bound


def test_bounded_range_is_the_least_bound_of_all_its_pairs() -> None:
    bound = 1.3
    pairs = [exact.two_losses(bound * i / 400, bound) for i in range(1, 400)]
    for x in (0.0, 0.2, 0.9, 1.25):
        worst, known = (
            max(exact.hockey_stick(each, x) for each in pairs),
            exact.bounded_range(x, 1.3),
        )
        assert worst <= known <= worst * (1 + 1e-3) + 1e-6
    for t in (0.2, 0.65, 1.1):
        three = exact.product([exact.two_losses(t, bound)] * 3)
        assert exact.hockey_stick(three, 1.0) <= upper_delta(repeated(3, exponential(bound)), 1.0)


def test_an_assumption_of_several_releases_is_stated_once() -> None:
    found = epsilon_at(composed(gaussian(2.0), laplace(2.0), gdp(0.1)), 1e-5).assumptions
    statements = [each.statement for each in found]
    assert len(statements) == len(set(statements)) > 1


def permuted_and_flipped(scores: Sequence[float], epsilon: float) -> list[float]:
    """Return the probability of each name, by its definition: over all orders of trials."""
    accepted = [math.exp(0.5 * epsilon * (score - max(scores))) for score in scores]
    chances = [0.0] * len(scores)
    for order in itertools.permutations(range(len(scores))):
        still = 1.0 / math.factorial(len(scores))
        for name in order:
            chances[name] += still * accepted[name]
            still *= 1 - accepted[name]
    return chances


def test_no_event_of_permute_and_flip_is_worse_than_laplace_noise() -> None:
    """Scores of two to five names, all or most of which a neighbour changes by Δ = 1."""
    rng, epsilon, most = random.Random(5), 1.4, 0.0
    for _ in range(150):
        scores = [rng.choice([0.0, rng.uniform(-3, 3)]) for _ in range(rng.randint(2, 5))]
        moved = [score + rng.choice([-1.0, 1.0, rng.uniform(-1, 1)]) for score in scores]
        one, other = (permuted_and_flipped(each, epsilon) for each in (moved, scores))
        for x in (-0.7, 0.0, 0.4, 1.1, 1.39):
            pairs = zip(one, other, strict=True)
            worst = math.fsum(max(p - math.exp(x) * q, 0.0) for p, q in pairs)
            allowed = 1 - math.exp((x - epsilon) / 2)
            assert worst <= allowed + 1e-12, (scores, moved, x)
            most = max(most, worst / allowed)
    assert most > 0.98  # two names attain it at one ε


def test_a_sampled_gdp_release_is_the_sampled_gaussian_mechanism() -> None:
    found, same = (
        epsilon_at(repeated(100, poisson(0.1, each)), 1e-6).epsilon
        for each in (gdp(0.5), gaussian(2.0))
    )
    assert found == same


def test_a_curve_of_gaussian_noise_is_above_the_gaussian_mechanism() -> None:
    for tree in (zcdp(0.5), rdp([1.5, 2, 3, 5, 9], [0.75, 1, 1.5, 2.5, 4.5])):
        for times, epsilon in itertools.product((1, 4), (0.0, 1.0, 4.0)):
            for document, mu in (
                (repeated(times, tree), math.sqrt(times)),
                (composed(repeated(times, tree), gaussian(1.0)), math.sqrt(times + 1)),
            ):
                assert oracles.gaussian_delta(epsilon, mu) <= upper_delta(document, epsilon)


def test_points_of_a_profile_dominate_the_mechanism_between_them() -> None:
    epsilons = [0.0, 0.25, 0.5, 1.0, 1.5, 2.5, 4.0]
    for first in (0, 3):  # without the smallest ε as well
        deltas = [float(oracles.gaussian_delta(each, 0.8)) for each in epsilons[first:]]
        tree = privacy_profile(epsilons[first:], deltas)
        for epsilon in (0.0, 0.1, 0.7, 2.0, 4.0, 6.0):
            for times in (1, 2):
                least = oracles.gaussian_delta(epsilon, 0.8 * math.sqrt(times))
                assert least <= upper_delta(repeated(times, tree), epsilon)
        at_points = [upper_delta(tree, each) for each in epsilons[first:]]
        assert at_points == pytest.approx(deltas, rel=1e-3)


def test_a_selection_costs_at_least_one_run_and_its_runs_compose() -> None:
    one = gaussian(5.0)
    best = [selection("geometric", mean, one) for mean in (1.01, 3)]
    several = selection("geometric", 3, repeated(4, poisson(0.9, one)))
    found = [epsilon_at(each, 1e-6).epsilon for each in (one, *best, several)]
    assert found == sorted(found)
    run = dp_sgd(5.0, sample_rate=0.1, steps=10, sampling="shuffled")
    assert epsilon_at(selection("poisson", 3, run), 1e-6).status is Status.ESTIMATE


# --------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("inner", [gaussian(2.0), laplace(2.0)])
def test_a_sample_that_is_never_cut_states_the_size_that_it_rests_on(inner: Json) -> None:
    """If the dataset had more records than the limit, samples would be cut, and ε larger."""
    found = epsilon_at(truncated_poisson(100, 0.5, 100, inner), 1e-5)
    same = epsilon_at(poisson(0.5, inner), 1e-5)
    assert (found.epsilon, found.mechanism_hash) == (same.epsilon, same.mechanism_hash)
    assert any("has `dataset_size` records" in each.statement for each in found.assumptions)
    assert not any("dataset_size" in each.statement for each in same.assumptions)
    if inner["kind"] == "gaussian":
        cut = epsilon_at(truncated_poisson(100, 0.5, 40, inner), 1e-5)
        assert cut.epsilon > found.epsilon


def test_the_addition_of_a_person_has_a_law_of_its_own() -> None:
    law, weights = Release(several_records(3, 0.3, 1.0)), exact.binomial(3, 0.3)
    assert distinct_directions([(law, 1)]) == DIRECTIONS
    for epsilon in (0.0, 0.5):
        both = exact.mixture_deltas(weights, range(4), epsilon, 1.0)
        for direction, delta in zip(DIRECTIONS, both, strict=True):
            found = bounds_near([(law, 1)], direction, epsilon)
            assert found is not None
            lower, upper = found.delta(np.array([epsilon]))
            assert lower[0] <= delta <= upper[0] <= delta * 1.02


@pytest.mark.slow
def test_more_records_of_a_person_cost_more() -> None:
    trees = [repeated(50, user_level(k, poisson(0.05, gaussian(3.0)))) for k in (1, 2, 20, 256)]
    found = [epsilon_at(each, 1e-5).epsilon for each in trees]
    assert found == sorted(found)


def batch_sums(values: Sequence[int], rate: float, most: int) -> dict[int, float]:
    """The law of the sum of a truncated Poisson batch of records with these values."""
    law: dict[int, float] = {}
    for size in range(len(values) + 1):
        chance = rate**size * (1 - rate) ** (len(values) - size)
        for batch in itertools.combinations(values, size):
            kept = list(itertools.combinations(batch, min(size, most)))
            for each in kept:
                law[sum(each)] = law.get(sum(each), 0.0) + chance / len(kept)
    return law


@pytest.mark.parametrize("others", [(-1, -1, -1), (-1, -1, 0), (0, 0, 0)])
def test_truncated_poisson_dominates_all_that_a_record_can_do(others: tuple[int, ...]) -> None:
    """Records −1, 0 or 1, batches of at most 2 of 4, in one dimension: both directions."""
    z = np.linspace(-12, 12, 400_001)
    one, other = (
        sum(chance * stats.norm.pdf(z - value) for value, chance in law.items())
        for law in (batch_sums(values, 0.5, 2) for values in ((*others, 1), others))
    )
    for epsilon in (0.0, 0.5, 1.5):
        delta = max(
            float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) * (z[1] - z[0])
            for p, q in ((one, other), (other, one))
        )
        assert delta <= upper_delta(truncated_poisson(4, 0.5, 2, gaussian(1.0)), epsilon) + 1e-9


def sums_over_binomial(trials: int, rate: float, values: Callable[[int], Any]) -> Any:
    """Return the mean of a function of a binomial variable, over 40 deviations around its mean."""
    reach = 40 * math.sqrt(trials * rate * (1 - rate)) + 40
    low, high = (int(trials * rate + sign * reach) for sign in (-1, 1))
    first = max(0, low)
    chance = mp.exp(
        mp.loggamma(trials + 1) - mp.loggamma(first + 1) - mp.loggamma(trials - first + 1)
        + first * mp.log(mpf(rate)) + (trials - first) * mp.log1p(-mpf(rate))
    )  # fmt: skip
    odds, total = mpf(rate) / (1 - mpf(rate)), mpf(0)
    for j in range(first, min(trials, high) + 1):
        total += chance * values(j)
        chance *= odds * (trials - j) / (j + 1)
    return total


@pytest.mark.parametrize(
    ("size", "rate", "most"),
    [
        (31, 0.5, 1),  # hardly ever are fewer sampled than are kept
        (100, 0.19, 1),
        (1000, 0.0206, 1),
        pytest.param(1_000_000, 1e-4, 90, marks=pytest.mark.slow),
        pytest.param(1_000_000_000, 1e-5, 9900, marks=pytest.mark.slow),
    ],
)
def test_a_record_in_the_truncated_sample_is_seen(size: int, rate: float, most: int) -> None:
    """The others contribute −C and noise is little, so that its presence is seen from the sum."""
    with mp.workdps(30):
        present = sums_over_binomial(
            size - 1, rate, lambda j: mpf(rate) * min(mpf(1), mpf(most) / (j + 1))
        )
        certain = present * (1 - mp.erfc(50 / mp.sqrt(2)) / 2)
    for epsilon in (0.5, 5.0):
        assert upper_delta(truncated_poisson(size, rate, most, gaussian(0.01)), epsilon) >= certain


@pytest.mark.parametrize(("trials", "rate"), [(30, 0.5), (10_000, 0.01), (1_000_000, 1e-4)])
def test_tails_of_a_binomial_are_far_more_exact_than_what_is_added_to_them(
    trials: int, rate: float
) -> None:
    spread = math.sqrt(trials * rate * (1 - rate))
    with mp.workdps(30):
        for deviations in (-5, -1, 0, 1, 5):
            least = max(1, round(trials * rate + deviations * spread))
            tail = sums_over_binomial(trials, rate, lambda j, least=least: j >= least)  # type: ignore[misc]
            below = sums_over_binomial(trials, rate, lambda j, least=least: j < least)  # type: ignore[misc]
            assert abs(binomial_tail(least, trials, rate) / tail - 1) < 1e-11
            assert abs(binomial_below(least, trials, rate) / below - 1) < 1e-11


RARE = pairwise(
    kind=[(discrete_gaussian(0.6, 1), 0.6638150449), (gdp(1.0), 0.3829249226)],
    rate=[1e-9, 1e-7],
    epsilon=[0.0, 1e-10, 1e-9],
)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*RARE[:3], *map(nightly, RARE[3:])], ids=str)
def test_rare_samples_cost_the_total_variation_at_epsilon_0(case: Json) -> None:
    """A sampled release has δ(0) = q·TV, and δ falls with ε by at most e^ε − 1."""
    (inner, total_variation), rate, epsilon = case["kind"], case["rate"], case["epsilon"]
    found = upper_delta(poisson(rate, inner), epsilon)
    assert found >= rate * total_variation * (1 - 1e-9) - 1.1 * epsilon
    assert found <= rate * total_variation * (1 + 1e-6)
    assert upper_delta(poisson(rate, inner), 0.0) >= found


def test_a_limit_that_is_hardly_ever_reached_costs_hardly_more_than_poisson_sampling() -> None:
    rare = repeated(100, truncated_poisson(100_000, 0.001, 400, gaussian(2.0)))
    plain = repeated(100, poisson(0.001, gaussian(2.0)))
    found, least = (epsilon_at(each, 1e-5).epsilon for each in (rare, plain))
    assert found == pytest.approx(least, rel=3e-3)


@pytest.mark.parametrize("records", [3, 7, 200])
def test_releases_whose_noise_rounds_to_the_same_number_are_all_counted(records: int) -> None:
    """One of two counts was lost: a million releases cost as much as one."""
    sigma = 250.0
    while sigma / records != math.nextafter(sigma, math.inf) / records:
        sigma = math.nextafter(sigma, math.inf)
    mixed, plain = (
        user_level(records, composed(repeated(10**6, gaussian(sigma)), gaussian(last)))
        for last in (math.nextafter(sigma, math.inf), sigma)
    )
    assert mechanisms.canonical_form(mechanisms.from_json(mixed)).steps == 10**6 + 1
    found, honest = epsilon_at(mixed, 1e-5), epsilon_at(plain, 1e-5)
    assert found.epsilon == pytest.approx(honest.epsilon, rel=1e-9)


# ---------------------------------------------------------------------- disjoint parts


def test_the_worst_part_counts_at_each_delta() -> None:
    pure, noisy = laplace(1.0), gaussian(2.0)
    rest = poisson(0.1, gaussian(1.0))
    for tree, alternatives in (
        (
            composed(rest, repeated(3, parallel(pure, noisy))),
            [composed(rest, repeated(3, each)) for each in (pure, noisy)],
        ),
        (
            composed(parallel(pure, noisy), parallel(rest, repeated(2, noisy))),
            [composed(a, b) for a in (pure, noisy) for b in (rest, repeated(2, noisy))],
        ),
    ):
        for at in (1e-2, 1e-9):  # another part is the worst
            parts = [proved_epsilon(each, at) for each in alternatives]
            found = proved_epsilon(tree, at)
            assert found.upper == max(each.upper for each in parts)
            assert found.lower == max(each.lower for each in parts)
            assert epsilon_at(tree, at, method="basic_composition").status is Status.PROVEN
        assert upper_delta(tree, 0.7) == max(upper_delta(each, 0.7) for each in alternatives)


@pytest.mark.parametrize(
    ("tree", "alternatives"),
    [
        (composed(PARTS, parallel(PURE, WIDE)), [[2, 0], [1, 1], [0, 2]]),
        (composed(PARTS, PARTS), [[2, 0], [1, 1], [0, 2]]),
        (repeated(2, PARTS), [[2, 0], [0, 2]]),
        (composed(repeated(2, PARTS), parallel(PURE, WIDE)), [[3, 0], [2, 1], [1, 2], [0, 3]]),
        (repeated(2, composed(PARTS, parallel(PURE, WIDE))), [[4, 0], [2, 2], [0, 4]]),
        (parallel(composed(PARTS, PURE), repeated(3, PURE)), [[1, 1], [0, 2], [0, 3]]),
        (parallel(repeated(2, WIDE), parallel()), [[2, 0]]),
    ],
)
def test_a_record_may_be_in_another_part_of_each_parallel_release_but_a_repeated_one(
    tree: Json, alternatives: list[list[int]]
) -> None:
    """`parallel[A, B]` and `parallel[B, A]` may divide the data alike: one record gets A then B."""
    releases = [composed(repeated(a, WIDE), repeated(b, PURE)) for a, b in alternatives]
    for delta in (1e-5, 5e-3):
        least = [epsilon_at(each, delta).epsilon for each in releases]
        found = epsilon_at(tree, delta)
        assert found.epsilon == max(least)
        assert found.status is Status.PROVEN
        at = found.epsilon / 2
        assert upper_delta(tree, at) == max(upper_delta(each, at) for each in releases)


def test_parts_are_doubted_where_a_record_may_move_and_refused_where_they_are_too_many() -> None:
    """A replaced record may move to a part without releases as well."""
    tree = parallel(gaussian(1.0), gaussian(2.0))
    for equal in (1.0, 2.0):
        replaced = epsilon_at(parallel(gaussian(1.0), gaussian(equal)), 1e-5, REPLACED)
        assert replaced.status is Status.ESTIMATE
    with pytest.raises(MethodNotApplicableError):
        calculator.trade_off(mechanisms.from_json(tree), 0.5, 11)
    many = [parallel(gaussian(1.0 + i), gaussian(2.0 + i)) for i in range(7)]
    for expensive in (composed(*many), composed(*[tree] * 64), composed(*[tree] * 3000)):
        with pytest.raises(TooExpensiveError, match="as one `repeated`"):
            epsilon_at(expensive, 1e-5)
    for tree in (parallel(WIDE, parallel()), parallel(parallel(), WIDE, repeated(0, PURE))):
        for relation in NeighbouringRelation:
            found = epsilon_at(tree, 5e-3, relation)
            assert (found.status is Status.ESTIMATE) == (relation is REPLACED)
            assert any("each record belongs to one part" in e.statement for e in found.assumptions)
    assert epsilon_at(parallel(WIDE), 5e-3, REPLACED).status is Status.PROVEN
    alone = user_level(3, gaussian(3.0))
    for relation in NeighbouringRelation:  # one part is no part
        one = epsilon_at(parallel(alone), 1e-5, relation)
        assert one.epsilon == epsilon_at(alone, 1e-5, relation).epsilon


@pytest.mark.slow
def test_equal_parts_and_parts_without_releases_have_the_trade_off_of_one_part() -> None:
    """Nested parts too. Different parts have none in common."""

    def charged(tree: Json) -> str:
        return mechanisms.canonical_form(mechanisms.from_json(tree)).of_common_part().hash

    expected = calculator.trade_off(mechanisms.from_json(RUN), 0.5, 5)
    for tree in (
        parallel(RUN, parallel()),
        parallel(RUN, RUN),
        parallel(parallel(RUN, parallel()), RUN),
        repeated(3, parallel(gaussian(2.0), parallel())),
        composed(*[parallel(gaussian(2.0), parallel())] * 3),
    ):
        read = mechanisms.from_json(tree)
        assert charged(tree) == hash_of(RUN)
        found = calculator.trade_off(read, 0.5, 5)
        assert found.advantage == expected.advantage
        assert found.false_negative_rates == expected.false_negative_rates
        assert found.status is Status.PROVEN
        assert calculator.trade_off(read, 0.5, 5, REPLACED).status is Status.ESTIMATE
    for tree in (parallel(gaussian(1.0), gaussian(2.0)), parallel(PARTS, WIDE)):
        assert charged(tree) == hash_of(tree)
    assert charged(parallel(PARTS, parallel())) == charged(PARTS)


# ------------------------------------------------------------------------------- refusals

EPOCH = balls_in_bins(100, gaussian(1.0), selections=1)
BANDED = banded(1.5, [1.0, 0.5], 6, 2, 0.3)
TREE = tree_aggregation(6.0, 8)
REPORTS = shuffled_reports(10, approximate_dp(1.0, 0))
BINS = dp_sgd(1.0, sampling="balls_in_bins")
SIZES = {"dataset_size": 60000, "batch_size": 600}
BAD: dict[str, list[Json]] = {
    "/categories": [randomized_response(1, 0.5), randomized_response(2.5, 0.5)],
    "/flip_probability": [randomized_response(2, 0), randomized_response(2, 2)],
    "/scale": [discrete_laplace(0, 1), discrete_laplace(1.0, 1000), truncated_laplace(0.01, 9, 2)],
    "/sensitivity": [
        discrete_laplace(1.0, 0.5),
        discrete_gaussian(1.0, 10**9),
        # such losses underflowed, and the trade-off ended in a 500
        truncated_laplace(0.01, 5e-324, 5e-324),
        truncated_laplace(1, 9, 9e-7),
    ],
    "/noise_std": [discrete_gaussian(1e9, 1), discrete_gaussian(1.0, 100)],
    "/epsilon": [exponential(0), approximate_dp(-1, 0), permute_and_flip(-1)],
    "/delta": [approximate_dp(1, 1.5)],
    "/mu": [gdp(0)],
    "/rho": [zcdp(-0.1)],
    "/divergences/0": [rdp([2], [-1])],
    "/divergences/1": [rdp([2, 4], [2, 1]), rdp([2, 3, 4], [1, 9, 9.5])],
    "/divergences": [rdp([2, 4], [1])],
    "/orders/0": [rdp([1], [1])],
    "/orders/1": [rdp([4, 2], [1, 2])],
    "/orders": [rdp([], [])],
    "/deltas/0": [privacy_profile([0], [1.1])],
    "/deltas/1": [privacy_profile([0, 1], [0.1, 0.2]), privacy_profile([0, 1, 2], [0.3, 0.29, 0])],
    "/deltas": [privacy_profile([0, 1], [0.1])],
    "/epsilons/0": [privacy_profile([-1], [0.1])],
    "/epsilons/1": [privacy_profile([1, 0], [0.2, 0.1])],
    "/epsilons": [privacy_profile([0] * 9999, [0])],
    "/bound": [truncated_laplace(1, 1, 2)],
    "/coefficients/1": [
        factorization(4.0, [0.5, 1.0], 10, 2, 2),
        factorization(4.0, [1.0, -1.0], 10, 2, 2),
        BANDED | {"coefficients": [1.0, -0.5]},
    ],
    "/coefficients": [
        factorization(4.0, [1.0] * 100_000, 100_000, 1, 100_000),
        BANDED | {"coefficients": [1.0, 0.5, 0.1]},
        BANDED | {"coefficients": []},
    ],
    "/participations": [
        factorization(4.0, [1.0], 10, 2, 6),
        TREE | {"participations": 0},
        TREE | {"participations": 9},
        TREE | {"participations": 3, "min_separation": 4},
    ],
    "/noise_multiplier": [
        factorization(4.0, [0.0], 10, 2, 2),
        BANDED | {"coefficients": [0.0, 0.5], "steps": 7},
        BANDED | {"noise_multiplier": 0.0},
        TREE | {"noise_multiplier": 0.01},
    ],
    "/groups": [BANDED | {"groups": 0}],
    "/min_separation": [BANDED | {"min_separation": 2}],
    "/steps": [
        BANDED | {"steps": 0},
        TREE | {"steps": 0},
        TREE | {"steps": 10**6},
        BINS | SIZES | {"steps": 150},
    ],
    "/repeats/mean": [selection("poisson", 1, gaussian(1.0))],
    "/repeats/shape": [
        selection("poisson", 2, gaussian(1.0), shape=1),
        selection("negative_binomial", 2, gaussian(1.0)),
    ],
    "/repeats/distribution": [selection("binomial", 2, gaussian(1.0))],
    "/records": [user_level(0, gaussian(1.0)), user_level(10**6, gaussian(1.0))],
    "/sample_rate": [
        truncated_poisson(100, 1.5, 10, gaussian(1.0)),
        BANDED | {"sample_rate": 1.5},
        BINS | {"sample_rate": 0.03, "steps": 100},
    ],
    "/batch_size_max": [truncated_poisson(100, 0.5, 0, gaussian(1.0))],
    "/dataset_size": [truncated_poisson(0, 0.5, 1, gaussian(1.0))],
    "/bins": [EPOCH | {"bins": 0}, EPOCH | {"bins": 10**6}],
    "/selections": [EPOCH | {"bins": 3, "selections": 4}, EPOCH | {"selections": 0}],
    "/mechanism": [
        EPOCH | {"mechanism": laplace(1.0)},
        EPOCH | {"mechanism": EPOCH},
        EPOCH | {"mechanism": poisson(0.1, gaussian(1.0))},
        REPORTS | {"mechanism": gaussian(1.0)},
        REPORTS | {"mechanism": laplace(1.0)},
        REPORTS | {"mechanism": repeated(2, approximate_dp(1.0, 0))},
    ],
    "/batch_size": [
        BINS | {"dataset_size": 60000, "batch_size": 7001, "epochs": 1},
        BINS | {"dataset_size": 600, "batch_size": 601, "epochs": 1},
        BINS | {"dataset_size": 10**9, "batch_size": 1, "epochs": 1},
    ],
    "/epochs": [BINS | SIZES | {"epochs": 1.5}],
    "/reports": [REPORTS | {"reports": each} for each in (0, 1.5, 10**10)],
    "/mechanism/delta": [REPORTS | {"mechanism": approximate_dp(1.0, 1e-9)}],
    "/mechanism/epsilon": [REPORTS | {"mechanism": approximate_dp(-1.0, 0)}],
    "/rounds": [REPORTS | {"rounds": 2}],
}


@pytest.mark.parametrize("pointer", BAD)
def test_bad_fields_are_refused_with_their_pointer(pointer: str) -> None:
    for document in BAD[pointer]:
        with pytest.raises(mechanisms.MechanismError) as refused:
            mechanisms.from_json(repeated(2, document))
        found = [each for each, _ in refused.value.faults]
        assert "/mechanism" + pointer in found, document
        assert document["kind"] != "balls_in_bins" or len(found) == 1


# ------------------------------------------------------- the total variation of a divergence


@pytest.mark.parametrize("divergence", [1e-12, 1e-7, 1.1e-6, 1e-4, 0.01, 0.3, 1, 3, 10, 20, 50])
def test_the_total_variation_of_a_divergence_is_that_of_the_worst_two_outcomes(
    divergence: float,
) -> None:
    """By data processing the worst laws have two outcomes: minimise their divergence directly."""

    def least_divergence(variation: Any) -> Any:
        """Return the least D(p + V ‖ p), which is convex in p."""

        def at(p: Any) -> Any:
            q = p + variation
            return q * mp.log(q / p) + (1 - q) * mp.log((1 - q) / (1 - p))

        low, high = mpf(0), 1 - variation
        for _ in range(150):
            left, right = (2 * low + high) / 3, (low + 2 * high) / 3
            low, high = (low, right) if at(left) < at(right) else (left, high)
        return at((low + high) / 2)

    found = mpf(largest_total_variation(divergence))
    with mp.workdps(50):
        assert found <= mp.sqrt(mpf(divergence) / 2) * (1 + mpf(1e-9))
        if found < 1:
            assert least_divergence(found) >= divergence
            assert least_divergence(found - mpf("3e-9")) <= divergence
        else:
            assert divergence >= 20


@pytest.mark.parametrize("rho", [0.01, 0.05, 1.0])
def test_the_advantage_of_concentrated_privacy_is_at_most_that_of_pinsker(rho: float) -> None:
    found = calculator.trade_off(mechanisms.from_json(zcdp(rho)), 0.5, 5)
    assert found.advantage.upper < math.sqrt(rho / 2)
    exact = proved_delta(gaussian(1 / math.sqrt(2 * rho)), 0.0)
    assert found.advantage.upper >= exact.lower
    assert found.advantage.upper == pytest.approx(proved_delta(zcdp(rho), 0.0).upper, rel=1e-9)


# ------------------------------------------------------- zeroed and replaced records of a batch


@pytest.mark.parametrize(
    "mechanism",
    [
        repeated(1000, fixed_size(60_000, 600, gaussian(1.0))),
        fixed_size(10, 4, laplace(1.0)),
        composed(fixed_size(10, 4, laplace(1.0)), fixed_size(10, 3, gaussian(1.0)), gaussian(3.0)),
        repeated(50, truncated_poisson(1000, 0.05, 60, gaussian(1.5))),
        truncated_poisson(1000, 1.0, 60, gaussian(1.5)),
        repeated(3, fixed_size(10, 9, gaussian(2.0))),
    ],
)
def test_a_zeroed_record_costs_at_most_what_a_replaced_one_does(mechanism: Json) -> None:
    """Nor more than on all the data, where it changes the sum by C and not by 2C."""
    zeroed, replaced = (proved_epsilon(mechanism, 1e-5, each) for each in (ZEROED, REPLACED))
    assert zeroed.upper <= replaced.upper * (1 + 1e-9)
    if "fixed_size_sampled" in kinds_of(mechanism):
        if "laplace" not in kinds_of(mechanism):
            whole = proved_epsilon(without_samples(mechanism), 1e-5, ZEROED)
            assert zeroed.upper <= whole.upper * (1 + 1e-9)
        # of two datasets where all others are like the replacement: twice as far if it is not zero
        assert 0 < zeroed.lower <= replaced.lower
        sampled = with_poisson_samples(mechanism)
        for found, same in ((zeroed, sampled), (replaced, with_half_the_noise(sampled))):
            alone = proved_epsilon(same, 1e-5, ADDED)
            assert found.lower <= alone.upper * (1 + 1e-9)
            assert found.lower >= alone.lower * (1 - 1e-3)


def without_samples(mechanism: Json) -> Json:
    """Return a document with all the data in place of each sample of fixed size."""
    if mechanism["kind"] == "fixed_size_sampled":
        return mechanism["mechanism"]
    return _changed_inside(mechanism, without_samples)


def with_poisson_samples(mechanism: Json) -> Json:
    """Return a document with a Poisson sample in place of each sample of fixed size."""
    if mechanism["kind"] == "fixed_size_sampled":
        rate = mechanism["batch_size"] / mechanism["dataset_size"]
        return poisson(rate, mechanism["mechanism"])
    return _changed_inside(mechanism, with_poisson_samples)


def with_half_the_noise(mechanism: Json) -> Json:
    """Return a document with half of each noise multiplier."""
    if "noise_multiplier" in mechanism:
        return {**mechanism, "noise_multiplier": mechanism["noise_multiplier"] / 2}
    return _changed_inside(mechanism, with_half_the_noise)


def _changed_inside(mechanism: Json, change: Callable[[Json], Json]) -> Json:
    """Return a document with all mechanisms inside it changed."""
    if "mechanisms" in mechanism:
        return composed(*map(change, mechanism["mechanisms"]))
    if "mechanism" in mechanism:
        return {**mechanism, "mechanism": change(mechanism["mechanism"])}
    return mechanism


def test_samples_that_differ_in_the_size_of_the_data_have_no_lower_bound() -> None:
    both = composed(fixed_size(10, 4, gaussian(1.0)), fixed_size(11, 4, gaussian(1.0)))
    assert proved_epsilon(both, 1e-5, REPLACED).lower == 0.0
