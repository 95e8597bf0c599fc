"""Batches for one's own training loop: drawn as charged, loaded when drawn, one step for each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from tests.support.cuda_streams import COPIES, DEVICE, USERS, stub_cuda
from tests.support.stub_service import linear_accountant, service
from training_client.budget import Budget, NoBudget
from training_client.errors import DataError, NoGuaranteeError, UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer, private_batches
from training_client.plan import Plan
from training_client.private_step import sampling
from training_client.private_step.sampling import (
    BallsInBinsSampler,
    PoissonSampler,
    sampler_for_plan,
)


class Records(Dataset[Any]):
    """Records that are made when they are read, as from a disk; it counts the reads."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, [0] * count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read[index] += 1
        row = torch.full((6,), float(index))
        return {"input": row, "label": torch.tensor(index % 4)}


BINS = Plan.balls_in_bins(40, 5, clip_norm=1.0, noise_multiplier=1.0)


def optimizer_of(plan: Plan, steps: int) -> PrivateOptimizer:
    """Return DP-SGD on a linear layer, with a budget of a number of steps."""
    return make_optimizer("dp_sgd", nn.Linear(6, 4), NoBudget(plan, steps, "a test"))


def poisson(count: int, rate: float) -> Plan:
    """Return a plan of Poisson sampling."""
    return Plan(dataset_size=count, sample_rate=rate, clip_norm=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_makes_as_many_steps_as_its_budget_covers(workers: int) -> None:
    records, optimizer = Records(40), optimizer_of(poisson(40, 0.1), 7)
    sizes = []
    for batch in private_batches(optimizer, records, workers=workers):
        sizes.append(len(batch["label"]))
        labels = batch.pop("label")
        optimizer.step(batch, labels, cross_entropy)
    assert len(sizes) == optimizer.steps_made == 7
    if workers == 0:
        assert sum(records.read) <= sum(sizes) + 40  # also of a batch that was drawn ahead


def test_a_batch_without_records_has_rows_of_the_same_shape() -> None:
    optimizer = optimizer_of(poisson(50, 1e-9), 3)
    for batch in private_batches(optimizer, Records(50)):
        assert (batch["input"].shape, batch["label"].shape) == ((0, 6), (0,))
        optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)
    assert optimizer.steps_made == 3


def test_each_record_is_in_one_batch_of_an_epoch_of_balls_in_bins() -> None:
    plan = Plan.balls_in_bins(30, 5, clip_norm=1.0, noise_multiplier=1.0)
    records, optimizer = Records(30), optimizer_of(plan, 10)
    for batch in private_batches(optimizer, records):
        optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)
    once_more = range(0, 30, 4)  # each alone, to compare widths; the first also for empty batches
    assert {records.read[i] for i in range(1, 30) if i not in once_more} == {2}  # two epochs
    assert {records.read[i] for i in once_more[1:]} == {3}


class Sequences(Dataset[Any]):
    """Sequences of 3 to 6 numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3 + index % 4)


def padded(width: int | None) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that pads records to a width, or to their longest."""

    def collate(records: list[torch.Tensor]) -> Any:
        to = width or max(map(len, records))
        rows = [nn.functional.pad(each, (0, to - len(each))) for each in records]
        return {"input": torch.stack(rows), "label": torch.zeros(len(rows), dtype=torch.int64)}

    return collate


def test_batches_that_are_padded_to_their_longest_record_are_refused() -> None:
    optimizer = optimizer_of(poisson(40, 0.5), 5)
    with pytest.raises(DataError, match=r"shape 3 and one number in a batch, and 6 and .*max_leng"):
        next(private_batches(optimizer, Sequences(), collate=padded(None)))
    with pytest.raises(NoGuaranteeError, match="step 1 was taken from the budget but not finished"):
        optimizer.take()


def test_batches_that_are_padded_to_one_width_are_used() -> None:
    optimizer = optimizer_of(poisson(40, 0.5), 5)
    for batch in private_batches(optimizer, Sequences(), collate=padded(6)):
        optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)
    assert optimizer.steps_made == 5


@pytest.mark.parametrize("changed", ["examples", "targets"])
def test_a_loop_of_ones_own_keeps_the_width_of_its_batches(changed: str) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum(dim=(1, 2)) + targets.flatten(1).sum(dim=1)

    optimizer = make_optimizer("dp_sgd", nn.Linear(6, 4), NoBudget(poisson(40, 0.5), 5, "a test"))
    optimizer.step(torch.ones(9, 7, 6), torch.ones(9, 2), loss)
    optimizer.step(torch.ones(0, 7, 6), torch.ones(0, 2), loss)
    wider = (8, 2) if changed == "examples" else (7, 3)
    with pytest.raises(DataError, match=r"shape .* in a batch, and 7×6 and 2 in earlier ones"):
        optimizer.step(torch.ones(9, wider[0], 6), torch.ones(9, wider[1]), loss)
    with pytest.raises(NoGuaranteeError, match="not finished"):
        optimizer.take()


def test_a_batch_that_is_not_used_ends_the_run() -> None:
    batches = private_batches(optimizer_of(poisson(40, 0.1), 7), Records(40))
    next(batches)
    with pytest.raises(NoGuaranteeError, match="not finished"):
        next(batches)


class Stream(IterableDataset[int]):
    """Records without an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize(
    ("dataset", "message"), [(Stream(), "random"), (Records(39), "39 records"),
                             (Records(0), "not empty"),
                             (DataLoader(Records(40), batch_size=4, shuffle=True), "a DataLoader")]
)  # fmt: skip
def test_data_that_cannot_be_drawn_as_charged_are_refused(
    dataset: Dataset[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        next(private_batches(optimizer_of(poisson(40, 0.1), 7), dataset))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (RandomSampler(range(40)), "prefers no record"),
        (
            SubsetRandomSampler(range(10)),
            r"on 10 of 40 records, and all would be drawn: .*Subset\(",
        ),
        (
            WeightedRandomSampler([1.0] * 40, 4),
            "prefers some records, .* weight each record's loss",
        ),
        (DistributedSampler(Records(40), 2, 0), "DistributedSampler chooses .* leaves some out"),
    ],
)
def test_a_sampler_that_would_be_replaced_is_named(chosen: Any, message: str) -> None:
    """The records that it leaves out would be trained on in silence."""
    loaders: Any = (
        DataLoader(Records(40), batch_size=4, sampler=chosen),
        DataLoader(Records(40), batch_sampler=BatchSampler(chosen, 4, drop_last=False)),
    )
    for loader in loaders:
        with pytest.raises(DataError, match=rf"got a DataLoader: .*{message}"):
            next(private_batches(optimizer_of(poisson(40, 0.1), 7), loader))
    with pytest.raises(DataError, match=f"{message}.*No step is charged by such a sampler"):
        next(private_batches(optimizer_of(poisson(40, 0.1), 7), Records(40), sampler=chosen))


PACKED = pack_padded_sequence(torch.zeros(3, 2, 6), torch.tensor([2, 2, 1]), batch_first=True)
IN_FORWARD = r"got (PackedSequence|list)\. .* in the model's forward"


@pytest.mark.parametrize(
    ("batch", "targets", "message"),
    [
        (torch.zeros(3, 6), 2, "3 examples and 2 targets"),
        ({"input": torch.zeros(3, 6), "mask": torch.zeros(2)}, 3, r"tensors of \[2, 3\] rows"),
        (PACKED, 3, IN_FORWARD),
        ({"input": torch.zeros(3, 6), "more": PACKED}, 3, IN_FORWARD),
        ([PACKED], 3, IN_FORWARD),
    ],
)
def test_batches_without_one_row_for_each_example_are_refused(
    batch: Any, targets: int, message: str
) -> None:
    optimizer = optimizer_of(poisson(40, 0.1), 7)
    with pytest.raises(DataError, match=message):
        optimizer.step(batch, torch.zeros(targets, dtype=torch.int64), cross_entropy)


class FirstState(nn.Module):
    """A recurrent layer that begins with a state of so many rows, or of one for each sequence."""

    def __init__(self, kind: type[nn.RNNBase], rows: int | None) -> None:
        super().__init__()
        self.layer, self.rows = kind(6, 4, batch_first=True), rows

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(1, self.rows or len(inputs), 4)
        is_lstm = isinstance(self.layer, nn.LSTM)
        outputs: torch.Tensor = self.layer(inputs, (zeros, zeros) if is_lstm else zeros)[0]
        return outputs[:, -1]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_s_state_of_another_number_of_rows_is_refused(kind: Any) -> None:
    batch = torch.zeros(3, 2, 6), torch.zeros(3, dtype=torch.int64), cross_entropy
    budget = NoBudget(poisson(40, 0.1), 7, "a test")
    make_optimizer("dp_sgd", FirstState(kind, None), budget).step(*batch)
    with pytest.raises(UnsupportedModelError, match="one row for each example"):
        make_optimizer("dp_sgd", FirstState(kind, 1), budget).step(*batch)


def test_a_plan_for_another_number_of_records_is_refused() -> None:
    """The sampler fits the records, but sums would be divided by another expected batch size."""
    for plan, sampler in (
        (poisson(40, 0.1), PoissonSampler(39, 0.1)),
        (BINS, BallsInBinsSampler(39, 5)),
        (poisson(40, 0.1), None),
    ):
        with pytest.raises(DataError, match=r"39 records, and the plan is charged for 40"):
            sampler_for_plan(plan, 39, sampler)


def normalised(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate records, and subtract the batch's mean."""
    batch = default_collate(records)
    return batch | {"input": batch["input"] - batch["input"].mean(0)}


def substituted(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate the first record in place of every other."""
    return default_collate([records[0]] * len(records))


def reversed_inputs(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate records with the inputs of one another."""
    batch = default_collate(records)
    return batch | {"input": batch["input"].flip(0)}


def mixed_up(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate records, and mix each with another at random."""
    batch = default_collate(records)
    given, share = batch["input"], torch.rand(())
    return batch | {"input": share * given + (1 - share) * given[torch.randperm(len(given))]}


def shuffled_by_numpy(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = default_collate(records)
    return batch | {"input": batch["input"][np.random.permutation(len(records))]}


def rolled_now_and_then(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = default_collate(records)
    return batch | {"input": batch["input"].roll(1, 0)} if random.random() < 0.3 else batch


@pytest.mark.parametrize(
    "collate",
    [normalised, substituted, reversed_inputs, mixed_up, shuffled_by_numpy, rolled_now_and_then],
)
def test_a_collate_that_mixes_records_is_refused(collate: Any) -> None:
    optimizer = optimizer_of(poisson(40, 0.5), 7)
    with pytest.raises(DataError, match=r"values .* for record .* depend on the record beside it"):
        next(private_batches(optimizer, Records(40), collate=collate))


def masked(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate records, and mask values at random; some values are NaN."""
    batch = default_collate(records)
    given = batch["input"]
    return batch | {"input": torch.where(torch.rand_like(given) < 0.3, torch.nan, given)}


def with_shared_values(records: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Collate records, beside a tensor of two rows and a scalar that all of them share."""
    batch: dict[str, Any] = default_collate(records)
    return batch | {"both": torch.tensor([1.0, 2.0]), "one": torch.tensor(3)}


def dropped_by_length(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Draw as many random numbers for a record as it has positive values."""
    batch = default_collate(records)
    for row in batch["input"]:
        for at in (row > 0).nonzero().flatten():
            row[at] *= random.random()
    return batch


@pytest.mark.parametrize("collate", [masked, with_shared_values, dropped_by_length])
def test_a_collate_may_be_random_and_may_add_shared_values(collate: Any) -> None:
    next(private_batches(optimizer_of(poisson(40, 0.5), 7), Records(40), collate=collate))


def test_a_collate_with_a_generator_of_its_own_is_refused() -> None:
    generator = np.random.default_rng(3)

    def collate(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_collate(records)
        return batch | {"input": batch["input"] * generator.random()}

    with pytest.raises(DataError, match=r"generator of its own.*torch, random or numpy\.random"):
        next(private_batches(optimizer_of(poisson(40, 0.5), 7), Records(40), collate=collate))


# --- batches on a device


def used_records(plan: Plan, **options: Any) -> list[list[int]]:
    """Train until the budget ends, with the same batches each time; return each one's records."""
    optimizer, used, keys = claiming(plan), list[list[int]](), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "draw_key", lambda _: next(keys).to_bytes(32))
        batches = private_batches(optimizer, Records(40), **options)
        for made, batch in enumerate(batches, start=1):
            assert optimizer.allowance.taken == made
            used.append([int(row[0]) for row in batch["input"].tolist()])
            optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)
    assert optimizer.steps_made == optimizer.allowance.taken == len(used)
    return used


@pytest.mark.spread(first=1, second=2)
@pytest.mark.parametrize("plan", [poisson(40, 0.1), poisson(40, 0.02), BINS])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_batches_on_a_device_are_those_without_one(
    plan: Plan, workers: int, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the second plan are empty; the last plan has epochs."""
    wanted = used_records(plan)
    assert len(wanted) >= 10
    stub_cuda(monkeypatch)
    assert used_records(plan, device=device, workers=workers) == wanted


def test_the_next_batch_is_copied_beside_a_step_that_waited_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step does not wait for the next; and its stream is named as a user of the memory."""
    events = stub_cuda(monkeypatch)
    optimizer = optimizer_of(poisson(40, 1.0), 3)
    firsts = iter(range(100))

    def collate(records: list[Any]) -> torch.Tensor:
        return torch.full((len(records), 6), float(next(firsts)))

    batches = private_batches(optimizer, Records(40), collate=collate, device=DEVICE)
    # private: the check collates records too, and would take part in the count
    monkeypatch.setitem(private_batches.__globals__, "_check_collate", lambda *_: None)
    labels = torch.zeros(40, dtype=torch.int64)
    for number, batch in enumerate(batches):
        assert bool((batch == number).all())
        events.append(("use", number))
        optimizer.step(batch, labels, cross_entropy)
    assert events[:2] == [("pin", True), ("copy", COPIES, 0.0)]
    assert events[2:] == [
        each
        for number in range(3)
        for each in [
            ("copy", COPIES, number + 1.0), ("wait", number),
            ("record", USERS, float(number)), ("use", number),
        ]
    ]  # fmt: skip


def test_other_devices_need_no_stream() -> None:
    batch = next(private_batches(optimizer_of(poisson(40, 0.5), 7), Records(40), device="meta"))
    assert {name: each.device.type for name, each in batch.items()} == {
        "input": "meta",
        "label": "meta",
    }


# --- batches that no sampler of the plan drew


def claiming(plan: Plan) -> PrivateOptimizer:
    """Return DP-SGD whose budget claims a guarantee."""
    budget = Budget(service(linear_accountant), plan, epsilon=2.0, delta=1e-5)
    return make_optimizer("dp_sgd", nn.Linear(6, 4), budget)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}])
def test_batches_of_an_ordinary_loader_are_refused(options: dict[str, Any]) -> None:
    """They repeat, leave out or order records otherwise than the plan's random batches do."""
    optimizer = claiming(poisson(40, 0.1))
    before = [each.detach().clone() for each in optimizer.parameters]
    for batch in DataLoader(Records(40), batch_size=4, **options):
        with pytest.raises(NoGuaranteeError, match=r"no batch was drawn.*private_batches"):
            optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)
    assert optimizer.steps_made == optimizer.allowance.taken == 0
    assert all(map(torch.equal, before, optimizer.parameters))


@pytest.mark.parametrize("plan", [poisson(40, 0.1), BINS])
def test_a_loop_may_draw_its_batches_itself(plan: Plan) -> None:
    optimizer = claiming(plan)
    inputs, labels = torch.rand(40, 6), torch.zeros(40, dtype=torch.int64)
    sampler = sampler_for_plan(plan, 40)
    seen = torch.zeros(40)
    for made in range(1, 11):
        rows = optimizer.draw(sampler)
        assert optimizer.allowance.taken == made  # before the batch is known
        seen[rows] += 1
        optimizer.step(inputs[rows], labels[rows], cross_entropy)
        with pytest.raises(NoGuaranteeError):  # the same batch again
            optimizer.step(inputs[rows], labels[rows], cross_entropy)
    if plan is BINS:
        assert bool((seen == 2).all())


def test_a_batch_of_another_size_than_drawn_is_refused() -> None:
    optimizer = claiming(poisson(40, 0.5))
    rows = optimizer.draw(PoissonSampler(40, 0.5))
    inputs, labels = torch.zeros(len(rows) + 1, 6), torch.zeros(len(rows) + 1, dtype=torch.int64)
    with pytest.raises(DataError, match="records were drawn, and the batch has"):
        optimizer.step(inputs, labels, cross_entropy)


@pytest.mark.parametrize(
    "sampler", [PoissonSampler(40, 0.2), PoissonSampler(41, 0.1), BallsInBinsSampler(40, 10)]
)
def test_a_sampler_of_another_plan_draws_nothing(sampler: Any) -> None:
    optimizer = claiming(poisson(40, 0.1))
    with pytest.raises(DataError, match="the plan is charged"):
        optimizer.draw(sampler)
    assert optimizer.allowance.taken == 0


def test_a_second_step_with_the_same_batch_is_refused() -> None:
    optimizer = optimizer_of(poisson(40, 0.5), 7)
    batch = next(private_batches(optimizer, Records(40)))
    given = {"input": batch["input"]}, batch["label"], cross_entropy
    optimizer.step(*given)
    with pytest.raises(NoGuaranteeError, match="the same batch a second time"):
        optimizer.step(*given)
    assert optimizer.steps_made == 1  # and the second step was not charged


@pytest.mark.parametrize("change", ["drop", "repeat"])
def test_a_batch_with_another_number_of_examples_than_records_is_refused(change: str) -> None:
    """Two examples of one record would move the sum by twice the clip norm."""
    optimizer = optimizer_of(poisson(40, 1.0), 7)

    def collate(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return default_collate(records[1:] if change == "drop" else [*records, records[0]])

    batch = next(private_batches(optimizer, Records(40), collate=collate))
    before = [each.detach().clone() for each in optimizer.parameters]
    with pytest.raises(DataError, match=r"40 records were drawn, and the batch has (39|41)"):
        optimizer.step({"input": batch["input"]}, batch["label"], cross_entropy)
    assert all(map(torch.equal, before, optimizer.parameters))
    with pytest.raises(NoGuaranteeError, match="not finished"):
        optimizer.take()
