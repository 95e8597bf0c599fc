"""Every example's gradient of one parameter, in the form that its layer gives it.

The gradient of one example in the weight of a Linear layer is the outer product of its output
gradient g and its input a, so the squared norm of D∘(g aᵀ) + c is

    Σₒ g²ₒ·[D²(a²)]ₒ + 2·gᵀ(D∘c)a + ‖c‖²,

which is ‖g‖²·‖a‖² without D and c, and a weighted sum over examples is one matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038). Only a
box is elementwise. Of every other layer the per-example gradients are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.clipping.blocks import Block
from training_client.clipping.box import clamped, clamped_products
from training_client.clipping.transform import Transform

_ROUNDINGS: Final = 64  # of a sum that is not a matrix product, and of its terms
_EXAMPLES: Final = 128  # at a time, where more would leave the cache


@dataclass(frozen=True, slots=True)
class Squares:
    """Squared norms of u, one for each example, in double precision.

    Attributes:
        found: as computed.
        lost: what rounding may have taken from them, at most.
    """

    found: torch.Tensor
    lost: torch.Tensor


class ExampleGradients(Protocol):
    """Of one parameter, every example's."""

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """Of u = D∘∇ + c, over all blocks of the parameter."""
        ...

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Σ wᵢ∇ᵢ on a block, into a tensor of its shape."""
        ...

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """Σ clamp(D∘∇ᵢ, ±1) on a block; what is no number counts as 0."""
        ...

    def only(self, kept: torch.Tensor) -> ExampleGradients:
        """Those of some examples."""
        ...


@dataclass(frozen=True, slots=True)
class OuterProducts:
    """∇ᵢ = gᵢaᵢᵀ, of the weight of a Linear layer.

    Attributes:
        gradients: g, of the layer's outputs, one row an example.
        inputs: a, one row an example.
    """

    gradients: torch.Tensor
    inputs: torch.Tensor

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """See `ExampleGradients`."""
        if transform.affine is None:
            found = _norms(self.gradients).mul_(_norms(self.inputs)).square_()
            return Squares(found, torch.zeros_like(found))
        heights, widths = _largest(self.gradients), _largest(self.inputs)
        inputs = self.inputs / widths[:, None]  # rows are scaled, so that no square underflows
        squared_inputs = inputs * inputs
        square = torch.zeros_like(heights, dtype=torch.float64)
        linear, constant = torch.zeros_like(square), torch.zeros_like(square[0])
        for block in blocks:
            scale, shift = transform.affine(block)
            gradients = self.gradients[:, block.rows] / heights[:, None]
            if shift is not None:
                linear += (inputs @ (scale * shift).T).mul_(gradients).sum(1)
                constant += _norm(shift).square()
            square += (squared_inputs @ (scale * scale).T).mul_(gradients.square_()).sum(1)
        sizes = heights.double() * widths
        square, linear = square.mul_(sizes**2), linear.mul_(2 * sizes)
        # a product of n terms lacks n roundings of what they add up to at most, in any order
        parts = square + linear.abs() + constant
        found = (square + linear + constant).clamp_min_(0.0)
        return Squares(found, parts.mul_(_roundings(inputs, inputs.shape[1])))

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        torch.mm((self.gradients[:, block.rows] * weights[:, None]).T, self.inputs, out=out)

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped_products(self.gradients[:, block.rows], self.inputs, scale)

    def only(self, kept: torch.Tensor) -> OuterProducts:
        """See `ExampleGradients`."""
        return OuterProducts(self.gradients[kept], self.inputs[kept])


@dataclass(frozen=True, slots=True)
class HeldGradients:
    """∇ᵢ itself.

    Attributes:
        gradients: one for each example, shaped like the parameter.
    """

    gradients: torch.Tensor

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """See `ExampleGradients`."""
        if transform.affine is None:
            found = _norms(self.gradients).square_()
            return Squares(found, torch.zeros_like(found))
        found = self.gradients.new_zeros(len(self.gradients), dtype=torch.float64)
        lost = torch.zeros_like(found)
        for block in blocks:
            scale, shift = transform.affine(block)
            for part in _parts(self.gradients):
                u = self.gradients[part, block.rows] * scale
                if shift is not None:  # what cancels is rounded by the size of its parts
                    lost[part] += _norms(u).square_().add_(_norm(shift).square())
                    u += shift
                found[part] += _norms(u).square_()
        return Squares(found, lost.mul_(_roundings(self.gradients)))

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        torch.mv(self.gradients[:, block.rows].flatten(1).T, weights, out=out.view(-1))

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped(self.gradients[:, block.rows] * scale).sum(0)

    def only(self, kept: torch.Tensor) -> HeldGradients:
        """See `ExampleGradients`."""
        return HeldGradients(self.gradients[kept])


def _parts(examples: torch.Tensor) -> list[slice]:
    """A few examples at a time, so that what is made of them stays in the cache."""
    rows = _EXAMPLES if examples.device.type == "cpu" else len(examples)
    return [slice(start, start + rows) for start in range(0, len(examples), rows)]


def _norms(examples: torch.Tensor) -> torch.Tensor:
    """‖·‖₂ of each example; in double precision, where squares of single precision fit."""
    flat = examples.flatten(1)
    found = [
        torch.linalg.vector_norm(flat[part], dim=1, dtype=torch.float64) for part in _parts(flat)
    ]
    return torch.cat(found)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return found


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest size of an entry of each row; 1 for a row of zeros."""
    sizes = torch.maximum(rows.amax(1), -rows.amin(1))
    return sizes.masked_fill_(sizes == 0, 1.0)


def _roundings(tensor: torch.Tensor, terms: int = 0) -> float:
    """What a sum of so many terms may lack, over what they add up to."""
    return (terms + _ROUNDINGS) * float(torch.finfo(tensor.dtype).eps)
