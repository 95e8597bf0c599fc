"""DP-PCA: what one record changes, how much noise there is, and that both are what is charged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training_client.errors import DataError
from training_client.lab import pca
from training_client.lab.data import Dataset
from training_client.lab.pca import PrivatePca, Projection, second_moments
from training_client.private_step.noise import FreshGenerator


def examples(rows: int = 200, inputs: int = 12, *, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return scale * torch.randn(rows, inputs, generator=generator)


def largest_change(data: torch.Tensor) -> float:
    """ℓ2 norm of what the removal of a record changes in the upper triangle, at most."""
    whole = second_moments(data)
    changes = [
        torch.triu(whole - second_moments(torch.cat([data[:one], data[one + 1 :]])))
        for one in range(len(data))
    ]
    return max(float(change.norm()) for change in changes)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e20, 1e30])
def test_a_record_changes_the_upper_triangle_by_at_most_one(scale: float) -> None:
    assert largest_change(examples(20, scale=scale)) <= 1 + 1e-9


def test_the_bound_is_reached_by_a_record_along_an_axis() -> None:
    data = torch.cat([examples(5), 7 * torch.eye(12)[:1]])
    assert largest_change(data) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_examples_count_as_zero(value: float) -> None:
    data = examples(5)
    data[3, 1] = value
    kept = torch.cat([data[:3], data[4:]])
    assert torch.equal(second_moments(data), second_moments(kept))


def released(monkeypatch: pytest.MonkeyPatch, plan: PrivatePca, data: torch.Tensor) -> Any:
    """The matrix that `fit` takes eigenvectors of."""
    seen = []
    genuine = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (seen.append(m), genuine(m))[1])
    plan.fit(data)
    monkeypatch.undo()
    return seen[0]


def test_the_noise_is_as_charged_symmetric_and_on_the_diagonal_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, data = PrivatePca(3, 5.0), examples(50, 150)
    matrix = released(monkeypatch, plan, data)
    assert plan.mechanism() == {"kind": "gaussian", "noise_multiplier": 5.0}
    assert torch.equal(matrix, matrix.T)
    noise = matrix - second_moments(data)
    above = noise[torch.triu_indices(150, 150, 1).unbind()]
    assert float(above.std()) == pytest.approx(5.0, rel=0.03)
    assert float(above.mean()) == pytest.approx(0.0, abs=0.2)
    assert float(noise.diagonal().std()) == pytest.approx(5.0, rel=0.25)
    rows, columns = noise[0, 1:], noise[1, 2:]
    assert abs(float(torch.corrcoef(torch.stack([rows[1:], columns]))[0, 1])) < 0.4


def test_noise_is_fresh_and_may_be_given() -> None:
    data, plan = examples(), PrivatePca(4, 10.0)
    assert not torch.equal(plan.fit(data).directions, plan.fit(data).directions)
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    once, again = (plan.fit(data, each).directions for each in generators)
    assert torch.equal(once, again)
    assert FreshGenerator(data.device).initial_seed() != 1


def test_with_little_noise_it_is_ordinary_pca() -> None:
    axes = torch.linalg.qr(examples(12, 12)).Q
    weights = torch.tensor([0.9, 0.5, 0.2] + [0.01] * 9)
    data = examples(3000) * weights @ axes.T / 10
    found = PrivatePca(2, 1e-6).fit(data).directions
    assert found.shape == (12, 2)
    assert torch.allclose(found.T @ found, torch.eye(2), atol=1e-5)
    assert torch.allclose((found.T @ axes[:, :2]).abs(), torch.eye(2), atol=0.1)


def test_a_data_set_is_projected_whole() -> None:
    rows = examples(10)
    labels = torch.zeros(10, dtype=torch.long)
    data = Dataset(rows, labels, rows[:4], labels[:4], 2, images=(1, 3, 4))
    projection = Projection(torch.eye(12)[:, :5])
    found = projection.project_dataset(data)
    assert (found.inputs, found.classes, found.images) == (5, 2, None)
    assert torch.equal(found.test_examples, rows[:4, :5])
    assert torch.equal(found.train_labels, labels)


def test_inputs_that_cannot_be_projected_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="--pca 20 is not possible with 12 inputs"):
        PrivatePca(20, 1.0).fit(examples())
    monkeypatch.setattr(pca, "INPUTS_MAX", 8)
    with pytest.raises(DataError, match="at most 8 inputs"):
        PrivatePca(2, 1.0).fit(examples())


@pytest.mark.parametrize(
    ("components", "noise"), [(0, 1.0), (5, 0.0), (5, -1.0), (5, float("nan"))]
)
def test_a_projection_without_privacy_is_refused(components: int, noise: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrivatePca(components, noise)
