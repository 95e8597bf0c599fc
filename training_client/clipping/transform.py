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
from training_client.elements import moments

Scale = Callable[[Block], torch.Tensor]
Shift = Callable[[Block, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Transform:
    """The map of a step, a block at a time.

    What `scale` and `shift` give is not to be changed. They may read the state of an optimizer as
    it is: they are used on a block before that block's state changes.

    Attributes:
        bound: B > 0, the ℓ2 norm that no example exceeds.
        scale: gives D > 0 of a block; D = 1 if there is none.
        shift: gives c of a block and its D; c = 0 if there is none.
        box: clamp each coordinate to ±1 rather than scale to the ball; without a shift.
    """

    bound: float
    scale: Scale | None = None
    shift: Shift | None = None
    box: bool = False

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        if not 0 < self.bound < math.inf:
            raise ValueError(f"expected a finite bound > 0, got {self.bound}")
        if self.scale is None and (self.box or self.shift is not None):
            raise ValueError("a box and a shift need scales")
        if self.box and self.shift is not None:
            raise ValueError("a box has no shifts")

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
        shift = None if shifts is None else lambda block, _: block.of(shifts)
        return cls(bound, lambda block: block.of(scales), shift, box)

    def at(self, block: Block) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """D and c of a block; None for 1 and for 0."""
        scale = None if self.scale is None else self.scale(block)
        if scale is None or self.shift is None:
            return scale, None
        return scale, self.shift(block, scale)

    def moments(
        self, block: Block, mean: torch.Tensor, deviation: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a mean of u says of the mean gradient, if nothing was clipped.

        Args:
            block: where.
            mean: of u, there.
            deviation: of the noise on each coordinate of it.

        Returns:
            ∇ = (u − c)/D, and ∇² less the variance of the noise on it, which may fall below 0:
            cut off there, a mean of it would keep half of the noise.
        """
        scale, shift = self.at(block)
        if scale is None:
            return mean, (mean * mean).sub_(deviation**2)
        return moments(mean, scale, shift, deviation**2)
