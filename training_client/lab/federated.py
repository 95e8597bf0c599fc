"""A-DDP: federated training in which each participant has their own data and budget (papers/003).

Algorithm 1: in every round each participant whose budget allows it samples their own data, clips
the per-example gradients, adds noise and sends the noisy mean. The server averages the means and
takes a gradient step. A participant leaves when their budget is spent, and training ends when
nobody is left, so the number of rounds is not fixed in advance.

A participant receives only the parameters and returns only a noisy mean, so a federated framework
can carry both; here all participants run in one process. The privacy unit is a record of a
participant's data. Nobody, not even the server, sees a gradient without noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from training_client.answers import Guarantee
from training_client.budget import Allowance
from training_client.errors import BudgetExhaustedError, DataError
from training_client.private_step import Loss, Transform
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.sampling import Sampler, sampler_for_plan


class Participant:
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
        self.name, self.budget = name, budget
        self._model = copy.deepcopy(model)
        self._examples, self._targets = examples, targets
        self._private_sum = PrivateSum(
            self._model, budget, generator, physical_batch_size, sparse_inputs=sparse_inputs
        )
        self._sampler = sampler_for_plan(budget.plan, len(examples), sampler)
        self._private_sum.continue_epoch(self._sampler.position)

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
            self._private_sum.take()
        except BudgetExhaustedError:
            return None
        with torch.no_grad():
            for own, received in zip(self._model.parameters(), parameters, strict=True):
                own.copy_(received)
        rows = self._sampler.draw().to(self._examples.device)
        transform = Transform(self._private_sum.plan.clip_norm)
        return self._private_sum.release(
            self._examples[rows], self._targets[rows], loss, transform
        ).to_tensors()

    def guarantee(self) -> Guarantee:
        """Return the privacy guarantee of all planned contributions."""
        return self.budget.guarantee(self.steps)


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
    participants: Sequence[Participant],
    loss: Loss,
    *,
    learning_rate: float,
    rounds_max: int | None = None,
    report: Callable[[Round], None] = lambda _: None,
) -> int:
    """Train a model in rounds until every budget is spent or `rounds_max` is reached.

    Args:
        model: the model to train, in place.
        participants: at least one, with unique names.
        loss: returns one value per example.
        learning_rate: η > 0, applied to the averaged gradient.
        rounds_max: the maximum number of rounds; no limit by default.
        report: called after every round.

    Returns:
        The number of rounds made.
    """
    if len({each.name for each in participants}) != len(participants):
        raise ValueError("participants need unique names")
    parameters, done = list(model.parameters()), 0
    trained = [each for each in parameters if each.requires_grad]  # contributions cover only these
    while rounds_max is None or done < rounds_max:
        answers = [(each.name, each.contribute(parameters, loss)) for each in participants]
        contributions = [(name, means) for name, means in answers if means is not None]
        if not contributions:
            break
        with torch.no_grad():
            columns = zip(*(means for _, means in contributions), strict=True)
            for parameter, column in zip(trained, columns, strict=True):
                parameter.sub_(torch.stack(column).mean(0), alpha=learning_rate)
        done += 1
        report(Round(done, tuple(name for name, _ in contributions)))
    return done
