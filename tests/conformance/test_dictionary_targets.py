"""Targets as a dictionary of tensors: the loss gets its rows, and the step is that of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.optimizer_cases import PLAN, build_optimizer
from tests.support.small_models import batch, model
from training_client.errors import DataError, UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer
from training_client.testing import clipped_sum


def weighted(outputs: torch.Tensor, targets: dict[str, Any]) -> torch.Tensor:
    """Return each example's loss times a weight of its own and a number of the batch."""
    losses = cross_entropy(outputs, targets["label"])
    found: torch.Tensor = losses * targets["weights"][:, 0] * targets["scale"]
    return found


def with_weights(labels: torch.Tensor) -> dict[str, Any]:
    return {"label": labels, "weights": torch.ones(len(labels), 2).double() / 2, "scale": 2.0}


@pytest.mark.spread(first=5)
@pytest.mark.parametrize("physical_batch_size", [None, 3])
@pytest.mark.parametrize(
    ("name", "state", "options"),
    [
        ("dp_adamw", "privatised", {}),
        ("adadp", "public", {"threshold": 0.0}),
        ("adadp", "public", {"threshold": 0.0, "example_squares": True}),
        ("pi_adam", "raw", {}),
        ("adadp", "raw", {"example_squares": True}),
    ],
)
def test_a_step_is_that_of_targets_in_one_tensor(
    name: str, state: str, options: dict[str, Any], physical_batch_size: int | None
) -> None:
    examples, labels = batch(16)

    def steps(in_dictionary: bool) -> list[torch.Tensor]:
        """Return the parameters after three steps, of which one has no example."""
        torch.manual_seed(2)
        targets: Any = with_weights(labels) if in_dictionary else labels
        optimizer: PrivateOptimizer = build_optimizer(
            name, model(), PLAN, state=state, generator=torch.Generator().manual_seed(1),
            public=(examples, targets), physical_batch_size=physical_batch_size, **options,
        )  # fmt: skip
        loss: Any = weighted if in_dictionary else cross_entropy
        losses = []
        for size in (7, 0, 5):
            part = with_weights(labels[:size]) if in_dictionary else labels[:size]
            torch.manual_seed(size)
            losses.append(optimizer.step(examples[:size], part, loss))
        return [torch.tensor(losses), *optimizer.parameters]

    for one, other in zip(steps(True), steps(False), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=0)


def test_the_clipped_sum_has_them_too() -> None:
    examples, labels = batch(6)
    sums = clipped_sum(model(), examples, with_weights(labels), weighted, 0.5)
    for one, other in zip(
        sums, clipped_sum(model(), examples, labels, cross_entropy, 0.5), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([0, 1, 2, 3], "targets as a tensor or a dictionary of tensors, got list"),
        ({"label": torch.zeros(4), "weights": torch.ones(3, 2)}, r"tensors of \[3, 4\] rows"),
        ({"label": torch.zeros(5).long(), "weights": torch.ones(5, 2), "scale": 1.0}, "5 targets"),
        ({"scale": 1.0}, "expected examples on|one example per row"),
    ],
)
def test_targets_without_a_row_for_each_example_are_refused(targets: Any, message: str) -> None:
    optimizer = build_optimizer("dp_sgd", model(), PLAN)
    with pytest.raises(DataError, match=message):
        optimizer.step(batch(4)[0], targets, weighted)


def test_targets_of_another_width_than_before_are_refused() -> None:
    """One record would have changed how the targets of others are padded."""
    optimizer, (examples, labels) = build_optimizer("dp_sgd", model(), PLAN), batch(4)
    optimizer.step(examples, with_weights(labels), weighted)
    with pytest.raises(DataError, match="and one number and 2 in earlier ones"):
        optimizer.step(examples, with_weights(labels) | {"weights": torch.ones(4, 3)}, weighted)


def test_a_loss_that_mixes_the_rows_of_a_dictionary_is_refused() -> None:
    """In a batch that is sorted by its labels, so that its first rows are alike."""

    def balanced(outputs: torch.Tensor, targets: dict[str, Any]) -> torch.Tensor:
        """Return losses weighted by how rare a label is in the batch."""
        counts = targets["label"].bincount(minlength=4)[targets["label"]]
        return weighted(outputs, targets) / counts

    examples, labels = batch(32)
    optimizer = build_optimizer("dp_sgd", model(), PLAN)
    with pytest.raises(UnsupportedModelError):
        optimizer.step(examples, with_weights(labels.sort()[0]), balanced)
