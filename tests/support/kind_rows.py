"""The table of mechanism kinds: documents, and their δ by definition in each relation.

`assert_encloses` compares the proved intervals of δ and ε with it. A row says why it is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from mpmath import mp, mpf

from accountant_service.accounting.guarantee import NeighbouringRelation
from tests.support import definition, oracles
from tests.support import exact_deltas as exact
from tests.support.exact_deltas import Pair
from tests.support.kinds import (
    ADDED,
    REPLACED,
    ZEROED,
    Json,
    approximate_dp,
    balls_in_bins,
    banded,
    composed,
    diagonal_gaussian,
    discrete_gaussian,
    discrete_laplace,
    dp_sgd,
    exponential,
    factorization,
    fixed_size,
    gaussian,
    gaussian_mixture,
    gdp,
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

Truth = Callable[[float, NeighbouringRelation], Any]
Relations = Set[NeighbouringRelation]
ALL, NONE = frozenset(NeighbouringRelation), frozenset[NeighbouringRelation]()
ABSENT = {ADDED, ZEROED}  # a record that is zeroed costs what one that goes away does


@dataclass(frozen=True, eq=False)
class Row:
    """A mechanism with its δ by definition.

    Attributes:
        name: what the case is, and why it is here if that is not clear.
        mechanism: its document.
        truth: δ at ε in a relation.
        epsilons: where δ is compared; ε is compared at δ of the one in the middle.
        relations: those in which the truth is stated; in others the service may know more.
        unproved: those in which the service refuses or only estimates.
        bounded: those in which no dominating pair is attained, so that the lower bound is not near.
        width: the largest relative width of δ's interval; of a bound, how far it is from the truth.
        epsilon_width: the same of ε; one of 0.01 is allowed besides, unless it is given.
        error: the relative error of the truth.
        lost: what brute force may lack of δ, relative; a fiftieth of that absolute.
        most: the largest δ that may be claimed, if it is not the truth.
        tier: the marker of the row's test, if any.
    """

    name: str
    mechanism: Json
    truth: Truth
    epsilons: Sequence[float] | Callable[[], Sequence[float]] = (0.0, 0.5, 2.0)
    relations: Relations = ALL
    unproved: Relations = NONE
    bounded: Relations = NONE
    width: float = 2e-3
    epsilon_width: float | None = None
    error: float = 0.0
    lost: float = 0.0
    most: Truth | None = None
    tier: str = ""

    @property
    def known(self) -> Relations:
        """The relations in which the proved intervals are compared with the truth."""
        return self.relations - self.unproved

    def points(self) -> Sequence[float]:
        """Return where δ is compared."""
        return self.epsilons() if callable(self.epsilons) else self.epsilons


@cache
def exact_delta(row: Row, epsilon: float, relation: NeighbouringRelation) -> Any:
    """Return δ of a row by its definition."""
    return row.truth(epsilon, relation)


def assert_encloses(row: Row, relation: NeighbouringRelation) -> None:
    """Assert that the proved intervals of δ and ε hold the truth and are narrow."""
    points = row.points()
    for epsilon in points:
        delta = exact_delta(row, epsilon, relation)
        found = proved_delta(row.mechanism, epsilon, relation)
        case = (row.name, relation.value, epsilon, float(delta), found)
        lower, upper = mpf(str(found.lower)), mpf(str(found.upper))  # they mean their decimals
        assert lower <= delta * (1 + row.error + row.lost) + row.lost / 50 + 1e-300, case
        assert delta * (1 - row.error) - row.lost * 1e-7 <= upper, case
        if relation in row.bounded:
            most = row.most(epsilon, relation) if row.most else delta * (1 + row.lost)
            assert found.upper <= most * (1 + row.width) + 1e-12, case
        else:
            assert found.upper - found.lower <= row.width * found.upper + 1e-12, case
    epsilon = points[len(points) // 2]
    delta = exact_delta(row, epsilon, relation)
    if 1e-9 < delta < 0.5:
        found = proved_epsilon(row.mechanism, float(delta), relation)
        case = (row.name, relation.value, epsilon, float(delta), found)
        width, room = row.epsilon_width or row.width, 0.0 if row.epsilon_width else 0.01
        assert found.upper >= epsilon * (1 - row.error - 1e-15), case
        if not row.lost:
            assert found.lower <= epsilon * (1 + row.error + 1e-15), case
        least = epsilon if relation in row.bounded else found.lower
        if not row.most and not row.lost:
            assert found.upper - least <= width * epsilon + room, case


def of(truth: Callable[..., Any], *values: Any) -> Truth:
    """Return a truth that is the same in every relation."""
    known = cache(lambda epsilon: truth(epsilon, *values))
    return lambda epsilon, _: known(epsilon)


def of_pair(pair: Callable[[], Pair]) -> Truth:
    """Return the truth of finitely many outcomes, which are listed when they are needed."""
    return lambda epsilon, _: exact.hockey_stick(pair(), epsilon)


def pair_row(name: str, mechanism: Json, pair: Callable[[], Pair], **fields: Any) -> Row:
    """Return a row of finitely many outcomes, compared over the whole range of ε."""

    def epsilons() -> list[float]:
        finite = [(abs(mp.log(p / q)), p) for p, q in pair() if p > 0 and q > 0]
        largest = max(loss for loss, mass in finite if mass > 1e-9)
        return [share * float(largest) for share in (0.0, 0.3, 0.8)]

    return Row(name, mechanism, of_pair(pair), epsilons, **fields)


def of_gaussian(mu: float) -> Truth:
    """Return the truth of a Gaussian release: a record that is replaced moves it twice as far."""
    return lambda epsilon, relation: oracles.gaussian_delta(
        epsilon, 2 * mu if relation is REPLACED else mu
    )


def of_sampled_gaussian(rate: float, sigma: float) -> Truth:
    """Return the truth of a Gaussian release on a Poisson sample."""

    def truth(epsilon: float, relation: NeighbouringRelation) -> Any:
        if relation is REPLACED:
            return oracles.replaced_record_delta(epsilon, rate, sigma)
        return max(
            oracles.single_step_delta(epsilon, rate, sigma, removing=each) for each in (True, False)
        )

    return truth


def of_fixed_size(size: int, batch: int, sigma: float) -> Truth:
    """Return the truth of a Gaussian release on a sample of fixed size, not all of the data."""

    def truth(epsilon: float, relation: NeighbouringRelation) -> Any:
        if relation is REPLACED:
            return oracles.fixed_size_replacement_delta(epsilon, batch / size, sigma)
        return of_sampled_gaussian(batch / size, sigma / 2)(epsilon, relation)

    return truth


def of_person(records: int, rate: float, sigma: float) -> Truth:
    """Return the truth of a person with several sampled records."""
    return lambda epsilon, relation: (
        exact.replaced_person if relation is REPLACED else exact.person
    )(epsilon, records, rate, sigma)


def of_drawn(weights: Sequence[float], shifts: Sequence[float], sigma: float) -> Truth:
    """Return the truth of a contribution that is drawn at random."""
    return lambda epsilon, relation: (
        exact.replaced_drawn if relation is REPLACED else exact.drawn
    )(epsilon, weights, shifts, sigma)


def largest(*truths: Truth) -> Truth:
    """Return the truth of the worst part."""
    return lambda epsilon, relation: max(each(epsilon, relation) for each in truths)


# --- brute force over datasets

BRUTE_EPSILONS = (0.0, 0.4, 1.2)


def fixed_sizes(tree: Json) -> list[tuple[int, int]]:
    """Return dataset and batch size of every fixed-size sample in a tree."""
    inner = tree.get("mechanisms", [tree["mechanism"]] if "mechanism" in tree else [])
    own = [(tree["dataset_size"], tree["batch_size"])] if "dataset_size" in tree else []
    return own + [sizes for each in inner for sizes in fixed_sizes(each)]


def _larger_sizes(tree: Json, relation: NeighbouringRelation) -> list[int]:
    """Return the sizes that the larger of two neighbours may have."""
    sizes = fixed_sizes(tree)
    if not sizes:
        return [2]
    if relation is not ADDED:
        return [sizes[0][0]]
    # of n records and one more; of n and one less only if that leaves a batch
    return [n + 1 for n, _ in sizes] + [n for n, b in sizes if all(b < n for n, b in sizes)]


def by_brute_force(tree: Json) -> Truth:
    """Return the truth of Gaussian and Laplace releases on nested samples of tiny datasets."""

    def truth(epsilon: float, relation: NeighbouringRelation) -> float:
        return largest(relation)[BRUTE_EPSILONS.index(epsilon)]

    @cache
    def largest(relation: NeighbouringRelation) -> list[float]:
        sizes = _larger_sizes(tree, relation)
        found = [definition.delta(tree, relation, n, BRUTE_EPSILONS) for n in sizes]
        return [max(each) for each in zip(*found, strict=True)]

    return truth


def brute_row(name: str, mechanism: Json, tree: Json | None = None, **fields: Any) -> Row:
    """Return a row of tiny datasets; what the oracle's cells lose of δ is allowed."""
    truth = by_brute_force(tree or mechanism)
    return Row(name, mechanism, truth, BRUTE_EPSILONS, lost=1e-2, **fields)


def replaced_by_brute_force(mechanism: Json) -> Truth:
    """Return the most that may be claimed of tiny datasets: a zeroed record is a replaced one."""
    truth = by_brute_force(mechanism)

    def most(epsilon: float, relation: NeighbouringRelation) -> Any:
        relations = {relation, REPLACED} - {ZEROED}
        return 1.01 * max(truth(epsilon, each) for each in relations)

    return most


# --- the rows

SLOW, NIGHTLY = "slow", "nightly"


def _lazy(pair: Callable[..., Pair], *fields: Any) -> Callable[[], Pair]:
    """Return a pair that is listed when it is needed."""
    return cache(lambda: pair(*fields))


_ATOMIC: list[tuple[str, Json, Callable[[], Pair]]] = [
    *(
        (
            f"randomized response of {k}",
            randomized_response(k, f),
            _lazy(exact.randomized_response, k, f),
        )
        for k, f in ((2, 0.5), (4, 0.6), (10**9, 0.9))
    ),
    *(
        (f"discrete Laplace {b}", discrete_laplace(b, s), _lazy(exact.discrete_laplace, b, s))
        for b, s in ((5.0, 1), (0.5, 1), (2.0, 3))
    ),
    *(
        (f"discrete Gaussian {b}", discrete_gaussian(b, s), _lazy(exact.discrete_gaussian, b, s))
        for b, s in ((1.5, 1), (0.3, 1), (4.0, 5))
    ),
    *(
        (f"({e}, {d})-DP", approximate_dp(e, d), _lazy(exact.approximate, e, d))
        for e, d in ((0.3, 1e-7), (1.0, 0.01))
    ),
    (
        "points of a profile",
        privacy_profile(
            [0.0, math.log(2), math.log(4)],
            [float(exact.hockey_stick(exact.dyadic(), math.log(e))) for e in (1, 2, 4)],
        ),
        exact.dyadic,
    ),
]


def _atomic_rows() -> Iterable[Row]:
    """Yield each kind with finitely many outcomes: one release, three, and one on a sample."""
    for at, (name, mechanism, pair) in enumerate(_ATOMIC):
        tier = "" if at in (0, 3, 6, 10) else SLOW
        yield pair_row(name, mechanism, pair)
        yield pair_row(
            f"three of {name}",
            repeated(3, mechanism),
            cache(lambda pair=pair: exact.product([pair()] * 3)),
            width=1e-2,
            tier=tier,
        )
        # sampled randomized response is in test_changed_in_place.py: it may be of each person
        if mechanism["kind"] != "randomized_response":
            yield pair_row(
                f"sampled {name}",
                poisson(0.2, mechanism),
                lambda pair=pair: exact.sampled(pair(), 0.2),
                relations={ADDED},
                tier=tier,
            )

    def different() -> Pair:
        pairs = [_ATOMIC[at][2]() for at in (0, 5, 10)]
        return exact.product([*pairs, exact.sampled(_ATOMIC[3][2](), 0.5)])

    yield pair_row(
        "different kinds",
        composed(*(_ATOMIC[at][1] for at in (0, 5, 10)), poisson(0.5, _ATOMIC[3][1])),
        cache(different),
        relations={ADDED},
        width=1e-2,
    )
    for reveal, epsilon in ((0.01, 0.5), (1e-6, 2.0)):
        yield Row(
            f"a lattice and a mass of {reveal} that reveals",
            composed(gaussian(2.0), approximate_dp(0.4, reveal)),
            lambda at, relation, reveal=reveal: exact.revealing_gaussian(
                at, 0.4, reveal, 1.0 if relation is REPLACED else 0.5
            ),
            (epsilon,),
            width=1e-2,
            epsilon_width=2e-2,
        )


def _noise_rows() -> Iterable[Row]:
    """Yield Gaussian and Laplace releases, and what is one by its definition."""
    tight = {"width": 1e-6, "epsilon_width": 1e-8}
    yield Row("Gaussian", gaussian(1.1), of_gaussian(1 / 1.1), **tight)
    yield Row(
        "Laplace",
        laplace(2.0),
        lambda at, relation: oracles.laplace_delta(at, 1.0 if relation is REPLACED else 2.0),
        (0.0, 0.2, 0.4),
    )
    mu = math.hypot(12 / 17, 6 / 8.5)
    yield Row("diagonal", diagonal_gaussian([12, 6], [17, 8.5]), of_gaussian(mu), **tight)
    run = dp_sgd(4.0, sample_rate=1.0, steps=9)
    yield Row("a run of DP-SGD on all the data", run, of_gaussian(3 / 4), **tight)
    yield Row("μ-GDP", gdp(0.7), of(oracles.gaussian_delta, 0.7), **tight)
    yield Row(
        "μ-GDP composes; only the distance of the Gaussian doubles",
        composed(gdp(0.3), repeated(2, gdp(0.4)), gaussian(2.0)),
        lambda at, relation: oracles.gaussian_delta(
            at, math.sqrt(0.41 + (1.0 if relation is REPLACED else 0.25))
        ),
        **tight,
    )
    yield Row(
        "a matrix factorization",
        factorization(4.0, [1.0, 0.5], 4, 2, 2),
        of_gaussian(math.hypot(1, 0.5, 1, 0.5) / 4),
        **tight,
    )
    yield Row("a tree of eight steps", tree_aggregation(6.0, 8), of_gaussian(2 / 6), **tight)
    yield Row(
        "a person's records on no sample",
        user_level(4, gaussian(6.0)),
        of_gaussian(4 / 6.0),
        **tight,
    )
    yield Row(
        "the worst of disjoint parts",
        parallel(laplace(1.0), gaussian(2.0)),
        largest(of(oracles.laplace_delta, 1.0), of_gaussian(0.5)),
        unproved={REPLACED},
    )


def _sampled_rows() -> Iterable[Row]:
    """Yield Gaussian releases on samples, in closed form or by integrals."""
    three = (0.0, 0.3, 2.0)
    for q, sigma in ((0.3, 2.0), (0.4, 0.6), (0.01, 1.0), (0.97, 2.0), (1e-3, 0.5)):
        yield Row(
            f"a Poisson sample at {q}",
            poisson(q, gaussian(sigma)),
            of_sampled_gaussian(q, sigma),
            three,
            width=1e-3,
            tier="" if q == 0.3 else SLOW,
        )
    for size, batch, sigma in ((10, 4, 0.6), (1000, 10, 1.0), (100, 97, 2.0), (10_000, 1, 0.5)):
        yield Row(
            f"{batch} of {size}",
            fixed_size(size, batch, gaussian(sigma)),
            of_fixed_size(size, batch, sigma),
            three,
            relations={ADDED, REPLACED},
            bounded={REPLACED},
            width=2e-2,
            tier=NIGHTLY if sigma == 0.5 else SLOW,
        )
    yield Row(
        "a batch of all the data has the record for certain",
        fixed_size(1000, 1000, gaussian(2.0)),
        of_gaussian(0.5),
        relations={REPLACED, ZEROED},
        width=1e-6,
        epsilon_width=1e-8,
    )
    for size in (2, 1, 60_000):
        yield Row(
            f"a batch of all {size} leaves one of one more out",
            fixed_size(size, size, gaussian(2.0)),
            of_sampled_gaussian(size / (size + 1), 1.0),
            relations={ADDED},
            width=1e-3,
            epsilon_width=1e-3,
            tier="" if size == 2 else SLOW,
        )
    yield Row(
        "groups in turn, one round",
        banded(1.5, [1.0, 0.5], 2, 2, 0.3),
        of_sampled_gaussian(0.3, 1.5 / math.hypot(1.0, 0.5)),
        tier=SLOW,
        unproved={REPLACED},
    )
    yield Row(
        "a cut Poisson sample",
        truncated_poisson(12, 0.3, 4, gaussian(2.0)),
        of(exact.truncated_poisson, 12, 0.3, 4, 2.0),
        (0.0, 0.5, 1.0),
        relations={ADDED},
        bounded={ADDED},
        error=1e-9,
    )
    for records, rate, sigma in ((2, 0.3, 1.0), (5, 0.05, 2.0), (3, 0.9, 4.0), (12, 0.03, 1.5)):
        yield Row(
            f"{records} records of a person",
            user_level(records, poisson(rate, gaussian(sigma))),
            of_person(records, rate, sigma),
            (0.0, 0.5, 2.0, 3.0),
            tier="" if records == 2 else SLOW,
        )
    for sigma, shifts, chances in (
        (2.0, (0.0, 1.0, 2.5), (0.9, 0.08, 0.02)),
        (0.7, (0.0, 0.1, 0.5, 0.7), (0.4, 0.3, 0.1, 0.2)),
        (3.0, (1.0, 2.0), (0.5, 0.5)),  # a contribution is always made
        (1.0, (0.0, 1.0), (0.7, 0.3)),  # a Poisson sample
    ):
        yield Row(
            f"contributions of {shifts}",
            gaussian_mixture(sigma, list(shifts), list(chances)),
            of_drawn(chances, shifts, sigma),
            (0.0, 0.5, 2.0),
            tier="" if sigma == 2.0 else SLOW,
        )
    yield Row(
        "contributions on a Poisson sample",
        poisson(0.3, gaussian_mixture(2.0, [1.0, 2.5], [0.8, 0.2])),
        of_drawn((0.7, 0.24, 0.06), (0.0, 1.0, 2.5), 2.0),
        (0.0, 0.5, 2.0),
    )
    yield Row(
        "contributions on samples of fixed size",
        fixed_size(10, 3, gaussian_mixture(2.0, [1.0, 2.5], [0.8, 0.2])),
        lambda _, __: mpf(0),
        unproved=ALL,
    )
    for sigma, epsilon in ((1.0, 0.5), (1.0, 4.0), (0.9, 1.0), (4.0, 0.3), (2.0, 2.2)):
        yield Row(
            f"two bins, σ = {sigma}, ε = {epsilon}",
            balls_in_bins(2, gaussian(sigma)),
            of(exact.epoch, 2, sigma),
            (epsilon,),
            relations=ABSENT,
            width=5e-2,
            tier="" if sigma == 0.9 else SLOW,
        )
    for sigma, epsilon, delta in THREE_BINS:
        yield Row(
            f"three bins, σ = {sigma}",
            balls_in_bins(3, gaussian(sigma)),
            lambda _, __, delta=delta: delta,
            (epsilon,),
            relations=ABSENT,
            width=5e-2,
            error=1e-5,
            tier=SLOW,
        )


THREE_BINS = [  # σ, ε, and the integral that takes half a minute each: checked at night
    (1.0, 1.0, 0.033500772977738326),
    (3.0, 0.5, 0.00045489300379008917),
    (0.8, 2.0, 0.013308067482670861),
]


def _brute_rows() -> Iterable[Row]:
    """Yield nested samples and compositions, against brute force over tiny datasets."""
    sample, all_two = poisson(0.3, gaussian(1.0)), fixed_size(2, 2, gaussian(2.0))
    yield brute_row("Poisson of Poisson", poisson(0.5, poisson(0.4, gaussian(1.0))), tier=SLOW)
    yield brute_row("the only record", fixed_size(1, 1, gaussian(2.0)))
    yield brute_row(
        "two of three",
        fixed_size(3, 2, gaussian(2.0)),
        bounded={REPLACED, ZEROED},
        most=replaced_by_brute_force(fixed_size(3, 2, gaussian(2.0))),
    )
    yield brute_row(
        "all of two, Laplace: one more is taken for a replacement",
        fixed_size(2, 2, laplace(2.0)),
        bounded={ADDED},
        most=of(oracles.laplace_delta, 1.0),
    )
    yield brute_row("all of two, twice", fixed_size(2, 2, repeated(2, gaussian(2.0))), tier=SLOW)
    yield brute_row("sampled Laplace", poisson(0.3, laplace(1.0)))
    both = poisson(0.3, composed(gaussian(1.0), gaussian(2.0)))
    yield brute_row("one sample, two releases", both, tier=SLOW)
    yield brute_row("Poisson and all of two", composed(sample, all_two), tier=SLOW)
    parts = composed(fixed_size(3, 3, gaussian(2.0)), fixed_size(3, 1, gaussian(0.7)))
    yield brute_row(
        "all and a part",
        parts,
        bounded=ALL,
        width=0.35,
        most=replaced_by_brute_force(parts),
        tier=SLOW,
    )
    yield brute_row("Gaussian and Laplace", composed(gaussian(1.0), laplace(2.0)), tier=SLOW)
    twice = repeated(2, poisson(0.2, gaussian(0.7)))
    yield brute_row("two sampled steps", twice, tier=SLOW)
    run = dp_sgd(0.7, sample_rate=0.2, steps=2)
    yield brute_row("two steps of DP-SGD", run, twice, tier=SLOW)


def _bound_rows() -> Iterable[Row]:
    """Yield releases of which a bound is known: the worst of what has it."""
    bounds = {"bounded": ALL, "width": 1e-3}
    some = (0.0, 0.2, 0.9, 1.25)
    yield Row("bounded range", exponential(1.3), of(exact.bounded_range, 1.3), some, **bounds)
    yield Row(
        "two of bounded range are the composition of their densities",
        repeated(2, exponential(1.3)),
        of(exact.two_of_bounded_range, 1.3),
        (0.7,),
        **bounds | {"width": 2e-3},
    )
    yield Row(
        "permute and flip costs what Laplace noise does",
        permute_and_flip(0.5),
        of(oracles.laplace_delta, 2.0),
        (0.0, 0.2, 0.45),
        **bounds,
    )
    for noise in ((1.0, 5.0, 1.0), (2.0, 1.5, 1.5), (0.5, 3.0, 2.0)):
        yield Row(
            f"truncated Laplace {noise}",
            truncated_laplace(*noise),
            of(exact.truncated_laplace, *noise),
            tuple(share * noise[2] / noise[0] for share in (0.0, 0.4, 0.9, 1.1)),
            width=3e-3,
            error=1e-9,
            tier="" if noise[0] == 1.0 else SLOW,
        )
    yield Row(
        "sampled truncated Laplace",
        poisson(0.3, truncated_laplace(1.0, 5.0, 1.0)),
        lambda at, _: 0.3 * exact.truncated_laplace(at, 1.0, 5.0, 1.0),
        (0.0,),
        relations={ADDED},
        error=1e-9,
    )
    for reports, local in ((1, 1.0), (2, 0.5), (7, 1.0), (12, 3.0)):
        yield Row(
            f"{reports} shuffled reports",
            shuffled_reports(reports, approximate_dp(local, 0)),
            of(exact.shuffled, reports, local),
            tuple(share * local for share in (0.0, 0.2, 0.7)),
            **bounds,
        )
    rounds = cache(lambda: exact.product([exact.clones(2, 1.0), exact.clones(3, 1.0)]))
    pure = approximate_dp(1.0, 0)
    yield Row(
        "two rounds of shuffled reports",
        composed(shuffled_reports(2, pure), shuffled_reports(3, pure)),
        of_pair(rounds),
        (0.6,),
        **bounds,
    )


def _curve_rows() -> Iterable[Row]:
    """Yield releases of which a Rényi curve is known, converted at many orders."""
    fields = {"bounded": ALL, "width": 3e-3}
    fine, orders = [1 + mpf(i) / 50 for i in range(1, 3000)], [2, 4, 8, 16]
    together = composed(zcdp(0.02), repeated(3, zcdp(0.01)))
    for name, tree in (("ρ-zCDP", zcdp(0.05)), ("zCDP adds up to one curve", together)):
        truth = of(lambda at: exact.converted(lambda a: mpf("0.05") * a, fine, at))
        yield Row(name, tree, truth, (0.5, 2.0), error=1e-4, **fields)
    curve = rdp(orders, [0.1, 0.2, 0.4, 0.8])
    for name, tree, slope, epsilons in (
        ("Rényi curve", curve, 0.05, (0.5, 2.0)),
        ("Rényi curves add up", composed(repeated(2, curve), zcdp(0.05)), 0.15, (3.0,)),
    ):
        between = [2 + mpf(i) / 20 for i in range(281)]
        every, some = (
            of(lambda at, each, slope=slope: exact.converted(lambda a: slope * mpf(a), each, at), o)
            for o in (between, orders)
        )
        yield Row(name, tree, every, epsilons, most=some, error=1e-6, **fields)
    selected = {"bounded": ALL, "width": 5e-2, "error": 1e-3}
    for distribution, shape, epsilon in (
        ("geometric", 1.0, 2.15),
        ("logarithmic", 0.0, 1.85),
        ("negative_binomial", 0.5, 2.05),
        ("poisson", 0.0, 2.5),
    ):
        more = {"shape": shape} if distribution == "negative_binomial" else {}
        width = 5e-3 if distribution == "poisson" else 3e-3
        truth = of(exact.selected, distribution, 10, shape, 4.0)
        # of a Gaussian release with half the noise, a replaced record is as a removed one
        for relations, noise in ((ABSENT, 4.0), ({REPLACED}, 8.0)):
            yield Row(
                f"the best of a {distribution} number of runs, σ = {noise}",
                selection(distribution, 10, gaussian(noise), **more),
                truth,
                (epsilon,),
                relations,
                epsilon_width=width,
                **selected,
            )


ROWS: list[Row] = [
    *_noise_rows(),
    *_sampled_rows(),
    *_brute_rows(),
    *_atomic_rows(),
    *_bound_rows(),
    *_curve_rows(),
]
