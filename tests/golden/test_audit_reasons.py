"""The reasons of the audit are claims: every number in them is computed again, in 30 digits.

Nothing here uses the product's formulas: sums where it integrates, integrals where it has closed
forms, and one line integral for compositions (`tests/support/oracles.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath as mp
import pytest

from accountant_service.accounting.methods import sampled_step
from accountant_service.papers import claims as paper_audit
from accountant_service.papers.claims import Finding
from tests.support import oracles

Numbers = Sequence[Any]  # exact numbers, or pairs of "at least" or "at most" and a number
_NUMBER = re.compile(r"(?<![\w.])\d+(?: \d{3})*(?:\.\d+)?(?:e-\d+)?(?!\w)")
DELTA = 1e-5


@cache
def findings() -> tuple[Finding, ...]:
    return tuple(paper_audit.findings())


def numbers_of(text: str) -> list[str]:
    return [each.replace(" ", "") for each in _NUMBER.findall(text)]


def exact(value: Any) -> Any:
    """Return a number, a fraction or a decimal text in the working precision."""
    if isinstance(value, Fraction):
        return mp.mpf(value.numerator) / value.denominator
    return mp.mpf(value)


def unit(printed: str) -> Any:
    """Return the unit in the last place of a printed number."""
    mantissa, _, exponent = printed.partition("e")
    return mp.mpf(10) ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def assert_printed(text: str, expected: Numbers) -> None:
    """Assert that a text's numbers are these, each rounded in its direction."""
    found = numbers_of(text)
    assert len(found) == len(expected), (found, expected)
    for printed, each in zip(found, expected, strict=True):
        direction, value = each if isinstance(each, tuple) else ("nearest", each)
        off = (mp.mpf(printed) - exact(value)) / unit(printed)
        least, most = {
            "nearest": (-0.5, 0.5),
            "at least": (-1, 0),
            "at most": (0, 1),
        }[direction]
        assert least - 1e-3 <= off <= most + 1e-3, (printed, mp.nstr(value, 12), text)


def best_conversion(
    moment: Callable[[int, float, float], Any], q: float, sigma: float, steps: int, last: int
) -> tuple[Any, int]:
    """Return the least ε by the classical conversion over whole orders, and its order."""
    return min(
        (oracles.classical_epsilon({a: moment(a, q, sigma)}, steps, DELTA), a)
        for a in range(2, last + 1)
    )


def root_of_delta(delta_at: Callable[[Any], Any], delta: float, near: float, by: float) -> Any:
    """Return the ε at which log δ, linear between two near values, is that of `delta`."""
    first, second = (mp.log(delta_at(each)) for each in (near, near + by))
    return near + by * (mp.log(delta) - first) / (second - first)


def moments_accountant(steps: int) -> Numbers:
    _, order = best_conversion(oracles.sampled_gaussian_moment, 0.01, 4.0, steps, 40)
    moment = oracles.sampled_gaussian_moment(order, 0.01, 4.0)
    return [oracles.tight_epsilon({order: moment}, steps, DELTA)]


def strong_composition() -> Numbers:
    shares = map(float, sampled_step.DELTA_SHARES)
    return [2, min(oracles.advanced(0.01, 2.0, 40_000, DELTA, share) for share in shares)]


def theorem_1_of_papers_000() -> Numbers:
    halved = best_conversion(oracles.without_replacement_moment, 0.01, 0.45, 1800, 6)[0]
    zeros = root_of_delta(
        lambda at: oracles.replaced_delta(at, 0.01, 0.9, 1800), DELTA, 4.6703, 1e-4
    )
    return [2, halved, 0, ("at least", zeros)]


def cosines() -> Numbers:
    def mean(deviations: tuple[float, float]) -> Any:
        """Radial integrals on equidistant angles: the integrand is periodic and analytic."""
        first, second = map(mp.mpf, deviations)

        def along(angle: Any) -> Any:
            c, s = mp.cos(angle), mp.sin(angle)
            return mp.quad(
                lambda r: r * mp.npdf(r * c, 10, first) * mp.npdf(r * s, 5, second),
                mp.linspace(0, 120, 5),
            )

        start, count = mp.atan2(5, 10), 48
        angles = [2 * mp.pi * k / count for k in range(count)]
        return sum(mp.cos(a - start) * along(a) for a in angles) * 2 * mp.pi / count

    return [mean((17.0, 8.5)), mean((13.5, 13.5))]


def ratio_of_line_23() -> Any:
    return mp.sqrt(exact(Fraction(9, 10) + Fraction(1, 10) * Fraction(6, 5) ** 2))


def conditions(q: float, sigma: float, steps: int) -> tuple[Any, Any]:
    """Return λ and the least ε of the theorem's condition."""
    order = 2 * mp.log(1 / mp.mpf(DELTA)) / oracles.mma(q, sigma, steps, DELTA)
    return order, mp.mpf("0.002") * steps / order


def zcdp_of_figure_4() -> Numbers:
    rho = mp.mpf("0.01") ** 2 / 4
    total = 40_000 * rho
    return [
        oracles.closed_form(0.01, 2.0, 40_000, DELTA),
        total + 2 * mp.sqrt(total * mp.log(1 / mp.mpf(DELTA))),
        64,
        oracles.sampled_gaussian_moment(64, 0.01, 2.0) / 63,
        64 * rho,
    ]


@cache
def accountants_of_figure_4() -> dict[str, tuple[Any, Any]]:
    """Return ε of each accountant at q = .01 and σ = 2 after 40 and after 400 epochs."""

    def both(compute: Callable[[int], Any]) -> tuple[Any, Any]:
        return compute(4_000), compute(40_000)

    sampled = {a: oracles.sampled_gaussian_moment(a, 0.01, 2.0) for a in range(2, 41)}
    return {
        "mma": both(lambda steps: oracles.mma(0.01, 2.0, steps, DELTA)),
        "closed": both(lambda steps: oracles.closed_form(0.01, 2.0, steps, DELTA)),
        "moments": both(lambda steps: oracles.classical_epsilon(sampled, steps, DELTA)),
        "renyi": both(tight_renyi_accounting),
        "printed": both(
            lambda steps: best_conversion(oracles.without_replacement_moment, 0.01, 2.0, steps, 12)[
                0
            ]
        ),
    }


def tight_renyi_accounting(steps: int) -> Any:
    """Return the least ε by the conversion of Canonne et al. over real orders."""

    def at(order: Any) -> Any:
        moment = oracles.sampled_gaussian_moment(order, 0.01, 2.0)
        return oracles.tight_epsilon({order: moment}, steps, DELTA)

    low, high = mp.mpf(2), mp.mpf(40)
    for _ in range(26):  # ε is convex in 1/(α − 1) there
        third = (high - low) / 3
        low, high = (
            (low, high - third) if at(low + third) < at(high - third) else (low + third, high)
        )
    return at(low)


def remark_4(*names: str) -> Numbers:
    """Return ε after 400 epochs."""
    return [accountants_of_figure_4()[name][1] for name in names]


def figure_4(*names: str) -> Numbers:
    """Return ε after 40 and after 400 epochs; `a/b` is a ratio."""
    found = accountants_of_figure_4()
    pairs = []
    for name in names:
        first, _, second = name.partition("/")
        divisors = found[second] if second else (1, 1)
        pairs += [a / b for a, b in zip(found[first], divisors, strict=True)]
    return pairs


def state_of_pigdo() -> Numbers:
    """Adam's second step by Table 1, in exact squares: g = 1 in the first step, 0 in the second."""
    first, second = Fraction(9, 10), Fraction(999, 1000)
    f, s = first / (1 - first**2), second / (1 - second**2)
    parameters = 784 * 1000 + 1000 + 1000 * 10 + 10
    norm = mp.sqrt(exact(f**2 / s * parameters))
    assert norm > 4
    return [norm, 600, 1]


def gains() -> Numbers:
    best = Fraction("92.02")
    pairs = {"91.25": "0.82", "90.92": "1.65", "89.75": "2.5", "88.91": "3.48"}
    off = [
        abs(100 * (best / Fraction(other) - 1) - Fraction(gain)) for other, gain in pairs.items()
    ]
    adppl = 100 * (best / Fraction("90.92") - 1)
    return [adppl, best - Fraction("90.92"), off.pop(1), max(off)]


def theorem_3(q: float) -> Numbers:
    epsilon = oracles.mma(q, 1.0, 100, DELTA)
    order, least = conditions(q, 1.0, 100)
    return [
        oracles.sampled_gaussian_moment(-order, q, 1.0),
        oracles.sampled_gaussian_moment(order + 1, q, 1.0),
        ("at least", oracles.sampled_delta(epsilon, q, 1.0, 100, removing=True)),
        ("at most", oracles.sampled_delta(epsilon, q, 1.0, 100, removing=False)),
        order,
        least,
    ]


def inequality_8() -> Numbers:
    cubed = mp.exp(oracles.sampled_gaussian_moment(-3, 0.1, 1.0))
    return [1, 1, 1, 1, 3, cubed, 1 + Fraction(9, 100)]


def variances() -> Numbers:
    def variance(epsilon: float) -> Any:
        low, high = mp.mpf("0.5"), mp.mpf(200)
        for _ in range(110):
            middle = (low + high) / 2
            is_enough = oracles.gaussian_delta(epsilon, 1 / middle) <= mp.mpf("1e-8")
            low, high = (low, middle) if is_enough else (middle, high)
        return high**2

    values = [(mp.mpf(each), variance(each)) for each in ("0.05", "0.1", "0.5", "1", "2")]
    ratios = []
    for power in (1, 2):
        scaled = [found * epsilon**power for epsilon, found in values]
        ratios.append(max(scaled) / min(scaled))
    return ratios


def crossing_of_figure_3() -> Numbers:
    noise = mp.findroot(
        lambda s: oracles.gaussian_delta("0.1", 1 / s) - DELTA, (20, 40), solver="anderson"
    )

    def excess(rate: Any) -> Any:
        step = rate / 10
        total = step * mp.sqrt(20 * mp.log(1 / mp.mpf(DELTA))) + 10 * step * mp.expm1(step)
        sampling = oracles.sampling_composition_delta(total, rate, noise, 10)
        return mp.log(sampling) - mp.log(10 * rate * DELTA + DELTA)

    return [mp.findroot(excess, (0.05, 0.1), solver="anderson", tol=1e-20)]


def poisson_of_the_autoencoder() -> Numbers:
    q, size = 64 / 60_000, 60_000

    def delta(at: Any) -> Any:
        return oracles.sampled_delta(at, q, 0.75, 80 * 938, removing=True)

    return [("at most", root_of_delta(delta, 1 / size, 2.6892, 1e-4)), 2]


def delta_of_dp_accounting() -> Numbers:
    delta = oracles.sampled_delta(1.114537, 0.001, 2.0, 100_000, removing=True)
    return [("at least", delta), 1]


REASONS: list[tuple[str, Callable[[], Numbers], bool]] = [  # the source, the numbers, is it slow
    ("Abadi et al. 2016, Figure 2", lambda: moments_accountant(10_000), False),
    ("Abadi et al. 2016, Figure 2", lambda: moments_accountant(40_000), False),
    ("Park, slides on Abadi et al. 2016, main theorem", strong_composition, True),
    (
        "Xu et al. 2020, §III-C",
        lambda: best_conversion(oracles.sampled_gaussian_moment, 0.01, 0.9, 1800, 12),
        False,
    ),
    ("Xu et al. 2020, Theorem 1 and Lemma 6", theorem_1_of_papers_000, True),
    ("Xu et al. 2020, §III-B", cosines, True),
    ("Xu et al. 2020, Algorithm 1, line 23", lambda: [ratio_of_line_23(), 71_010], False),
    ("Ding et al. 2021, Remark 4", lambda: [*conditions(0.01, 2.0, 40_000)], False),
    ("Ding et al. 2021, Remark 4", lambda: remark_4("moments"), True),
    (
        "Ding et al. 2021, Abstract and Remark 4",
        lambda: [remark_4("mma")[0] / remark_4("moments")[0], *remark_4("closed")],
        True,
    ),
    ("Ding et al. 2021, Figure 4", lambda: figure_4("moments"), True),
    (
        "Ding et al. 2021, §5.2",
        lambda: [*figure_4("renyi/moments"), 7, 0, *figure_4("printed")],
        True,
    ),
    ("Ding et al. 2021, §5.2 and Figure 4", zcdp_of_figure_4, False),
    *(
        (
            "Ding et al. 2021, §5.2",
            lambda sigma=sigma, steps=steps: [
                2,
                oracles.mma(0.01, 2.0, steps, DELTA),
                *conditions(0.01, sigma, steps),
            ],
            False,
        )
        for sigma, steps in ((2.0, 26_000), (4.0, 10_000), (8.0, 3_000))
    ),
    ("Ding et al. 2021, §4.2 and Algorithm 1", lambda: [1200, 2], False),
    ("Ding et al. 2021, Algorithm 1 and Table 1", state_of_pigdo, False),
    ("Ding et al. 2021, §5.2, σ = 8", gains, False),
    *(
        ("Ding et al. 2021, Theorem 3", lambda q=q: theorem_3(q), True)
        for q in (0.1, 0.05, 0.02, 0.01)
    ),
    ("Ding et al. 2021, §4.2, last step of (8)", inequality_8, False),
    *(
        (
            "Cheng et al. 2020, Theorem 1",
            lambda sigma=sigma, steps=steps: [
                oracles.gaussian_epsilon(DELTA, mp.sqrt(steps) / sigma)
            ],
            False,
        )
        for sigma, steps in ((2.0, 10), (3.0, 20), (5.0, 10))
    ),
    (
        "Cheng et al. 2020, The Amplification Effect of Sampling",
        lambda: [1, 1, mp.log(1 + (mp.e - 1) / 10)],
        False,
    ),
    ("Cheng et al. 2020, Algorithm 1", lambda: [2], False),
    ("Cheng et al. 2020, Logistic Regression", variances, False),
    ("Cheng et al. 2020, Figure 3", crossing_of_figure_3, False),
    ("Li et al. 2022, §6.1.2", lambda: [1], False),
    ("Li et al. 2022, Appendix B, IMDB", lambda: [4, 2, "0.5"], False),
    ("Li et al. 2022, Appendix B, autoencoder", lambda: [4, 2, "0.5"], False),
    ("Li et al. 2022, Appendix B, StackOverflow", lambda: [4, 2, "0.475"], False),
    ("Li et al. 2022, Algorithm 1 and §6, autoencoder", poisson_of_the_autoencoder, True),
    ("dp_accounting 0.6.0", delta_of_dp_accounting, True),
    ("opacus #571; arXiv 2605.15648", lambda: [Fraction(10_000, 9_999) ** 2], False),
    ("opacus #819", lambda: [Fraction(100, 99) ** 2], False),
    ("arXiv 2605.15648", lambda: [Fraction(101, 100) ** 2], False),
]


def test_every_finding_has_its_reason_here() -> None:
    assert [each.source for each in findings()] == [source for source, _, _ in REASONS]


def _cases() -> Iterator[Any]:
    for at, (source, expected, is_slow) in enumerate(REASONS):
        marks = [pytest.mark.slow] if is_slow else []
        yield pytest.param(at, expected, id=f"{at} {source}", marks=marks)


@pytest.mark.spread(second=3)
@pytest.mark.parametrize(("at", "expected"), list(_cases()))
def test_every_number_of_a_reason_is_that_of_thirty_digits(
    at: int, expected: Callable[[], Numbers]
) -> None:
    with mp.workdps(30):
        assert_printed(findings()[at].remark, expected())


def test_a_number_that_is_off_by_a_unit_is_found() -> None:
    for text, value in (("1.2279", 1.22782), ("at most 2.6e-19", ("at most", 2.68e-19))):
        with pytest.raises(AssertionError):
            assert_printed(text, [value])
    assert numbers_of("in 71 010 of 1 000, λ = 3.49, .002·T, (8), q² 2.7e-19.") == [
        "71010", "1000", "3.49", "8", "2.7e-19"
    ]  # fmt: skip


# --- the numbers that findings compare, where no other test has them


def named(source: str) -> list[Finding]:
    return [each for each in findings() if each.source == source]


def lower(finding: Finding) -> float:
    """Return the lower bound that a finding proves."""
    found = re.search(r"ε ≥ ([\d.]+)|([\d.]+) ≤ ε", finding.proved)
    assert found
    return float(found[1] or found[2])


def test_both_numbers_of_remark_4_follow_from_the_papers_formulas() -> None:
    """§5.2 says which formula its moments accountant is; neither number is a misprint."""
    found = named("Ding et al. 2021, Remark 4")
    assert [each.verdict for each in found] == ["confirmed", "confirmed"]
    assert_printed(found[0].computed, [oracles.mma(0.01, 2.0, 40_000, DELTA)])
    assert_printed(found[1].computed, [3, oracles.closed_form(0.01, 2.0, 40_000, DELTA)])


@pytest.mark.slow
def test_the_order_of_figure_4_is_that_at_its_own_noise() -> None:
    with mp.workdps(30):
        found = accountants_of_figure_4()
        for at in (0, 1):
            order = [found[name][at] for name in ("renyi", "moments", "mma", "closed")]
            assert order == sorted(order)
        (ordered,) = named("Ding et al. 2021, Figure 4")
        assert_printed(ordered.computed, figure_4("closed", "mma", "renyi"))
        half = named("Ding et al. 2021, §5.2")[0]
        assert_printed(half.computed, figure_4("renyi/closed"))
        (tighter,) = named("Ding et al. 2021, Abstract and Remark 4")
        assert_printed(tighter.computed, remark_4("mma", "moments"))
    assert (ordered.verdict, half.verdict, tighter.verdict) == ("confirmed", "confirmed", "refuted")


def test_mma_is_refuted_by_the_other_direction_alone() -> None:
    """The bound holds in the direction that is proved; in the other one δ is exceeded."""
    for finding, q in zip(
        named("Ding et al. 2021, Theorem 3"), (0.1, 0.05, 0.02, 0.01), strict=True
    ):
        gap = paper_audit.mma_gap(q, 1.0, 100)
        assert finding.verdict == "refuted"
        assert lower(finding) > gap.epsilon
        assert gap.adding < gap.bound < gap.removing
        assert gap.delta_adding < 1e-14 < DELTA < gap.delta_removing
        with mp.workdps(30):
            order = conditions(q, 1.0, 100)[0]
            assert gap.bound == pytest.approx(float(mp.log1p((q * order) ** 2)), rel=1e-9)
            step = (mp.e - 1) * (order + 1) / (2 * order * (1 - mp.mpf(q)))
            assert gap.last_step == pytest.approx(float(step), rel=1e-9)


def test_the_last_step_of_8_is_false_below_its_limit() -> None:
    (finding,) = named("Ding et al. 2021, §4.2, last step of (8)")
    with mp.workdps(30):
        limit = mp.findroot(lambda x: (mp.e - 1) * (x + 1) / (2 * x) - 1, 6)
        assert_printed(finding.proved, [limit, 0])
        ratios = []
        for q in (mp.mpf("0.1"), mp.mpf("0.05")):
            order = conditions(float(q), 1.0, 100)[0]
            left = (mp.e - 1) * order * (order + 1) * q**2 / (2 * (1 - q))
            ratios.append(left / (q * order) ** 2)
        assert_printed(finding.computed, [3, *ratios])


def test_bounds_on_clipped_means_are_those_of_twice_the_distance() -> None:
    """Clipped means: 1.51, 1.59 and .87 by Rényi accounting; the truth at half the noise."""
    rows = [each for each in findings() if each.source.startswith("Li et al. 2022, Appendix B")]
    printed = [float(each.computed.rpartition(" ")[2]) for each in rows]
    assert printed == pytest.approx([1.5119, 1.5923, 0.8705], abs=1e-9)
    assert [math.floor(100 * lower(each)) for each in rows] == [1099, 1168, 665]
    assert {each.verdict for each in rows} == {"refuted"}


@pytest.mark.spread(second=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "sigma", "epochs", "name"),
    [
        (25_000, 1.0, 32, "Appendix B, IMDB"),
        (60_000, 1.0, 80, "Appendix B, autoencoder"),
        (246_092, 0.95, 50, "Appendix B, StackOverflow"),
        (60_000, 0.75, 80, "Algorithm 1 and §6, autoencoder"),
    ],
)
def test_a_bound_of_papers_004_is_the_root_of_a_line_integral(
    size: int, sigma: float, epochs: int, name: str
) -> None:
    (finding,) = named(f"Li et al. 2022, {name}")
    with mp.workdps(30):

        def delta(at: Any) -> Any:
            steps = epochs * -(-size // 64)
            return oracles.sampled_delta(at, 64 / size, sigma / 2, steps, removing=True)

        root = root_of_delta(delta, 1 / size, lower(finding), 1e-5)
        assert lower(finding) <= root <= lower(finding) + 4e-5


def tail(parameters: int, at: Any) -> Any:
    """P(χ² ≥ at)."""
    return mp.gammainc(mp.mpf(parameters) / 2, at / 2, mp.inf, regularized=True)


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("source", "parameters", "ratio", "chance"),
    [
        ("Xu et al. 2020, Algorithm 1, line 23", 71_010, None, "0.01"),
        ("opacus #571; arXiv 2605.15648", 10**6, Fraction(10_000, 9_999), 1),
        ("opacus #819", 10**6, Fraction(100, 99), 1),
        ("arXiv 2605.15648", 10**4, Fraction(101, 100), 1),
    ],
)
def test_a_scale_that_a_record_changes_costs_what_is_printed(
    source: str, parameters: int, ratio: Fraction | None, chance: Any
) -> None:
    (finding,) = named(source)
    with mp.workdps(30):
        square = exact(ratio or Fraction()) ** 2 or ratio_of_line_23() ** 2

        def excess(deviations: Any) -> Any:
            """The ε that an event shows, negated."""
            at = parameters + deviations * mp.sqrt(2 * parameters)
            gain = mp.mpf(chance) * tail(parameters, at / square) - DELTA
            return -mp.log(gain / tail(parameters, at)) if gain > 0 else mp.inf

        best = min((mp.mpf(k) / 10 for k in range(-40, 271)), key=excess)
        shown = max(-excess(best + mp.mpf(k) / 200) for k in range(-20, 21))
    assert lower(finding) <= shown + 1e-5
    assert lower(finding) >= shown - 1e-3


def test_the_state_of_pigdo_costs_at_least_one_event() -> None:
    """The event that the sum is nearer to that with the record, which is there in 1 % of runs."""
    (finding,) = named("Ding et al. 2021, Algorithm 1 and Table 1")
    with mp.workdps(30):
        shown = mp.log((mp.mpf("0.01") / 2 - DELTA) / mp.ncdf(-300))
    assert lower(finding) <= shown <= lower(finding) + 1e-3
    assert_printed(finding.computed, [600])


@pytest.mark.slow
def test_the_average_has_600_times_the_noise() -> None:
    (finding,) = named("Ding et al. 2021, §4.2 and Algorithm 1")
    with mp.workdps(30):
        printed = float(finding.computed.rpartition(" ")[2])
        at = printed - 5e-5, printed + 5e-5
        deltas = [
            max(
                oracles.sampled_delta(each, 0.01, 1200.0, 40_000, removing=removing)
                for removing in (True, False)
            )
            for each in at
        ]
    assert deltas[0] >= DELTA >= deltas[1]
