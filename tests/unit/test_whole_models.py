"""Models whose layers do not show their gradients: the model is run on each example alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.support.clipped_sums import clipped_rows, per_example
from tests.support.small_models import Scaled, Uses, batch, model, sum_clipped
from training_client.errors import UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.private_step import Clipper, Loss, Transform
from training_client.testing import clipped_sum

Case = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]
SIZE = 7


class Own(nn.Module):
    """A model of a parameter that is a single number, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(0.7)), nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows.float()) * self.scale
        return found


def rows() -> torch.Tensor:
    return batch(SIZE)[0]


def sequences() -> torch.Tensor:
    return torch.randn(SIZE, 5, 6, dtype=torch.float64)


def tokens() -> torch.Tensor:
    return torch.randint(0, 9, (SIZE, 6))


def attention_of_positions_first() -> nn.Module:
    found = Uses(
        lambda m, x: m.last(m.inner(*[x.transpose(0, 1)] * 3)[0].mean(0)),
        inner=nn.MultiheadAttention(6, 2), last=nn.Linear(6, 4),
    )  # fmt: skip
    return found.double()


WHOLE: dict[str, Case] = {
    "position ids without a dimension for examples": (
        lambda: Uses(
            lambda m, x: m.last((m.words(x) + m.places(torch.arange(x.shape[1]))).mean(1)),
            words=nn.Embedding(9, 5), places=nn.Embedding(6, 5), last=nn.Linear(5, 4),
        ).double(),
        tokens,
        r"layer places \(Embedding.* applied to 6 rows, of 3 examples.*position ids",
    ),
    "offsets of bags": (
        lambda: Uses(
            lambda m, x: m.layer(x.flatten(), torch.arange(len(x)) * x.shape[1]),
            layer=nn.EmbeddingBag(9, 4, mode="sum"),
        ).double(),
        tokens,
        r"layer layer \(EmbeddingBag.*pad the bags",
    ),
    "a maximum of bags": (
        lambda: nn.Sequential(nn.EmbeddingBag(9, 6, mode="max"), nn.Linear(6, 4)).double(),
        tokens,
        r"layer 0 \(EmbeddingBag.*mode='sum' or 'mean'",
    ),
    "a parameter outside of its layer": (
        lambda: Uses(
            lambda m, x: linear(m.layer(x), m.layer.weight), layer=nn.Linear(6, 6)
        ).double(),
        rows,
        r"parameter weight of shape \(6, 6\) of layer layer \(Linear\) do not add up",
    ),
    "a layer that is never called": (
        lambda: Uses(
            lambda m, x: m.last(linear(x, m.layer.weight)),
            layer=nn.Linear(6, 5, bias=False), last=nn.Linear(5, 4),
        ).double(),
        rows,
        r"weight .*of layer layer \(Linear\) takes no part in the loss, or not by an ordinary call",
    ),
    "more rows than examples": (  # each row of an example would count as an example
        lambda: Uses(
            lambda m, x: m.layer(x.reshape(-1, 3)).reshape(len(x), -1), layer=nn.Linear(3, 4)
        ).double(),
        rows,
        r"layer layer \(Linear.* is applied to 6 rows, of 3 examples",
    ),
    "examples in the second dimension": (
        lambda: Uses(
            lambda m, x: m.layer(x.T[:, :, None]).sum(0), layer=nn.Linear(1, 4)
        ).double(),
        rows,
        "is applied to 6 rows|is not given one row for each example",
    ),
    "groups of examples by their targets": (
        lambda: Uses(
            lambda m, x: m.layer(x, x.argmax(1) % 4).output[:, None].expand(-1, 4) * x[:, :4],
            layer=nn.AdaptiveLogSoftmaxWithLoss(6, 4, [2]),
        ).double(),
        rows,
        r"layer layer \(AdaptiveLogSoftmaxWithLoss\) .*: call its log_prob",
    ),
    "attention, batch second": (
        attention_of_positions_first,
        sequences,
        r"layer inner \(MultiheadAttention.*use batch_first=True",
    ),
}  # fmt: skip


def mean_over_examples(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs - outputs.mean(0), labels)


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_its_layers_do_not_show_is_clipped_as_a_whole(name: str) -> None:
    make, draw, reason = WHOLE[name]
    torch.manual_seed(3)
    net, examples, labels = make(), draw(), torch.arange(SIZE) % 4
    transform = Transform(0.3)
    with pytest.warns(UserWarning, match=rf"{reason}.* run on each example alone"):
        found = clipped_sum(net, examples, labels, cross_entropy, 0.3)
    expected = clipped_rows(net, transform, examples, labels, cross_entropy).sum(0)
    torch.testing.assert_close(
        torch.cat([each.flatten() for each in found]), expected, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("name", ["more rows than examples", "attention, batch second"])
def test_a_model_as_a_whole_sees_no_other_example(name: str) -> None:
    """An example is a batch of its own, so that a loss that mixes has nothing to mix."""
    make, draw, _ = WHOLE[name]
    net, examples, labels = make(), draw(), torch.arange(SIZE) % 4
    with pytest.warns(UserWarning, match="alone"):
        sums = [
            clipped_sum(net, examples[:n], labels[:n], mean_over_examples, 0.1)
            for n in (SIZE - 1, SIZE)
        ]
    change = torch.cat([(a - b).flatten() for a, b in zip(*sums, strict=True)])
    assert change.norm() <= 0.1


def test_random_numbers_beside_own_parameters_are_those_of_each_example() -> None:
    net = nn.Sequential(
        Scaled(lambda m, x: nn.functional.dropout(x * m.scale, 0.5, m.training)), model()
    )
    examples, labels = rows()[:1].expand(64, -1), torch.zeros(64, dtype=torch.long)
    clipper = Clipper(net)
    with pytest.warns(UserWarning, match=r"Scaled\) draws random numbers.*alone"):
        sums, _ = sum_clipped(clipper, examples, labels, cross_entropy, Transform(1e-3))
    total = torch.cat([each.flatten() for each in sums]).norm()
    assert (
        1e-3 * 8 < total < 1e-3 * 63.9
    )  # equal examples, and other draws: neither 0 nor all equal


def test_a_single_number_is_trained_as_part_of_its_model() -> None:
    net, examples, labels = Own(), rows(), torch.arange(SIZE) % 4
    found = clipped_sum(net, examples, labels, cross_entropy, 0.3)
    assert found[0].shape == ()
    gradients = torch.cat(
        [each.reshape(SIZE, -1) for each in per_example(net, examples, labels)], 1
    ).double()
    expected = (gradients * (0.3 / gradients.norm(dim=1, keepdim=True)).clamp_max(1)).sum(0)
    torch.testing.assert_close(
        torch.cat([each.flatten() for each in found]).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_layers_that_overwrite_their_inputs_train_if_nothing_else_needs_these() -> None:
    labels = torch.arange(SIZE) % 4
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)).double()
    expected = clipped_rows(net, Transform(0.3), rows(), labels, cross_entropy).sum(0)
    found = clipped_sum(net, rows(), labels, cross_entropy, 0.3)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)
    needed = Uses(
        lambda m, x: m.last(m.first(h := m.before(x)) + torch.relu_(h.detach()[:, :4])),
        before=nn.Linear(6, 6), first=nn.Linear(6, 4), last=nn.Linear(4, 4),
    ).double()  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        clipped_sum(needed, rows(), labels, cross_entropy, 0.3)


def test_batch_norm_trains_with_frozen_statistics_only() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    with pytest.raises(
        UnsupportedModelError, match=r"BatchNorm1d\) normalises over the batch.*eval"
    ):
        Clipper(net)
    net[1].eval()
    labels = torch.arange(SIZE) % 4
    expected = clipped_rows(net, Transform(0.3), rows(), labels, cross_entropy).sum(0)
    clipper = Clipper(net)
    sums, _ = sum_clipped(clipper, rows(), labels, cross_entropy, Transform(0.3))
    torch.testing.assert_close(torch.cat([each.flatten() for each in sums]), expected)
    net.train()
    with pytest.raises(UnsupportedModelError, match="normalises over the batch"):
        sum_clipped(clipper, rows(), labels, cross_entropy, Transform(0.3))


def test_a_forced_path_of_the_engine_is_not_replaced() -> None:
    make, draw, reason = WHOLE["a parameter outside of its layer"]
    with pytest.raises(UnsupportedModelError, match=reason):
        clipped_sum(make(), draw(), torch.arange(SIZE) % 4, cross_entropy, 0.3, path="held")


def test_a_model_that_reads_its_examples_in_python_is_refused_with_both_reasons() -> None:
    net = Uses(
        lambda m, x: linear(m.layer(x), m.layer.weight) * (2.0 if x.sum().item() > 0 else 1.0),
        layer=nn.Linear(6, 6),
    ).double()
    with pytest.raises(UnsupportedModelError, match=r"depends on values of examples|vectorised"):
        clipped_sum(net, rows(), torch.arange(SIZE) % 4, cross_entropy, 0.3)


@pytest.mark.slow
def test_layers_that_random_numbers_leave_out_of_a_step_train_in_others() -> None:
    """Their gradients are 0 in the steps that leave them out (stochastic depth of a batch)."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        kept = [each for each in (m.one, m.two, m.three) if torch.rand(()) < 0.5]
        drawn.append(tuple(each in kept for each in (m.one, m.two, m.three)))
        for layer in kept:
            x = x + layer(x).tanh()
        return m.last(x)  # type: ignore[no-any-return]

    drawn: list[tuple[bool, ...]] = []
    torch.manual_seed(0)
    net = Uses(
        forward, one=nn.Linear(6, 6), two=nn.Linear(6, 6), three=nn.Linear(6, 6),
        last=nn.Linear(6, 4),
    ).double()  # fmt: skip
    clipper, labels = Clipper(net), torch.arange(SIZE) % 4
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        sums, _ = sum_clipped(clipper, rows(), labels, cross_entropy, Transform(0.3))
        found = drawn[-1]
        seen.add(found)
        assert [bool(each.any()) for each in sums[:6:2]] == list(found)
    assert len(seen) > 3
    torch.manual_seed(7)
    exact = clipped_rows(net, Transform(0.3), rows()[:1], labels[:1], cross_entropy)
    torch.manual_seed(7)
    sums, _ = sum_clipped(clipper, rows()[:1], labels[:1], cross_entropy, Transform(0.3))
    torch.testing.assert_close(torch.cat([each.flatten() for each in sums]), exact[0])


def test_an_embedding_of_one_row_with_all_examples_is_not_taken_for_shared() -> None:
    torch.manual_seed(0)
    net = Uses(
        lambda m, x: m.last(m.words(x[None]).squeeze(0)), words=nn.Embedding(9, 5),
        last=nn.Linear(5, 4),
    ).double()  # fmt: skip
    words, labels = torch.randint(9, (SIZE,)), torch.arange(SIZE) % 4
    with pytest.warns(UserWarning, match=r"words \(Embedding\) is given one row that has values"):
        found = clipped_sum(net, words, labels, cross_entropy, 0.3)
    expected = clipped_rows(net, Transform(0.3), words, labels, cross_entropy).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)


def first_rows(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Add what the program kept of the first batch that it ever saw."""
    if not hasattr(net, "bank"):
        net.bank = x.detach()
    return x + net.bank.mean()


def last_rows(net: Any, x: torch.Tensor) -> torch.Tensor:
    old, net.bank = getattr(net, "bank", None), x.detach()
    return x if old is None else x + old.mean()


def written_rows(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.total = getattr(net, "total", torch.zeros((), dtype=x.dtype))
    net.total += x.detach().sum()
    return x + net.total


BATCH = torch.randn(SIZE, 5, 6, dtype=torch.float64)
LEAKS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Loss]] = {
    "the batch itself in the model": (lambda _, x: x + BATCH.mean(), cross_entropy),
    "the batch itself in the loss": (
        lambda _, x: x, lambda o, t: cross_entropy(o, t) * BATCH.sum(),
    ),
    "a view of the batch": (lambda _, x: x + BATCH[1:].mean(), cross_entropy),
    "rows of the first batch": (first_rows, cross_entropy),
    "rows of the last batch": (last_rows, cross_entropy),
    "rows that were added up": (written_rows, cross_entropy),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKS)
def test_no_other_example_is_in_reach_of_a_model_as_a_whole(name: str) -> None:
    """Attention with examples second is run as a whole from the start: nothing is proved before."""
    mix, loss = LEAKS[name]
    net = Uses(
        lambda m, x: m.last(m.inner(*[mix(m, x).transpose(0, 1)] * 3)[0].mean(0)),
        inner=nn.MultiheadAttention(6, 2), last=nn.Linear(6, 4),
    ).double()  # fmt: skip
    clipper, labels = Clipper(net), torch.arange(SIZE) % 4

    def train() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(3):
                clipper.clip(BATCH, labels, loss, Transform(0.1))

    with pytest.raises(UnsupportedModelError, match=r"depend on other examples|escaped|outlives"):
        train()
