"""Recompute the papers' claims and compare each with the proved interval, for `accountant audit`.

Each finding has the claim as in the paper, the value of the paper's formula, the proved value, and
the reason of the verdict. Reasons are claims too: their numbers are computed here as well. Claims
about something other than an ε have their own computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import optimize, special

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import Guarantee, Interval, NeighbouringRelation
from accountant_service.accounting.methods import mma
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import gaussian, sampled_gaussian
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from accountant_service.numerics.privacy_profile import bounds_near
from accountant_service.writing import number_format

_DELTA: Final = 1e-5
_ADD_OR_REMOVE: Final = NeighbouringRelation.ADD_OR_REMOVE_ONE
_REPLACE: Final = NeighbouringRelation.REPLACE_ONE
_LOT: Final = 600  # L of papers/000 and 001


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking one claim of a paper or library.

    Attributes:
        source: paper and place.
        claim: the claim, as in the source.
        computed: the value of the source's formula.
        proved: the proved interval, or another proved value.
        verdict: confirmed, misprinted, refuted or not reproduced.
        remark: the reason of the verdict, with computed numbers.
    """

    source: str
    claim: str
    computed: str
    proved: str
    verdict: str
    remark: str


def findings() -> Iterator[Finding]:
    """Recompute every claim of the audit and yield its finding."""
    for audit in (
        _papers_002,
        _papers_000,
        _papers_001,
        _mma,
        _papers_003,
        _papers_004,
        _dp_accounting,
        _data_dependent_divisors,
    ):
        yield from audit()


def _guarantee(
    method: str, rate: float, noise: float, steps: int, delta: float = _DELTA
) -> Guarantee:
    """Return a method's guarantee for a Poisson-sampled DP-SGD run."""
    run = {"kind": "dp_sgd", "noise_multiplier": noise, "sample_rate": rate, "steps": steps}
    return calculator.epsilon(mechanisms.from_json(run), delta, method)


def _fixed_size_guarantee(
    method: str,
    sizes: tuple[int, int],
    noise: float,
    steps: int,
    delta: float = _DELTA,
    relation: NeighbouringRelation = _REPLACE,
) -> Guarantee:
    """Return a method's guarantee for batches of fixed size; `sizes` are of dataset and batch."""
    size, batch = sizes
    run = {"kind": "dp_sgd", "noise_multiplier": noise, "steps": steps, "sampling": "fixed_size"}
    described = mechanisms.from_json({**run, "dataset_size": size, "batch_size": batch})
    return calculator.epsilon(described, delta, method, relation)


def _certified(claim: Guarantee) -> Interval:
    """Return the proved interval around a claim's ε.

    Raises:
        ValueError: there is none.
    """
    if claim.certified is None:
        raise ValueError(f"no proved interval: {claim.certified_reason}")
    return claim.certified


def _format_interval(claim: Guarantee) -> str:
    """Format a certified interval to five decimals: lower rounded down, upper rounded up."""
    proved = _certified(claim)
    lower, upper = math.floor(proved.lower * 1e5) / 1e5, math.ceil(proved.upper * 1e5) / 1e5
    return f"{lower:.5f} ≤ ε ≤ {upper:.5f}"


def _format_lower(lower: float) -> str:
    """Format a lower bound on ε to five decimals, rounded down."""
    return f"ε ≥ {math.floor(lower * 1e5) / 1e5:.5f}"


def _grouped(count: int) -> str:
    """Format a whole number with spaces between groups of three digits."""
    return f"{count:_}".replace("_", " ")


def _verdict(claimed: float, proved: Interval) -> str:
    """Return whether a claimed ε is refuted by a proved lower bound, or confirmed."""
    return "refuted" if claimed < proved.lower else "confirmed"


def _clip(gradient: Array) -> Array:
    """Return a gradient clipped to the norm 1."""
    return gradient / max(1.0, float(np.linalg.norm(gradient)))


# --- papers/002


def _papers_002() -> Iterator[Finding]:
    """Check the claims of papers/002 (moments accountant)."""
    for steps in (10_000, 40_000):
        claim = _guarantee("moments_accountant", 0.01, 4.0, steps)
        order = claim.optimal_order or math.nan
        converted = claim.epsilon - math.log(order) / (order - 1) + math.log1p(-1 / order)
        yield Finding(
            "Abadi et al. 2016, Figure 2",
            f"moments accountant at q = .01, σ = 4, {steps} steps",
            f"ε = {claim.epsilon:.4f} at α = {order:g}",
            _format_interval(claim),
            "confirmed",
            "Sound: its moments are exact. What it loses is in the conversion to (ε, δ): that of "
            f"Canonne et al. gives {converted:.4f} from the same moment.",
        )
    clipped, unclipped = (
        _guarantee("advanced_composition", 0.01, noise, 40_000) for noise in (4.0, 2.0)
    )
    yield Finding(
        "Park, slides on Abadi et al. 2016, main theorem",
        "the bound by strong composition is the one without clipping; here q = .01, σ = 4, "
        "40 000 steps",
        f"strong composition with clipping: ε = {clipped.epsilon:.4f}",
        _format_interval(clipped),
        "refuted",
        "Both bounds are for the same clipped steps. Without clipping no ε holds: a gradient of "
        f"2·C alone raises that of strong composition to {unclipped.epsilon:.4f}.",
    )


# --- papers/000


def _papers_000() -> Iterator[Finding]:
    """Check the claims of papers/000 (AdaDP)."""
    printed = _guarantee("adadp_rdp", 0.01, 0.9, 1800)
    poisson = _guarantee("moments_accountant", 0.01, 0.9, 1800)
    yield Finding(
        "Xu et al. 2020, §III-C",
        "L = 600, N = 60 000, σ = .9, 1800 steps, α = 6 gives (4.0, 1e-5)",
        f"Theorem 1 as in the paper: ε = {printed.epsilon:.4f} at α = {printed.optimal_order:g}",
        _format_interval(printed),
        "misprinted",
        f"The paper's value is that of the Poisson-sampled Gaussian, {poisson.epsilon:.4f} at "
        f"α = {poisson.optimal_order:g}.",
    )
    sizes = 60_000, _LOT
    fixed = _fixed_size_guarantee("adadp_rdp", sizes, 0.9, 1800)
    halved = _fixed_size_guarantee("adadp_rdp", sizes, 0.45, 1800)
    zeros = calculator.epsilon(
        mechanisms.DpSgd(0.9, sample_rate=_LOT / 60_000, steps=1800), _DELTA, "pld", _REPLACE
    )
    yield Finding(
        "Xu et al. 2020, Theorem 1 and Lemma 6",
        "it holds for samples of fixed size without replacement and datasets that differ in one "
        "record, with σ relative to C; here the numbers of §III-C",
        f"ε = {fixed.epsilon:.4f} at α = {fixed.optimal_order:g}",
        _format_interval(fixed),
        str(fixed.status),
        "A record and its replacement are up to 2·C apart, so σ counts half: then the formula "
        f"gives {halved.epsilon:.4f}. Even if all other gradients are 0, ε is at least "
        f"{math.floor(_certified(zeros).lower * 1e4) / 1e4:.4f}.",
    )
    found = [expected_cosine((10.0, 5.0), each) for each in ((17, 8.5), (13.5, 13.5), (12.4, 24.8))]
    yield Finding(
        "Xu et al. 2020, §III-B",
        "noise (17, 8.5) / (13.5, 13.5) / (12.4, 24.8) on the query (10, 5): cosine similarity to "
        "it .52 / .36 / .28",
        " / ".join(f"{each:.4f}" for each in found),
        "–",
        "not reproduced",
        "The noise in proportion to the sensitivities does not have the highest cosine: "
        f"{found[0]:.4f} < {found[1]:.4f}.",
    )
    share, decay, parameters = 0.2, 0.9, 60 * 1000 + 1000 + 1000 * 10 + 10
    ratio = math.sqrt(decay + (1 - decay) * (1 + share) ** 2)
    lower = scaled_noise_lower_bound(ratio, parameters, _DELTA, _LOT / 60_000)
    yield Finding(
        "Xu et al. 2020, Algorithm 1, line 23",
        "the state E′[g²] needs no noise of its own; here γ′ = .9, L = 600, N = 60 000, the "
        "60-1000-10 network, and a record with a fifth of one batch's gradient",
        "–",
        _format_lower(lower),
        "refuted",
        "It is made of raw gradients and scales the next noise: here its deviation grows by a "
        f"factor of {ratio:.4f} in each of {_grouped(parameters)} coordinates.",
    )


def expected_cosine(query: tuple[float, float], deviations: tuple[float, float]) -> float:
    """Return the mean cosine of the angle between a query and its noisy value in the plane.

    The density of the noisy value's direction has a closed form. It is periodic and analytic, so
    the trapezoidal rule is exact to rounding.

    Args:
        query: the value without noise.
        deviations: the noise's standard deviation in each coordinate.
    """
    angles = 2 * math.pi * np.arange(512) / 512
    directions = np.array([np.cos(angles), np.sin(angles)]) / np.array(deviations)[:, None]
    centre = np.array(query) / np.array(deviations)
    spread = (directions**2).sum(axis=0)
    offset = centre @ directions / np.sqrt(spread)
    density = math.exp(-0.5 * float(centre @ centre)) / (2 * math.pi * math.prod(deviations))
    radial = 1 + offset * math.sqrt(2 * math.pi) * np.exp(offset**2 / 2) * special.ndtr(offset)
    cosines = np.cos(angles - math.atan2(query[1], query[0]))
    return float((cosines * radial / spread).mean() * 2 * math.pi * density)


def scaled_noise_lower_bound(
    ratio: float, parameters: int, delta: float, chance: float = 1.0
) -> float:
    """Return a lower bound on ε at δ for noise whose scale depends on a record.

    All gradients are 0. The noise of d parameters then has mean 0 under both neighbours, with
    standard deviations whose ratio is r > 1. With P the wider law, which a record causes with some
    chance, Q the other, and A the event that the sum of squares is at least t,
    chance·P(A) ≤ e^ε·Q(A) + δ for every t: any t gives a bound.

    Args:
        ratio: ratio r > 1 of the standard deviations.
        parameters: number d of parameters.
        delta: δ.
        chance: probability that the record changes the scale, in (0, 1].
    """
    tail_error = 1e-6  # relative error of the computed tails
    farthest = 12.0 + (ratio**2 - 1) * math.sqrt(parameters / 2)  # deviations: P's mean is there
    thresholds = parameters + np.linspace(-10.0, farthest, 8801) * math.sqrt(2 * parameters)
    wider = chance * (1 - tail_error) * special.chdtrc(parameters, thresholds / ratio**2) - delta
    narrower = (1 + tail_error) * special.chdtrc(parameters, thresholds)
    usable = (wider > 0) & (narrower > 0)
    return max(0.0, float(np.log(wider[usable] / narrower[usable]).max()))


# --- papers/001


def _papers_001() -> Iterator[Finding]:
    """Check the claims of papers/001 (PIGDO)."""
    yield from _accountants_of_figure_4()
    for noise, epochs, printed in ((2.0, 260, 5.47), (4.0, 100, 3.39), (8.0, 30, 1.86)):
        own, read_off = (_guarantee("mma", 0.01, sigma, 100 * epochs) for sigma in (noise, 2.0))
        yield Finding(
            "Ding et al. 2021, §5.2",
            f"q = .01, σ = {noise:g}, {epochs} epochs: ε = {printed}",
            f"MMA {own.epsilon:.4f}",
            _format_interval(own),
            _compare(own.epsilon, str(printed)),
            f"The curve of σ = 2 has {read_off.epsilon:.4f} there. "
            + _conditions(own, 100 * epochs),
        )
    average, total = (_guarantee("pld", 0.01, noise, 40_000) for noise in (2.0 * _LOT, 2.0))
    yield Finding(
        "Ding et al. 2021, §4.2 and Algorithm 1",
        "noise of N(0, σ²C²) on the average of L gradients is as likely as on their sum; here "
        "L = 600, q = .01, σ = 2, 40 000 steps",
        f"the average: ε = {average.epsilon:.4f}",
        f"the sum: {_format_interval(total)}",
        "refuted",
        f"A record moves the average by C/L, so its noise multiplier is σL = {2.0 * _LOT:g}, and "
        "not 2: the algorithm adds L times the noise that the theorem accounts for.",
    )
    yield _raw_state_of_pigdo()
    best, printed_gains = 92.02, {"ADADP": 0.82, "ADPPL": 1.65, "EXP": 2.5, "DPSGD": 3.48}
    others = {"ADADP": 91.25, "ADPPL": 90.92, "EXP": 89.75, "DPSGD": 88.91}
    gains = {name: 100 * (best / other - 1) for name, other in others.items()}
    off = {name: abs(gains[name] - each) for name, each in printed_gains.items()}
    yield Finding(
        "Ding et al. 2021, §5.2, σ = 8",
        "PIAdam's 92.02 % improves by .82, 1.65, 2.5 and 3.48 % over ADADP (91.25), ADPPL (90.92), "
        "EXP (89.75) and DPSGD (88.91)",
        ", ".join(f"{each:.2f}" for each in gains.values()) + " % of each accuracy",
        "–",
        "misprinted",
        f"The gain over ADPPL is {gains['ADPPL']:.2f} %, or {best - others['ADPPL']:.2f} points: "
        f"{off.pop('ADPPL'):.2f} off. The other three are at most {max(off.values()):.2f} off.",
    )


def _conditions(claim: Guarantee, steps: int) -> str:
    """Say whether a claim of MMA meets the conditions that Theorem 3 states, with their numbers."""
    order = mma.moment_order(claim.epsilon, claim.delta)
    least = f"{0.002 * steps / order:.3g}"
    stated = [each for each in claim.assumptions if each.statement != mma.OTHER_DIRECTION]
    if all(each.holds for each in stated):
        return f"The theorem's conditions hold: λ = {order:.2f}, .002·T/λ = {least}."
    return (
        f"At λ = {order:.2f}, from which ε comes, a condition of the theorem fails: ε is not above "
        f".002·T/λ = {least}."
    )


def _compare(computed: float, printed: str) -> str:
    """Return whether a formula's value is the printed one, up to half a unit in its last place."""
    unit = 10.0 ** -len(printed.partition(".")[2])
    return "confirmed" if abs(computed - float(printed)) <= unit / 2 else "misprinted"


def _accountants_of_figure_4() -> Iterator[Finding]:
    """Check what papers/001 says of the accountants that it compares, at its own q and σ.

    Its moments accountant is the closed form with constant 3 (§5.2), its RDP that of papers/000.
    """
    methods = ("mma", "moments_accountant_closed_form", "moments_accountant", "subsampled_rdp",
               "adadp_rdp")  # fmt: skip
    early, late = (
        {method: _guarantee(method, 0.01, 2.0, steps) for method in methods}
        for steps in (4_000, 40_000)
    )
    mma_early, closed_early, moments_early, renyi_early, printed_early = (
        early[method].epsilon for method in methods
    )
    mma_late, closed_late, moments_late, renyi_late, printed_late = (
        late[method].epsilon for method in methods
    )
    proved = _format_interval(late["mma"])
    at = "q = .01, σ = 2, 40 000 steps: "
    yield Finding(
        "Ding et al. 2021, Remark 4", f"{at}ε of MMA is 6.8", f"MMA {mma_late:.4f}", proved,
        _compare(mma_late, "6.8"), _conditions(late["mma"], 40_000),
    )  # fmt: skip
    yield Finding(
        "Ding et al. 2021, Remark 4",
        f"{at}ε of the moments accountant is 10.2",
        f"closed form with constant 3: {closed_late:.4f}",
        proved,
        _compare(closed_late, "10.2"),
        "The paper takes this for the moments accountant; its constant has no proof. The "
        f"moments themselves give {moments_late:.4f}.",
    )
    yield Finding(
        "Ding et al. 2021, Abstract and Remark 4",
        f"{at}MMA is a tighter bound than the moments accountant",
        f"MMA {mma_late:.4f}; moments accountant, by its moments: {moments_late:.4f}",
        proved,
        "refuted" if moments_late < mma_late else "confirmed",
        f"MMA is {mma_late / moments_late:.3f} times the moments accountant. It is below the "
        f"closed form that the paper takes for it: {closed_late:.4f}.",
    )
    yield Finding(
        "Ding et al. 2021, Figure 4",
        "q = .01, σ = 2: MMA is below the moments accountant, and slightly above RDP; here at 40 "
        "and 400 epochs",
        f"closed form {closed_early:.4f}, {closed_late:.4f}; MMA {mma_early:.4f}, {mma_late:.4f}; "
        f"Rényi accounting {renyi_early:.4f}, {renyi_late:.4f}",
        proved,
        "confirmed"
        if renyi_early < mma_early < closed_early and renyi_late < mma_late < closed_late
        else "not reproduced",
        "This is the order of the formulas. By its moments the moments accountant has "
        f"{moments_early:.4f} and {moments_late:.4f}, below MMA.",
    )
    yield Finding(
        "Ding et al. 2021, §5.2",
        "RDP is about half of the moments accountant; here q = .01, σ = 2, 40 and 400 epochs",
        f"Rényi accounting over the closed form: {renyi_early / closed_early:.3f}, "
        f"{renyi_late / closed_late:.3f}",
        proved,
        "confirmed" if 0.4 < renyi_late / closed_late < 0.6 else "not reproduced",
        "Of the moments accountant by its moments it is "
        f"{renyi_early / moments_early:.3f} and {renyi_late / moments_late:.3f}. The formula that "
        "the paper names, (7) of papers/000, gives more than the closed form: "
        f"{printed_early:.4f} and {printed_late:.4f}.",
    )
    yield _zcdp_of_figure_4()


def _zcdp_of_figure_4() -> Finding:
    """Check where the zCDP curve of papers/001 lies."""
    early, late = (_guarantee("zcdp", 0.01, 2.0, steps) for steps in (4_000, 40_000))
    rho, order = 0.01**2 / 2.0**2, 64
    total = 40_000 * rho
    sampled = total + 2 * math.sqrt(-total * math.log(_DELTA))
    closed = _guarantee("moments_accountant_closed_form", 0.01, 2.0, 40_000)
    moment = float(sampled_gaussian.log_moments(np.array([float(order)]), 0.01, 2.0)[0])
    return Finding(
        "Ding et al. 2021, §5.2 and Figure 4",
        "q = .01, σ = 2: zCDP is slightly below the moments accountant (10.2 at 400 epochs)",
        f"zCDP: {early.epsilon:.0f} at 40 epochs, {late.epsilon:.0f} at 400",
        _format_interval(late),
        "not reproduced",
        f"Only ρ = Tq²/σ² gives less than {closed.epsilon:.4f}: {sampled:.4f}. A sampled step is "
        f"not that private: at α = {order} its Rényi divergence is {moment / (order - 1):.4f}, "
        f"above ρα = {rho * order:.4f}.",
    )


def _raw_state_of_pigdo() -> Finding:
    """Check that the state of papers/001, made of raw gradients, is free.

    By Table 1 with f = s = 0 at the start: a record in the first batch has a large gradient, all
    others have 0. In the second batch all have 0, and f of the first one moves every example.
    """
    first, second, parameters = 0.9, 0.999, 784 * 1000 + 1000 + 1000 * 10 + 10
    mean = 1e3  # the record's share of the first batch's mean gradient, in each coordinate
    momentum = first * mean / (1 - first**2)
    square = second * mean**2 / (1 - second**2)
    norm = momentum / (math.sqrt(square) + 1e-8) * math.sqrt(parameters)
    distance = _LOT * min(norm, 4.0) / 4.0  # of the two clipped sums, over C = 4
    shift, rate = distance / 2.0, 0.01  # over σ = 2
    lower = math.log(rate * (0.5 - 1e-9) - _DELTA) - float(special.log_ndtr(-shift)) * (1 - 1e-9)
    return Finding(
        "Ding et al. 2021, Algorithm 1 and Table 1",
        "f and s of the batches before need no noise of their own; here PIAdam's second step, "
        "L = 600, q = .01, σ = 2, C = 4, the 784-1000-10 network",
        f"two sums that differ by a record of the first batch: {distance:g}·C apart",
        _format_lower(lower),
        "refuted",
        "They are made of raw gradients. A record of the batch before gives each of the L "
        f"gradients the norm {norm:.1f}, clipped to C: the sum moves by {distance:g}·C, with noise "
        "for 1·C.",
    )


@dataclass(frozen=True, slots=True)
class MmaGap:
    """The moments that Theorem 3 of papers/001 bounds and would have to bound, at one claim.

    With μ₀ and μ the outputs of a step without and with the record.

    Attributes:
        epsilon: ε by the formula.
        order: λ, the order of the moment that the formula comes from.
        bound: the theorem's bound on the log-moment of one step.
        adding: log E_{μ₀}[(μ₀/μ)^λ], which the proof bounds.
        removing: log E_μ[(μ/μ₀)^λ], which it does not.
        delta_adding: an upper bound on δ at ε, adding the record.
        delta_removing: a lower bound on δ at ε, removing it.
        last_step: left over right of the last step of the proof's inequality (8), true up to 1.
    """

    epsilon: float
    order: float
    bound: float
    adding: float
    removing: float
    delta_adding: float
    delta_removing: float
    last_step: float


def mma_gap(rate: float, noise: float, steps: int, delta: float = _DELTA) -> MmaGap:
    """Compute the moments of MMA's theorem in both directions of neighbours, and their effect.

    Args:
        rate: sample rate q in (0, 1).
        noise: noise multiplier σ.
        steps: number T of steps.
        delta: δ of the claim.
    """
    epsilon = _guarantee("mma", rate, noise, steps, delta).epsilon
    order = mma.moment_order(epsilon, delta)
    orders = np.array([-order, order + 1])
    adding, removing = map(float, sampled_gaussian.log_moments(orders, rate, noise))
    releases = [(Release(GaussianPair(1 / noise), rate), steps)]
    profiles = (bounds_near(releases, each, epsilon) for each in ("adding", "removing"))
    at = np.array([epsilon])
    (_, most), (least, _) = (each.delta(at) if each else ([0.0], [1.0]) for each in profiles)
    return MmaGap(
        epsilon,
        order,
        math.log1p((rate * order / noise) ** 2),
        adding,
        removing,
        float(most[0]),
        float(least[0]),
        (math.e - 1) / 2 * (order + 1) / (order * (1 - rate)),
    )


def _mma() -> Iterator[Finding]:
    """Check Theorem 3 of papers/001, the modified moments accountant (MMA)."""
    for rate in (0.1, 0.05, 0.02, 0.01):
        claim, gap = _guarantee("mma", rate, 1.0, 100), mma_gap(rate, 1.0, 100)
        yield Finding(
            "Ding et al. 2021, Theorem 3",
            f"MMA is a guarantee; here q = {rate:g}, σ = 1, 100 steps",
            f"ε = {gap.epsilon:.4f}; bound on a step's log-moment at λ = {gap.order:.2f}: "
            f"{gap.bound:.4f}",
            _format_interval(claim),
            str(claim.status),
            f"The log-moment of adding a record is {gap.adding:.4f}. That of removing it is "
            f"{gap.removing:.4f}, which the proof does not bound: at this ε, δ is at least "
            f"{number_format.round_down(gap.delta_removing, 2)} removing and at most "
            f"{number_format.round_up(gap.delta_adding, 2)} adding. "
            f"{_conditions(claim, 100)}",
        )
    gaps = [mma_gap(rate, 1.0, 100) for rate in (0.1, 0.05)]
    limit = (math.e - 1) / (3 - math.e)
    cubed = math.exp(float(sampled_gaussian.log_moments(np.array([-3.0]), 0.1, 1.0)[0]))
    yield Finding(
        "Ding et al. 2021, §4.2, last step of (8)",
        "(e − 1)·λ(λ + 1)q²/(2(1 − q)σ²) ≤ q²λ²/σ²",
        "left over right in the first two rows of Theorem 3: "
        + ", ".join(f"{each.last_step:.4f}" for each in gaps),
        f"false for λ < {limit:.4f} as q → 0",
        "refuted",
        "The ratio is (e − 1)(λ + 1)/(2λ(1 − q)). This is not what makes MMA false: the moment of "
        f"adding stays below the bound; at q = .1, σ = 1, λ = 3 it is {cubed:.4f} < "
        f"{1 + 0.1**2 * 3**2:.4f}.",
    )


# --- papers/003


def _papers_003() -> Iterator[Finding]:
    """Check the claims of papers/003 (A-DDP)."""
    for rate, noise, steps in ((0.1, 2.0, 10), (0.5, 3.0, 20), (1.0, 5.0, 10)):
        claim = _guarantee("gaussian_sampling_composition", rate, noise, steps)
        whole = _guarantee("pld", 1.0, noise, steps)
        yield Finding(
            "Cheng et al. 2020, Theorem 1",
            f"the theorem is a guarantee; here q = {rate:g}, σ = {noise:g}, {steps} steps",
            f"ε = {claim.epsilon:.4f}",
            _format_interval(claim),
            str(claim.status).replace("proven", "confirmed"),
            f"Without sampling ε is {whole.epsilon:.4f}. "
            + (
                "The theorem is exact there."
                if rate == 1.0
                else "The theorem takes the steps with the record for known; that they are not "
                "lowers ε to the proved one."
            ),
        )
    release = {
        "kind": "poisson_sampled",
        "sample_rate": 0.1,
        "mechanism": {"kind": "laplace", "noise_multiplier": 1.0},
    }
    claim = calculator.epsilon(mechanisms.from_json(release), 1e-12)
    yield Finding(
        "Cheng et al. 2020, The Amplification Effect of Sampling",
        "sampling at rate p makes an (ε, δ)-DP step (pε, pδ)-DP; here Laplace noise with ε = 1, "
        "p = .1, δ = 1e-12",
        "ε = 0.1000",
        _format_interval(claim),
        "refuted",
        f"The amplified ε is log(1 + p(e^ε − 1)) = {math.log1p(0.1 * math.expm1(1.0)):.4f}.",
    )
    sums = (np.array([-5.0]), np.array([-5.0 + 20.0]))
    apart = float(np.linalg.norm(_clip(sums[1]) - _clip(sums[0])))
    replaced = float(np.linalg.norm(_clip(np.array([20.0])) - _clip(np.array([-20.0]))))
    yield Finding(
        "Cheng et al. 2020, Algorithm 1",
        "clipping the gradient of the batch to C gives sensitivity C",
        f"two batches that differ in one example: {apart:g}·C apart",
        "–",
        "refuted",
        "Each example's gradient must be clipped. A batch of one example has the sensitivity "
        f"{replaced:g}·C too, because another example takes its place.",
    )
    yield _variance_by_epsilon()
    yield _compositions_of_figure_3()


def _calibrated_noise(epsilon: float, delta: float) -> float:
    """Return the least σ at which the Gaussian mechanism with sensitivity 1 is (ε, δ)-DP."""

    def excess(log_sigma: float) -> float:
        return float(gaussian.log_delta(epsilon, math.exp(-log_sigma))) - math.log(delta)

    return math.exp(optimize.brentq(excess, math.log(0.05), math.log(1e4), xtol=1e-14))


def _variance_by_epsilon() -> Finding:
    """Check how the variance of Gaussian noise depends on ε, in papers/003."""
    epsilons = (0.05, 0.1, 0.5, 1.0, 2.0)
    variances = [_calibrated_noise(each, 1e-8) ** 2 for each in epsilons]
    scaled = [each * epsilon for each, epsilon in zip(variances, epsilons, strict=True)]
    squared = [each * epsilon for each, epsilon in zip(scaled, epsilons, strict=True)]
    return Finding(
        "Cheng et al. 2020, Logistic Regression",
        "the variance of its Gaussian noise is ∝ 1/ε, not ∝ 1/ε²; here δ = 1e-8 and "
        f"ε = {', '.join(f'{each:g}' for each in epsilons)}",
        "σ²ε = " + ", ".join(f"{each:.2f}" for each in scaled),
        "–",
        "refuted",
        f"Over this range σ²ε changes by a factor of {max(scaled) / min(scaled):.1f}, and σ²ε² by "
        f"{max(squared) / min(squared):.2f}.",
    )


def _compositions_of_figure_3() -> Finding:
    """Check that advanced composition wins at small sample rates, by the protocol of papers/003.

    A step is (ε, δ)-DP; sampled it counts as (pε, pδ). The total ε is that of advanced composition.
    """
    steps, noise = 10, _calibrated_noise(0.1, _DELTA)

    def log_ratio(rate: float) -> float:
        """Return the log of δ by sampling composition over that by advanced composition."""
        step = 0.1 * rate
        total = step * math.sqrt(-2 * steps * math.log(_DELTA)) + steps * step * math.expm1(step)
        run = mechanisms.DpSgd(noise, sample_rate=rate, steps=steps)
        sampling = calculator.delta(run, total, "gaussian_sampling_composition").delta
        return math.log(sampling / (steps * rate * _DELTA + _DELTA))

    crossing = optimize.brentq(log_ratio, 0.03, 0.2, xtol=1e-9)
    return Finding(
        "Cheng et al. 2020, Figure 3",
        "at very small p, advanced composition has the smaller δ; by the paper's protocol, with "
        "10 steps, each (.1, 1e-5)-DP",
        "δ of sampling over advanced composition: "
        f"{math.exp(log_ratio(0.03)):.2f} at p = .03, {math.exp(log_ratio(0.1)):.2f} at p = .1",
        "–",
        "confirmed",
        f"With pε and pδ a step, advanced composition has the smaller δ for p < {crossing:.4f}.",
    )


# --- papers/004


def _papers_004() -> Iterator[Finding]:
    """Check the claims of papers/004 (AdaDPS)."""
    held, missing = np.array([1, 0]), np.array([0, 0])  # occurrences of a token, record by record
    seen = float(held.sum() > 0) - float(missing.sum() > 0)  # P(A) − e^ε·Q(A), as Q(A) = 0
    yield Finding(
        "Li et al. 2022, §6.1.2",
        "token frequencies and TF-IDF values of the training data are open knowledge",
        "a token that only one record has: its frequency is above 0, or 0",
        f"δ = {seen:g} at every ε",
        "refuted",
        "It is free only if it is public: the frequency tells two neighbours apart with "
        f"probability {seen:g}.",
    )
    others, record = np.full(3, -1.0), 10.0
    with_record = _clip(np.array([np.append(others, record).mean()]))
    without = _clip(np.array([np.append(others, -1.0).mean()]))
    apart = float(np.linalg.norm(with_record - without))
    for name, size, noise, epochs in (
        ("IMDB", 25_000, 1.0, 32),
        ("autoencoder", 60_000, 1.0, 80),
        ("StackOverflow", 246_092, 0.95, 50),
    ):
        steps = epochs * math.ceil(size / 64)
        charged = _guarantee("subsampled_rdp", 64 / size, noise, steps, 1 / size)
        true = _guarantee("pld", 64 / size, noise / apart, steps, 1 / size)
        yield Finding(
            f"Li et al. 2022, Appendix B, {name}",
            f"clipping means of several gradients to C gives sensitivity C; here σ = {noise:g}, "
            f"batches of 64 of {_grouped(size)}, δ = 1/{_grouped(size)}, and the {epochs} epochs "
            "of the authors' code",
            f"Rényi accounting at σ: ε = {charged.epsilon:.4f}",
            _format_lower(_certified(true).lower),
            _verdict(charged.epsilon, _certified(true)),
            f"Two clipped means of 4 that differ in one example are {apart:g}·C apart, so the "
            f"noise multiplier is {noise / apart:g}.",
        )
    size, noise = 60_000, 0.75
    steps = 80 * math.ceil(size / 64)
    poisson = _guarantee("subsampled_rdp", 64 / size, noise, steps, 1 / size)
    fixed = _fixed_size_guarantee("pld", (size, 64), noise, steps, 1 / size, _ADD_OR_REMOVE)
    proved = _certified(_guarantee("pld", 64 / size, noise, steps, 1 / size))
    yield Finding(
        "Li et al. 2022, Algorithm 1 and §6, autoencoder",
        "batches of fixed size cost what the accountant of the subsampled Gaussian says; here "
        f"σ = {noise:g}, 64 of {_grouped(size)}, δ = 1/{_grouped(size)}, 80 epochs",
        f"Rényi accounting of Poisson samples: ε = {poisson.epsilon:.4f}",
        _format_interval(fixed),
        _verdict(poisson.epsilon, _certified(fixed)),
        "That accountant is for Poisson samples, whose ε is at most "
        f"{math.ceil(proved.upper * 1e4) / 1e4:.4f}. In a batch of fixed size another record takes "
        "the place, 2·C away.",
    )


# --- programs


def _dp_accounting() -> Iterator[Finding]:
    """Check the ε that the pessimistic PLD accountant of dp_accounting reports."""
    printed, run = 1.114537, mechanisms.DpSgd(2.0, sample_rate=0.001, steps=100_000)
    claim, delta = _guarantee("pld", 0.001, 2.0, 100_000, 1e-12), calculator.delta(run, printed)
    least = delta.certified.lower if delta.certified else 0.0
    yield Finding(
        "dp_accounting 0.6.0",
        "“pessimistic” PLD, interval 3.2e-5: q = .001, σ = 2, 100 000 steps, δ = 1e-12: "
        f"{printed:.6f}",
        "–",
        _format_interval(claim),
        "refuted",
        f"At this ε, δ is at least {number_format.round_down(least, 4)}. The masses are rounded up "
        "to a grid, but not by the rounding errors of the Fourier transform, which are relative to "
        "a mass of 1.",
    )


def _data_dependent_divisors() -> Iterator[Finding]:
    """Check claims about noisy sums that are divided by a private count of records."""
    for source, divisor, sampling, noise, ratio, parameters in (
        (
            "opacus #571; arXiv 2605.15648",
            "qN, with N = 10 000 or 9 999 counted from the records",
            0.01,
            1.0,
            10_000 / 9_999,
            10**6,
        ),
        ("opacus #819", "⌊qN⌋, with N = 10 000 or 9 999", 0.01, 1.0, 100 / 99, 10**6),
        ("arXiv 2605.15648", "the batch drawn, of 101 or 100 records", 1.0, 10.0, 101 / 100, 10**4),
    ):
        claim = _guarantee("pld", sampling, noise, 1)
        yield Finding(
            source,
            f"the noisy sum may be divided by {divisor}; here one step at q = {sampling:g}, "
            f"σ = {noise:g}, {_grouped(parameters)} parameters",
            f"the sum alone has ε = {claim.epsilon:.4f}",
            _format_lower(scaled_noise_lower_bound(ratio, parameters, _DELTA)),
            "refuted",
            "The noise is divided too, so its variance reveals the divisor: it differs by a factor "
            f"of {ratio**2:.6f} in each coordinate. Divide by a constant.",
        )


# --- the papers' figures, with the certified value


@dataclass(frozen=True, slots=True)
class Figure:
    """The data of one plot: axis labels, x values, and each line's y values."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    lines: dict[str, tuple[float, ...]]
    logarithmic: bool = False
    logarithmic_x: bool = False
    lowest: float | None = None


def figures() -> Iterator[Figure]:
    """Compute the papers' three figures on accounting, with the certified values added."""
    epochs = tuple(range(10, 401, 30))
    yield Figure(
        "moments-accountant",
        "Abadi et al. 2016, Figure 2: q = .01, σ = 4, δ = 1e-5",
        "epochs",
        "ε",
        epochs,
        {
            "strong composition": _epsilons("advanced_composition", 4.0, epochs),
            "moments accountant": _epsilons("moments_accountant", 4.0, epochs),
            "certified": _epsilons("pld", 4.0, epochs),
        },
    )
    yield Figure(
        "mma",
        "Ding et al. 2021, Figure 4: q = .01, σ = 2, δ = 1e-5",
        "epochs",
        "ε",
        epochs,
        {
            "moments accountant (closed form)": _epsilons(
                "moments_accountant_closed_form", 2.0, epochs
            ),
            "zCDP (which sampling does not help)": _epsilons("zcdp", 2.0, epochs),
            "MMA": _epsilons("mma", 2.0, epochs),
            "RDP": _epsilons("subsampled_rdp", 2.0, epochs),
            "certified": _epsilons("pld", 2.0, epochs),
        },
        logarithmic=True,
    )
    yield from _sampling_against_advanced_composition()


def _epsilons(method: str, noise: float, epochs: tuple[float, ...]) -> tuple[float, ...]:
    """Return a method's ε at δ = 1e-5 after each number of epochs, at sample rate 0.01."""
    return tuple(_guarantee(method, 0.01, noise, int(100 * count)).epsilon for count in epochs)


def _sampling_against_advanced_composition() -> Iterator[Figure]:
    """Compute Figure 3 of papers/003 (A-DDP): δ at the ε of advanced composition."""
    steps = (1, 2, 5, 10, 20, 50, 100)
    rates = (0.03, 0.05, 0.1, 0.2, 0.3, 0.6, 0.9)
    for name, label, values, run_of in (
        ("steps", "steps (q = .1, σ = 5)", steps, _with_steps),
        ("rate", "sample rate (σ = 5, 10 steps)", rates, _with_rate),
    ):
        runs = [run_of(value) for value in values]
        at = [calculator.epsilon(run, _DELTA, "advanced_composition").epsilon for run in runs]
        yield Figure(
            f"sampling-composition-{name}",
            "Cheng et al. 2020, Figure 3: δ at the same ε",
            label,
            "δ",
            tuple(map(float, values)),
            {
                "advanced composition": tuple(_DELTA for _ in values),
                "sampling composition": _deltas("gaussian_sampling_composition", runs, at),
                "certified": _deltas("pld", runs, at),
            },
            logarithmic=True,
            logarithmic_x=True,
            lowest=1e-60,
        )


def _with_steps(steps: float) -> mechanisms.DpSgd:
    """Return a run with noise multiplier 5, sample rate 0.1 and this number of steps."""
    return mechanisms.DpSgd(5.0, sample_rate=0.1, steps=int(steps))


def _with_rate(rate: float) -> mechanisms.DpSgd:
    """Return a run of ten steps with noise multiplier 5 and this sample rate."""
    return mechanisms.DpSgd(5.0, sample_rate=rate, steps=10)


def _deltas(method: str, runs: list[mechanisms.DpSgd], epsilons: list[float]) -> tuple[float, ...]:
    """Return a method's δ of each run, at the ε given for that run."""
    return tuple(
        calculator.delta(run, epsilon, method).delta
        for run, epsilon in zip(runs, epsilons, strict=True)
    )
