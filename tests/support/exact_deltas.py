"""δ(ε) of each kind of mechanism by its definition: enumerated, or integrated at many digits.

A pair is the list of the masses of each outcome under P and under Q. No code is shared with the
service; `oracles` and `definition` have the closed forms and the brute force over datasets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpmath import mp, mpf
from numpy.typing import NDArray
from scipy import optimize

from tests.support import oracles

Array = NDArray[np.float64]

Pair = list[tuple[Any, Any]]


def product(pairs: Sequence[Pair]) -> Pair:
    """Return the joint outcomes of independent releases; those of equal ratio are merged."""
    found: Pair = [(mpf(1), mpf(1))]
    for pair in pairs:
        merged: dict[str, tuple[Any, Any]] = {}
        for (p, q), (r, s) in itertools.product(found, pair):
            ratio = "inf" if q * s == 0 else mp.nstr(p * r / (q * s), 20)
            old = merged.get(ratio, (mpf(0), mpf(0)))
            merged[ratio] = (old[0] + p * r, old[1] + q * s)
        found = list(merged.values())
    return found


def sampled(pair: Pair, rate: float) -> Pair:
    """Return the pair of a Poisson sample, at the rate as it is written."""
    share = mpf(str(rate))
    return [((1 - share) * q + share * p, q) for p, q in pair]


def hockey_stick(pair: Pair, epsilon: float) -> Any:
    """Return the larger δ(ε) of both directions of a pair."""
    factor = mp.exp(epsilon)
    both = (pair, [(q, p) for p, q in pair])
    return max(mp.fsum(max(p - factor * q, mpf(0)) for p, q in each) for each in both)


def randomized_response(categories: int, flip: float) -> Pair:
    """Return the two categories that differ, and all others together."""
    k, f = mpf(categories), mpf(flip)
    true, other = 1 - f + f / k, f / k
    return [(true, other), (other, true), ((k - 2) * other, (k - 2) * other)]


def _shifted_noise(mass: Callable[[int], Any], reach: int, sensitivity: int) -> Pair:
    """Return integer noise, shifted and not; the reach leaves less than 1e-30."""
    outcomes = range(-reach, reach + sensitivity + 1)
    total = mp.fsum(mass(j) for j in range(-reach - sensitivity, reach + sensitivity + 1))
    return [(mass(j - sensitivity) / total, mass(j) / total) for j in outcomes]


def discrete_laplace(scale: float, sensitivity: int) -> Pair:
    """Return the pair of two-sided geometric noise."""
    reach = round(80 * scale)
    return _shifted_noise(lambda j: mp.exp(-abs(j) / mpf(scale)), reach, sensitivity)


def discrete_gaussian(std: float, sensitivity: int) -> Pair:
    """Return the pair of discrete Gaussian noise."""
    reach, variance = round(13 * std), mpf(std) ** 2
    return _shifted_noise(lambda j: mp.exp(-(j**2) / (2 * variance)), reach, sensitivity)


def approximate(epsilon: float, reveal: float) -> Pair:
    """Return the worst pair of (ε, δ)-DP, with the δ as it is written."""
    written = mpf(str(reveal))
    kept, e = 1 - written, mp.exp(epsilon)
    infinite: Pair = [(written, mpf(0)), (mpf(0), written)]
    return [*infinite, (kept * e / (1 + e), kept / (1 + e)), (kept / (1 + e), kept * e / (1 + e))]


def dyadic() -> Pair:
    """Return a pair with dyadic masses, and losses ±log 2 and ±log 4, 0 and ±∞."""
    half = [(mpf(8), mpf(4)), (mpf(4), mpf(1)), (mpf(1) / 2, mpf(0))]
    whole = half + [(q, p) for p, q in half]
    rest = 64 - mp.fsum(p for p, _ in whole)
    return [(p / 64, q / 64) for p, q in [*whole, (rest, rest)]]


def two_losses(loss: float, bound: float) -> Pair:
    """Return the pair with the losses t and t − ε, which has bounded range."""
    p = (1 - mp.exp(loss - bound)) / (1 - mp.exp(-bound))
    return [(p, p * mp.exp(-loss)), (1 - p, 1 - p * mp.exp(-loss))]


def bounded_range(epsilon: Any, bound: Any) -> Any:
    """Return the largest δ of all pairs of bounded range, at any real ε."""
    x, e = mpf(epsilon), mpf(bound)
    if x >= e:
        return mpf(0)
    return 1 - mp.exp(x) if x <= -e else (1 - mp.exp((x - e) / 2)) ** 2 / (1 - mp.exp(-e))


def two_of_bounded_range(epsilon: float, bound: float) -> Any:
    """Return δ of two releases of bounded range: of one, over the density of the other's loss."""
    x, e = mpf(epsilon), mpf(bound)
    scale = 1 / (4 * mp.sinh(e / 2))
    return mp.quad(
        lambda first: scale * mp.exp(first / 2) * bounded_range(x - first, e), [-e, x - e, 0, e]
    )


def truncated_laplace(epsilon: float, scale: float, bound: float, sensitivity: float) -> Any:
    """Return δ of truncated Laplace noise, by integration."""
    with mp.workdps(25):
        return _truncated_laplace(epsilon, scale, bound, sensitivity)


def _truncated_laplace(epsilon: float, scale: float, bound: float, sensitivity: float) -> Any:
    kept = 2 * scale * (1 - mp.exp(-mpf(bound) / scale))

    def density(x: Any) -> Any:
        return mp.exp(-abs(x) / scale) / kept if abs(x) <= bound else mpf(0)

    end = max(min((epsilon * scale + sensitivity) / 2, sensitivity), sensitivity - bound)
    if epsilon * scale > sensitivity:  # only what reveals everything is left
        end = bound
    return mp.quad(
        lambda x: density(x - sensitivity) - mp.exp(epsilon) * density(x),
        sorted({end, bound, bound + sensitivity, max(end, sensitivity)}),
    )


def revealing_gaussian(epsilon: float, local: float, reveal: float, mu: float) -> Any:
    """Return δ of an (ε₀, δ₀)-DP release and a Gaussian one: the latter's at ε − l."""

    def rest(x: Any) -> Any:
        if x >= 0:
            return oracles.gaussian_delta(x, mu)
        return 1 - mp.exp(x) + mp.exp(x) * oracles.gaussian_delta(-x, mu)

    known = approximate(local, reveal)
    return reveal + mp.fsum(p * rest(epsilon - mp.log(p / q)) for p, q in known if p and q)


def binomial(records: int, rate: float) -> list[Any]:
    """Return the law of how many of a person's records are sampled."""
    q = mpf(rate)
    return [mp.binomial(records, j) * q**j * (1 - q) ** (records - j) for j in range(records + 1)]


def mixture_deltas(weights: Sequence[Any], shifts: Sequence[Any], epsilon: float, mu: Any) -> Any:
    """Return δ(ε) of Σ w·N(shift·μ) and N(0): removing, and adding."""

    def ratio(z: Any) -> Any:
        return mp.fsum(
            w * mp.exp(s * mu * z - (s * mu) ** 2 / 2) for w, s in zip(weights, shifts, strict=True)
        )

    def above(threshold: Any) -> Any:
        low, high = mpf(-40), mpf(40)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if ratio(middle) < threshold else (low, middle)
        return low

    def tail(z: Any) -> Any:
        return mp.fsum(w * mp.ncdf(s * mu - z) for w, s in zip(weights, shifts, strict=True))

    factor = mp.exp(epsilon)
    removing, adding = above(factor), above(1 / factor)
    return (
        tail(removing) - factor * mp.ncdf(-removing),
        mp.ncdf(adding) - factor * (1 - tail(adding)),
    )


def drawn(epsilon: float, weights: Sequence[Any], shifts: Sequence[Any], sigma: float) -> Any:
    """Return δ of a person who comes or goes, and whose contribution is drawn at random."""
    with mp.workdps(25):
        return max(mixture_deltas(weights, shifts, epsilon, 1 / mpf(sigma)))


def replaced_drawn(
    epsilon: float, weights: Sequence[Any], shifts: Sequence[Any], sigma: float
) -> Any:
    """Return δ of opposite gradients: of the outputs above where the densities' ratio is e^ε."""
    with mp.workdps(20):
        parts = [(mpf(w), mpf(s) / mpf(sigma)) for w, s in zip(weights, shifts, strict=True)]

        def density(z: Any) -> Any:
            return mp.fsum(w * mp.npdf(z, shift) for w, shift in parts)

        edge = mp.findroot(
            lambda z: mp.log(density(z) / density(-z)) - epsilon,
            (mpf(-60), mpf(60)),
            solver="anderson",
        )
        return mp.fsum(
            w * (mp.ncdf(shift - edge) - mp.exp(epsilon) * mp.ncdf(-shift - edge))
            for w, shift in parts
        )


def person(epsilon: float, records: int, rate: float, sigma: float) -> Any:
    """Return δ of a person with several records who comes or goes."""
    return drawn(epsilon, binomial(records, rate), range(records + 1), sigma)


def replaced_person(epsilon: float, records: int, rate: float, sigma: float) -> Any:
    """Return δ of a person with several records who is replaced."""
    return replaced_drawn(epsilon, binomial(records, rate), range(records + 1), sigma)


def truncated_poisson(epsilon: float, size: int, rate: float, most: int, sigma: float) -> Any:
    """Return δ of a sample that is cut, as a mixture of its cases: it is cut, and it is not."""
    others, whole = binomial(size - 1, rate), binomial(size, rate)
    cut = mp.fsum(others[most:])
    exchanged = mp.fsum(whole[most + 1 :]) * most / size / cut
    direct = mp.fsum(rate * others[j] * most / (j + 1) for j in range(most, size)) / cut
    assert mp.almosteq(exchanged, direct, 1e-12)
    first, second = (
        max(mixture_deltas([1 - mpf(p), mpf(p)], [0, shift], epsilon, 1 / mpf(sigma)))
        for p, shift in ((rate, 1), (exchanged, 2))
    )
    return (1 - cut) * first + cut * second


def shuffled(epsilon: float, reports: int, local: float) -> Any:
    """Return δ of the clones' pair, summed over all clones and zeros."""
    pair = clones(reports, local)
    return mp.fsum(max(p - mp.exp(epsilon) * q, mpf(0)) for p, q in pair)


def clones(reports: int, local: float) -> Pair:
    """Return the worst pair of shuffled reports: how many clones there are, and zeros shown."""
    e = mp.exp(mpf(local))
    clone, pair = 2 / (e + 1), []
    for number in range(reports):
        weight = mp.binomial(reports - 1, number) * clone**number
        weight *= (1 - clone) ** (reports - 1 - number)
        for zeros in range(number + 2):
            with_zero, with_one = (
                mp.binomial(number, each) / mpf(2) ** number if 0 <= each <= number else mpf(0)
                for each in (zeros - 1, zeros)
            )
            p, q = (e * with_zero + with_one), (with_zero + e * with_one)
            pair.append((weight * p / (e + 1), weight * q / (e + 1)))
    return pair


def epoch(epsilon: float, bins: int, sigma: float) -> Any:
    """Return the larger δ(ε) of both directions of one epoch of two or three bins."""
    with mp.workdps(20 if bins == 2 else 15):
        mu = 1 / mpf(sigma)

        def call(strike: Any) -> Any:
            if strike <= 0:
                return 1 - strike
            d = (-mp.log(strike) + mu * mu / 2) / mu
            return mp.ncdf(d) - strike * mp.ncdf(d - mu)

        def excess(strike: Any, others: int) -> Any:
            if others == 0:
                return call(strike)
            # where the strike is used up, the integrand has a kink
            kink = (mp.log(strike) / mu + mu / 2) if strike > 0 else mpf(0)
            points = sorted({mpf(-13), mpf(0), mpf(4), min(max(kink, mpf(-12)), mpf(14)), mpf(15)})
            return mp.quad(
                lambda z: mp.npdf(z) * excess(strike - mp.exp(mu * z - mu * mu / 2), others - 1),
                points,
                maxdegree=6 if others == 1 else 5,
            )

        removing = excess(bins * mp.exp(epsilon), bins - 1) / bins
        strike = bins * mp.exp(-mpf(epsilon))
        adding = mp.exp(epsilon) * (excess(strike, bins - 1) - (bins - strike)) / bins
        return max(removing, adding)


def converted(divergence: Callable[[Any], Any], orders: Sequence[Any], epsilon: float) -> Any:
    """Return the least δ of Canonne, Kamath & Steinke's Proposition 12 over some orders."""
    return min(
        mp.exp((a - 1) * (divergence(a) - epsilon) + a * mp.log(1 - 1 / mpf(a))) / (a - 1)
        for a in orders
    )


def selected(epsilon: float, distribution: str, mean: float, shape: float, sigma: float) -> float:
    """Return δ of the best of a random number of Gaussian runs (Papernot & Steinke, 2 and 6)."""
    orders, rho = 1 + np.logspace(-2, 3, 2500), 1 / (2 * sigma**2)

    def log_delta(log_moments: Array, at: Array) -> Array:
        fixed = log_moments + orders * np.log1p(-1 / orders) - np.log(orders - 1)
        return np.asarray((fixed - np.multiply.outer(at, orders - 1)).min(axis=1))

    run = rho * orders * (orders - 1)
    if distribution == "poisson":
        extra = mean * np.exp(log_delta(run, np.log1p(1 / (orders - 1))))
    else:

        def excess(g: float) -> float:
            if shape == 0:
                return (1 / g - 1) / math.log(1 / g) - mean
            return shape * (1 - g) / (g * (1 - g**shape)) - mean

        gamma = optimize.brentq(excess, 1e-3, 0.9, xtol=1e-15)
        best = ((1 - 1 / orders) * rho * orders + math.log(1 / gamma) / orders).min()
        extra = np.full(len(orders), (1 + shape) * best)
    total = run + (orders - 1) * extra + math.log(mean)
    return float(np.exp(log_delta(total, np.array([epsilon]))[0]))
