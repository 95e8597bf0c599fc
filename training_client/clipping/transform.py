"""What happens to an example's gradient before it is added up: an affine map, and a bound.

    u = D∘∇ + c,    then u is scaled to ‖u‖₂ ≤ B (a ball), or each coordinate clamped to ±1 (a box)

D, c and B must be known before the batch is looked at: public, or made of noisy sums. Then one
example moves the sum of the u by at most B in ℓ2, whatever D and c are, and noise of deviation σB
on every coordinate of that sum is the Gaussian mechanism of noise multiplier σ. Divided by D again
the noise deviates by σB/Dᵢ: large where gradients are (papers/000, Lemma 1, is this remark).

A box of m coordinates lies in the ball of B = √m: one bound serves both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Transform:
    """The map of a step.

    Attributes:
        bound: B > 0, the ℓ2 norm that no example exceeds.
        scales: D > 0, a tensor per parameter; 1 if there are none.
        shifts: c, a tensor per parameter; 0 if there are none.
        box: clamp each coordinate to ±1 rather than scale to the ball; without shifts.
    """

    bound: float
    scales: Sequence[torch.Tensor] | None = None
    shifts: Sequence[torch.Tensor] | None = None
    box: bool = False

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        if not 0 < self.bound < math.inf:
            raise ValueError(f"expected a finite bound > 0, got {self.bound}")
        if self.box and (self.scales is None or self.shifts is not None):
            raise ValueError("a box has scales and no shifts")
        size = sum(each.numel() for each in self.scales or ())
        if self.box and self.bound < math.sqrt(size):
            raise ValueError(f"a box of {size} coordinates is bounded by their root, not less")

    @classmethod
    def ellipsoid(cls, half_axes: Sequence[torch.Tensor], *, box: bool = False) -> Transform:
        """Gradients within {Σ(∇ᵢ/sᵢ)² ≤ m}, or within the box |∇ᵢ| ≤ sᵢ inside of it.

        Args:
            half_axes: s > 0, a tensor per parameter.
            box: see above.
        """
        size = sum(each.numel() for each in half_axes)
        return cls(math.sqrt(size), [1 / each for each in half_axes], box=box)

    def gradients_of(self, means: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """∇ = (u − c)/D: what a mean of u says of the mean gradient, if nothing was clipped."""
        found = self._unshifted(means)
        if self.scales is not None:
            found = [u / d for u, d in zip(found, self.scales, strict=True)]
        return found

    def squares_of(self, means: Sequence[torch.Tensor], deviation: float) -> list[torch.Tensor]:
        """∇², less the variance of the noise on it, at least 0.

        Args:
            means: of u.
            deviation: of the noise on each coordinate of them.
        """
        found = [(u * u).sub_(deviation**2).clamp_min_(0.0) for u in self._unshifted(means)]
        if self.scales is not None:
            for square, scale in zip(found, self.scales, strict=True):
                square.div_(scale).div_(scale)
        return found

    def _unshifted(self, means: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.shifts is None:
            return means
        return [u - c for u, c in zip(means, self.shifts, strict=True)]
