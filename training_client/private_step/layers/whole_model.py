"""Per-example gradients from the model as a whole, for what its layers do not show.

The model is run on one example: on all of them at once, vectorised over the batch (`torch.func`);
or, if it cannot be vectorised, on one after the other. It cannot if it differentiates in its
forward pass, or chooses positions by their values. So an example's gradient is computed from that
example alone: no other is in its reach (`isolation.alone`), and neither is their number. Every
example's gradient is held in memory, which takes more of it, and more time, than the layers' own
ways (`layer_recorder`).

One after the other, numbers and flags of the modules are restored before each example, and must be
the same after it. Python may keep more from one example to the next. So all examples must pass the
same operations, which are given the same constants and numbers: then each pass is the same function
of its example. Where an example decides which positions are chosen, or random numbers which layers,
passes differ, and no Python code may be in the backward pass. Those that differ, and the first, are
run again in reverse order, and must pass as before: this is a test of what remains, such as a list
of sizes, or what an operation of the program's own keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.hooks import RemovableHandle

from training_client.errors import UnsupportedModelError
from training_client.private_step.batches import Examples, call_model, select_examples, tensors_of
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.isolation.alone import (
    Alone,
    Storages,
    followed_alone,
    storages_of,
)
from training_client.private_step.isolation.places import is_close
from training_client.private_step.isolation.trace import HOOK_OF_TENSOR, python_in_backward
from training_client.private_step.kernels.matmul import full_precision
from training_client.private_step.layers.double_sums import DoubleSums
from training_client.private_step.layers.model_pass import Loss, ModelPass, parameters_and_buffers
from training_client.private_step.layers.patches import without_own_rules
from training_client.private_step.model_state import (
    Numbers,
    RandomStates,
    numbers_of,
    restore_numbers,
    restored_random_state,
)
from training_client.private_step.module_names import describe_tensor
from training_client.private_step.trained_parameters import is_sharded_module

_FAILURES: Final = (RuntimeError, TypeError, ValueError, LookupError, NotImplementedError)
_FEW: Final = 4  # examples that show whether a parameter is used
_PASSES_DIFFERENTLY: Final = (
    "an example passes differently after others: model or loss keep what they learn of examples"
)


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
            self._alone(task, [*batch.values(), of]), DoubleSums(), without_own_rules(),
            full_precision(self._parameters[0].device), torch.enable_grad(),
        ):  # fmt: skip
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap
            found, losses = differentiate(trained, batch, of)
        return [found[names[id(each)]].contiguous() for each in self._parameters], losses

    def _run_one_by_one(self, task: _Task) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return every example's gradients and loss, from one pass after the other."""
        start, device = numbers_of(self._model), self._parameters[0].device
        count, passes = len(task.targets), []  # type: int, list[_OnePass]
        rows: list[torch.Tensor] = []
        before = []
        for at in range(count):
            before.append(RandomStates(device, all_generators=True))
            one = self._run_alone(task, at, start, passes[0].alone if passes else None)
            passes.append(one)
            rows = rows or [each.new_empty(count, *each.shape) for each in one.found]
            for row, value in zip(rows, one.found, strict=True):
                row[at] = value
            one.found.clear()
        after = RandomStates(device, all_generators=True)
        differing = [at for at in range(1, count) if not passes[at].alone.is_as_first()]
        if any(each.end != passes[0].end for each in passes):
            raise UnsupportedModelError(_PASSES_DIFFERENTLY)
        if differing:
            self._require_explained(passes, [*before, after])
        for at in [*reversed(differing), 0] if count > 1 else ():
            before[at].restore()
            again = self._run_alone(task, at, start, None).found
            if not all(map(is_close, again, (each[at] for each in rows))):
                raise UnsupportedModelError(_PASSES_DIFFERENTLY)
        after.restore()
        return rows[1:], rows[0]

    def _run_alone(self, task: _Task, at: int, start: Numbers, first: Alone | None) -> _OnePass:
        """Run one example alone: compute its loss, and its gradient in each parameter."""
        restore_numbers(self._model, start)
        one, target = task.copy(slice(at, at + 1))
        hooks = RemovableHandle.next_id
        with (
            self._alone(task, [*tensors_of(one), target], is_noted=True, first=first) as alone,
            full_precision(self._parameters[0].device), torch.enable_grad(),
        ):  # fmt: skip
            value = task.loss(call_model(self._model, one), target).reshape(())
            backward = python_in_backward(value, RemovableHandle.next_id - hooks)
            gradients = torch.autograd.grad(
                value, self._parameters, allow_unused=True, materialize_grads=True
            )
            found = [each.detach().clone() for each in (value, *gradients)]
        return _OnePass(alone, backward, found, numbers_of(self._model))

    def _require_explained(
        self, passes: Sequence[_OnePass], states: Sequence[RandomStates]
    ) -> None:
        """Raise unless examples or random numbers may be why passes differ."""
        names = python_of_program(self._model, {n for each in passes for n in each.backward})
        if names:
            raise UnsupportedModelError(
                f"the backward pass runs Python code ({', '.join(names)}), and examples pass "
                "different operations, so nothing shows that it keeps none of them for the next: "
                "compute gradients by PyTorch's own operations"
            )
        for at, each in enumerate(passes):
            if each.alone.is_shaped or each.alone.has_read or states[at] != states[at + 1]:
                return
        raise UnsupportedModelError(_PASSES_DIFFERENTLY)

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

    def _alone(
        self, task: _Task, given: Sequence[torch.Tensor], **options: Any
    ) -> AbstractContextManager[Alone]:
        """Return a context manager for a pass that is given these tensors."""
        owned = parameters_and_buffers(self._model)
        return followed_alone(owned, given, task.others, task.kept, **options)


@dataclass(frozen=True)
class _OnePass:
    """A pass of one example.

    Attributes:
        alone: what it consisted of.
        backward: the Python code of the program in the backward pass, by name.
        found: the loss, and its gradient in each parameter.
        end: the numbers that the modules kept.
    """

    alone: Alone
    backward: Sequence[str]
    found: list[torch.Tensor]
    end: Numbers


def python_of_program(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of the Python code in a backward pass that is not PyTorch's own.

    Args:
        model: the model; `fully_shard` has hooks on its tensors.
        names: as `python_in_backward` returns them.
    """
    is_sharded = any(map(is_sharded_module, model.modules()))
    return sorted(set(names) - {HOOK_OF_TENSOR} if is_sharded else set(names))


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
