"""The relevance of each input for the label, released with noise: for ADPPL (papers/001, §5.1).

A record's part is the outer product x·tᵀ of its input, scaled to ‖x‖₂ ≤ 1, and its label t, a one
in its class and zeros elsewhere, minus 1/k. Its norm is below 1, so the sum over records with
Gaussian noise of standard deviation σ is one Gaussian release of noise multiplier σ. An input's
relevance is the length of its row, the noise's part subtracted; all that follows is
post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from training_client.errors import DataError
from training_client.lab.pca import CHUNK_ROWS, EXAMPLES, SUM_SHARE, scale_to_unit_ball
from training_client.private_step.noise import draw_key
from training_client.private_step.rounded_gaussian import NoiseGrid


@dataclass(frozen=True, slots=True)
class PrivateRelevance:
    """The parameters of a release of relevances, which determine its privacy cost.

    Attributes:
        noise_multiplier: σ > 0; the sensitivity is 1.
        spread: K ≥ 1, the largest ratio of an input's share to the mean share, and its inverse.
    """

    noise_multiplier: float
    spread: float = 10.0

    def __post_init__(self) -> None:
        """Raise if the parameters give no privacy, or no range."""
        if not (self.noise_multiplier > 0 and self.spread >= 1):
            raise ValueError(
                f"expected noise_multiplier > 0 and spread ≥ 1, got {self.noise_multiplier} and "
                f"{self.spread}"
            )

    def mechanism(self) -> dict[str, Any]:
        """Return the privacy mechanism of one call of `fit`, as JSON for the accounting service."""
        return {"kind": "gaussian", "noise_multiplier": self.noise_multiplier}

    def fit(
        self,
        examples: torch.Tensor,
        labels: torch.Tensor,
        classes: int,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Release the noisy relevance of each input; each call costs further privacy.

        Args:
            examples: private, one example per row; one that is not finite counts as zero.
            labels: class numbers from 0.
            classes: their number, which is public.
            generator: draws the noise, on the device of `examples`; seeded by the operating system
                by default.

        Returns:
            One number ≥ 0 per input.

        Raises:
            DataError: there are too many examples.
        """
        if len(examples) > 8 * EXAMPLES:
            raise DataError(f"expected at most {8 * EXAMPLES} examples, got {len(examples)}")
        total = examples.new_zeros(examples.shape[1], classes, dtype=torch.float64)
        for at in range(0, len(examples), CHUNK_ROWS):  # as in a PCA, so that sums round as there
            rows = slice(at, at + CHUNK_ROWS)
            targets = functional.one_hot(labels[rows], classes).double() - 1 / classes
            total += scale_to_unit_ball(examples[rows].double()).T @ targets
        grid = NoiseGrid.for_sum(self.noise_multiplier, 1 + SUM_SHARE, total.numel(), EXAMPLES)
        grid.add_noise(total, 1.0, draw_key(generator))
        return (total.square().sum(1) - classes * self.noise_multiplier**2).clamp_min(0).sqrt()

    def shares(self, model: nn.Module, relevance: torch.Tensor) -> list[torch.Tensor]:
        """Return `Adppl`'s shares from released relevances; it costs no further privacy.

        Args:
            model: a model whose first Linear layer takes the inputs.
            relevance: of each input.

        Returns:
            One tensor per parameter; ones except for the first Linear layer's weights.
        """
        first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).weight
        mean = relevance.mean().clamp_min(torch.finfo(relevance.dtype).tiny)
        row = (relevance / mean).clamp(1 / self.spread, self.spread).to(first)
        return [
            row.expand_as(each).clone() if each is first else torch.ones_like(each)
            for each in model.parameters()
            if each.requires_grad
        ]
