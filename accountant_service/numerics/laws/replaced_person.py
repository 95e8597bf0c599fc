"""A person whose contribution's norm is drawn at random, and who is replaced by another person.

Each person's contribution has a norm of at most sⱼ with probability wⱼ, as in `gaussian_mixture`.
With z the output in units of the noise's standard deviation, the pair is

    N₁ = Σⱼ wⱼ·N(sⱼ)   against   N₀ = Σⱼ wⱼ·N(−sⱼ).

It dominates every replacement. *Proof.* Given everybody else's part, the outputs of the two
datasets are mixtures over j: P of laws N(v), Q of laws N(u), each with |v|, |u| ≤ sⱼ, if missing
records count as gradients of 0. Let A be any event and a = N(0)(A) = Φ(t). By the Neyman–Pearson
lemma N(v)(A) ≤ Φ(t + |v|) and N(u)(A) ≥ Φ(t − |u|), so for every γ ≥ 0

    P(A) − γ·Q(A) ≤ Σⱼ wⱼ·(Φ(t + sⱼ) − γ·Φ(t − sⱼ)).

The right-hand side is the same difference for the pair and the event {z > −t}. So the pair has at
least the hockey-stick divergence of P and Q at every γ, also below 1, and dominates compositions as
well. Two persons whose contributions are opposite attain it in every step. ∎ For one sampled record
it is the pair of `replaced_record`.

With A±(z) = Σⱼ wⱼ·exp(±sⱼz − sⱼ²/2) the densities are n·A₊ and n·A₋, and the log-likelihood ratio
Λ = log(A₊/A₋) is odd and increasing in z. Norms that the mixture drops count as infinite loss, in
either direction.

**Moments.** E_{N₀}[e^{aΛ}] = ∫ n·A₊^a·A₋^{1−a} dz is the same for a and 1 − a, so let a > 1. It is
computed by the trapezoidal rule of spacing h. In the strip |Im z| ≤ y < π/s, s the largest sⱼ, the
terms of A± lie within an angle of sy, so |A±| lies between cos(sy/2) and 1 times its value at the
real part, and the error is at most 2K·e^{y²/2}·cos(sy/2)^{1−a}/(e^{2πy/h} − 1) for a moment K.
Beyond the last node z₁ the slope of log(A₊^a·A₋^{1−a}) is at most κ = (2a − 1)s, so what is left
out is at most the value there times e^{κ²/2 − κz₁}·P(Z > z₁ − κ). Before the first node z₀ < 0,
e^{aΛ} is at most its value at z₀.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from scipy import special

from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    log_normal_tail,
    log_sum_exp,
)
from accountant_service.numerics.laws.dominating_pair import IntervalMasses
from accountant_service.numerics.laws.gaussian_mixture import (
    GaussianMixturePair,
    invert_increasing,
    total_variation_of,
)

_EPS: Final = float(np.finfo(float).eps)
_LOG_ERROR: Final = -80.0  # of the quadrature, relative
_TAIL_DEVIATIONS: Final = 13.0
_STRIP: Final = np.linspace(0.02, 0.98, 49)  # shares of the strip of analyticity that are tried


@dataclass(frozen=True, slots=True)
class ReplacedPersonPair:
    """The pair of output laws for two persons whose contributions' norms are drawn at random.

    Attributes:
        person: the pair of one of them, who is added or removed.
    """

    is_symmetric: ClassVar[bool] = True
    infinite_is_certain: ClassVar[bool] = False  # it is an allowance, of which no lower bound holds
    person: GaussianMixturePair

    @property
    def infinite_masses(self) -> tuple[float, float]:
        """The probability, in each direction, of larger norms than are considered."""
        dropped = self.person.infinite_masses[1]
        return dropped, dropped

    def log_ratio(self, z: Array) -> Array:
        """Return the log-likelihood ratio Λ at each output z."""
        return self.person.log_ratio(z) - self.person.log_ratio(-z)

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, before and after the change."""
        finite = np.isfinite(edges)
        z, error = edges.astype(float), np.zeros(len(edges))
        z[finite], error[finite] = self._outputs_at(edges[finite])
        without_record, without_rounding = self.person.mixture_masses(z, -1.0)
        with_record, with_rounding = self.person.mixture_masses(z, 1.0)
        for mass, rounding, last in (
            (without_record, without_rounding, 0),
            (with_record, with_rounding, -1),
        ):
            mass[last] += self.infinite_masses[1]
            rounding[last] += self.infinite_masses[1]
        return IntervalMasses(without_record, with_record, without_rounding, with_rounding, error)

    def _outputs_at(self, log_ratios: Array) -> tuple[Array, Array]:
        """Return the output z at each log-likelihood ratio, and bounds on the ratios' errors."""

        def ratio_and_slope(z: Array) -> tuple[Array, Array]:
            """Return Λ and its slope at each output z."""
            up, up_slope = self.person.ratio_and_slope(z)
            down, down_slope = self.person.ratio_and_slope(-z)
            return up - down, up_slope + down_slope

        end = self.person.largest_output()
        limits = (-end, end)
        z = invert_increasing(ratio_and_slope, log_ratios, limits, self.person.largest_shift)
        return z, np.abs(self.log_ratio(z) - log_ratios) + 2 * self.person.ratio_rounding(z)

    def limits(self, tail_deviations: float) -> tuple[float, float]:
        """Return limits of the log-likelihood ratio; `tail_deviations` sets the mass outside."""
        end = float(self.log_ratio(np.array([self.person.largest_shift + tail_deviations]))[0])
        return -end, end

    def log_moments(self, orders: Array, sample_rate: float) -> Array:  # noqa: ARG002
        """Return upper bounds on log E[e^{a·loss}] before the change, per order a > 1 or a < 0."""
        found = [self._log_moment(max(float(each), 1.0 - float(each))) for each in orders]
        upper: Array = np.maximum(np.array(found, dtype=float), 0.0)
        return upper

    def _log_moment(self, order: float) -> float:
        """Return an upper bound on log E[e^{`order`·Λ}] before the change, for an order > 1."""
        spacing, slope = self._spacing(order), self._steepest(order)
        last, first = slope + _TAIL_DEVIATIONS, self.person.largest_shift + _TAIL_DEVIATIONS
        z = spacing * np.arange(
            -math.ceil(first / spacing), math.ceil(last / spacing) + 1, dtype=float
        )
        up, down = self.person.log_ratio(z), self.person.log_ratio(-z)
        growth = order * up + (1.0 - order) * down
        total = float(log_sum_exp(growth - 0.5 * z * z)) + math.log(spacing) - LOG_SQRT_TWO_PI
        right = float(growth[-1]) + slope * (0.5 * slope - float(z[-1]))
        right += float(log_normal_tail(np.array([z[-1] - slope]))[0])
        left = order * float(up[0] - down[0])
        left += float(special.log_ndtr(z[0] + self.person.largest_shift))
        missing = np.logaddexp(np.logaddexp(left, right), total + _LOG_ERROR + math.log(4))
        error = 2 * order * float(self.person.ratio_rounding(z[-1:])[0])
        error += 8 * _EPS * (8 + float(z[-1] ** 2))
        return float(np.logaddexp(total, missing)) + error

    def _steepest(self, order: float) -> float:
        """Return the largest slope of log(A₊^a·A₋^{1−a}), for an order a > 1."""
        return (2.0 * order - 1.0) * self.person.largest_shift

    def _spacing(self, order: float) -> float:
        """Return the widest trapezoidal spacing whose relative error is below e^`_LOG_ERROR`."""
        y = np.minimum(math.pi / self.person.largest_shift * _STRIP, 12.6)
        cost = 0.5 * y * y + (1.0 - order) * np.log(np.cos(0.5 * self.person.largest_shift * y))
        return float(np.max(2 * math.pi * y / (cost - _LOG_ERROR)))

    def count_nodes(self, tilt: float) -> float:
        """Return how many terms a log-moment at this `tilt` sums, which measures its cost."""
        length = self._steepest(tilt + 1) + self.person.largest_shift + 2 * _TAIL_DEVIATIONS
        return 2 * length / self._spacing(tilt + 1) * (len(self.person.shifts) + 1)

    def total_variation(self) -> float:
        """Return an upper bound on the total variation of the outputs before and after."""
        return total_variation_of(self.masses(np.array([-np.inf, 0.0, np.inf])))
