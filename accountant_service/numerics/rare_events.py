"""Where δ comes from a single improbable outcome: where it lies, and what is common.

With few, rarely sampled releases an outcome that costs about ε is so improbable that two of them
do not matter: δ(ε) is about Σ T·δ₁(ε), δ₁ of one sampled Gaussian release,

    δ₁(ε) = q·δ_G(log(1 + (e^ε − 1)/q)),

δ_G of the unsampled one (removing; the other direction costs less). That tells where to look and
how steep δ is there. Losses far below ε are common outcomes: their compositions alone hardly ever
reach ε, by Chernoff's bound, so the lattice leaves them out of its transform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics import gaussian
from accountant_service.numerics.privacy_loss import Composition, Direction, GaussianRatio
from accountant_service.numerics.special import Array, log_sum_exp

_NODES: Final = 1024
_SHARES: Final = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1)  # of ε, that a common loss may be
_LOG_NEGLIGIBLE: Final = -14.0  # natural log of the share of δ that common outcomes may add
_LEAST_SHARE: Final = 0.9
_RARE: Final = 0.3  # the most uncommon outcomes that may be expected
_LOG_RESOLVED: Final = 12.0  # natural log of their multiple of δ that a transform resolves
_TILTS: Final = np.geomspace(1.0, 1e6, 61)


@dataclass(frozen=True, slots=True)
class RareEvents:
    """What a lattice needs to know.

    Attributes:
        epsilon: about the ε at δ.
        least: an ε somewhat below it, under which nothing need be said.
        slope: about −d log δ/dε there.
        split: losses up to it are common.
    """

    epsilon: float
    least: float
    slope: float
    split: float


def look(
    releases: Composition, direction: Direction, log_delta: float, bound: float
) -> RareEvents | None:
    """Where the rare events are, if δ comes from such.

    Args:
        releases: with their counts.
        direction: of add-or-remove.
        log_delta: log of the δ to be reached.
        bound: an upper bound of ε.
    """
    if direction == "adding" or not all(isinstance(r.ratio, GaussianRatio) for r, _ in releases):
        return None
    epsilons = np.geomspace(1e-4, max(bound, 1e-3), 400)
    seen = _log_delta_of_one(releases, epsilons)
    at = int(np.searchsorted(-seen, -log_delta))
    if not 0 < at < len(epsilons):
        return None
    slope = -(seen[at] - seen[at - 1]) / (epsilons[at] - epsilons[at - 1])
    epsilon = float(epsilons[at])
    least = _LEAST_SHARE * epsilon
    split = _split(releases, least, log_delta)
    return None if split is None else RareEvents(epsilon, least, float(slope), split)


def _log_delta_of_one(releases: Composition, epsilons: Array) -> Array:
    """log Σ T·δ₁(ε)."""
    total = np.full_like(epsilons, -np.inf)
    for release, count in releases:
        if isinstance(release.ratio, GaussianRatio):
            unsampled = np.log1p(np.expm1(np.minimum(epsilons, 500.0)) / release.sample_rate)
            log_delta = gaussian.log_delta(unsampled, release.ratio.mu)
            total = np.logaddexp(total, log_delta + math.log(count * release.sample_rate))
    return total


def _split(releases: Composition, epsilon: float, log_delta: float) -> float | None:
    """The largest loss up to which outcomes may be called common, if the others are rare."""
    laws = []
    for release, count in releases:
        low, high = release.ratio.limits(13.0)
        edges = np.linspace(low - 1e-9, high + 1e-9, _NODES)
        of, q = release.ratio.masses(edges), release.sample_rate
        loss = release.loss(edges[1:])
        laws.append((np.log((1 - q) * of.zero + q * of.one + 1e-300), loss, count))
    for share in _SHARES:
        split = share * epsilon
        expected, moment = 0.0, np.zeros_like(_TILTS)
        for log_mass, loss, count in laws:
            common = loss <= split
            if not common.any():
                return None
            expected += count * float(np.exp(log_mass[~common]).sum())
            moment += count * log_sum_exp(log_mass[common] + _TILTS[:, None] * loss[common])
        if expected > min(_RARE, math.exp(log_delta + _LOG_RESOLVED)):
            return None
        if float((moment - _TILTS * epsilon).min()) <= log_delta + _LOG_NEGLIGIBLE:
            return split
    return None
