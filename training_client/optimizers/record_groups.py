"""Several examples of one privacy unit: a record's augmented copies, or a person's records.

The gradient of all of them together is clipped once. So one unit moves a sum by at most the clip
norm, as one record does: the plan is charged as ever, for as many units as are drawn from.

- Augmentation multiplicity (De et al. 2022, arXiv 2204.13650, §3.3): the mean of the gradients of
  a record's augmented copies is clipped.

      data = AugmentedDataset(images, flip_and_crop, multiplicity=8)
      optimizer = make_optimizer("dp_sgd", PerRecord(net), budget)
      for copies, labels in private_batches(optimizer, data):
          optimizer.step(copies, labels, mean_per_record(cross_entropy))

- User-level batches (McMahan et al. 2018, arXiv 1710.06963): the sum of the gradients of a person's
  records is clipped.

      data = PersonDataset(visits, people, records_max=4)
      optimizer = make_optimizer("dp_sgd", PerRecord(net), budget)
      for batch in private_batches(optimizer, data):
          optimizer.step(batch.pop("examples"), batch, sum_per_record(cross_entropy))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

from training_client.budget import Allowance
from training_client.errors import DataError, NoGuaranteeError
from training_client.private_step.batches import TargetLoss, Targets
from training_client.private_step.processes.shared_budget import SharedBudget


class PerRecord(nn.Module):
    """A model that is called with several examples of each record.

    Tensors have the records as first dimension and the examples of each as second. The model is
    called with the first example of every record, then with the second, and so on. So its layers
    are used several times, and each record's gradient is that of all uses.

    Attributes:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *examples: torch.Tensor, **named: Any) -> list[Any]:
        """Return the model's outputs for the first example of each record, the second, …."""
        given = [each for each in (*examples, *named.values()) if isinstance(each, torch.Tensor)]
        return [
            self.model(*(each[:, at] for each in examples), **_columns(named, at))
            for at in range(given[0].shape[1])
        ]


def mean_per_record(loss: TargetLoss) -> TargetLoss:
    """Return the loss that is the mean over each record's examples, which share its target.

    Args:
        loss: returns one value per example.
    """

    def mean(outputs: Sequence[Any], targets: Targets) -> torch.Tensor:
        """Return the mean loss of each record."""
        return torch.stack([loss(each, targets) for each in outputs]).mean(0)

    return mean


def sum_per_record(loss: TargetLoss) -> TargetLoss:
    """Return the loss that is the sum over each person's records.

    Args:
        loss: returns one value per record. It is called with the `targets` of a `PersonDataset`.
    """

    def add_up(outputs: Sequence[Any], person: Mapping[str, Any]) -> torch.Tensor:
        """Return the sum of the losses of each person's records."""
        present = person["is_present"]
        losses = [
            loss(each, _columns(person["targets"], at)) * present[:, at]
            for at, each in enumerate(outputs)
        ]
        return torch.stack(losses).sum(0)

    return add_up


def _columns(rows: Any, at: int) -> Any:
    """Return one example of each record, of tensors with several; a dictionary may hold them."""
    if isinstance(rows, Mapping):
        return {name: _columns(each, at) for name, each in rows.items()}
    return rows[:, at] if isinstance(rows, torch.Tensor) else rows


class AugmentedDataset(Dataset[Any]):
    """Records with several augmented copies of each, drawn anew whenever a record is.

    Args:
        dataset: of pairs of an example, a tensor, and a target.
        augment: returns an augmented copy of one example; it must use no other record.
        multiplicity: the number of copies.

    Raises:
        ValueError: the multiplicity is not positive.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        augment: Callable[[torch.Tensor], torch.Tensor],
        multiplicity: int,
    ) -> None:
        if multiplicity < 1:
            raise ValueError(f"expected multiplicity ≥ 1, got {multiplicity}")
        self._dataset, self._augment, self._multiplicity = dataset, augment, multiplicity

    def __len__(self) -> int:
        """Return the number of records."""
        return _length(self._dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        """Return the copies of a record's example, stacked, and its target."""
        example, target = self._dataset[index]
        return torch.stack([self._augment(example) for _ in range(self._multiplicity)]), target


class PersonDataset(Dataset[Any]):
    """The records of each person together: batches are drawn of persons, not of records.

    An item has `examples` and `targets`, each with `records_max` rows, and `is_present`, which is 0
    in rows that only fill up. Of a person with more records the first are used. The budget of a
    ledger must be for the same unit.

    Attributes:
        privacy_unit: the word for a person, as in the ledger.

    Args:
        dataset: of pairs of an example and a target, tensors or numbers.
        people: the person of each record, such as a number or name.
        records_max: the most records that are used of a person.
        privacy_unit: see above.

    Raises:
        DataError: there are more or fewer `people` than records.
        ValueError: `records_max` is not positive.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        people: Sequence[Any] | torch.Tensor,
        records_max: int,
        privacy_unit: str = "person",
    ) -> None:
        if records_max < 1:
            raise ValueError(f"expected records_max ≥ 1, got {records_max}")
        names = people.tolist() if isinstance(people, torch.Tensor) else list(people)
        if len(names) != (count := _length(dataset)):
            raise DataError(f"{len(names)} persons are named for {count} records: name one of each")
        self.privacy_unit = privacy_unit
        self._dataset, self._records_max = dataset, records_max
        records: dict[Any, list[int]] = {}
        for index, name in enumerate(names):
            records.setdefault(name, []).append(index)
        self._records = [each[:records_max] for each in records.values()]

    def __len__(self) -> int:
        """Return the number of persons."""
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a person's records, filled up with copies of the first."""
        own = self._records[index]
        filled = own + own[:1] * (self._records_max - len(own))
        examples, targets = default_collate([self._dataset[each] for each in filled])
        present = torch.arange(self._records_max) < len(own)
        return {"examples": examples, "targets": targets, "is_present": present.float()}


def require_unit(allowance: Allowance, dataset: Any) -> None:
    """Raise unless a budget is for the unit of which a dataset's batches are drawn.

    A dataset without `privacy_unit` says nothing, and is not checked.

    Raises:
        NoGuaranteeError: the ledger's dataset has another unit.
        ServiceError: the service gave no usable answer.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    unit = getattr(dataset, "privacy_unit", None)
    if unit is None:
        return
    if isinstance(allowance, SharedBudget):
        allowance.run(lambda budget: require_unit(budget, dataset))
        return
    allowance.assume(f"Each item of the training data is all that one {unit} contributes.")
    found = allowance.privacy_unit
    if found not in (None, unit):
        raise NoGuaranteeError(
            f"the ledger's budget is for one {found}, and batches are drawn of items that are each "
            f"one {unit}: train on a dataset of the ledger with the unit {unit!r}"
        )


def _length(dataset: Any) -> int:
    """Return the number of a dataset's records.

    Raises:
        DataError: it has no length.
    """
    if not isinstance(dataset, Sized):
        raise DataError("expected a dataset of records that are drawn by their index, with __len__")
    return len(dataset)
