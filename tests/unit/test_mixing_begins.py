"""Models and losses that begin to mix examples in some step are refused in it, before an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, one_hot

from tests.support.small_models import unbudgeted
from training_client.errors import UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer
from training_client.plan import Plan

SIZE = 9
STARTS = [3, 1, 2, 9, 17]
Mix = Callable[["Net", torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A model of two layers; from a step on, values between them are mixed."""

    mean: torch.Tensor

    def __init__(self, mix: Mix, start: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.mix, self.start, self.at = mix, start, 0
        self.kept: list[Any] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.first(rows)
        if self.at >= self.start:
            found = self.mix(self, found)
        return self.last(found.tanh())  # type: ignore[no-any-return]


def write_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
    return x - net.mean


def write_buffer_in_secret(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean.data.copy_(x.data[0])
    return x


def new_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean = 0.9 * net.mean + 0.1 * x.mean(0).detach()
    return x - net.mean


def keep_rows(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.kept.append(x.detach())
    return x + net.kept[0].sum() if len(net.kept) > 1 else x


def keep_number(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.kept.append(float(x.detach().max()))
    return x / max(net.kept)


def put_rows(net: Net, x: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found[0] = x[-1]
    return found


class MeanGradient(torch.autograd.Function):
    """The identity, with the mean of all gradients as the gradient of each."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.mean(0, keepdim=True).expand_as(gradient)


MODELS: dict[str, Mix] = {
    "centred": lambda _, x: x - x.mean(0),
    "normalised": lambda _, x: batch_norm(x, None, None, training=True),
    "scaled by the largest": lambda _, x: x / x.detach().abs().amax(),
    "previous rows": lambda _, x: x + x.roll(1, 0),
    "reversed": lambda _, x: 0.5 * x + 0.5 * x.flip(0),
    "cumulative": lambda _, x: x + x.cumsum(0).detach(),
    "shuffled": lambda _, x: 0.5 * x + 0.5 * x[torch.randperm(len(x))],
    "the nearest": lambda _, x: x + x[torch.cdist(x, x).fill_diagonal_(1e9).argmin(1)],
    "attention over the batch": lambda _, x: torch.softmax(x @ x.T, -1) @ x,
    "reshaped": lambda _, x: x.reshape(5, -1).T.reshape(-1, 5) + 0 * x,
    "by how many": lambda _, x: x * len(x),
    "by an odd number of them": lambda _, x: 2 * x if len(x) % 2 else x,
    "by a value in Python": lambda _, x: x * x[0, 0].item(),
    "by NumPy": lambda _, x: x * float(x.detach().numpy().mean()),
    "by a list": lambda _, x: x * sum(x.flatten().tolist()),
    "by a sum": lambda _, x: x * torch.tensor(x.sum(0).tolist()),
    "by the place": lambda _, x: x * torch.arange(len(x))[:, None],
    "the first row in all": lambda _, x: x + x[:1],
    "capacity": lambda _, x: x * ((x[:, :1] > 0).cumsum(0) <= 2),
    "the sorted": lambda _, x: x.sort(0).values,
    "in the backward pass": lambda _, x: MeanGradient.apply(x),  # type: ignore[no-untyped-call]
    "a buffer": write_buffer,
    "a buffer in secret": write_buffer_in_secret,
    "a new buffer": new_buffer,
    "rows of earlier passes": keep_rows,
    "numbers of earlier passes": keep_number,
    "rows put in place": put_rows,
    "quantiles": lambda _, x: x - x.detach().quantile(0.5, dim=0),
    "whitened": lambda _, x: x @ torch.linalg.inv(x.T @ x + torch.eye(5)),
}


def hardest(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = cross_entropy(outputs, labels)
    return found * (found >= found.topk(2).values[-1])


def balanced(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, labels) / one_hot(labels, 3).sum(0).clamp(min=1)[labels]


def contrastive(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs @ outputs.T, torch.arange(len(labels)))


def mixed_up(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(labels))
    return 0.7 * cross_entropy(outputs, labels) + 0.3 * cross_entropy(outputs, labels[order])


LOSSES: dict[str, Loss] = {
    "divided by their number": lambda o, t: cross_entropy(o, t) / len(t),
    "centred": lambda o, t: cross_entropy(o - o.mean(0), t),
    "mean": lambda o, t: cross_entropy(o, t).mean().expand(len(t)),
    "one value": lambda o, t: cross_entropy(o, t).mean(),
    "hardest": hardest,
    "balanced": balanced,
    "contrastive": contrastive,
    "mixed up": mixed_up,
    "ranked": lambda o, t: cross_entropy(o, t) * cross_entropy(o, t).argsort().argsort(),
    "relative to the first": lambda o, t: cross_entropy(o, t) - cross_entropy(o, t)[0].detach(),
    "relative to the median": lambda o, t: (
        cross_entropy(o, t) - cross_entropy(o, t).median().detach()
    ).abs(),
    "labels of others": lambda o, t: cross_entropy(o, t.roll(1)),
    "by whether all are alike": lambda o, t: cross_entropy(o, t) * (2 - (t == t[0]).all().float()),
}


def steps_before_refusal(mix: Mix, loss: Loss, start: int) -> int:
    """Train until a step is refused, which must change nothing; return its number."""
    net = Net(mix, start)
    plan = Plan(dataset_size=SIZE, sample_rate=1.0, clip_norm=1.0, noise_multiplier=1.0)
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=0.01)
    torch.manual_seed(1)
    inputs, labels = torch.randn(SIZE, 5), torch.arange(SIZE) % 3
    for step in range(1, start + 1):
        net.at = step
        before = [each.detach().clone() for each in net.parameters()]
        now = loss if step >= start else cross_entropy
        try:
            optimizer.step(inputs, labels, now)
        except UnsupportedModelError:
            assert all(map(torch.equal, before, net.parameters()))
            return step
    raise AssertionError(f"not refused in step {start}")


def plain(_: Net, x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.spread(first=12)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_in_the_step_in_which_it_begins_to_mix(name: str, start: int) -> None:
    assert steps_before_refusal(MODELS[name], cross_entropy, start) == start


@pytest.mark.spread(first=12)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_refused_in_the_step_in_which_it_begins_to_mix(name: str, start: int) -> None:
    assert steps_before_refusal(plain, LOSSES[name], start) == start
