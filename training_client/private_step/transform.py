"""The transform of an example's gradient before it is summed: an affine map, then a bound.

    u = D∘(∇ + b),   then u is scaled to ‖u‖₂ ≤ B (a ball), or each coordinate clamped to ±1 (a box)

or, damped by c > 0, u = D∘(∇ + b)/√(1 + (c·D∘∇)²), then scaled to the ball.

D, b, c and B must be known before the batch is looked at: public, or made of noisy sums. Then one
example moves the sum of the u by at most B in ℓ2, whatever D and b are, and noise of standard
deviation σB on every coordinate of that sum is the Gaussian mechanism of noise multiplier σ. After
division by D the noise has standard deviation σB/Dᵢ: large where gradients are (papers/000,
Lemma 1, is this remark).

A box of m coordinates lies in the ball of B = √m: one bound serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from training_client.private_step.blocks import Block, flatten_tensors
from training_client.private_step.kernels.elementwise import AffineMap

Scale = Callable[[Block], torch.Tensor]
Shift = Callable[[Block], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Transform:
    """One step's clipping: shift and scale each gradient, then limit its norm or coordinates.

    The tensors that `scale` and `shift` return must not be changed. They may depend on an
    optimizer's state and parameters on their block, since that block is updated only afterwards.

    Attributes:
        bound: B > 0, the ℓ2 norm that no example exceeds.
        scale: returns D > 0 on a block; None for D = 1.
        shift: returns b on a block; None for b = 0.
        box: clamp each coordinate to ±1 rather than scale to the ball; not with a shift.
        damping: c ≥ 0; if c > 0, as in a box, every coordinate of every example's gradient is
            computed.
        stability: γ added to norms before the bound is divided by them; 0 to clip. See `automatic`.
        gain: the factor that the noisy sum is multiplied by; 1 to clip.
        counts: count the examples that are not clipped, for adaptive clipping; not for a box.
    """

    bound: float
    scale: Scale | None = None
    shift: Shift | None = None
    box: bool = False
    damping: float = 0.0
    stability: float = 0.0
    gain: float = 1.0
    counts: bool = False

    def __post_init__(self) -> None:
        """Refuse combinations that do not bound each example's contribution."""
        if not (0 <= self.stability < math.inf and 0 < self.gain < math.inf):
            raise ValueError(
                f"expected a finite stability ≥ 0 and gain > 0, got {self.stability}, {self.gain}"
            )
        if self.stability and self.bound > self.stability:
            raise ValueError(
                f"expected a bound ≤ stability = {self.stability:g} for automatic clipping, got "
                f"{self.bound:g}: use `automatic`"
            )
        if self.box and (self.counts or self.stability):
            raise ValueError("a box clips no example as a whole: it cannot adapt, or be automatic")
        if not 0 < self.bound < math.inf:
            raise ValueError(f"expected a finite bound > 0, got {self.bound}")
        if not 0 <= self.damping < math.inf:
            raise ValueError(f"expected a finite damping ≥ 0, got {self.damping}")
        if self.scale is None and (self.box or self.damping or self.shift is not None):
            raise ValueError("a box, a shift or damping needs a scale")
        if self.box and (self.damping or self.shift is not None):
            raise ValueError("a box cannot have a shift or damping")

    def automatic(self, stability: float) -> Transform:
        """Return the transform for automatic clipping: divide by gradient norm + `stability` (γ).

        It is B/γ times u·γ/(‖u‖ + γ), whose weight is at most 1 and whose norm is below γ. So the
        sum is bounded by γ, gets noise for γ, and is multiplied by B/γ afterwards (Bu et al. 2022,
        arXiv 2206.07136).

        Args:
            stability: γ > 0.
        """
        gain = self.bound / stability
        return replace(self, bound=stability, stability=stability, gain=gain)

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
        """Return a transform whose scale and shift are given tensors, one per parameter.

        Args:
            bound: B.
            scales: D, one tensor per parameter.
            shifts: b, one tensor per parameter.
            box: see the class.
            damping: see the class.
        """

        def by_block(tensors: Sequence[torch.Tensor]) -> Scale:
            """Return a function from a block to these tensors' values on its coordinates."""
            vector = flatten_tensors(tensors)
            return lambda block: block.view_in(vector)

        shift = None if shifts is None else by_block(shifts)
        return cls(bound, by_block(scales), shift, box, damping)

    def for_block(self, block: Block) -> AffineMap:
        """Return the shift and scale on a block of coordinates."""
        return AffineMap(self.scale and self.scale(block), self.shift and self.shift(block))
