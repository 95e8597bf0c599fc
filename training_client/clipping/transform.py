"""What happens to an example's gradient before it is added up: an affine map, and a bound.

    u = D∘(∇ + b),   then u is scaled to ‖u‖₂ ≤ B (a ball), or each coordinate clamped to ±1 (a box)

or, damped by c > 0, u = D∘(∇ + b)/√(1 + (c·D∘∇)²), then scaled to the ball.

D, b, c and B must be known before the batch is looked at: public, or made of noisy sums. Then one
example moves the sum of the u by at most B in ℓ2, whatever D and b are, and noise of deviation σB
on every coordinate of that sum is the Gaussian mechanism of noise multiplier σ. Divided by D again
the noise deviates by σB/Dᵢ: large where gradients are (papers/000, Lemma 1, is this remark).

A box of m coordinates lies in the ball of B = √m: one bound serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training_client.clipping.blocks import Block, Piece, joined
from training_client.elements import affine, moments

Scale = Callable[[Block], torch.Tensor]
Shift = Callable[[Block], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Affine:
    """The map of a block, or of a piece of one.

    Attributes:
        scale: D; None for 1.
        shift: b; None for 0, as it is without a scale.
    """

    scale: torch.Tensor | None
    shift: torch.Tensor | None = None

    def on(self, piece: Piece) -> Affine:
        """That of a piece, in its shape, from that of its block."""
        scale = None if self.scale is None else piece.within(self.scale)
        return Affine(scale, None if self.shift is None else piece.within(self.shift))

    def in_a_row(self) -> Affine:
        """That of a piece, in one row."""
        scale = None if self.scale is None else self.scale.reshape(1, -1)
        return Affine(scale, None if self.shift is None else self.shift.reshape(1, -1))

    def map_sum(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        """Σ wᵢ·D∘(∇ᵢ + b) = D∘(Σ wᵢ∇ᵢ + (Σ wᵢ)·b), in place.

        Args:
            total: Σ wᵢ∇ᵢ; of what is not finite, or becomes so, nothing is left.
            weights: w, which are added up in double precision.
        """
        if self.scale is not None:
            shifted = None if self.shift is None else (self.shift, weights.sum(dtype=torch.float64))
            affine(total, self.scale, shifted)

    def moments(self, mean: torch.Tensor, deviation: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What a mean of u says of the mean gradient, if nothing was clipped.

        Args:
            mean: of u.
            deviation: of the noise on each coordinate of it.

        Returns:
            ∇ = u/D − b, and ∇² less the variance of the noise on it, which may fall below 0:
            cut off there, a mean of it would keep half of the noise.
        """
        if self.scale is None:
            return mean, (mean * mean).sub_(deviation**2)
        return moments(mean, self.scale, self.shift, deviation**2)


@dataclass(frozen=True, slots=True)
class Transform:
    """The map of a step, a block at a time.

    What `scale` and `shift` give is not to be changed. They may read a block's state in an
    optimizer, and its parameters: they are used on a block before that block's change.

    Attributes:
        bound: B > 0, the ℓ2 norm that no example exceeds.
        scale: gives D > 0 of a block; D = 1 if there is none.
        shift: gives b of a block; b = 0 if there is none.
        box: clamp each coordinate to ±1 rather than scale to the ball; without a shift.
        damping: c ≥ 0; where it is not 0 every example's gradient is gone through, as in a box.
    """

    bound: float
    scale: Scale | None = None
    shift: Shift | None = None
    box: bool = False
    damping: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        if not 0 < self.bound < math.inf:
            raise ValueError(f"expected a finite bound > 0, got {self.bound}")
        if not 0 <= self.damping < math.inf:
            raise ValueError(f"expected a finite damping ≥ 0, got {self.damping}")
        if self.scale is None and (self.box or self.damping or self.shift is not None):
            raise ValueError("a box, a shift and damping need scales")
        if self.box and (self.damping or self.shift is not None):
            raise ValueError("a box has no shifts, and is not damped")

    @classmethod
    def fixed(
        cls,
        bound: float,
        scales: Sequence[torch.Tensor],
        shifts: Sequence[torch.Tensor] | None = None,
        *,
        box: bool = False,
        damping: float = 0.0,
    ) -> Transform:
        """With D and b that are there already.

        Args:
            bound: B.
            scales: D, a tensor per parameter.
            shifts: b, a tensor per parameter.
            box: see above.
            damping: see above.
        """

        def by_block(tensors: Sequence[torch.Tensor]) -> Scale:
            vector = joined(tensors)
            return lambda block: block.of(vector)

        shift = None if shifts is None else by_block(shifts)
        return cls(bound, by_block(scales), shift, box, damping)

    def at(self, block: Block) -> Affine:
        """D and b of a block."""
        return Affine(self.scale and self.scale(block), self.shift and self.shift(block))
