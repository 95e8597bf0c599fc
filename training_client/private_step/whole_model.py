"""Per-example gradients from the model as a whole, for what its layers do not show.

The model is run on one example: on all of them at once, vectorised over the batch (`torch.func`);
or, if it cannot be vectorised, on one after the other. It cannot if it differentiates in its
forward pass, or chooses positions by their values. So an example's gradient is computed from that
example alone: no other is in its reach (`isolation.alone`), and neither is their number. Every
example's gradient is held in memory, which takes more of it, and more time, than the layers' own
ways (`layer_recorder`).

One after the other, numbers and flags of the modules are restored before each example, and must be
the same after it. The first example is run again after the others, and must pass as before: this is
a test of what remains, such as a list of sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from training_client.errors import UnsupportedModelError
from training_client.private_step.batches import Examples, call_model, select_examples, tensors_of
from training_client.private_step.example_gradients import ExampleGradients, MaterializedGradients
from training_client.private_step.isolation.alone import (
    Alone,
    Storages,
    followed_alone,
    storages_of,
)
from training_client.private_step.isolation.places import is_close
from training_client.private_step.kernels.matmul import full_precision
from training_client.private_step.model_pass import Loss, ModelPass, parameters_and_buffers
from training_client.private_step.module_names import describe_tensor
from training_client.private_step.module_numbers import numbers_of, restore_numbers
from training_client.private_step.random_state import RandomStates, restored_random_state

_FAILURES: Final = (RuntimeError, TypeError, ValueError, LookupError, NotImplementedError)
_FEW: Final = 4  # examples that show whether a parameter is used


class WholeModel:
    """Runs a model on each example alone.

    Attributes:
        is_vectorised: whether it is run on all examples at once, as far as is known.

    Args:
        model: the model; each example has random numbers of its own.
        parameters: the trained parameters.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self.is_vectorised, self._is_checked = True, False

    def run(
        self, examples: Examples, targets: torch.Tensor, loss: Loss, kept: Storages
    ) -> ModelPass:
        """Return the losses of a batch, and every example's gradient of each parameter.

        Args:
            examples: at least one.
            targets: one per example.
            loss: one value per example.
            kept: storages that earlier passes computed from their examples; it is updated.

        Raises:
            UnsupportedModelError: the model cannot be run in this way, or does not use a parameter.
            MixingError: an example depends on others.
            StateChangeError: a pass writes to a parameter or buffer.
        """
        task = _Task(examples, targets, loss, storages_of([*tensors_of(examples), targets]), kept)
        ways = [self._run_at_once, self._run_one_by_one][not self.is_vectorised :]
        failures = []
        for way in ways:
            try:
                rows, losses = way(task)
                break
            except _FAILURES as error:
                failures.append(str(error))
        else:
            raise UnsupportedModelError(
                "the model cannot be run on one example of a vectorised batch either, nor on one "
                f"example after the other ({'; '.join(failures)})"
            )
        self.is_vectorised = way == self._run_at_once
        if not self._is_checked:
            self._require_used_parameters(task)
            self._is_checked = True
        held: dict[torch.Tensor, ExampleGradients] = {
            parameter: MaterializedGradients(each)
            for parameter, each in zip(self._parameters, rows, strict=True)
        }
        return ModelPass(self._model, losses.detach(), [], [held])

    def _run_at_once(self, task: _Task) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return every example's gradients and loss, vectorised over the batch."""
        names = {id(each): name for name, each in self._model.named_parameters()}
        trained = {names[id(each)]: each.detach() for each in self._parameters}
        own, of = task.copy(slice(None))
        is_tensor = isinstance(own, torch.Tensor)
        given: dict[str, Any] = {"": own} if is_tensor else dict(own)
        batch = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        rest = {name: each for name, each in given.items() if name not in batch}

        def loss_of_one(
            values: dict[str, torch.Tensor], row: dict[str, torch.Tensor], target: torch.Tensor
        ) -> torch.Tensor:
            """Return the loss of one example, in a batch of its own."""
            one = {name: each[None] for name, each in row.items()}
            args, kwargs = ((one[""],), {}) if is_tensor else ((), {**rest, **one})
            output = functional_call(self._model, values, args, kwargs)
            return task.loss(output, target[None]).reshape(())

        differentiate = vmap(
            grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different"
        )
        with (
            warnings.catch_warnings(),
            self._alone(task, [*batch.values(), of]),
            full_precision(self._parameters[0].device), torch.enable_grad(),
        ):  # fmt: skip
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap
            found, losses = differentiate(trained, batch, of)
        return [found[names[id(each)]].contiguous() for each in self._parameters], losses

    def _run_one_by_one(self, task: _Task) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return every example's gradients and loss, from one pass after the other."""
        start = numbers_of(self._model)
        ends = []

        def run(at: int) -> list[torch.Tensor]:
            """Return the loss of an example, and its gradient in each parameter."""
            restore_numbers(self._model, start)
            one, target = task.copy(slice(at, at + 1))
            with (
                self._alone(task, [*tensors_of(one), target]),
                full_precision(self._parameters[0].device), torch.enable_grad(),
            ):  # fmt: skip
                value = task.loss(call_model(self._model, one), target).reshape(())
                gradients = torch.autograd.grad(
                    value, self._parameters, allow_unused=True, materialize_grads=True
                )
                found = [each.detach().clone() for each in (value, *gradients)]
            ends.append(numbers_of(self._model))
            return found

        like, count = self._parameters[0], len(task.targets)
        losses = like.new_empty(count)
        found = [losses, *(each.new_empty(count, *each.shape) for each in self._parameters)]
        before = RandomStates(like.device, all_generators=True)
        for at in range(count):
            for rows, value in zip(found, run(at), strict=True):
                rows[at] = value
        if count > 1:
            after = RandomStates(like.device, all_generators=True)
            before.restore()
            again = run(0)
            after.restore()
            is_same = all(map(is_close, again, (rows[0] for rows in found)))
            if not is_same or any(end != ends[0] for end in ends):
                raise UnsupportedModelError(
                    "an example passes differently after others: model or loss keep what they "
                    "learn of examples"
                )
        return found[1:], losses

    @torch.enable_grad()
    def _require_used_parameters(self, task: _Task) -> None:
        """Raise if a trained parameter has no part in the losses: it would only get noise."""
        few, of = task.copy(slice(0, _FEW))
        try:
            with (
                restored_random_state(self._parameters[0].device),
                self._alone(task, [*tensors_of(few), of]) as alone,
            ):
                losses = task.loss(call_model(self._model, few), of)
        except RuntimeError as error:
            raise UnsupportedModelError(f"the model cannot be run on a batch ({error})") from error
        found = torch.autograd.grad(
            losses, self._parameters, torch.ones_like(losses), allow_unused=True
        )
        for parameter, gradient in zip(self._parameters, found, strict=True):
            if gradient is None and not alone.has_read:  # no random branch left its layer out
                raise UnsupportedModelError(
                    f"{describe_tensor(self._model, parameter)} takes no part in the loss: freeze "
                    "it, or it would be trained on noise alone"
                )

    def _alone(self, task: _Task, given: Sequence[torch.Tensor]) -> AbstractContextManager[Alone]:
        """Return a context manager for a pass that is given these tensors."""
        return followed_alone(parameters_and_buffers(self._model), given, task.others, task.kept)


@dataclass(frozen=True)
class _Task:
    """A batch, its loss, and the storages that a pass must not use; see `followed_alone`."""

    examples: Examples
    targets: torch.Tensor
    loss: Loss
    others: Storages
    kept: Storages

    def copy(self, rows: slice) -> tuple[Examples, torch.Tensor]:
        """Return some examples and their targets, in memory of their own."""
        numbers = torch.arange(len(self.targets))[rows]
        return select_examples(self.examples, numbers), self.targets[numbers]
