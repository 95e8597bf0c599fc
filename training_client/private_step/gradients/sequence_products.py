"""Per-example gradients of a weight that is applied to every position of a sequence.

The gradient of one example is ∇ = Σₜ gₜaₜᵀ over its positions t, with g the output gradients and a
the inputs. Its squared norm is computed in one of two ways, whichever multiplies less. A
multiplication in double precision counts as 4. On an accelerator it counts as 64: many have so many
times fewer units for it (CUDA programming guide, arithmetic instructions, capability 8.6), which
was not measured here:

    ‖∇‖² = Σₜₛ (gₜ·gₛ)(aₜ·aₛ)          for short sequences, by two Gram matrices in double precision
    ‖∇‖² = Σₒᵢ (Σₜ gₜₒaₜᵢ)²              for long ones, from a few examples' ∇ at a time

Gram matrices are as in Li et al. 2022, arXiv 2110.05679. The weighted sum needs each example's ∇,
from a few examples at a time: see `chunked_gradients`.

By the Cauchy-Schwarz inequality Σₜ|gₜₒaₜᵢ| ≤ GₒAᵢ, with G²ₒ = Σₜ g²ₜₒ and A²ᵢ = Σₜ a²ₜᵢ. So the
magnitude M of `chunked_gradients` is at most ‖G‖‖A‖, and ‖D∘(G Aᵀ)‖ after a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import torch

from training_client.private_step.gradients.chunked_gradients import ChunkedGradients
from training_client.private_step.gradients.example_gradients import OuterProducts, zero_rows
from training_client.private_step.kernels import accelerator_sums
from training_client.private_step.kernels.accelerator_sums import SquareSums
from training_client.private_step.kernels.compiled import is_on_cpu
from training_client.private_step.rounding_bounds import (
    gram_underflow,
    mapped_magnitude_underflow,
    rounding_error,
    squared_norm_upper_bounds,
)

_GRAM_CHUNK_SIZE: Final = 1 << 20  # double-precision copies of factors at a time
_GRAM_COST: Final = 4.0  # of a multiplication in double precision with its conversion
_ACCELERATOR_GRAM_COST: Final = 64.0  # many accelerators multiply so much slower there
_READING_COST: Final = 8  # of a coordinate of ∇, in multiplications

NormMethod = Literal["gram", "product"]


@dataclass(frozen=True)
class SequenceProducts(ChunkedGradients):
    """Per-example gradients of a weight used at many positions, as output gradients and inputs.

    Attributes:
        gradients: g, of shape (examples, positions, rows of the weight).
        inputs: a, of shape (examples, positions, columns of the weight).
        method: how norms are computed; None for the cheaper one.
    """

    gradients: torch.Tensor
    inputs: torch.Tensor
    method: NormMethod | None = None

    @classmethod
    def from_outer_products(cls, products: OuterProducts) -> SequenceProducts:
        """Convert outer products to sequences of length 1."""
        return cls(products.gradients[:, None], products.inputs[:, None])

    @classmethod
    def merge(cls, parts: Sequence[SequenceProducts]) -> SequenceProducts:
        """Sum the gradients of several uses of one weight, by concatenating their positions."""
        gradients = torch.cat([each.gradients for each in parts], 1)
        return cls(gradients, torch.cat([each.inputs for each in parts], 1), parts[0].method)

    @property
    def element_count(self) -> int:
        """The number of elements of both stored factors."""
        return self.gradients.numel() + self.inputs.numel()

    @property
    def terms(self) -> int:
        """The length of the sequence: the number of products summed to one gradient."""
        return self.gradients.shape[1]

    @property
    def example_count(self) -> int:
        """The number of examples."""
        return len(self.gradients)

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return torch.Size((self.gradients.shape[2], self.inputs.shape[2]))

    @property
    def sample(self) -> torch.Tensor:
        """One of the stored tensors, whose dtype and device are those of the gradients."""
        return self.gradients

    @property
    def uses_gram_matrices(self) -> bool:
        """Return whether norms are computed by Gram matrices: by `method`, else by tensor sizes."""
        if self.method is not None:
            return self.method == "gram"
        rows, columns = self.shape
        cost = _GRAM_COST if is_on_cpu(self.gradients) else _ACCELERATOR_GRAM_COST
        by_gram = cost * self.terms**2 * (rows + columns)
        return by_gram < rows * columns * (self.terms + _READING_COST)

    def dense(self, examples: slice, rows: slice) -> torch.Tensor:
        """Compute some examples' gradients on `rows` of the weight, one matrix per example."""
        return torch.bmm(self.gradients[examples, :, rows].mT, self.inputs[examples])

    def squared_norms(self, bound: float) -> torch.Tensor:
        """Return upper bounds on squared gradient norms per example; ∞ on excessive underflow."""
        if not self.uses_gram_matrices:
            return super().squared_norms(bound)
        rows, columns = self.shape
        found, terms = self._zeros(), self.terms
        step = max(1, _GRAM_CHUNK_SIZE // max(1, terms * (rows + columns)))
        for start in range(0, self.example_count, step):
            part = slice(start, start + step)
            g, a = self.gradients[part].double(), self.inputs[part].double()
            found[part] = torch.bmm(g, g.mT).mul_(torch.bmm(a, a.mT)).flatten(1).sum(1)
        gradient_squares, input_squares = self._squared_sizes
        # each of the terms is at most (Σₜ‖gₜ‖‖aₜ‖)² ≤ ‖g‖²‖a‖² in total
        error = rounding_error(torch.float64, rows + columns + terms * terms)
        found.add_(gradient_squares * input_squares, alpha=error)
        found += gram_underflow(gradient_squares, input_squares, rows, columns, terms)
        return self._upper_bounds(found.clamp_min_(0.0), 1, bound)

    def magnitudes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two numbers per example, from which rounding and underflow errors are bounded."""
        gradient_squares, input_squares = self._squared_sizes
        return gradient_squares * input_squares, torch.maximum(gradient_squares, input_squares)

    @cached_property
    def _squared_sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Upper bounds on the squared norms of each example's output gradients and inputs."""
        gradient_squares = squared_norm_upper_bounds(self.gradients.flatten(1))
        return gradient_squares, squared_norm_upper_bounds(self.inputs.flatten(1))

    def mapped_magnitudes(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Bound ‖Σ|tᵢ|·scale‖² per example, whose gradient on `rows` is the sum of terms tᵢ."""
        if not is_on_cpu(scale) and accelerator_sums.are_multipliable(self.gradients, self.inputs):
            left, right = self._square_sums
            left = left._replace(sums=left.sums[:, rows])
            return accelerator_sums.mapped_products(left, right, scale)
        g, a = (each[:, rows] if at == 0 else each for at, each in enumerate(self._column_squares))
        found = torch.mm(a, scale.double().square().T).mul_(g).sum(1)
        size = scale.numel()
        found.mul_(1 + rounding_error(torch.float64, size))
        return found + mapped_magnitude_underflow(g.sum(1), a.sum(1), size)

    @cached_property
    def _square_sums(self) -> tuple[SquareSums, SquareSums]:
        """Sums over positions as `_column_squares`, but scaled, and in single precision."""
        return accelerator_sums.square_sums(self.gradients), accelerator_sums.square_sums(
            self.inputs
        )

    @cached_property
    def _column_squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over positions of squared output gradients and of squared inputs, per feature."""
        return _sum_squares(self.gradients), _sum_squares(self.inputs)

    def select(self, kept: torch.Tensor) -> SequenceProducts:
        """Return the per-example gradients of those examples where `kept` is true."""
        return SequenceProducts(self.gradients[kept], self.inputs[kept], self.method)

    def zero_others(self, kept: torch.Tensor) -> SequenceProducts:
        """Return the gradients with 0 for examples where `kept` is false."""
        return SequenceProducts(
            zero_rows(self.gradients, kept), zero_rows(self.inputs, kept), self.method
        )


def _sum_squares(factor: torch.Tensor) -> torch.Tensor:
    """Sum the squares of a factor's entries over positions, per example, in double precision."""
    found = factor.new_zeros((len(factor), factor.shape[2]), dtype=torch.float64)
    for each in factor.unbind(1):
        found += each.double().square()
    return found
