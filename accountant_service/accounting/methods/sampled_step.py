"""Amplification by sampling: the (ε₁, δ₁) of one sampled release, for composition theorems.

The unsampled release is (ε₀, δ₀)-DP with ε₀ from the analytic Gaussian mechanism (or 1/b for
Laplace noise); sampling at rate q makes it (log(1 + q(e^{ε₀} − 1)), q·δ₀)-DP:

* Poisson, add/remove: Li, Qardaji & Su 2012 (arXiv 1101.2604), Theorem 1;
* fixed size, replace-one, and Poisson, replace-one: Balle, Barthe & Gaboardi 2018
  (arXiv 1807.01647v2), Theorem 2 (advanced joint convexity) and Theorem 9.

Papers/003 uses (q·ε₀, q·δ₀) instead; that is too small, because log(1 + q(e^{ε₀} − 1)) ≥ q·ε₀.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods.base import (
    Question,
    assume_sampling,
    require_noise,
)
from accountant_service.accounting.release_laws import ReleaseGroup
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import gaussian

SOURCE: Final = "Balle, Barthe & Gaboardi 2018, arXiv 1807.01647v2, Theorems 2 and 9"

# Fractions of δ for the composition; the rest is for the releases. They are dense towards both
# ends. Any fraction is valid, and a fixed set keeps ε monotone in every parameter.
DELTA_SHARES: Final = 1 / (1 + np.exp(-np.linspace(-9.0, 9.0, 37)))


def assumptions(method: str, question: Question) -> tuple[Assumption, ...]:
    """Return the hypothesis of amplification by sampling: steps draw batches independently."""
    require_noise(method, question, ["gaussian", "laplace"])
    return (
        assume_sampling(
            question,
            ["poisson", "fixed_size", "none", "shuffled"],
            "a record takes part in each step with probability q, independently of other steps",
            SOURCE,
        ),
    )


def step_epsilons(group: ReleaseGroup, step_deltas: Array) -> Array:
    """Return ε of one sampled step, amplified by sampling, at each δ in `step_deltas`.

    ε₁ = log(1 + q·(e^{ε₀} − 1)) with δ₀ = δ₁/q.

    Args:
        group: the release; its count is not used.
        step_deltas: δ₁ > 0, any shape.
    """
    base_deltas = np.minimum(step_deltas / group.rate, 1.0)
    if group.atom.noise == "laplace":
        base = np.full_like(step_deltas, 1 / group.sigma)
    else:
        base = gaussian.epsilon(base_deltas, 1 / group.sigma)
    if group.rate == 1.0:
        return base
    capped = np.minimum(base, 500.0)
    return np.log1p(group.rate * np.expm1(capped)) + (base - capped)
