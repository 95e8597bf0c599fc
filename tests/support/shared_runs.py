"""Runs of several processes that share a budget, and the same runs of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from training_client.budget import NoBudget
from training_client.errors import TrainingStoppedError
from training_client.lab.models import cross_entropy
from training_client.optimizers import (
    OPTIMIZERS,
    PrivateOptimizer,
    make_optimizer,
    private_batches,
)
from training_client.plan import AdaptiveClipping, Plan, Schedule
from training_client.private_step.processes.shared_budget import share_budget
from training_client.private_step.sampling import PoissonSampler

RECORDS: Final = 48
STEPS: Final = 4
PLAN: Final = Plan(dataset_size=RECORDS, sample_rate=0.5, clip_norm=0.5, noise_multiplier=1.0)


@dataclass(frozen=True)
class Case:
    """An optimizer to train with.

    Attributes:
        optimizer: its name.
        state: the source of its state; the optimizer's default if None.
        plan: of its steps.
        options: of the optimizer.
    """

    optimizer: str
    state: str | None = None
    plan: Plan = PLAN
    options: Mapping[str, Any] = field(default_factory=dict)


def _scheduled(name: str) -> Plan:
    """Return the plan with a schedule of this name: the factor changes after two steps."""
    return replace(PLAN, **{name: Schedule.by_steps([(2, 1.0), (2, 0.25)])})  # type: ignore[arg-type]


_HALF_AXES: Final = {"threshold": 0.0}  # from the second step on
CASES: Final = (
    *(Case(name) for name in OPTIMIZERS if name not in ("adadp", "adan")),
    *(Case(name, "public", options=_HALF_AXES) for name in ("adadp", "adan")),
    Case("adadp", "privatised", options=_HALF_AXES),
    Case("adadp", "public", options=_HALF_AXES | {"box": True}),
    Case("adadp", "public", options=_HALF_AXES | {"example_squares": True}),
    Case("pi_adam", "public", options={"own_squares": True}),
    Case("dp_adam", options={"automatic_clipping": 0.1}),
    Case("dp_adam", plan=replace(PLAN, adaptive_clipping=AdaptiveClipping(count_noise=2.0))),
    *(Case("dp_sgd", plan=_scheduled(f"{name}_schedule")) for name in ("noise", "clip")),
    Case("dp_sgd", plan=_scheduled("learning_rate_schedule")),
)


class Records(Dataset[Any]):
    """Records of six numbers, each with a class."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"input": row, "index": torch.tensor(index), "label": torch.tensor(index % 4)}


class Model(nn.Module):
    """Two layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as the batch has it
        found: torch.Tensor = self.layers(input)
        return found


def seeded(seed: int) -> torch.Generator:
    """Return a generator that makes runs with and without other processes comparable."""
    return torch.Generator().manual_seed(seed)


def no_claim(plan: Plan = PLAN, steps: int = STEPS) -> NoBudget:
    """Return a budget without a claim."""
    return NoBudget(plan, steps, "a test")


def step_with(optimizer: PrivateOptimizer, batch: dict[str, torch.Tensor]) -> float:
    """Make a step with one batch."""
    return optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)


def make_seeded(net: nn.Module, case: Case, **options: Any) -> PrivateOptimizer:
    """Make an optimizer with a shared budget without a claim, and a fixed seed for the noise."""
    public = torch.randn(16, 6, generator=seeded(9)), torch.arange(16) % 4
    budget = share_budget(lambda: no_claim(case.plan))
    return make_optimizer(
        case.optimizer, net, budget, state=case.state, public=public,
        public_batch_size=16, generator=seeded(3), **case.options, **options,
    )  # fmt: skip


def trained(
    rank: int,
    case: Case,
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    **options: Any,
) -> Any:
    """Train with a fixed seed for samples and noise; return parameters, losses and records.

    Args:
        rank: the process; it has a seed of its own for the first parameters.
        case: the optimizer.
        wrap: distributes the model.
        options: of the optimizer, which change nothing in what it trains.
    """
    net = wrap(Model(seed=5 + rank))
    optimizer = make_seeded(net, case, **options)
    losses, seen = [], []
    sampler = PoissonSampler(RECORDS, 0.5, seeded(4))
    for batch in private_batches(optimizer, Records(), sampler=sampler):
        losses.append(step_with(optimizer, batch))
        seen.append(batch["index"].tolist())
    return whole_parameters(net), losses, seen


class Shift(nn.Module):
    """Adds a buffer, which each process has drawn for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the shifted rows."""
        found: torch.Tensor = rows + self.shift
        return found


def with_frozen_parts(net: nn.Module) -> nn.Module:
    """Freeze the first layer of a `Model`, and put a layer with a buffer before it."""
    net.layers[0].requires_grad_(False)
    net.layers = nn.Sequential(Shift(), *net.layers)
    return net


def whole_parameters(net: nn.Module) -> list[torch.Tensor]:
    """Return copies of a model's parameters, in one piece."""
    found: list[Any] = [each.detach() for each in net.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in found]


def require_model_of_one(
    found: Sequence[Any], case: Case, change: Callable[[nn.Module], nn.Module] = lambda net: net
) -> None:
    """Each process must have the model that one process makes of the same samples and noise.

    Args:
        found: what `trained` returned in each process.
        case: the optimizer.
        change: what each process did to the model before.
    """
    alone, losses, seen = trained(0, case, change)
    for parameters, other_losses, _ in found:
        for one, other in zip(alone, parameters, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert other_losses == pytest.approx(losses, rel=1e-4)
    for step in range(STEPS):
        shares = [rank[2][step] for rank in found]
        assert sorted(i for share in shares for i in share) == seen[step]
        assert all(i % len(found) == rank for rank, share in enumerate(shares) for i in share)
    assert all(all(map(torch.equal, found[0][0], rank[0])) for rank in found)


def message_of(way: Callable[[int], object], rank: int) -> str:
    """Return the error that a function stops with in this process."""
    try:
        way(rank)
    except TrainingStoppedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
