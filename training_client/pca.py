"""DP-PCA: the directions in which the data vary most, released with noise (papers/000, §IV-A).

An example x, scaled to ‖x‖₂ ≤ 1, adds x xᵀ to the second-moment matrix. That matrix is symmetric,
so its upper triangle, with the diagonal, is all there is to release. A record that is added or
removed changes the triangle by

    √(Σ_{i ≤ j} xᵢ²xⱼ²) ≤ √(Σ_{i,j} xᵢ²xⱼ²) = ‖x xᵀ‖_F = ‖x‖₂² ≤ 1

in ℓ2. Independent noise of deviation σ_p on each entry of the triangle is therefore the Gaussian
mechanism of noise multiplier σ_p on a sum of vectors of norm at most 1. To mirror the triangle, to
take eigenvectors and to project is post-processing (Dwork et al. 2014, "Analyze Gauss").

The second moment is about 0, not about the mean: the mean would be a release of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from training_client.data import Dataset
from training_client.errors import DataError
from training_client.noise import FreshGenerator, gaussian_like

INPUTS_MAX: Final = 4096  # a matrix of 128 MiB, whose eigenvectors take minutes
_ROWS: Final = 8192  # of examples that are held in double precision at a time
_ROUNDING: Final = 1 + 1e-12  # a norm may be rounded down; what is divided by it may not exceed 1


@dataclass(frozen=True, slots=True)
class PrivatePca:
    """A private projection, as it is run and as it is charged.

    Attributes:
        components: k, directions to keep.
        noise_multiplier: σ_p, the noise's deviation over the sensitivity, which is 1.
    """

    components: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Refuse what would release without privacy."""
        for name in ("components", "noise_multiplier"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    def mechanism(self) -> dict[str, Any]:
        """What `fit` releases, as the accounting service reads it: to be charged before."""
        return {"kind": "gaussian", "noise_multiplier": self.noise_multiplier}

    def require(self, inputs: int) -> None:
        """Return if examples of so many inputs can be projected: ask before it is charged.

        Raises:
            DataError: there are too many, or fewer than components.
        """
        if not self.components <= inputs <= INPUTS_MAX:
            raise DataError(
                f"PCA finds at most as many directions as there are inputs, of which it takes "
                f"{INPUTS_MAX} here: {self.components} were asked for, of {inputs} inputs"
            )

    def fit(self, examples: torch.Tensor, generator: torch.Generator | None = None) -> Projection:
        """Release the directions once; every call is charged anew.

        Args:
            examples: private, one row an example.
            generator: of the noise, on the device of `examples`; seeded by the operating system
                by default.

        Raises:
            DataError: see `require`.
        """
        self.require(examples.shape[1])
        moments = second_moments(examples)
        noise = gaussian_like(
            moments, self.noise_multiplier, generator or FreshGenerator(moments.device)
        )
        released = torch.triu(moments + noise)
        _, directions = torch.linalg.eigh(released + torch.triu(released, 1).T)
        return Projection(directions[:, -self.components :].flip(1).float())


@dataclass(frozen=True, slots=True)
class Projection:
    """Directions that were released: whatever is done with them is post-processing.

    Attributes:
        directions: orthonormal columns, the strongest first; a matrix of inputs by components.
    """

    directions: torch.Tensor

    def __call__(self, examples: torch.Tensor) -> torch.Tensor:
        """Each example's coordinates along the directions; examples are not scaled."""
        return examples @ self.directions.to(examples.device)

    def of(self, data: Dataset) -> Dataset:
        """A data set whose inputs are the components."""
        return replace(
            data,
            train_examples=self(data.train_examples),
            test_examples=self(data.test_examples),
            images=None,
            frequencies=None,
        )


def second_moments(examples: torch.Tensor) -> torch.Tensor:
    """Σ x xᵀ over examples that are scaled to ‖x‖₂ ≤ 1; private.

    An example that is not finite counts as zero.

    Args:
        examples: one row an example.

    Returns:
        A symmetric matrix in double precision. One record changes its upper triangle by at most 1
        in ℓ2.
    """
    inputs = examples.shape[1]
    total = torch.zeros(inputs, inputs, dtype=torch.float64, device=examples.device)
    for at in range(0, len(examples), _ROWS):
        scaled = _scaled(examples[at : at + _ROWS].double())
        total += scaled.T @ scaled
    return total


def _scaled(examples: torch.Tensor) -> torch.Tensor:
    norms = examples.norm(dim=1, keepdim=True)
    inside = examples / (norms * _ROUNDING).clamp_min(1.0)
    return torch.where(norms.isfinite(), inside, 0.0)
