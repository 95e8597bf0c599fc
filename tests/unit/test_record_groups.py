"""Several examples of one unit: a record's augmented copies, a person's records, their clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Subset, TensorDataset

from tests.support.clipped_sums import norm_of
from tests.support.small_models import unbudgeted
from training_client.budget import NoBudget
from training_client.errors import DataError, NoGuaranteeError, UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.optimizers import (
    AugmentedDataset,
    PerRecord,
    PersonDataset,
    make_optimizer,
    mean_per_record,
    private_batches,
    sum_per_record,
)
from training_client.plan import Plan
from training_client.testing import clipped_sum

CLIP, COPIES = 0.3, 3
PEOPLE = [7, 7, 5, 7, 9, 5, 7, 9]  # of records; 7 has four, and three are used


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 6, 6)), nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 3),
    )  # fmt: skip


def records(count: int) -> TensorDataset:
    torch.manual_seed(0)
    rows = torch.randn(count, 72, dtype=torch.float64)
    return TensorDataset(rows, torch.randint(0, 3, (count,)))


def clipped_by_hand(net: nn.Module, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of the clipped gradients of losses, one for each unit."""
    total = [torch.zeros_like(each) for each in net.parameters()]
    for loss in losses:
        found = torch.autograd.grad(loss, list(net.parameters()))
        for own, each in zip(total, found, strict=True):
            own.add_(each, alpha=min(1.0, CLIP / norm_of(found)))
    return total


def require_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


@pytest.mark.spread(first=1)
@pytest.mark.parametrize("build", [linear, convolution])
def test_a_records_copies_are_averaged_before_the_clip(build: Callable[[], nn.Module]) -> None:
    """So a record with its copies moves the sum by no more than the clip norm."""
    net = build().double()
    data = AugmentedDataset(records(4), lambda row: row + torch.randn(72), COPIES)
    copies, labels = (torch.stack(each) for each in zip(*map(data.__getitem__, range(4)),
                                                        strict=True))  # fmt: skip
    assert copies.shape == (4, COPIES, 72)
    assert not torch.equal(copies[:, 0], copies[:, 1])
    loss = mean_per_record(cross_entropy)
    by_hand = clipped_by_hand(
        net,
        [cross_entropy(net(each), label.expand(COPIES)).mean()
         for each, label in zip(copies, labels, strict=True)],
    )  # fmt: skip
    whole = clipped_sum(PerRecord(net), copies, labels, loss, CLIP)
    require_equal(whole, by_hand)
    fewer = clipped_sum(PerRecord(net), copies[1:], labels[1:], loss, CLIP)
    moved = [one - other for one, other in zip(whole, fewer, strict=True)]
    assert norm_of(moved) <= CLIP * (1 + 1e-9)


def test_a_persons_records_are_added_up_before_the_clip() -> None:
    net, data = linear().double(), records(8)
    persons = PersonDataset(data, torch.tensor(PEOPLE), 3)
    assert len(persons) == 3
    items = [persons[index] for index in range(3)]
    assert [each["is_present"].tolist() for each in items] == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    batch = {name: torch.stack([each[name] for each in items]) for name in items[0]}
    found = clipped_sum(
        PerRecord(net), batch.pop("examples"), batch, sum_per_record(cross_entropy), CLIP
    )
    losses = []
    for own in ([0, 1, 3], [2, 5], [4, 7]):
        rows, labels = data[own]
        losses.append(cross_entropy(net(rows), labels).sum())
    require_equal(found, clipped_by_hand(net, losses))


def test_examples_of_several_records_must_be_apart() -> None:
    mixed = PerRecord(nn.Sequential(nn.Linear(72, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double())
    copies, labels = torch.randn(4, COPIES, 72, dtype=torch.float64), torch.zeros(4).long()
    with pytest.raises(UnsupportedModelError):
        clipped_sum(mixed, copies, labels, mean_per_record(cross_entropy), CLIP)

    def centred(outputs: Any, targets: Any) -> torch.Tensor:
        return cross_entropy(outputs - outputs.mean(0), targets)

    with pytest.raises(UnsupportedModelError):
        clipped_sum(PerRecord(linear().double()), copies, labels,
                    mean_per_record(centred), CLIP)  # fmt: skip


class LedgerOf(NoBudget):
    """A budget whose ledger has a word for a record."""

    unit = "record"

    @property
    def privacy_unit(self) -> str:
        return self.unit


def test_batches_of_persons_need_a_budget_for_persons() -> None:
    persons = PersonDataset(records(8), PEOPLE, 3)
    plan = Plan(len(persons), 0.5, CLIP, 1.0)
    budget = LedgerOf(plan, 5, "it is a test")
    optimizer = make_optimizer("dp_sgd", PerRecord(linear().double()), budget)
    loss = sum_per_record(cross_entropy)
    for dataset in (persons, Subset(persons, range(3))):
        with pytest.raises(NoGuaranteeError, match=r"one record, .* each one person"):
            next(private_batches(optimizer, dataset))
    assert optimizer.steps_made == 0
    object.__setattr__(budget, "unit", "person")
    for batch in private_batches(optimizer, persons):
        optimizer.step(batch.pop("examples"), batch, loss)
    assert optimizer.steps_made == 5
    assert (
        budget.assumed[-1] == "Each item of the training data is all that one person contributes."
    )


def test_a_plan_for_records_is_not_one_for_persons() -> None:
    persons = PersonDataset(records(8), PEOPLE, 3)
    optimizer = make_optimizer("dp_sgd", PerRecord(linear()), unbudgeted(Plan(8, 0.5, CLIP, 1.0)))
    with pytest.raises(DataError, match="there are 3 records, and the plan is charged for 8"):
        next(private_batches(optimizer, persons))
    with pytest.raises(DataError, match="7 persons are named for 8 records"):
        PersonDataset(records(8), PEOPLE[1:], 3)
    for make in (lambda: PersonDataset(records(8), PEOPLE, 0),
                 lambda: AugmentedDataset(records(8), torch.clone, 0)):  # fmt: skip
        with pytest.raises(ValueError, match="≥ 1, got 0"):
            make()


def test_averaged_weights_are_made_of_what_was_released() -> None:
    """PyTorch's own average, beside the engine: no step is changed, and none is charged."""
    plan, ends = Plan(8, 0.5, CLIP, 1.0), []
    for is_averaged in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(72, 3)
        budget = NoBudget(plan, 4, "it is a test")
        optimizer = make_optimizer(
            "dp_sgd", net, budget, generator=torch.Generator().manual_seed(5), learning_rate=0.5
        )
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        rows, labels = records(8).tensors
        expected: Any = None
        for _ in range(4):
            optimizer.step(rows.float(), labels, cross_entropy)
            if is_averaged:
                average.update_parameters(net)
                now = net.weight.detach().clone()
                expected = now if expected is None else 0.9 * expected + 0.1 * now
        ends.append(net.weight.tolist())
    assert ends[0] == ends[1]
    torch.testing.assert_close(average.module.weight, expected)
