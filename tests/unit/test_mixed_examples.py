"""Models and losses that mix examples only in some batches, and layers with arguments for all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from training_client.errors import UnsupportedModelError
from training_client.private_step.token_gradients import TokenGradients
from training_client.testing import clipped_sum


def class_losses(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, labels, reduction="none")


def balanced_losses(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(labels, minlength=2)
    weights = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
    return class_losses(outputs, labels) * weights[labels]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return (
        sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5
    )


def test_weights_of_the_batchs_classes_are_refused_also_if_the_data_are_sorted() -> None:
    inputs, labels = torch.randn(64, 5), torch.arange(64) // 60
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(nn.Linear(5, 2), inputs, labels, balanced_losses, 1.0)


class Centred(nn.Module):
    """Subtracts a running mean that it keeps where no one looks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean = nn.Linear(5, 2), torch.zeros(5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * rows.mean(0).detach()
        found: torch.Tensor = self.inner(rows - self.mean)
        return found


def test_examples_are_compared_also_if_each_is_a_physical_batch() -> None:
    inputs, labels = torch.randn(8, 5), torch.arange(8) % 2
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(Centred(), inputs, labels, class_losses, 1.0, physical_batch_size=1)


class Hidden(nn.Module):
    """Writes a statistic of the batch into a buffer, past PyTorch's count of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 2)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(rows.mean(0), alpha=0.1)  # type: ignore[union-attr]
        found: torch.Tensor = self.inner(rows)
        return found


def test_a_buffer_that_is_changed_in_secret_is_found() -> None:
    with pytest.raises(UnsupportedModelError, match="changes the model's buffers"):
        clipped_sum(Hidden(), torch.randn(8, 5), torch.arange(8) % 2, class_losses, 1.0)


class Scaled(nn.Module):
    """A layer without a rule of its own: it is run again for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (rows + other) * self.scale


class WithTable(nn.Module):
    """Adds a table of positions, which has as many rows as some batches have examples."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.register_buffer("table", torch.randn(positions, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scaled(rows, self.table).mean(1)
        return found


def test_an_argument_for_all_examples_may_have_as_many_rows_as_the_batch() -> None:
    torch.manual_seed(0)
    model, inputs, labels = WithTable(12), torch.randn(13, 12, 8), torch.arange(13) % 8
    sums = [clipped_sum(model, inputs[:n], labels[:n], class_losses, 0.01) for n in (11, 12, 13)]
    assert distance(sums[0], sums[1]) <= 0.01
    assert distance(sums[1], sums[2]) <= 0.01


class Spread(nn.Module):
    """Gives a layer the mean of the batch, as an argument for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scaled(rows, -rows.detach().mean(0))
        return found


def test_an_argument_for_all_examples_that_depends_on_them_is_refused() -> None:
    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.sum(1) - targets).abs()

    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(Spread(), torch.randn(16, 8), torch.full((16,), 1e4), losses, 1.0)


def test_short_integers_as_tokens_do_not_overflow() -> None:
    """The key of a token of an example is token × examples + example, beyond 32 bits here."""
    examples, vocabulary = 3, 2**30
    tokens = torch.tensor([[vocabulary - 1], [5], [vocabulary - 2]], dtype=torch.int32)
    gradients = torch.ones(examples, 1, 2)
    one, other = (
        TokenGradients.from_output_gradients(each, gradients, vocabulary)
        for each in (tokens, tokens.long())
    )
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.examples, other.examples)
