"""No private step without an allowance, each taken once, in one process that trains alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tests.support.stub_service import PLAN, linear_accountant, service, tiny_data
from training_client.budget import Budget, NoBudget
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, UnsupportedModelError
from training_client.lab import train as training
from training_client.lab.models import cross_entropy, mlp
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.private_step import Clipper, single_process

FITS = 20


def budget() -> Budget:
    return Budget(service(linear_accountant), PLAN, epsilon=2.0, delta=1e-5, block=7)


def copies(net: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in net.parameters()]


def step(optimizer: PrivateOptimizer, loss: Any = cross_entropy) -> None:
    data = tiny_data()
    optimizer.step(data.train_examples[:10], data.train_labels[:10], loss)


def fails(*_: object) -> torch.Tensor:
    raise MemoryError("a batch was too large")


def test_a_custom_training_loop_makes_exactly_the_steps_that_fit() -> None:
    net, allowance = mlp(5, 8, 2), budget()
    optimizer = make_optimizer("dp_sgd", net, allowance)
    for made in range(1, FITS + 1):
        step(optimizer)
        assert allowance.taken == optimizer.steps_made == made
    left = copies(net)
    for _ in range(2):
        with pytest.raises(BudgetExhaustedError, match="20 steps fit"):
            step(optimizer)
    assert all(map(torch.equal, left, net.parameters()))
    assert allowance.taken == FITS


def test_no_step_is_taken_twice() -> None:
    """`train` takes each before its batch is drawn, and a step after `take` takes none."""
    allowance = budget()
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), allowance)
    assert training.train(mlp(5, 8, 2), tiny_data(), optimizer, steps_max=3).steps == 3
    assert allowance.taken == 3
    optimizer.take()
    assert allowance.taken == 4
    step(optimizer)
    assert allowance.taken == optimizer.steps_made == 4


def test_two_optimizers_do_not_share_one_allowance() -> None:
    allowance = budget()
    first, second = (make_optimizer("dp_sgd", mlp(5, 8, 2), allowance) for _ in range(2))
    step(first)
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        step(second)


def test_a_budget_without_a_claim_has_a_last_step() -> None:
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), NoBudget(PLAN, 2, "it is a test"))
    for _ in range(2):
        step(optimizer)
    with pytest.raises(BudgetExhaustedError, match="all 2 steps"):
        step(optimizer)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_was_not_finished_ends_the_run(ahead: bool) -> None:
    """It was left out because of its batch, perhaps of one record, and no noise hides that."""
    net, allowance = mlp(5, 8, 2), budget()
    optimizer = make_optimizer("dp_sgd", net, allowance)
    step(optimizer)
    left = copies(net)
    if ahead:
        optimizer.take()
    with pytest.raises(MemoryError):
        step(optimizer, fails)
    for _ in range(2):
        with pytest.raises(
            NoGuaranteeError, match="step 2 was taken from the budget but not finished"
        ):
            step(optimizer)
    with pytest.raises(NoGuaranteeError, match="step 2 was taken from the budget but not finished"):
        training.train(net, tiny_data(), optimizer)
    assert all(map(torch.equal, left, net.parameters()))
    assert allowance.taken == 2  # charged, for its batch was drawn


def test_a_batch_that_was_drawn_and_dropped_ends_the_run() -> None:
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), budget())
    optimizer.take()
    with pytest.raises(NoGuaranteeError, match="step 1 was taken from the budget but not finished"):
        optimizer.take()


def test_a_grad_scaler_is_refused() -> None:
    """It leaves a step out if a gradient is infinite, which may be that of one record."""
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), budget())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(NoGuaranteeError, match=r"GradScaler.*float32.*bfloat16"):
        scaler.step(optimizer)  # type: ignore[arg-type]


# --- several processes


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer checks when it is made and at each step: a process group may come later."""
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), budget())
    step(optimizer)
    monkeypatch.setattr(single_process, "world_size", lambda: 2)
    with pytest.raises(NoGuaranteeError, match=r"2 processes train.*start one process"):
        step(optimizer)
    assert optimizer.allowance.taken == 1
    with pytest.raises(NoGuaranteeError, match="2 processes train"):
        make_optimizer("dp_sgd", mlp(5, 8, 2), budget())


@pytest.mark.parametrize(("said", "refused"), [("2", True), ("1", False), ("", False)])
def test_torchruns_environment_variables_count_as_several_processes(
    said: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torchrun's processes each is a run of its own, also where none joins a group."""
    optimizer = make_optimizer("dp_sgd", mlp(5, 8, 2), budget())
    monkeypatch.setenv("WORLD_SIZE", said)
    expected = pytest.raises(NoGuaranteeError, match="WORLD_SIZE") if refused else nullcontext()
    with expected:
        step(optimizer)


@contextmanager
def group_of_one() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*FSDP")
@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        DistributedDataParallel,
        lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        lambda net: nn.Sequential(DistributedDataParallel(net)),
    ],
)
def test_a_distributed_model_is_refused(wrap: Any) -> None:
    with group_of_one():
        Clipper(mlp(5, 8, 2))
        with pytest.raises(UnsupportedModelError, match="run of its own: pass the model"):
            Clipper(wrap(mlp(5, 8, 2)))
