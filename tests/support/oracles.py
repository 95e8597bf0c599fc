"""Slow reference values at 50 digits, computed from the papers' formulas alone.

None of these shares code or method with the service: sums where it integrates, quadrature where it
sums, bisection on exact values where it has closed forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
from scipy import special

mp.mp.dps = 50
Number = mp.mpf


def _bisect(function: Callable[[Number], Number], low: Number, high: Number) -> Number:
    """Return the root of a decreasing function by bisection."""
    low, high = mp.mpf(low), mp.mpf(high)
    for _ in range(150):
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high


def sampled_gaussian_moment(order: float, q: float, sigma: float) -> Number:
    """Return log E_{μ₀}[(μ/μ₀)^a] of the Poisson-sampled Gaussian, by a sum or by quadrature."""
    a, q, sigma = mp.mpf(order), mp.mpf(q), mp.mpf(sigma)
    if a == int(a) and a > 0:
        return mp.log(
            sum(
                mp.binomial(a, k)
                * (1 - q) ** (a - k)
                * q**k
                * mp.e ** ((k * k - k) / (2 * sigma**2))
                for k in range(int(a) + 1)
            )
        )
    low, high = min(0, a) - 40 * sigma, max(1, a) + 40 * sigma
    points = [low + (high - low) * i / 40 for i in range(41)]
    return mp.log(
        mp.quad(
            lambda z: mp.npdf(z, 0, sigma) * (1 + q * mp.expm1((2 * z - 1) / (2 * sigma**2))) ** a,
            points,
        )
    )


def central_moment(order: int, sigma: float) -> Number:
    """Return B(l) = Σ (−1)^i C(l, i) e^{i(i−1)/(2σ²)}, the alternating sum, at 200 digits."""
    with mp.workdps(400):
        s = mp.mpf(sigma)
        return sum(
            (-1) ** i * mp.binomial(order, i) * mp.e ** (mp.mpf(i * (i - 1)) / (2 * s * s))
            for i in range(order + 1)
        )


def without_replacement_moment(order: int, q: float, sigma: float) -> Number:
    """Return (α−1)·ε′(α), the sum of papers/000, eq. (7), for fixed-size samples."""
    qq, s = mp.mpf(q), mp.mpf(sigma)
    first = min(4 * (mp.e ** (1 / s**2) - 1), 2 * mp.e ** (1 / s**2))
    total = 1 + qq**2 * mp.binomial(order, 2) * first
    for j in range(3, order + 1):
        pair = central_moment(2 * (j // 2), sigma) * central_moment(2 * ((j + 1) // 2), sigma)
        total += 4 * qq**j * mp.binomial(order, j) * mp.sqrt(pair)
    return mp.log(total)


def gaussian_delta(epsilon: float, mu: float) -> Number:
    """Return δ(ε) of the analytic Gaussian mechanism."""
    e, m = mp.mpf(epsilon), mp.mpf(mu)
    return mp.ncdf(m / 2 - e / m) - mp.e**e * mp.ncdf(-m / 2 - e / m)


def gaussian_epsilon(delta: float, mu: float) -> Number:
    """Return the smallest ε ≥ 0 at which the analytic Gaussian mechanism has this δ."""
    if gaussian_delta(0, mu) <= delta:
        return mp.mpf(0)
    m = mp.mpf(mu)
    high = m * m / 2 + m * mp.sqrt(-2 * mp.log(delta))
    return _bisect(lambda e: gaussian_delta(e, mu) - delta, 0, high)


def classical_epsilon(moments: dict[float, Number], steps: int, delta: float) -> Number:
    """Return ε by the classical conversion: min over α of (T·m(α) + log 1/δ)/(α − 1)."""
    return min((steps * m - mp.log(delta)) / (mp.mpf(a) - 1) for a, m in moments.items())


def tight_epsilon(moments: dict[float, Number], steps: int, delta: float) -> Number:
    """Return ε by the conversion of Canonne, Kamath & Steinke 2020, Proposition 12."""
    return min(
        (steps * m - mp.log(delta) - mp.log(a) + (mp.mpf(a) - 1) * mp.log(1 - 1 / mp.mpf(a)))
        / (mp.mpf(a) - 1)
        for a, m in moments.items()
    )


def sampling_composition_delta(epsilon: float, q: float, sigma: float, steps: int) -> Number:
    """Return δ at ε by papers/003, Theorem 1, with every term of its sum."""
    qq = mp.mpf(q)
    return sum(
        mp.binomial(steps, i)
        * qq**i
        * (1 - qq) ** (steps - i)
        * gaussian_delta(epsilon, mp.sqrt(i) / mp.mpf(sigma))
        for i in range(1, steps + 1)
    )


def sampling_composition_epsilon(delta: float, q: float, sigma: float, steps: int) -> Number:
    """Return the smallest ε ≥ 0 at which `sampling_composition_delta` is δ."""
    if sampling_composition_delta(0, q, sigma, steps) <= delta:
        return mp.mpf(0)
    high = gaussian_epsilon(delta, mp.sqrt(steps) / mp.mpf(sigma))
    return _bisect(lambda e: sampling_composition_delta(e, q, sigma, steps) - delta, 0, high + 1)


def mma(q: float, sigma: float, steps: int, delta: float) -> Number:
    """Return ε by the modified moments accountant (papers/001, Theorem 3)."""
    d = mp.mpf(delta)
    return 2 * mp.mpf(q) * mp.log(1 / d) / (mp.mpf(sigma) * mp.sqrt(d ** (-mp.mpf(1) / steps) - 1))


def closed_form(q: float, sigma: float, steps: int, delta: float) -> Number:
    """Return ε by the moments accountant's closed form (papers/001, section 5.2)."""
    return 3 * mp.mpf(q) * mp.sqrt(steps * mp.log(1 / mp.mpf(delta))) / mp.mpf(sigma)


def zcdp(sigma: float, steps: int, delta: float) -> Number:
    """Return ε of Gaussian releases by zCDP (Bun & Steinke 2016, Proposition 1.3)."""
    rho = steps / (2 * mp.mpf(sigma) ** 2)
    return rho + 2 * mp.sqrt(rho * mp.log(1 / mp.mpf(delta)))


def gdp_clt(q: float, sigma: float, steps: int, delta: float) -> Number:
    """Return ε by the central limit theorem of Gaussian DP (Bu et al. 2020)."""
    mu = mp.mpf(q) * mp.sqrt(steps * mp.expm1(1 / mp.mpf(sigma) ** 2))
    return gaussian_epsilon(delta, mu)


def composed_delta(
    epsilon: float,
    steps: int,
    density: Callable[[Number], Number],
    loss: Callable[[Number], Number],
    ends: tuple[float, float],
    saddles: tuple[float, float] = (0.01, 200.0),
) -> Number:
    """Return δ(ε) of equal independent steps by one line integral, to about ten digits.

    δ = (1/2π)∫ M(w)^T·e^{−wε}/(w(w + 1)) dv over w = s + iv, with M(w) = E_P[e^{wL}].

    Args:
        epsilon: ε.
        steps: number T of steps.
        density: density of one output z under P.
        loss: privacy loss of an output.
        ends: outputs outside have no weight.
        saddles: where the best s is searched.
    """
    spacing = mp.mpf(1) / 16
    count = int((ends[1] - ends[0]) / spacing)
    nodes = [ends[0] + spacing * i for i in range(count + 1)]
    weights, losses = [spacing * density(z) for z in nodes], [loss(z) for z in nodes]

    def exponent(s: Number) -> Number:
        """Log of the integrand on the real axis; least at the saddle point."""
        moment = mp.fdot(weights, [mp.exp(s * each) for each in losses])
        return steps * mp.log(moment) - s * epsilon - mp.log(s * (s + 1))

    low, high = (mp.log(each) for each in saddles)
    for _ in range(60):
        left, right = low + (high - low) * 2 / 5, low + (high - low) * 3 / 5
        low, high = (
            (low, right) if exponent(mp.exp(left)) < exponent(mp.exp(right)) else (left, high)
        )
    s = mp.exp((low + high) / 2)
    scale, bend = exponent(s), mp.mpf(1) / 1000
    curvature = (exponent(s * (1 + bend)) + exponent(s * (1 - bend)) - 2 * scale) / (s * bend) ** 2
    step = min(2 * mp.pi * s / 30, 1 / (4 * mp.sqrt(curvature)))
    turns = [mp.expjpi(step * each / mp.pi) for each in losses]
    terms = [weight * mp.exp(s * each) for weight, each in zip(weights, losses, strict=True)]
    whole = mp.fsum(terms)
    total, v = mp.mpf(0), mp.mpf(0)
    while True:
        w = mp.mpc(s, v)
        ratio = (mp.fsum(terms) / whole) ** steps  # M(s + iv)^T over M(s)^T
        value = ratio * mp.expj(-v * epsilon) * s * (s + 1) / (w * (w + 1))
        total += mp.re(value) * (1 if v else mp.mpf(1) / 2)
        if abs(value) < mp.mpf(10) ** -22:
            return mp.exp(scale) * total * step / mp.pi
        terms = [term * turn for term, turn in zip(terms, turns, strict=True)]
        v += step


def sampled_delta(epsilon: float, q: float, sigma: float, steps: int, *, removing: bool) -> Number:
    """Return δ(ε) of Poisson-sampled Gaussian steps in one direction, by `composed_delta`."""
    mu, qq = 1 / mp.mpf(sigma), mp.mpf(q)

    def log_ratio(z: Number) -> Number:
        return mp.log1p(qq * mp.expm1(mu * z - mu * mu / 2))

    def density(z: Number) -> Number:
        return mp.npdf(z) * (mp.exp(log_ratio(z)) if removing else 1)

    def loss(z: Number) -> Number:
        return log_ratio(z) if removing else -log_ratio(z)

    return composed_delta(epsilon, steps, density, loss, (-14, 14 + 12 * float(mu)))


def replaced_delta(epsilon: float, q: float, sigma: float, steps: int) -> Number:
    """Return δ(ε) of Poisson-sampled steps if a record is replaced, by `composed_delta`."""
    mu, qq = 1 / mp.mpf(sigma), mp.mpf(q)

    def log_ratio(z: Number) -> Number:
        return mp.log1p(qq * mp.expm1(mu * z - mu * mu / 2))

    return composed_delta(
        epsilon,
        steps,
        lambda z: mp.npdf(z) * mp.exp(log_ratio(z)),
        lambda z: log_ratio(z) - log_ratio(-z),
        (-14, 14 + 12 * float(mu)),
    )


def step_epsilon(q: float, sigma: float, step_delta: Number) -> Number:
    """Return ε of one sampled step: log(1 + q(e^{ε₀} − 1)), with ε₀ without sampling at δ₁/q."""
    base = gaussian_epsilon(min(step_delta / mp.mpf(q), mp.mpf(1)), 1 / mp.mpf(sigma))
    return mp.log1p(mp.mpf(q) * mp.expm1(base))


def advanced(q: float, sigma: float, steps: int, delta: float, share: float) -> Number:
    """Return ε by advanced composition (Dwork & Roth 2014, Theorem 3.20) at this share of δ."""
    d, part = mp.mpf(delta), mp.mpf(share)
    e = step_epsilon(q, sigma, (1 - part) * d / steps)
    return e * mp.sqrt(2 * steps * mp.log(1 / (part * d))) + steps * e * mp.expm1(e)


def basic(q: float, sigma: float, steps: int, delta: float) -> Number:
    """Return ε by basic composition: the sum of the steps' ε at δ/T each."""
    return steps * step_epsilon(q, sigma, mp.mpf(delta) / steps)


def randomised_responses_delta(epsilon: float, step: Number, steps: int) -> Number:
    """Return δ(ε) of `steps` randomised responses, each ε₁-DP (Kairouz et al. 2015)."""
    truth = mp.e**step / (1 + mp.e**step)
    total = mp.mpf(0)
    for lies in range(steps + 1):
        loss = (steps - 2 * lies) * step
        if loss > epsilon:
            weight = mp.binomial(steps, lies) * truth ** (steps - lies) * (1 - truth) ** lies
            total += weight * (1 - mp.e ** (epsilon - loss))
    return total


def optimal(q: float, sigma: float, steps: int, delta: float, share: float) -> Number:
    """Return ε by optimal composition (Kairouz et al. 2015, Theorem 3.3) at this share of δ."""
    d, part = mp.mpf(delta), mp.mpf(share)
    step_delta = (1 - part) * d / steps
    step = step_epsilon(q, sigma, step_delta)
    slack = 1 - (1 - d) / (1 - step_delta) ** steps
    if randomised_responses_delta(0, step, steps) <= slack:
        return mp.mpf(0)
    return _bisect(lambda e: randomised_responses_delta(e, step, steps) - slack, 0, steps * step)


def single_step_delta(epsilon: float, q: float, sigma: float, *, removing: bool) -> Number:
    """Return δ(ε) of one Poisson-sampled Gaussian release in one direction, in closed form.

    Removing: the mixture exceeds e^ε·N(0) right of one point; adding: left of one.
    """
    e, qq, s = mp.mpf(epsilon), mp.mpf(q), mp.mpf(sigma)

    def point(loss: Number) -> Number:
        """Return the outcome at which the privacy loss has this value."""
        return mp.mpf(1) / 2 + s * s * mp.log((mp.e**loss - (1 - qq)) / qq)

    if removing:
        x = point(e)
        tail, shifted = mp.ncdf(-x / s), mp.ncdf((1 - x) / s)
        return (1 - qq) * tail + qq * shifted - mp.e**e * tail
    if mp.e ** (-e) <= 1 - qq:
        return mp.mpf(0)
    x = point(-e)
    head, shifted = mp.ncdf(x / s), mp.ncdf((x - 1) / s)
    return head - mp.e**e * ((1 - qq) * head + qq * shifted)


def single_step_epsilon(delta: float, q: float, sigma: float) -> Number:
    """Return ε of one Poisson-sampled Gaussian release: the larger of both directions."""
    found = mp.mpf(0)
    for removing in (True, False):

        def excess(e: Number, removing: bool = removing) -> Number:
            """Return by how much δ in one direction exceeds the target."""
            return single_step_delta(e, q, sigma, removing=removing) - delta

        if excess(mp.mpf(0)) > 0:
            high = gaussian_epsilon(delta, 1 / mp.mpf(sigma))
            found = max(found, _bisect(excess, 0, high))
    return found


def laplace_moment(order: float, scale: float) -> Number:
    """Return (α−1)·D_α of the Laplace mechanism (Mironov 2017, Proposition 6)."""
    a, b = mp.mpf(order), mp.mpf(scale)
    return mp.log(
        a / (2 * a - 1) * mp.e ** ((a - 1) / b) + (a - 1) / (2 * a - 1) * mp.e ** (-a / b)
    )


def laplace_delta(epsilon: float, scale: float) -> Number:
    """Return δ(ε) of one Laplace release: max(0, 1 − e^{(ε − 1/b)/2})."""
    return max(mp.mpf(0), 1 - mp.e ** ((mp.mpf(epsilon) - 1 / mp.mpf(scale)) / 2))


Run = tuple[float, float, int]  # sample rate, noise multiplier, steps


def line_integral_delta(
    parts: list[Run], epsilon: float, tilt: float, *, removing: bool, digits: int = 24
) -> Number:
    """Return δ(ε) of composed releases, (1/π)∫Re M(s+iv)·e^{−wε}/(w(w+1)) dv with w = s+iv.

    Both integrals by sums so fine and long that what they miss is below 10^−digits of δ, for parts
    whose characteristic functions decay. Written without any of the service's bounds.
    """
    with mp.workdps(40):
        s, step = mp.mpf(tilt), mp.mpf(1) / 24
        tables = []
        for q, sigma, count in parts:
            mu = 1 / mp.mpf(sigma)
            order = s + 1 if removing else -s
            low, high = min(order * mu, 0) - 14, max(order * mu, mu) + 14
            weights, losses = [], []
            for k in range(int(low / step), int(high / step) + 1):
                z = k * step
                loss = mp.log1p(mp.mpf(q) * mp.expm1(mu * z - mu * mu / 2))
                weights.append(step * mp.npdf(z) * mp.exp(order * loss))
                losses.append(loss if removing else -loss)
            tables.append((weights, losses, count))
        spacing = 2 * mp.pi * s / (digits * mp.log(10) + 60)
        total, k = mp.mpf(0), 0
        while True:
            v = k * spacing
            moment = mp.mpf(1)
            for weights, losses, count in tables:
                phases = (w * mp.expj(v * x) for w, x in zip(weights, losses, strict=True))
                moment *= mp.fsum(phases) ** count
            w = mp.mpc(s, v)
            term = moment * mp.exp(-w * mp.mpf(epsilon)) / (w * (w + 1))
            total += term.real / (2 if k == 0 else 1)
            if k > 4 and abs(term) < mp.mpf(10) ** -digits * abs(total):
                return total * spacing / mp.pi
            k += 1


def double_line_integral_delta(parts: list[Run], epsilon: float, *, removing: bool) -> float | None:
    """Return `line_integral_delta` in double precision, to about 1e-9; None if it decays slowly.

    Its own choice of tilt, nodes and spacing; for many random cases.
    """
    z = np.arange(-14.0, 40.0, 1 / 24)
    tables = []
    for q, sigma, count in parts:
        ratio = z / sigma - 0.5 / sigma**2
        loss = np.log1p(q * np.expm1(np.minimum(ratio, 200.0)))
        loss = np.where(ratio > 200, np.log(q) + ratio, loss)
        log_weight = -0.5 * z * z - 0.5 * np.log(2 * np.pi) + np.log(1 / 24)
        tables.append((log_weight + (loss if removing else 0), loss if removing else -loss, count))

    def log_moment(tilt: float) -> float:
        """Return the logarithm of the composition's moment at a tilt."""
        return sum(
            count * float(special.logsumexp(log_weight + tilt * loss))
            for log_weight, loss, count in tables
        )

    tilts = np.geomspace(1e-4, 3e4, 110)
    cost = [log_moment(s) - s * epsilon - np.log(s * (s + 1)) for s in tilts]
    s = 0.8 * float(tilts[int(np.argmin(cost))])
    deviation = np.sqrt(
        sum(count * _tilted_variance(w + s * loss, loss) for w, loss, count in tables)
    )
    spacing = 2 * np.pi / max(70 / s, 50 * deviation)
    total, size, first = 0.0, 0.0, 0
    while first < 8000:
        v = spacing * np.arange(first, first + 64)
        log_phi = np.zeros(64, complex)
        for log_weight, loss, count in tables:
            weight = np.exp(log_weight + s * loss - special.logsumexp(log_weight + s * loss))
            seen = weight[1:] > 1e-16
            if not seen.any() or (v[-1] * np.abs(np.diff(loss)))[seen].max() > 1.5:
                return None  # the nodes no longer resolve it
            rise = np.expm1(1j * np.outer(v, loss)) @ weight
            log_phi += count * np.log1p(rise)
        w = s + 1j * v
        terms = (np.exp(log_phi - 1j * v * epsilon) / (w * (w + 1))).real
        if first == 0:
            terms[0] /= 2
        total, size = total + float(terms.sum()), size + float(np.abs(terms).sum())
        if size > 1e5 * abs(total):
            return None  # too many digits cancel
        if np.abs(np.exp(log_phi[-8:].real) / np.abs(w[-8:])).max() < 1e-12 * abs(total):
            return total * spacing / np.pi * float(np.exp(log_moment(s) - s * epsilon))
        first += 64
    return None


def _tilted_variance(log_weight: Any, loss: Any) -> float:
    """Return the variance of the privacy loss under a tilted distribution."""
    weight = np.exp(log_weight - special.logsumexp(log_weight))
    return float(weight @ (loss - weight @ loss) ** 2)


def replaced_record_moment(tilt: float, q: float, sigma: float) -> Number:
    """Return log E_P[(P/Q)^s] of P = (1−q)N(0) + qN(1) and Q = (1−q)N(0) + qN(−1).

    A sum so fine and long that what it misses is far below the 40 digits it is computed with.
    """
    with mp.workdps(40):
        s, rate, mu = mp.mpf(tilt), mp.mpf(q), 1 / mp.mpf(sigma)
        step = 1 / (24 + 16 * mu)
        total = mp.mpf(0)
        for k in range(int(-14 / step), int((14 + mu * (2 * s + 1)) / step)):
            z = k * step
            top, bottom = (1 - rate + rate * mp.exp(x * mu * z - mu * mu / 2) for x in (1, -1))
            total += mp.npdf(z) * mp.exp((s + 1) * mp.log(top) - s * mp.log(bottom))
        return mp.log(total * step)


def replaced_record_delta(epsilon: float, q: float, sigma: float) -> Number:
    """Return δ(ε), at any real ε, of (1−q)N(0) + qN(1) against (1−q)N(0) + qN(−1)."""
    e, rate, noise = mp.mpf(epsilon), mp.mpf(q), mp.mpf(sigma)

    def loss(z: Number) -> Number:
        """Return the privacy loss at outcome z."""
        top, bottom = (1 - rate + rate * mp.exp((x * z - 0.5) / noise**2) for x in (1, -1))
        return mp.log(top / bottom)

    reach = 1 + (abs(e) + 40) * noise * (1 + noise) + 40 * noise
    cut = _bisect(lambda z: e - loss(z), -reach, reach)

    def above(mean: int) -> Number:
        """Return the probability of losses above ε under the mixture with this mean."""
        return (1 - rate) * mp.ncdf(-cut / noise) + rate * mp.ncdf((mean - cut) / noise)

    return above(1) - mp.exp(e) * above(-1)


def fixed_size_replacement_delta(epsilon: float, q: float, sigma: float) -> Number:
    """Return δ(ε) of (1−q)N(0) + qN(2) against N(0), the largest P(A) − e^ε·Q(A), for ε ≥ 0.

    For ε < 0, by 1 − e^ε + e^ε·δ(−ε).
    """
    e, rate, noise = mp.mpf(epsilon), mp.mpf(q), mp.mpf(sigma)
    if e < 0:
        return 1 - mp.exp(e) + mp.exp(e) * fixed_size_replacement_delta(-epsilon, q, sigma)
    cut = noise**2 / 2 * mp.log((mp.expm1(e) + rate) / rate) + 1
    absent, present = mp.ncdf(-cut / noise), mp.ncdf((2 - cut) / noise)
    return (1 - rate - mp.exp(e)) * absent + rate * present
