"""Rates of parameter groups under schedules: the plan's, PyTorch's, and rates set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.optimizer_cases import QUIET
from tests.support.small_models import batch, model, unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import NoisyTorchOptimizer
from training_client.plan import Plan, Schedule

pytestmark = pytest.mark.usefixtures("quiet")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with two groups, of which the first has the last parameters."""
    head, rest = parameters[2:], parameters[:2]
    return torch.optim.Adam([{"params": head, "lr": 0.1}, {"params": rest}], lr=0.02)


def optimizer_of(make: Make = in_groups, schedule: Schedule | None = None) -> NoisyTorchOptimizer:
    size = QUIET.dataset_size
    plan = Plan(size, 0.5, QUIET.clip_norm, QUIET.noise_multiplier, learning_rate_schedule=schedule)
    return NoisyTorchOptimizer(model(), unbudgeted(plan), make)


def rates(optimizer: NoisyTorchOptimizer) -> list[float]:
    return [group["lr"] for group in optimizer.torch_optimizer.param_groups]


def step(optimizer: NoisyTorchOptimizer) -> None:
    optimizer.step(*batch(), cross_entropy)


def test_a_plan_s_schedule_scales_the_rate_of_each_group_for_its_step() -> None:
    """It used to overwrite all rates with the first, for good."""
    optimizer = optimizer_of(schedule=Schedule.by_steps([(2, 0.5), (1, 0.25)]))
    used: list[list[float]] = []
    optimizer.torch_optimizer.register_step_pre_hook(lambda *_: used.append(rates(optimizer)))
    for _ in range(3):
        step(optimizer)
        assert rates(optimizer) == [0.1, 0.02]
    assert used == [[0.05, 0.01], [0.05, 0.01], [0.025, 0.005]]


def test_a_rate_that_is_set_keeps_the_groups_in_proportion() -> None:
    optimizer = optimizer_of()
    for rate in (0.2, 0.0, 0.05):  # a warm-up sets 0
        optimizer.learning_rate = rate
        assert rates(optimizer) == pytest.approx([rate, rate / 5])
    unknown = optimizer_of(lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.0},
                                                      {"params": p[2:]}], lr=0.1))  # fmt: skip
    with pytest.raises(ValueError, match="no ratio to it: set torch_optimizer"):
        unknown.learning_rate = 0.1
    single = optimizer_of(lambda p: torch.optim.SGD(p, lr=0.0))
    single.learning_rate = 0.1
    assert rates(single) == [0.1]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.02], total_steps=10),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.filterwarnings("error")  # of a scheduler whose optimizer seems to make no step
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_pytorch_change_the_rates_as_without_privacy(name: str) -> None:
    """Also after the run is resumed from a checkpoint of both."""
    plain, optimizer = model(), optimizer_of()
    reference = in_groups(list(plain.parameters()))
    ours, theirs = (SCHEDULERS[name](each) for each in (optimizer.torch_optimizer, reference))
    for number in range(6):
        if number == 3:
            kept, left = optimizer.state_dict(), ours.state_dict()
            resumed = optimizer_of()
            for own, other in zip(resumed.parameters, optimizer.parameters, strict=True):
                own.data.copy_(other)
            optimizer, ours = resumed, SCHEDULERS[name](resumed.torch_optimizer)
            optimizer.load_state_dict(kept)
            ours.load_state_dict(left)
        step(optimizer)
        reference.zero_grad()
        examples, labels = batch()
        (cross_entropy(plain(examples), labels).sum() / 32).backward()
        reference.step()
        ours.step()
        theirs.step()
        assert rates(optimizer) == [group["lr"] for group in reference.param_groups]
    for own, other in zip(optimizer.parameters, plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-6)
