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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training_client.clipping.blocks import Block

Affine = Callable[[Block], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Transform:
    """The map of a step, a block at a time.

    Attributes:
        bound: B > 0, the ℓ2 norm that no example exceeds.
        affine: gives D > 0 and c (or None for 0) of a block; D = 1 and c = 0 if there is none. What
            it gives is not to be changed. It may read the state of an optimizer as it is: use it on
            a block before that block's state changes.
        box: clamp each coordinate to ±1 rather than scale to the ball; without c.
    """

    bound: float
    affine: Affine | None = None
    box: bool = False

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        if not 0 < self.bound < math.inf:
            raise ValueError(f"expected a finite bound > 0, got {self.bound}")
        if self.box and self.affine is None:
            raise ValueError("a box needs scales")

    @classmethod
    def fixed(
        cls,
        bound: float,
        scales: Sequence[torch.Tensor],
        shifts: Sequence[torch.Tensor] | None = None,
        *,
        box: bool = False,
    ) -> Transform:
        """With D and c that are there already.

        Args:
            bound: B.
            scales: D, a tensor per parameter.
            shifts: c, a tensor per parameter.
            box: see above.
        """
        if shifts is None:
            return cls(bound, lambda block: (block.of(scales), None), box)
        return cls(bound, lambda block: (block.of(scales), block.of(shifts)), box)

    def moments(
        self, block: Block, mean: torch.Tensor, deviation: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a mean of u says of the mean gradient, if nothing was clipped.

        Args:
            block: where.
            mean: of u, there.
            deviation: of the noise on each coordinate of it.

        Returns:
            ∇ = (u − c)/D, and ∇² less the variance of the noise on it, at least 0.
        """
        scale, shift = (None, None) if self.affine is None else self.affine(block)
        u = mean if shift is None else mean - shift
        square = (u * u).sub_(deviation**2).clamp_min_(0.0)
        if scale is None:
            return u, square
        return u / scale, square.div_(scale).div_(scale)
