"""Federated training in which each participant has their own data and budget.

`Participant` is A-DDP (papers/003); `AdaptiveParticipant` is federated AdaDPS (papers/004).

A-DDP, Algorithm 1: in every round each participant whose budget allows it samples their own data,
clips the per-example gradients, adds noise and sends the noisy mean. The server averages the means
and takes a gradient step. A participant leaves when their budget is spent, and training ends when
nobody is left, so the number of rounds is not fixed in advance.

A participant receives only the parameters and returns only a noisy mean, so a federated framework
can carry both (`training_client.integrations.flower.client_app` does); here all participants run in
one process. The privacy unit is a record of a participant's data. Nobody, not even the server, sees
a gradient without noise.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.client.answers import Guarantee
from training_client.errors import BudgetExhaustedError, DataError
from training_client.integrations.flower.federated_average import ServerMomentum, descend_along_mean
from training_client.optimizers.adadps import AdaDps
from training_client.plan import Schedule, factor_at
from training_client.private_step import Loss, Transform
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.sampling import Sampler, sampler_for_plan


class Contributor(Protocol):
    """Interface of participants, whatever carries their contributions to the server.

    Attributes:
        name: a unique name.
    """

    name: str

    def contribute(
        self, parameters: Sequence[torch.Tensor], loss: Loss
    ) -> list[torch.Tensor] | None:
        """Return an update for the server to average and subtract; None if the budget is spent."""


class Site(ABC):
    """A participant with records, a plan and a budget of its own.

    Attributes:
        name: a unique name.
        budget: covers its steps.
    """

    def __init__(
        self, name: str, examples: torch.Tensor, targets: torch.Tensor, budget: Allowance
    ) -> None:
        self.name, self.budget = name, budget
        self._examples, self._targets = examples, targets

    @property
    @abstractmethod
    def steps(self) -> int:
        """The number of steps, or rounds, that were charged."""

    def guarantee(self) -> Guarantee:
        """Return the privacy guarantee of all planned steps."""
        return self.budget.guarantee(self.steps)


class Participant(Site):
    """A participant of federated training, with its own data, plan and budget.

    Args:
        name: a unique name.
        model: a model of the same architecture as the trained one; it is copied.
        examples, targets: the participant's data, on the model's device.
        budget: the participant's budget; its plan sets the sample rate, C and σ. The paper accounts
            with `Budget(method="gaussian_sampling_composition")`; pld is the default.
        generator: draws the noise; seeded by the operating system by default.
        sampler: draws the batches; by default a new one that draws as the plan says.
        physical_batch_size: examples per forward pass; all by default.
        sparse_inputs: whether most features are 0; see `Clipper`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        examples: torch.Tensor,
        targets: torch.Tensor,
        budget: Allowance,
        generator: torch.Generator | None = None,
        sampler: Sampler | None = None,
        physical_batch_size: int | None = None,
        *,
        sparse_inputs: bool = False,
    ) -> None:
        if len(examples) != budget.plan.dataset_size:
            raise DataError(
                f"{name} has {len(examples)} records, the plan is for {budget.plan.dataset_size}"
            )
        super().__init__(name, examples, targets, budget)
        self._model = copy.deepcopy(model)
        self._private_sum = PrivateSum(
            self._model, budget, generator, physical_batch_size, sparse_inputs=sparse_inputs
        )
        self._sampler = sampler_for_plan(budget.plan, len(examples), sampler, budget.has_claim)
        self._private_sum.continue_epoch(self._sampler)

    @property
    def steps(self) -> int:
        """The number of rounds to which the participant contributed."""
        return self._private_sum.steps

    def contribute(
        self, parameters: Sequence[torch.Tensor], loss: Loss
    ) -> list[torch.Tensor] | None:
        """Return a noisy mean gradient at the given parameters; None if the budget is spent.

        Args:
            parameters: all parameters of the model, in its order, frozen ones too.
            loss: returns one value per example.

        Raises:
            NoGuaranteeError: another run draws on the same budget; nothing was computed.
            ServiceError: the service gave no usable answer; nothing was computed.
        """
        try:
            rows = self._private_sum.draw(self._sampler)
        except BudgetExhaustedError:
            return None
        copy_parameters(parameters, self._model)
        transform = Transform(self._private_sum.plan.clip_norm)
        return self._private_sum.release(
            self._examples[rows], self._targets[rows], loss, transform
        ).to_tensors()


class AdaptiveParticipant(Site):
    """A participant of federated AdaDPS (papers/004, Algorithm 3): several local steps a round.

    Each example's gradient is divided by the side information, clipped, summed, and given noise,
    all on the participant's side; fresh noise is drawn in every step. The contribution is the
    update of the model, negated, so the server subtracts its mean with learning rate 1. In the
    paper a trusted server adds the noise, and the privacy unit is a participant; here the unit is a
    record, and no trust in the server is needed.

    Args:
        name: a unique name.
        model: a model of the same architecture as the trained one; it is copied.
        examples, targets: the participant's data, on the model's device.
        budget: the participant's budget; each local step is charged.
        side_information: A, one tensor per trained parameter, known without private data.
        learning_rate: the local η > 0.
        local_steps: the number of steps in a round.
        generator: draws the noise; seeded by the operating system by default.
        sampler: draws the batches; by default a new one that draws as the plan says.
        physical_batch_size: examples per forward pass; all by default.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        examples: torch.Tensor,
        targets: torch.Tensor,
        budget: Allowance,
        *,
        side_information: Sequence[torch.Tensor],
        learning_rate: float,
        local_steps: int,
        generator: torch.Generator | None = None,
        sampler: Sampler | None = None,
        physical_batch_size: int | None = None,
    ) -> None:
        if local_steps < 1:
            raise DataError(f"expected at least one local step in a round, got {local_steps}")
        super().__init__(name, examples, targets, budget)
        self._model, self._local_steps = copy.deepcopy(model), local_steps
        self._sampler = sampler_for_plan(budget.plan, len(examples), sampler, budget.has_claim)
        self._optimizer = AdaDps(
            self._model,
            budget,
            learning_rate=learning_rate,
            side_information=side_information,
            generator=generator,
            physical_batch_size=physical_batch_size,
        )
        self._optimizer.continue_epoch(self._sampler)

    @property
    def steps(self) -> int:
        """The number of local steps taken."""
        return self._optimizer.steps_made

    def contribute(
        self, parameters: Sequence[torch.Tensor], loss: Loss
    ) -> list[torch.Tensor] | None:
        """Return the negated update of this round's local steps; None if the budget allows none.

        Arguments and errors as for `Participant.contribute`.
        """
        copy_parameters(parameters, self._model)
        trained = [each for each in self._model.parameters() if each.requires_grad]
        before = [each.detach().clone() for each in trained]
        made = sum(self._make_step(loss) for _ in range(self._local_steps))
        if not made:
            return None
        return [old - new.detach() for old, new in zip(before, trained, strict=True)]

    def _make_step(self, loss: Loss) -> bool:
        """Take a local step, charged before its batch is drawn; return False without budget."""
        try:
            rows = self._optimizer.draw(self._sampler)
        except BudgetExhaustedError:
            return False
        self._optimizer.step(self._examples[rows], self._targets[rows], loss)
        return True


@torch.no_grad()
def copy_parameters(parameters: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Copy received parameters into a participant's model."""
    for own, received in zip(model.parameters(), parameters, strict=True):
        own.copy_(received)


@dataclass(frozen=True, slots=True)
class Round:
    """A completed round of federated training, with the participants that took part.

    Attributes:
        number: the number of the round, from 1.
        took_part: the names of the participants who contributed.
    """

    number: int
    took_part: tuple[str, ...]


def train_federated(
    model: nn.Module,
    participants: Sequence[Contributor],
    loss: Loss,
    *,
    learning_rate: float,
    learning_rate_schedule: Schedule | None = None,
    momentum: float = 0.0,
    rounds_max: int | None = None,
    report: Callable[[Round], None] = lambda _: None,
) -> int:
    """Train a model in rounds until every budget is spent or `rounds_max` is reached.

    Args:
        model: the model to train, in place.
        participants: at least one, with unique names.
        loss: returns one value per example.
        learning_rate: η > 0, applied to the averaged contribution; 1 for `AdaptiveParticipant`.
        learning_rate_schedule: factors of the learning rate, round by round.
        momentum: β of the server's moving average of the mean contributions.
        rounds_max: the maximum number of rounds; no limit by default.
        report: called after every round.

    Returns:
        The number of rounds made.
    """
    if len({each.name for each in participants}) != len(participants):
        raise ValueError("participants need unique names")
    parameters, done, averages = list(model.parameters()), 0, ServerMomentum(momentum)
    trained = [each for each in parameters if each.requires_grad]  # contributions cover only these
    while rounds_max is None or done < rounds_max:
        answers = [(each.name, each.contribute(parameters, loss)) for each in participants]
        contributions = [(name, means) for name, means in answers if means is not None]
        if not contributions:
            break
        done += 1
        rate = learning_rate * factor_at(learning_rate_schedule, done)
        mean = averages.average([given for _, given in contributions])
        descend_along_mean(trained, [mean], rate)
        report(Round(done, tuple(name for name, _ in contributions)))
    return done
