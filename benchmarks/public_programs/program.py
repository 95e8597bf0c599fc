"""A public program: a small version of it, and what the engine makes of it.

The engine's clipped sum is compared with the definition: one pass for each example, alone, in
float64, with the random numbers that the engine drew for it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tag, nn
from torch.utils._python_dispatch import TorchDispatchMode

from training_client.errors import UnsupportedModelError
from training_client.private_step import Clipper, Transform
from training_client.private_step.batches import (
    Examples,
    TargetLoss,
    Targets,
    by_row,
    call_model,
    count_examples,
    select_examples,
)
from training_client.private_step.blocks import unflatten_vector

TOLERANCE: Final = 1e-5  # of the sums, in single precision
_SEED: Final = 5
_SMALLEST_SHARE: Final = 1e-2  # of all terms: what a parameter's difference is at least relative to

Way = Literal["layers", "tested", "whole", "single"]
Draws = list[torch.Tensor]


class Task(NamedTuple):
    """A model, one batch and a loss.

    Attributes:
        model: the model, in training mode.
        examples: a batch.
        targets: of the batch.
        loss: one value per example.
    """

    model: nn.Module
    examples: Examples
    targets: Targets
    loss: TargetLoss


@dataclass(frozen=True)
class Program:
    """A small version of a public program.

    Attributes:
        name: its name on the command line.
        title: what it is.
        source: the repository, paper or tutorial that it is a small version of.
        address: of the source.
        build: returns its model, batch and loss.
        refused: a pattern of the reason why it cannot be trained; None if it can.
    """

    name: str
    title: str
    source: str
    address: str
    build: Callable[[], Task]
    refused: str | None = None

    def make(self) -> Task:
        """Return the model, batch and loss, with seeded parameters and examples."""
        torch.manual_seed(_SEED)
        return self.build()


PROGRAMS: Final[list[Program]] = []


def program(
    title: str, source: str, address: str, refused: str | None = None
) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Return a decorator that adds a function's program to the list; see `Program`."""

    def add(build: Callable[[], Task]) -> Callable[[], Task]:
        PROGRAMS.append(Program(build.__name__, title, source, address, build, refused))
        return build

    return add


@dataclass(frozen=True)
class Outcome:
    """A program's result: how it was clipped and how exactly, or why it was refused.

    Attributes:
        name: the program's name.
        title: what it is.
        source: see `Program`.
        address: see `Program`.
        way: how it was clipped: by its "layers", proved; by its layers, "tested" where no rule
            proves it; or as a "whole", on each example alone. None if it was not.
        difference: of the clipped sum from a loop over the examples in float64: the largest of all
            parameters, relative to the sum of the norms of its terms.
        reason: why it was refused, how it failed, or what the way is due to.
        dependence: how it depends on other examples, as found by running it beside fewer.
        is_expected: whether it trains and is right, or is refused for the true reason.
    """

    name: str
    title: str
    source: str
    address: str
    way: Way | None
    difference: float | None
    reason: str
    dependence: str
    is_expected: bool


def run_program(program: Program) -> Outcome:
    """Train a program for two steps without noise, and compare the second with the definition."""
    way: Way | None = None
    difference: float | None = None
    reason = dependence = ""
    is_expected = False
    try:
        if program.refused is not None:
            dependence = find_dependence(program.make())
        way, reason, difference = measure_difference(
            program.make(), is_apart=program.refused is None
        )
        is_expected = program.refused is None and difference <= TOLERANCE
    except UnsupportedModelError as error:
        reason = str(error)
        is_expected = program.refused is not None and _names(program.refused, reason)
    except Exception as error:  # a crash is a result of this table
        reason = f"fails: {type(error).__name__}: {error}"
    return Outcome(
        program.name, program.title, program.source, program.address, way, difference, reason,
        dependence, is_expected,
    )  # fmt: skip


def _names(pattern: str, reason: str) -> bool:
    return all(each in reason for each in pattern.split(" … "))


def measure_difference(task: Task, *, is_apart: bool = True) -> tuple[Way, str, float]:
    """Return how a program is clipped, why in this way, and its difference: see `Outcome`.

    Args:
        task: the program.
        is_apart: whether the definition makes sense, because it keeps its examples apart.
    """
    exact = copy.deepcopy(task)  # before anything was run
    targets, loss = by_row(task.targets, task.loss)
    clipper, draws = Clipper(task.model), _Recording()
    clip_norm = _median_norm(exact) if is_apart else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in (_Recording(), draws):  # the first proves, and passes more
            torch.manual_seed(_SEED)
            with mode:
                total = clipper.clip(task.examples, targets, loss, Transform(clip_norm))
                sums = clipper.zeros()
                with torch.no_grad():
                    for block in clipper.blocks:
                        total.write_block(
                            block, Transform(clip_norm).for_block(block), block.view_in(sums)
                        )
    checked = clipper._checked  # private: says how the model was run
    way: Way = "tested" if checked.unproved else "layers"
    if checked.as_a_whole:
        way = "whole" if checked.whole.is_vectorised else "single"
    reason = checked.as_a_whole or "; ".join(checked.unproved)
    found = unflatten_vector(sums, clipper.parameters)
    drawn = _draws_of_examples(draws.kept, len(targets), way)
    terms = [*_clipped_terms(exact, drawn, clip_norm)]
    return way, reason, _largest_difference(found, terms)


def _largest_difference(
    found: Sequence[torch.Tensor], terms: Sequence[Sequence[torch.Tensor]]
) -> float:
    """Return the largest difference of a parameter's sum; see `Outcome`."""
    sizes = [sum(float(each.norm()) for each in column) for column in zip(*terms, strict=True)]
    least = _SMALLEST_SHARE * math.hypot(*sizes)
    return max(
        float((sum(column) - one.double()).norm()) / max(size, least)
        for one, column, size in zip(found, zip(*terms, strict=True), sizes, strict=True)
    )


def _clipped_terms(
    task: Task, draws: Sequence[Draws], clip_norm: float
) -> Iterator[list[torch.Tensor]]:
    """Yield each example's clipped gradient by its definition, in float64."""
    for gradients in _gradients_alone(task, draws):
        norm = math.hypot(*(float(each.norm()) for each in gradients))
        yield [each * min(1.0, clip_norm / norm) for each in gradients]


def _median_norm(task: Task) -> float:
    """Return the median norm of the examples' gradients, with some random numbers."""
    norms = [
        math.hypot(*(float(each.norm()) for each in gradients))
        for gradients in _gradients_alone(copy.deepcopy(task), None)
    ]
    return float(torch.tensor(norms).median())


def _gradients_alone(
    task: Task, draws: Sequence[Draws] | None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the gradient of each example, run alone in float64.

    Args:
        task: its model is converted.
        draws: the random numbers of each example, to use again; None for others.
    """
    model, targets = task.model.double(), _as_double(task.targets)
    examples = _as_double(task.examples)
    trained = [each for each in model.parameters() if each.requires_grad]
    for at in range(count_examples(examples)):
        row = slice(at, at + 1)
        with _double_by_default(), nullcontext() if draws is None else _Replay(draws[at]):
            outputs = call_model(model, select_examples(examples, row))
            value = task.loss(outputs, select_examples(targets, row))
            gradients = torch.autograd.grad(
                value.sum(), trained, allow_unused=True, materialize_grads=True
            )
        yield gradients


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Context manager for new tensors in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _draws_of_examples(draws: Draws, count: int, way: Way) -> list[Draws]:
    """Return what was drawn for each example.

    Passes of one example draw one after the other, and the first once more.
    """
    if way == "single":
        each = len(draws) // (count + 1)
        return [draws[at * each : (at + 1) * each] for at in range(count)]
    return [
        [drawn[at] if drawn.dim() and len(drawn) == count else drawn for drawn in draws]
        for at in range(count)
    ]


def _as_double(batch: Any) -> Any:
    """Return a tensor, or a dictionary of tensors, in float64 where it was in float32."""
    if isinstance(batch, torch.Tensor):
        return batch.double() if batch.is_floating_point() else batch
    return (
        {name: _as_double(each) for name, each in batch.items()}
        if isinstance(batch, Mapping)
        else batch
    )


class _Recording(TorchDispatchMode):
    """Keeps what the random operations of a pass drew.

    Attributes:
        kept: their results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: Draws = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and keep what it drew."""
        result = func(*args, **(kwargs or {}))
        if Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor):
            self.kept.append(result.detach().clone())
        return result


class _Replay(TorchDispatchMode):
    """Draws for one example what was drawn for it in a batch.

    Args:
        draws: its random numbers; those that all examples share have their own shape.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = iter(draws)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; give it the random numbers of the batch."""
        result = func(*args, **(kwargs or {}))
        if Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor):
            result.detach().copy_(next(self._draws).reshape(result.shape))
        return result


def find_dependence(task: Task) -> str:
    """Return how a program depends on other examples; an empty text if that is not seen.

    It is run on a batch, and on each half of it.
    """
    count, buffers = count_examples(task.examples), list(task.model.buffers())
    versions = [each._version for each in buffers]
    rows = [slice(0, count), slice(0, count // 2), slice(count // 2, count)]
    found = [_losses_of(task, part) for part in rows]
    if any(each.shape != (part.stop - part.start,) for each, part in zip(found, rows, strict=True)):
        return "one loss for the batch"
    if versions != [each._version for each in buffers]:
        return "writes buffers"
    if torch.allclose(found[0], torch.cat(found[1:]), rtol=1e-4):
        return ""
    return "other losses beside others"


def _losses_of(task: Task, rows: slice) -> torch.Tensor:
    """Return the losses of some examples of a batch."""
    torch.manual_seed(_SEED)
    outputs = call_model(task.model, select_examples(task.examples, rows))
    return task.loss(outputs, select_examples(task.targets, rows)).detach()
