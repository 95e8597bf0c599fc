"""A-DDP: people who train one model, each on data and within a budget of their own (papers/003).

Algorithm 1: in every round each user whose budget allows it draws a sample of their own data, clips
each example's gradient, adds noise of their own and sends the result; the server averages what it
gets and descends. A user whose budget is spent drops out, and the rounds end when nobody is left:
how many there are is not fixed in advance.

A participant needs only the parameters and gives back only a noisy mean, so that a federated engine
can carry both; here they are in one process. The privacy unit is a record of a participant's data;
nobody, the server included, sees a gradient without noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.clipping import Loss, Transform
from training_client.errors import BudgetExhaustedError, DataError
from training_client.private_sum import PrivateSum
from training_client.sampling import PoissonSampler
from training_client.service import Guarantee


class Participant:
    """Someone with data, a plan and a budget.

    Args:
        name: to tell them apart.
        model: the shape of what is trained; a copy is kept.
        examples, targets: their data, on the model's device.
        budget: theirs; its plan says the sample rate, C and σ. The paper accounts for it by
            gaussian_sampling_composition, which `Budget.method` takes; pld is the default.
        generator: of the noise; seeded by the operating system by default.
        sampler: of the batches; Poisson at the plan's rate by default.
        physical_batch_size: so many examples go through the model at a time; all by default.
        sparse_inputs: most numbers of examples are 0; see `Clipper`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        examples: torch.Tensor,
        targets: torch.Tensor,
        budget: Allowance,
        generator: torch.Generator | None = None,
        sampler: PoissonSampler | None = None,
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
        self._sampler = PoissonSampler.of(budget.plan, len(examples), sampler)

    @property
    def steps(self) -> int:
        """Contributions that count as made."""
        return self._private_sum.steps

    def contribute(
        self, parameters: Sequence[torch.Tensor], loss: Loss
    ) -> list[torch.Tensor] | None:
        """A noisy mean gradient of what is trained; None if the budget allows no more.

        Args:
            parameters: of the model, in its order, frozen ones too; the gradient is taken there.
            loss: one value an example.

        Raises:
            NoGuaranteeError: somebody else draws on the same budget; nothing was computed.
            ServiceError: no usable answer about the budget; nothing was computed.
        """
        try:
            self._private_sum.take()
        except BudgetExhaustedError:
            return None
        with torch.no_grad():
            for own, given in zip(self._model.parameters(), parameters, strict=True):
                own.copy_(given)
        rows = self._sampler.draw().to(self._examples.device)
        transform = Transform(self.budget.plan.clip_norm)
        return self._private_sum.release(
            self._examples[rows], self._targets[rows], loss, transform
        ).whole()

    def guarantee(self) -> Guarantee:
        """The claim about all contributions that this participant planned to make."""
        return self.budget.guarantee(self.steps)


@dataclass(frozen=True, slots=True)
class Round:
    """What a round was.

    Attributes:
        number: from 1.
        took_part: names of those who contributed.
    """

    number: int
    took_part: tuple[str, ...]


def train_together(
    model: nn.Module,
    participants: Sequence[Participant],
    loss: Loss,
    *,
    learning_rate: float,
    rounds_max: int | None = None,
    report: Callable[[Round], None] = lambda _: None,
) -> int:
    """Rounds until nobody's budget allows another, or there are enough of them.

    Args:
        model: what is trained.
        participants: at least one; names differ.
        loss: one value an example.
        learning_rate: η > 0, of the average.
        rounds_max: no more than so many.
        report: called after every round.

    Returns:
        How many rounds there were.
    """
    if len({each.name for each in participants}) != len(participants):
        raise ValueError("participants need names that differ")
    parameters, done = list(model.parameters()), 0
    trained = [each for each in parameters if each.requires_grad]  # what contributions are about
    while rounds_max is None or done < rounds_max:
        given = [(each.name, each.contribute(parameters, loss)) for each in participants]
        contributions = [(name, means) for name, means in given if means is not None]
        if not contributions:
            break
        with torch.no_grad():
            columns = zip(*(means for _, means in contributions), strict=True)
            for parameter, column in zip(trained, columns, strict=True):
                parameter.sub_(torch.stack(column).mean(0), alpha=learning_rate)
        done += 1
        report(Round(done, tuple(name for name, _ in contributions)))
    return done
