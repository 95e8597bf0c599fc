"""Recompute the papers' claims and compare each with the proved interval, for `accountant audit`.

Each finding has the claim as in the paper, the value of the paper's formula, and the proved value.
Claims about something other than an ε have their own computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from accountant_service import calculator, mechanisms
from accountant_service.guarantee import Guarantee

_DELTA: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking one claim of a paper or library.

    Attributes:
        source: paper and place.
        claim: the claim, as in the source.
        computed: the value of the source's formula.
        proved: the proved interval, or another proved value.
        verdict: confirmed, misprinted, refuted or not reproduced.
        remark: the reason, in one sentence.
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


def _format_interval(claim: Guarantee) -> str:
    """Format a certified interval to five decimals: lower rounded down, upper rounded up."""
    proved = claim.certified
    if proved is None:
        return "none"
    lower, upper = math.floor(proved.lower * 1e5) / 1e5, math.ceil(proved.upper * 1e5) / 1e5
    return f"{lower:.5f} ≤ ε ≤ {upper:.5f}"


def _papers_002() -> Iterator[Finding]:
    """Check the claims of papers/002 (moments accountant)."""
    for steps in (10_000, 40_000):
        claim = _guarantee("moments_accountant", 0.01, 4.0, steps)
        yield Finding(
            "Abadi et al. 2016, Figure 2",
            f"moments accountant at q = .01, σ = 4, {steps} steps",
            f"ε = {claim.epsilon:.4f} at α = {claim.optimal_order:g}",
            _format_interval(claim),
            "confirmed",
            "Sound; above the true ε because of its conversion to (ε, δ).",
        )


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
    draws = np.random.default_rng(0).standard_normal((1_000_000, 2))
    query, found = np.array([10.0, 5.0]), []
    for deviations in ((17.0, 8.5), (13.5, 13.5), (12.4, 24.8)):
        noisy = query + draws * deviations
        cosine = noisy @ query / np.linalg.norm(noisy, axis=1) / np.linalg.norm(query)
        found.append(f"{float(cosine.mean()):.2f}")
    yield Finding(
        "Xu et al. 2020, §III-B",
        "noise (17, 8.5) / (13.5, 13.5) / (12.4, 24.8) on the query (10, 5): cosine similarity to "
        "it .52 / .36 / .28",
        " / ".join(found) + " (10⁶ draws)",
        "–",
        "not reproduced",
        "The first noise, in proportion to the sensitivities, does not have the highest cosine.",
    )
    yield Finding(
        "Xu et al. 2020, Algorithm 1, line 23",
        "the state E′[g²] needs no noise of its own",
        "–",
        "–",
        "refuted",
        "It is computed from raw gradients and sets clip norm and noise, so later steps reveal it.",
    )


def _papers_001() -> Iterator[Finding]:
    """Check the claims of papers/001 (PIGDO)."""
    claim, closed = (
        _guarantee(method, 0.01, 2.0, 40_000)
        for method in ("mma", "moments_accountant_closed_form")
    )
    yield Finding(
        "Ding et al. 2021, Remark 4",
        "q = .01, σ = 2, 40 000 steps: MMA 6.8, moments accountant 10.2",
        f"MMA {claim.epsilon:.4f}; closed form with constant 3: {closed.epsilon:.4f}; moments "
        f"accountant {_guarantee('moments_accountant', 0.01, 2.0, 40_000).epsilon:.4f}",
        _format_interval(claim),
        "misprinted",
        "10.2 is the value of a closed form, not of the numerical moments accountant.",
    )
    for noise, epochs, printed in ((2.0, 260, 5.47), (4.0, 100, 3.39), (8.0, 30, 1.86)):
        own, read_off = (_guarantee("mma", 0.01, sigma, 100 * epochs) for sigma in (noise, 2.0))
        yield Finding(
            "Ding et al. 2021, §5.2",
            f"q = .01, σ = {noise:g}, {epochs} epochs: ε = {printed}",
            f"MMA {own.epsilon:.4f}",
            _format_interval(own),
            "confirmed" if noise == 2.0 else "misprinted",
            "The formula gives this value."
            if noise == 2.0
            else f"The value is from the curve of σ = 2, which has {read_off.epsilon:.4f} there.",
        )
    for rate in (0.1, 0.05, 0.02, 0.01):
        claim = _guarantee("mma", rate, 1.0, 100)
        yield Finding(
            "Ding et al. 2021, Theorem 3",
            f"MMA is a guarantee; here q = {rate:g}, σ = 1, 100 steps, which meet its conditions",
            f"ε = {claim.epsilon:.4f}",
            _format_interval(claim),
            str(claim.status),
            "The proof drops the terms t ≥ 3 of the moment's expansion.",
        )


def _papers_003() -> Iterator[Finding]:
    """Check the claims of papers/003 (A-DDP)."""
    for rate, noise, steps in ((0.1, 2.0, 10), (0.5, 3.0, 20), (1.0, 5.0, 10)):
        claim = _guarantee("gaussian_sampling_composition", rate, noise, steps)
        yield Finding(
            "Cheng et al. 2020, Theorem 1",
            f"the theorem is a guarantee; here q = {rate:g}, σ = {noise:g}, {steps} steps",
            f"ε = {claim.epsilon:.4f}",
            _format_interval(claim),
            "confirmed",
            "Exact without sampling." if rate == 1.0 else "Sampling reduces δ, but hardly ε.",
        )
    release = {
        "kind": "poisson_sampled",
        "sample_rate": 0.1,
        "mechanism": {"kind": "laplace", "noise_multiplier": 1.0},
    }
    claim = calculator.epsilon(mechanisms.from_json(release), 1e-12)
    yield Finding(
        "Cheng et al. 2020",
        "sampling at rate p makes an (ε, δ)-DP step (pε, pδ)-DP; here Laplace noise with ε = 1, "
        "p = .1, δ = 1e-12",
        "ε = 0.1000",
        _format_interval(claim),
        "refuted",
        f"The amplified ε is log(1 + p(e^ε − 1)) = {math.log1p(0.1 * math.expm1(1.0)):.4f}.",
    )
    batch, example = -5.0, 20.0  # the sum of the other gradients, and one more gradient
    apart = abs(np.clip(batch + example, -1, 1) - np.clip(batch, -1, 1))
    yield Finding(
        "Cheng et al. 2020, Algorithm 1",
        "clipping the gradient of the batch to C gives sensitivity C",
        f"two batches that differ in one example: {apart:g}·C apart",
        "–",
        "refuted",
        "Each example's gradient must be clipped.",
    )


def _papers_004() -> Iterator[Finding]:
    """Check the claims of papers/004 (AdaDPS)."""
    yield Finding(
        "Li et al. 2022",
        "side information such as token frequencies of the training data is free",
        "–",
        "–",
        "refuted",
        "Only if it is public; otherwise its release costs privacy like any other.",
    )


def _dp_accounting() -> Iterator[Finding]:
    """Check the ε that the pessimistic PLD accountant of dp_accounting reports."""
    claim = _guarantee("pld", 0.001, 2.0, 100_000, 1e-12)
    yield Finding(
        "dp_accounting 0.6.0",
        "“pessimistic” PLD, interval 3.2e-5: q = .001, σ = 2, 100 000 steps, δ = 1e-12: 1.114537",
        "–",
        _format_interval(claim),
        "refuted",
        "The rounding error of its Fourier transform exceeds δ.",
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
        lower = divisor_lower_bound(ratio, parameters, _DELTA)
        yield Finding(
            source,
            f"the noisy sum may be divided by {divisor}; here one step at q = {sampling:g}, "
            f"σ = {noise:g}, {parameters:_} parameters".replace("_", " "),
            f"the sum alone has ε = {claim.epsilon:.4f}",
            f"ε ≥ {math.floor(lower * 1e5) / 1e5:.5f}",
            "refuted",
            "The noise is divided too, so its variance reveals the divisor. Divide by a constant.",
        )


def divisor_lower_bound(ratio: float, parameters: int, delta: float) -> float:
    """Return a lower bound on ε at δ for noise that is divided by a data-dependent count.

    All gradients are 0. The noise of d parameters then has mean 0 under both neighbours, with
    standard deviations whose ratio is r > 1. With P the wider law, Q the other, and A the event
    that the sum of squares is at least t, P(A) ≤ e^ε·Q(A) + δ for every t: any t gives a bound.

    Args:
        ratio: ratio r > 1 of the divisors.
        parameters: number d of parameters.
        delta: δ.
    """
    tail_error = 1e-6  # relative error of the computed tails
    thresholds = parameters + np.linspace(-10.0, 12.0, 4401) * math.sqrt(2 * parameters)
    wider = (1 - tail_error) * special.chdtrc(parameters, thresholds / ratio**2) - delta
    narrower = (1 + tail_error) * special.chdtrc(parameters, thresholds)
    usable = (wider > 0) & (narrower > 0)
    return max(0.0, float(np.log(wider[usable] / narrower[usable]).max()))


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
