"""DP-PCA: a projection on noisy principal components of the examples (papers/000, §IV-A).

An example x, scaled to ‖x‖₂ ≤ 1, adds x xᵀ to the second-moment matrix. That matrix is symmetric,
so releasing its upper triangle, with the diagonal, is enough. Adding or removing a record changes
the triangle by

    √(Σ_{i ≤ j} xᵢ²xⱼ²) ≤ √(Σ_{i,j} xᵢ²xⱼ²) = ‖x xᵀ‖_F = ‖x‖₂² ≤ 1

in ℓ2. Independent noise of standard deviation σ_p on each entry of the triangle is therefore the
Gaussian mechanism with noise multiplier σ_p on a sum of vectors of norm at most 1. Mirroring the
triangle, computing eigenvectors and projecting are post-processing (Dwork et al. 2014, "Analyze
Gauss").

The second moment is taken about 0, not about the mean: the mean would need a release of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from training_client.errors import DataError
from training_client.lab.data import Dataset
from training_client.private_step.noise import draw_key
from training_client.private_step.rounded_gaussian import NoiseGrid

INPUTS_MAX: Final = 4096  # the matrix takes 128 MiB and its eigenvectors take minutes
CHUNK_ROWS: Final = 8192  # examples converted to double precision at a time
EXAMPLES: Final = 1 << 20  # about the most: the grid of the noise has room for 8 times as many
SUM_SHARE: Final = 2e-5  # what rounding may add: for n records 2n(8192 + n/8192 + 8)·2⁻⁵³
_ROUNDING: Final = 1 + 1e-12  # a norm may be rounded down; scaled examples must not exceed norm 1


@dataclass(frozen=True, slots=True)
class PrivatePca:
    """The parameters of a private PCA, which determine its result and its privacy cost.

    Attributes:
        components: k, the number of principal components to keep.
        noise_multiplier: σ_p, the standard deviation of the noise; the sensitivity is 1.
    """

    components: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Raise if the parameters give no privacy."""
        for name in ("components", "noise_multiplier"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    def mechanism(self) -> dict[str, Any]:
        """Return the privacy mechanism of one call of `fit`, as JSON for the accounting service."""
        return {"kind": "gaussian", "noise_multiplier": self.noise_multiplier}

    def require_fits(self, inputs: int) -> None:
        """Raise unless examples with `inputs` features have enough dimensions to project to.

        Raises:
            DataError: there are too many inputs, or fewer than components.
        """
        if not self.components <= inputs <= INPUTS_MAX:
            raise DataError(
                f"--pca {self.components} is not possible with {inputs} inputs: it needs at least "
                f"{self.components} and at most {INPUTS_MAX} inputs"
            )

    def fit(self, examples: torch.Tensor, generator: torch.Generator | None = None) -> Projection:
        """Release noisy principal components; each call costs further privacy.

        Args:
            examples: private, one example per row.
            generator: draws the noise, on the device of `examples`; seeded by the operating system
                by default.

        Raises:
            DataError: there are too many inputs, or fewer than components; or too many examples.
        """
        self.require_fits(examples.shape[1])
        if len(examples) > 8 * EXAMPLES:
            raise DataError(f"--pca takes at most {8 * EXAMPLES} examples, got {len(examples)}")
        moments = second_moments(examples)
        inputs = moments.shape[0]
        coordinates = inputs * (inputs + 1) // 2
        grid = NoiseGrid.for_sum(self.noise_multiplier, 1 + SUM_SHARE, coordinates, EXAMPLES)
        grid.add_noise(moments, 1.0, draw_key(generator))
        released = torch.triu(moments)
        _, directions = torch.linalg.eigh(released + torch.triu(released, 1).T)
        return Projection(directions[:, -self.components :].flip(1).float())


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection onto released principal components; it costs no further privacy.

    Attributes:
        directions: a matrix of inputs by components with orthonormal columns, strongest first.
    """

    directions: torch.Tensor

    def __call__(self, examples: torch.Tensor) -> torch.Tensor:
        """Return each example's coordinates along the principal components, not rescaled."""
        return examples @ self.directions.to(examples.device)

    def project_dataset(self, data: Dataset) -> Dataset:
        """Return the data set with its training and test examples projected."""
        return replace(
            data,
            train_examples=self(data.train_examples),
            test_examples=self(data.test_examples),
            images=None,
            frequencies=None,
        )


def second_moments(examples: torch.Tensor) -> torch.Tensor:
    """Return the private matrix Σ x·xᵀ over examples x, each scaled to norm at most 1.

    A non-finite example counts as zero.

    Args:
        examples: one example per row.

    Returns:
        A symmetric matrix in double precision. One record changes its upper triangle by at most 1
        in ℓ2, and rounding by 2·10⁻⁵, for up to eight million records.
    """
    inputs = examples.shape[1]
    total = torch.zeros(inputs, inputs, dtype=torch.float64, device=examples.device)
    for at in range(0, len(examples), CHUNK_ROWS):
        scaled = scale_to_unit_ball(examples[at : at + CHUNK_ROWS].double())
        total += scaled.T @ scaled
    return total


def scale_to_unit_ball(examples: torch.Tensor) -> torch.Tensor:
    """Scale examples to norm at most 1; replace those with a non-finite norm by 0."""
    norms = examples.norm(dim=1, keepdim=True)
    inside = examples / (norms * _ROUNDING).clamp_min(1.0)
    return torch.where(norms.isfinite(), inside, 0.0)
