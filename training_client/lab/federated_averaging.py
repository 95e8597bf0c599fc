"""Federated averaging with a guarantee for all records of a site or user (DP-FedAvg).

McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models",
arXiv 1710.06963v3, Algorithm 1: a participant trains on its own records without noise, and the
*update* of the model is clipped to norm C. There a trusted server adds noise to the sum of the
updates. Here the participant adds it before anything leaves, and the server need not be trusted.
The privacy unit is the participant, with all of its records.

An update is one vector of one unit, as a gradient is one vector of one record. So it is clipped,
noised and charged by the code that does so for gradients, as if the site had a single record.

`train_devices` has the trusted server: devices send their updates, and the noise is added once, to
the sum. With side information it is Algorithm 3 of papers/004 at user level.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.errors import BudgetExhaustedError, DataError
from training_client.lab.federated import Site, copy_parameters, train_federated
from training_client.private_step import Loss, Transform
from training_client.private_step.blocks import unflatten_vector
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.sampling import sampler_for_plan


class FedAvgParticipant(Site):
    """A participant of DP-FedAvg: its whole update is clipped, and noise is added at the site.

    With sample rate q below 1 the participant takes part in a round with probability q. Otherwise
    it sends noise alone, and nobody can tell the difference, so sampling lowers ε. An update is
    divided by q, as a mean gradient is by the expected batch size.

    Under `add_or_remove_one` ε compares the site with one without records. A server that receives
    each contribution usually calls for `replace_one`: any records in place of the site's own.

    Args:
        name: a unique name.
        model: a model of the same architecture as the trained one; it is copied.
        examples, targets: the participant's records, on the model's device.
        budget: the participant's budget, for a dataset of size 1: the site is the privacy unit.
        learning_rate: η > 0 of the local descent.
        local_epochs: how often a round passes over the records.
        local_batch_size: records in a local step; all by default.
        side_information: see `LocalTraining`.
        generator: draws the noise; seeded by the operating system by default.

    Raises:
        DataError: the plan is for another number of privacy units than 1, or there are no records,
            no epochs or no records in a batch.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        examples: torch.Tensor,
        targets: torch.Tensor,
        budget: Allowance,
        *,
        learning_rate: float,
        local_epochs: int = 1,
        local_batch_size: int | None = None,
        side_information: Sequence[torch.Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if budget.plan.dataset_size != 1:
            raise DataError(
                f"the plan of {name} is for {budget.plan.dataset_size} privacy units, but the site "
                "is one unit with all of its records: make the dataset and the plan with size 1"
            )
        size = len(examples) if local_batch_size is None else local_batch_size
        if min(len(examples), local_epochs, size) < 1:
            raise DataError(
                f"expected records, local_epochs and local_batch_size of at least 1, got "
                f"{len(examples)}, {local_epochs} and {size}"
            )
        super().__init__(name, examples, targets, budget)
        self._local = LocalTraining(model, learning_rate, local_epochs, size, side_information)
        self._updates = _UpdateSum(self._local, budget, generator)

    @property
    def steps(self) -> int:
        """The number of rounds that were charged."""
        return self._updates.steps

    def contribute(
        self, parameters: Sequence[torch.Tensor], loss: Loss
    ) -> list[torch.Tensor] | None:
        """Return the negated update of local training, clipped and noisy; None without budget.

        The server subtracts the mean of contributions, with learning rate 1. Arguments and errors
        as for `Participant.contribute`.
        """
        drawn = self._updates.draw()
        if drawn is None:
            return None
        update = self._local.negated_update(  # even if it is not sent: the time must not tell
            parameters, (self._examples, self._targets), loss
        )
        return self._updates.release(update[None][: len(drawn)])


class LocalTraining:
    """Training on the records of one site or device, without noise (papers/004, Algorithm 3).

    Args:
        model: a model of the same architecture as the trained one; it is copied.
        learning_rate: η > 0.
        epochs: how often a round passes over the records.
        batch_size: records in a step.
        side_information: A, one tensor of positive numbers per trained parameter, known without
            private data: a step subtracts η∇/A. Without it, η∇.

    Raises:
        DataError: the side information is not of the parameters' shapes, or not positive; or there
            are no epochs, or no records in a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        epochs: int,
        batch_size: int,
        side_information: Sequence[torch.Tensor] | None,
    ) -> None:
        if min(epochs, batch_size) < 1:
            raise DataError(f"expected epochs and a batch size ≥ 1, got {epochs} and {batch_size}")
        self._model = copy.deepcopy(model)
        self.trained = [each for each in self._model.parameters() if each.requires_grad]
        self._learning_rate, self._epochs, self._batch_size = learning_rate, epochs, batch_size
        self._scales = side_information or [torch.ones(()).to(each) for each in self.trained]
        shapes = [each.shape for each in self.trained]
        if side_information and [each.shape for each in side_information] != shapes:
            raise DataError("the side information is not shaped like the trained parameters")
        if not all(bool(((each > 0) & each.isfinite()).all()) for each in self._scales):
            raise DataError("expected finite side information above 0")

    def negated_update(
        self,
        parameters: Sequence[torch.Tensor],
        records: tuple[torch.Tensor, torch.Tensor],
        loss: Loss,
    ) -> torch.Tensor:
        """Train from these parameters; return before minus after, as one vector: NOT private."""
        copy_parameters(parameters, self._model)
        (examples, targets), before = records, _as_vector(self.trained)
        for _ in range(self._epochs):
            order = torch.randperm(len(examples)).to(examples.device)
            for rows in torch.split(order, self._batch_size):
                losses = loss(self._model(examples[rows]), targets[rows])
                self._descend(torch.autograd.grad(losses.mean(), self.trained, allow_unused=True))
        return before - _as_vector(self.trained)

    @torch.no_grad()
    def _descend(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make a step of local gradient descent."""
        for parameter, gradient, scale in zip(self.trained, gradients, self._scales, strict=True):
            if gradient is not None:  # None: the loss does not depend on the parameter
                parameter.sub_(gradient / scale, alpha=self._learning_rate)


class _UpdateSum:
    """A plan's steps on updates: each is clipped as one unit's, and their sum gets the noise."""

    def __init__(
        self, local: LocalTraining, budget: Allowance, generator: torch.Generator | None
    ) -> None:
        self._trained = local.trained
        self._sampler = sampler_for_plan(budget.plan, budget.plan.dataset_size)
        self._private_sum = PrivateSum(_vector_model(local.trained), budget, generator)
        self._private_sum.continue_epoch(self._sampler)

    @property
    def steps(self) -> int:
        """The number of rounds that were charged."""
        return self._private_sum.steps

    def draw(self) -> list[int] | None:
        """Charge a round, and return the units that take part; None if the budget is spent."""
        try:
            found: list[int] = self._private_sum.draw(self._sampler).tolist()
        except BudgetExhaustedError:
            return None
        return found

    def release(self, updates: torch.Tensor) -> list[torch.Tensor]:
        """Return the noisy mean of the updates, one row a unit, as one tensor per parameter."""
        transform = Transform(self._private_sum.plan.clip_norm)
        noisy = self._private_sum.release(
            updates, updates.new_zeros(len(updates)), _dot_product, transform
        )
        return unflatten_vector(noisy.to_tensors()[0].flatten(), self._trained)


class _Devices:
    """Devices and the server that they trust, as one participant that holds all updates."""

    name = "devices"

    def __init__(
        self,
        devices: Sequence[tuple[torch.Tensor, torch.Tensor]],
        local: LocalTraining,
        updates: _UpdateSum,
    ) -> None:
        self._devices, self._local, self._updates = devices, local, updates

    def contribute(
        self, parameters: Sequence[torch.Tensor], loss: Loss
    ) -> list[torch.Tensor] | None:
        """Return the noisy mean of the drawn devices' negated updates; None without budget."""
        drawn = self._updates.draw()
        if drawn is None:
            return None
        updates = _as_vector(self._local.trained).new_zeros(
            len(drawn), sum(each.numel() for each in self._local.trained)
        )
        for row, device in enumerate(drawn):
            updates[row] = self._local.negated_update(parameters, self._devices[device], loss)
        return self._updates.release(updates)


def train_devices(
    model: nn.Module,
    devices: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss: Loss,
    budget: Allowance,
    *,
    learning_rate: float,
    local_epochs: int = 1,
    local_batch_size: int = 100,
    side_information: Sequence[torch.Tensor] | None = None,
    momentum: float = 0.0,
    generator: torch.Generator | None = None,
) -> int:
    """Train with many devices and a trusted server (papers/004, Algorithm 3; DP-FedAvg).

    In each round every device takes part with the plan's sample rate, trains on its own records,
    and sends its update. The server clips each update to C, adds them up, adds noise once, divides
    by the expected number of devices, and follows the moving average of these means. The privacy
    unit is a device with all of its records. Nobody but the server may see an update.

    Args:
        model: the model to train, in place.
        devices: each device's examples and targets, on the model's device; none may be empty.
        loss: returns one value per example.
        budget: of a dataset of as many records as there are devices; one step is one round.
        learning_rate: η > 0 of the local steps; the server's is 1.
        local_epochs: how often a round passes over a device's records.
        local_batch_size: records in a local step.
        side_information: see `LocalTraining`.
        momentum: β of the server's moving average, in [0, 1).
        generator: draws the noise; seeded by the operating system by default.

    Returns:
        The number of rounds made, when the budget was spent.

    Raises:
        DataError: the plan is for another number of devices, or a device has no records.
        ValueError: `momentum` is out of range.
    """
    if budget.plan.dataset_size != len(devices):
        raise DataError(
            f"the plan is for {budget.plan.dataset_size} devices, and there are {len(devices)}"
        )
    if min((len(targets) for _, targets in devices), default=0) < 1:
        raise DataError("each device needs at least one record")
    local = LocalTraining(model, learning_rate, local_epochs, local_batch_size, side_information)
    server = _Devices(devices, local, _UpdateSum(local, budget, generator))
    return train_federated(model, [server], loss, learning_rate=1.0, momentum=momentum)


def _as_vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of tensors as one vector."""
    return torch.cat([each.detach().flatten() for each in tensors])


def _vector_model(parameters: Sequence[torch.Tensor]) -> nn.Module:
    """Return a model that multiplies a vector with its weights.

    The gradient of its output with respect to the weights is the vector itself.
    """
    example = _as_vector(parameters)
    layer = nn.Linear(len(example), 1, bias=False, device=example.device, dtype=example.dtype)
    nn.init.zeros_(layer.weight)
    return layer


def _dot_product(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Return the output of `_vector_model` as the loss of each example."""
    return outputs[:, 0]
