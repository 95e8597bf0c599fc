"""Per-example gradients of a parameter that is used in several ways, such as a tied embedding.

The parts of one example are added before the clip, because together they are its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training_client.private_step.gradients.chunked_gradients import ChunkedGradients
from training_client.private_step.gradients.convolution_gradients import ConvolutionProducts
from training_client.private_step.gradients.example_gradients import MaterializedGradients
from training_client.private_step.gradients.sequence_products import SequenceProducts
from training_client.private_step.gradients.token_gradients import TokenGradients
from training_client.private_step.kernels.row_sums import mapped_squared_norms, squared_norms

Part = MaterializedGradients | TokenGradients | SequenceProducts | ConvolutionProducts


@dataclass(frozen=True)
class SummedGradients(ChunkedGradients):
    """Per-example gradients that are sums of parts stored in different representations.

    Attributes:
        parts: two or more, each of all examples.
    """

    parts: tuple[Part, ...]

    @property
    def element_count(self) -> int:
        """The number of elements of the tensors of all parts."""
        return sum(each.element_count for each in self.parts)

    @property
    def terms(self) -> int:
        """The number of additions that a term takes part in: those of the longest part, and all."""
        longest = max(each.terms for each in self.parts if isinstance(each, ChunkedGradients))
        return longest + len(self.parts)

    @property
    def underflows(self) -> int:
        """The number of terms that underflow may take, those of all parts."""
        chunked = (each.underflows for each in self.parts if isinstance(each, ChunkedGradients))
        return sum(chunked) + len(self.parts)

    @property
    def example_count(self) -> int:
        """The number of examples."""
        return next(e.example_count for e in self.parts if isinstance(e, ChunkedGradients))

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return next(each.shape for each in self.parts if isinstance(each, ChunkedGradients))

    @property
    def sample(self) -> torch.Tensor:
        """One of the stored tensors, whose dtype and device are those of the gradients."""
        return next(each.sample for each in self.parts if isinstance(each, ChunkedGradients))

    def dense(self, examples: slice, rows: slice) -> torch.Tensor:
        """Compute some examples' gradients on `rows` of the parameter, summed over the parts."""
        total = self._dense_of(self.parts[0], examples, rows).clone()
        for each in self.parts[1:]:
            total += self._dense_of(each, examples, rows)
        return total

    @staticmethod
    def _dense_of(part: Part, examples: slice, rows: slice) -> torch.Tensor:
        """Compute one part of some examples' gradients, on `rows` of the parameter."""
        if isinstance(part, MaterializedGradients):
            return part.gradients[examples, rows]
        return part.dense(examples, rows)

    def magnitudes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two numbers per example, from which rounding and underflow errors are bounded."""
        pairs = [_magnitudes_of(each) for each in self.parts]
        total = torch.stack([each.sqrt() for each, _ in pairs]).sum(0).square_()
        return total, torch.stack([largest for _, largest in pairs]).amax(0)

    def mapped_magnitudes(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Bound ‖Σ|tᵢ|·scale‖² per example, whose gradient on `rows` is the sum of terms tᵢ."""
        found = [_mapped_magnitudes_of(each, rows, scale) for each in self.parts]
        return torch.stack([each.sqrt() for each in found]).sum(0).square_()

    def select(self, kept: torch.Tensor) -> SummedGradients:
        """Return the per-example gradients of those examples where `kept` is true."""
        return SummedGradients(tuple(each.select(kept) for each in self.parts))

    def zero_others(self, kept: torch.Tensor) -> SummedGradients:
        """Return the gradients with 0 for examples where `kept` is false."""
        return SummedGradients(tuple(each.zero_others(kept) for each in self.parts))


def _magnitudes_of(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for one part, two numbers per example that bound rounding and underflow errors."""
    if isinstance(part, MaterializedGradients):
        found = squared_norms(part.gradients.flatten(1))
        return found, found
    return part.magnitudes()


def _mapped_magnitudes_of(part: Part, rows: slice, scale: torch.Tensor) -> torch.Tensor:
    """Bound ‖Σ|tᵢ|·scale‖² per example, whose gradient on `rows` of one part is the sum Σtᵢ."""
    if isinstance(part, MaterializedGradients):
        held = part.gradients[:, rows].flatten(1).contiguous()
        return mapped_squared_norms(held, scale.reshape(1, -1))
    return part.mapped_magnitudes(rows, scale)
