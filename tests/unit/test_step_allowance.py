"""No private step without an allowance, each taken once, in one process that trains alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.process_groups import group_of_one
from tests.support.small_models import unbudgeted
from tests.support.stub_service import PLAN, linear_accountant, service, tiny_data
from training_client.budget import Budget, NoBudget
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, UnsupportedModelError
from training_client.lab import train as training
from training_client.lab.models import cross_entropy, mlp
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.optimizers.torch_optimizers import NoisyTorchOptimizer
from training_client.private_step import Clipper
from training_client.private_step.processes import single_process

FITS = 20


def budget() -> Budget:
    return Budget(service(linear_accountant), PLAN, epsilon=2.0, delta=1e-5, block=7)


def optimizer_of(allowance: Any, net: nn.Module | None = None) -> PrivateOptimizer:
    return make_optimizer("dp_sgd", mlp(5, 8, 2) if net is None else net, allowance)


def copies(net: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in net.parameters()]


def step(optimizer: PrivateOptimizer, loss: Any = cross_entropy) -> None:
    data = tiny_data()
    optimizer.expect_examples(10)
    optimizer.step(data.train_examples[:10], data.train_labels[:10], loss)


def fails(*_: object) -> torch.Tensor:
    raise MemoryError("a batch was too large")


@pytest.mark.slow
def test_a_custom_training_loop_makes_exactly_the_steps_that_fit() -> None:
    net, allowance = mlp(5, 8, 2), budget()
    optimizer = optimizer_of(allowance, net)
    for made in range(1, FITS + 1):
        step(optimizer)
        assert allowance.taken == optimizer.steps_made == made
    left = copies(net)
    for _ in range(2):
        with pytest.raises(BudgetExhaustedError, match="20 steps fit"):
            step(optimizer)
    assert all(map(torch.equal, left, net.parameters()))
    assert allowance.taken == FITS


@pytest.mark.slow
def test_no_step_is_taken_twice() -> None:
    """`train` takes each before its batch is drawn, and a step after `take` takes none.

    Nor does a second optimizer take a step of the same budget again.
    """
    allowance = budget()
    optimizer = optimizer_of(allowance)
    assert training.train(mlp(5, 8, 2), tiny_data(), optimizer, steps_max=3).steps == 3
    assert allowance.taken == 3
    optimizer.take()
    assert allowance.taken == 4
    second = optimizer_of(allowance)
    step(optimizer)
    assert allowance.taken == optimizer.steps_made == 4
    step(second)
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        step(optimizer)
    second.take()  # and a batch that was drawn is dropped
    with pytest.raises(NoGuaranteeError, match="step 6 was taken from the budget but not finished"):
        second.take()


def test_a_budget_without_a_claim_has_a_last_step() -> None:
    optimizer = optimizer_of(NoBudget(PLAN, 2, "it is a test"))
    for _ in range(2):
        step(optimizer)
    with pytest.raises(BudgetExhaustedError, match="all 2 steps"):
        step(optimizer)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_was_not_finished_ends_the_run(ahead: bool) -> None:
    """It was left out because of its batch, perhaps of one record, and no noise hides that."""
    net, allowance = mlp(5, 8, 2), budget()
    optimizer = optimizer_of(allowance, net)
    step(optimizer)
    left = copies(net)
    if ahead:
        optimizer.take()
    with pytest.raises(MemoryError):
        step(optimizer, fails)
    for again in (
        lambda: step(optimizer),
        lambda: step(optimizer),
        optimizer.take,  # for another batch
        lambda: training.train(net, tiny_data(), optimizer),
    ):
        with pytest.raises(NoGuaranteeError, match="step 2 was taken from the budget but not fini"):
            again()
    assert all(map(torch.equal, left, net.parameters()))
    assert allowance.taken == 2  # charged, for its batch was drawn


def test_a_grad_scaler_is_refused() -> None:
    """It leaves a step out if a gradient is infinite, which may be that of one record."""
    optimizer = optimizer_of(budget())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(NoGuaranteeError, match=r"GradScaler.*float32.*bfloat16"):
        scaler.step(optimizer)  # type: ignore[arg-type]


# --- several processes


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer checks when it is made and at each step: a process group may come later."""
    optimizer = optimizer_of(budget())
    step(optimizer)
    monkeypatch.setattr(single_process, "world_size", lambda: 2)
    with pytest.raises(NoGuaranteeError, match=r"2 processes train.*start one process"):
        step(optimizer)
    assert optimizer.allowance.taken == 1
    with pytest.raises(NoGuaranteeError, match="2 processes train"):
        optimizer_of(budget())


def test_torchruns_environment_variables_count_as_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of torchrun's processes each is a run of its own, also where none joins a group."""
    optimizer = optimizer_of(budget())
    for said in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", said)
        step(optimizer)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NoGuaranteeError, match="WORLD_SIZE"):
        step(optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*FSDP")
def test_a_distributed_model_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    with group_of_one():
        Clipper(mlp(5, 8, 2))
        for wrap in (
            nn.DataParallel,
            DistributedDataParallel,
            lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
            lambda net: nn.Sequential(DistributedDataParallel(net)),
        ):
            with pytest.raises(UnsupportedModelError, match="run of its own: pass the model"):
                Clipper(wrap(mlp(5, 8, 2)))


# --- steps that no budget pays for, and changes while a run is made


def test_a_step_of_pytorchs_optimizer_alone_is_refused() -> None:
    """It would move the parameters by gradients without noise, and no budget would pay."""
    net = mlp(5, 8, 2)
    optimizer = NoisyTorchOptimizer(net, budget(), make_sgd)
    data = tiny_data()
    for private in (optimizer, copy.deepcopy(NoisyTorchOptimizer(net, unbudgeted(PLAN), make_sgd))):
        step(private)
        nn.functional.cross_entropy(net(data.train_examples), data.train_labels).backward()
        left = copies(net)
        with pytest.raises(NoGuaranteeError, match="gradients that have no noise"):
            private.torch_optimizer.step()
        assert all(map(torch.equal, left, net.parameters()))
        step(private)


def test_an_optimizer_with_a_budget_cannot_be_copied() -> None:
    optimizer = NoisyTorchOptimizer(mlp(5, 8, 2), budget(), make_sgd)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NoGuaranteeError, match="give each run its own budget"):
            copied(optimizer)


def test_a_learning_rate_may_follow_a_scheduler_of_pytorchs_optimizer() -> None:
    optimizer = NoisyTorchOptimizer(mlp(5, 8, 2), budget(), make_sgd)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.torch_optimizer, 1, gamma=0.5)
    rates = []
    for _ in range(3):
        rates.append(optimizer.learning_rate)
        step(optimizer)
        schedule.step()
    assert rates == [0.1, 0.05, 0.025]


def make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_gradients_of_other_parameters_in_pytorchs_optimizer_are_refused() -> None:
    """A layer that thaws during a run would be updated with its own raw gradients."""
    net, allowance = mlp(5, 8, 2), budget()
    first = next(net.parameters()).requires_grad_(False)
    optimizer = NoisyTorchOptimizer(net, allowance, lambda _: make_sgd(list(net.parameters())))
    step(optimizer)
    first.grad = torch.ones_like(first)
    with pytest.raises(NoGuaranteeError, match=r"parameter of shape .*no noise"):
        step(optimizer)
    assert allowance.taken == 1


def test_the_plan_of_a_budget_cannot_be_replaced() -> None:
    """The guarantee of all steps is that of the plan at the end."""
    allowance = budget()
    step(optimizer_of(allowance))
    with pytest.raises(NoGuaranteeError, match=r"noise_schedule.*before="):
        allowance.plan = replace(PLAN, noise_multiplier=2 * PLAN.noise_multiplier)
    assert allowance.plan == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.half(), "float16, which would round"),
        (lambda net: net.bfloat16(), "bfloat16, which would round"),
        (lambda net: net.requires_grad_(False), "was frozen after"),
        (lambda net: net.append(nn.BatchNorm1d(2)), r"BatchNorm1d.*over the batch"),
        (lambda net: net.append(Centred()), "depend on other examples"),
    ],
)
def test_a_model_that_is_changed_during_a_run_is_checked_again(
    change: Callable[[nn.Module], object], message: str
) -> None:
    net, allowance = nn.Sequential(*mlp(5, 8, 2).children()), budget()
    optimizer = optimizer_of(allowance, net)
    for _ in range(2):
        step(optimizer)
    change(net)
    with pytest.raises(UnsupportedModelError, match=message):
        step(optimizer)


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0)


class CentredInTraining(nn.Module):
    """Subtracts the mean of the batch, in training mode only."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0) if self.training else rows


def test_a_model_is_checked_in_each_mode() -> None:
    net = nn.Sequential(*mlp(5, 8, 2).children(), CentredInTraining()).eval()
    optimizer = optimizer_of(budget(), net)
    step(optimizer)
    net.train()
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        step(optimizer)
