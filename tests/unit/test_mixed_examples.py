"""Models and losses that mix examples only in some batches, and layers with arguments for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence

from tests.support.clipped_sums import norm_of
from tests.support.small_models import Uses
from training_client.errors import UnsupportedModelError
from training_client.private_step import Clipper, Transform
from training_client.private_step.gradients.token_gradients import TokenGradients
from training_client.testing import clipped_sum


def class_losses(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, labels, reduction="none")


def balanced_losses(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(labels, minlength=2)
    weights = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
    return class_losses(outputs, labels) * weights[labels]


def test_weights_of_the_batchs_classes_are_refused_also_if_the_data_are_sorted() -> None:
    inputs, labels = torch.randn(64, 5), torch.arange(64) // 60
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(nn.Linear(5, 2), inputs, labels, balanced_losses, 1.0)


def subtract_running_mean(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """Subtract a running mean that the model keeps where no one looks."""
    net.mean = 0.9 * getattr(net, "mean", 0.0) + 0.1 * rows.mean(0).detach()
    return net.inner(rows - net.mean)  # type: ignore[no-any-return]


def test_examples_are_compared_also_if_each_is_a_physical_batch() -> None:
    net = Uses(subtract_running_mean, inner=nn.Linear(5, 2))
    inputs, labels = torch.randn(8, 5), torch.arange(8) % 2
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(net, inputs, labels, class_losses, 1.0, physical_batch_size=1)


def write_in_secret(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """Write a statistic of the batch into a buffer or parameter, unseen by PyTorch's count."""
    net.mean.data.mul_(0.9).add_(rows.mean(0), alpha=0.1)
    return net.inner(rows)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_parameter", [False, True])
def test_state_that_is_changed_in_secret_is_found(is_parameter: bool) -> None:
    net = Uses(write_in_secret, inner=nn.Linear(5, 2))
    if is_parameter:
        net.register_parameter("mean", nn.Parameter(torch.zeros(5), requires_grad=False))
    else:
        net.register_buffer("mean", torch.zeros(5))
    with pytest.raises(UnsupportedModelError, match=r"changes (buffer|parameter) mean .*the model"):
        clipped_sum(net, torch.randn(8, 5), torch.arange(8) % 2, class_losses, 1.0)


class Scaled(nn.Module):
    """A layer without a rule of its own: it is run again for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (rows + other) * self.scale


@pytest.mark.slow
def test_an_argument_for_all_examples_may_have_as_many_rows_as_the_batch() -> None:
    """A table of positions has as many rows as one of the batches has examples."""
    torch.manual_seed(0)
    table = torch.randn(12, 8)
    net = Uses(lambda m, rows: m.scaled(rows, table).mean(1), scaled=Scaled())
    inputs, labels = torch.randn(13, 12, 8), torch.arange(13) % 8
    sums = [clipped_sum(net, inputs[:n], labels[:n], class_losses, 0.01) for n in (11, 12, 13)]
    for one, other in pairwise(sums):
        assert norm_of([a - b for a, b in zip(one, other, strict=True)]) <= 0.01


def test_an_argument_for_all_examples_that_depends_on_them_is_refused() -> None:
    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.sum(1) - targets).abs()

    net = Uses(lambda m, rows: m.scaled(rows, -rows.detach().mean(0)), scaled=Scaled())
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clipped_sum(net, torch.randn(16, 8), torch.full((16,), 1e4), losses, 1.0)


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


def wrapped(mix: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a model of two layers, the first of which is given what `mix` makes of the batch."""
    return Uses(
        lambda m, rows: m.last(m.first(mix(rows)).tanh()),
        first=nn.Linear(5, 5), last=nn.Linear(5, 3),
    )  # fmt: skip


def add_previous(rows: torch.Tensor) -> torch.Tensor:
    return rows + torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])


def add_all_previous(rows: torch.Tensor) -> torch.Tensor:
    return rows + rows.cumsum(0).detach()


def drop_beyond_capacity(rows: torch.Tensor) -> torch.Tensor:
    return rows * ((rows[:, :1] > 0).cumsum(0) <= 4)


@pytest.mark.parametrize("mix", [add_previous, add_all_previous, drop_beyond_capacity])
@pytest.mark.parametrize("size", [5, 12, 40])
def test_examples_that_depend_on_those_before_them_are_refused(
    mix: Callable[[torch.Tensor], torch.Tensor], size: int
) -> None:
    """The first of two examples depends on no other: the reverse order shows the dependence."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(size, 5), torch.arange(size) % 3
    inputs[:, 0].abs_()
    with pytest.raises(UnsupportedModelError, match="other examples"):
        clipped_sum(wrapped(mix), inputs, labels, class_losses, 1.0)


class OfLengths(nn.Module):
    """Packs sequences for an LSTM, sorted by length, or as somebody else sorted them."""

    def __init__(self, *, sorts: bool) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)
        self.sorts = sorts

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        order = torch.arange(len(rows))
        if self.sorts:
            order = lengths.sort(descending=True, stable=True).indices
        packed = pack_padded_sequence(rows[order], lengths[order], batch_first=True)
        _, (hidden, _) = self.recurrent(packed)
        found: torch.Tensor = self.last(hidden[-1][order.argsort()])
        return found


@pytest.mark.spread(first=2)
@pytest.mark.parametrize("seed", range(12))
def test_a_layer_that_gets_the_examples_sorted_is_refused(seed: int) -> None:
    """The layers would attribute their parts of a gradient to different examples."""
    torch.manual_seed(seed)
    batch = {"rows": torch.randn(12, 6, 5), "lengths": torch.randint(1, 7, (12,))}
    with pytest.raises(UnsupportedModelError, match=r"LSTM.*depend on other examples"):
        clipped_sum(OfLengths(sorts=True), batch, torch.arange(12) % 3, class_losses, 1.0)


def test_a_model_that_needs_sorted_examples_is_refused_with_the_way_out() -> None:
    batch = {"rows": torch.randn(6, 6, 5), "lengths": torch.arange(6, 0, -1)}
    with pytest.raises(UnsupportedModelError, match=r"in another order.*enforce_sorted=False"):
        clipped_sum(OfLengths(sorts=False), batch, torch.arange(6) % 3, class_losses, 1.0)


def mix_up(rows: torch.Tensor) -> torch.Tensor:
    return 0.5 * rows + 0.5 * rows[torch.randperm(len(rows))]


def mix_up_sometimes(rows: torch.Tensor) -> torch.Tensor:
    return 0.5 * rows + 0.5 * rows.flip(0) if torch.rand(()) < 0.5 else rows


@pytest.mark.spread(first=2)
@pytest.mark.parametrize("seed", range(6))
def test_examples_that_are_mixed_at_random_are_refused(seed: int) -> None:
    torch.manual_seed(seed)
    inputs, labels = torch.randn(12, 5), torch.arange(12) % 3
    with pytest.raises(UnsupportedModelError, match="other examples"):
        clipped_sum(wrapped(mix_up), inputs, labels, class_losses, 1.0)


def test_examples_that_are_mixed_now_and_then_are_refused_when_they_are() -> None:
    clipper = Clipper(wrapped(mix_up_sometimes))
    inputs, labels = torch.randn(12, 5), torch.arange(12) % 3
    found = []
    for seed in range(12):
        torch.manual_seed(seed)
        found.append(bool(torch.rand(()) < 0.5))
        torch.manual_seed(seed)
        with (
            pytest.raises(UnsupportedModelError, match=r"add in test_mixed_examples.*flip")
            if found[-1]
            else nullcontext()
        ):
            clipper.clip(inputs, labels, class_losses, Transform(1.0))
    assert set(found) == {True, False}


def hardest(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = class_losses(outputs, labels)
    return losses * (losses >= losses.topk(min(8, len(losses))).values[-1])


def weighted_from_eight_on(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return class_losses(outputs, labels) / torch.bincount(labels, minlength=3)[labels].clamp(min=8)


def centred_by_the_median(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - outputs[:, 0].median().detach()).square() + 0 * labels


@pytest.mark.parametrize("loss", [hardest, weighted_from_eight_on, centred_by_the_median])
@pytest.mark.parametrize("physical_batch_size", [None, 32])
def test_a_loss_that_depends_on_a_large_batch_only_is_refused(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], physical_batch_size: int | None
) -> None:
    """Two or four of its examples do not show it."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 5), torch.arange(64) // 22
    with pytest.raises(UnsupportedModelError, match="other examples"):
        clipped_sum(
            nn.Linear(5, 3), inputs, labels, loss, 1.0, physical_batch_size=physical_batch_size
        )


class RandomlyDropped(nn.Module):
    """Layers that draw random numbers in a way of their own when they are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(5, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.drop, self.last = nn.Dropout(), nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.recurrent(rows)[0]
        found = self.attention(found, found, found)[0].mean(1)
        return self.last(self.drop(found))  # type: ignore[no-any-return]


def test_the_check_of_losses_draws_the_random_numbers_of_the_step() -> None:
    torch.manual_seed(4)
    inputs, labels = torch.randn(40, 6, 5), torch.arange(40) % 3
    assert clipped_sum(RandomlyDropped(), inputs, labels, class_losses, 1.0)


def test_the_order_of_summation_does_not_depend_on_the_tokens() -> None:
    """The size of the gradients decides about the order if a last layer shares the table."""
    gradients = torch.ones(3, 4, 2)
    equal, other = (
        TokenGradients.from_output_gradients(tokens, gradients, 50, padding=1)
        for tokens in (torch.ones(3, 4, dtype=torch.long), torch.arange(12).view(3, 4))
    )
    assert equal.element_count == other.element_count == gradients.numel()
    assert equal.select(torch.tensor([True, False, True])).element_count == 2 * 4 * 2
    assert TokenGradients.merge([equal, other]).element_count == 2 * gradients.numel()
