"""Proves that model and loss keep examples apart, and sees in every step what was not proved yet.

Two passes, of three and of two examples, are followed through every operation (`trace`). They must
consist of the same operations, with the same shared values wherever these meet examples: Python
sees the number of examples as an integer, which no operation shows. Then every pass of a step is
compared with what was proved: its operations, and their arguments that are whole numbers. One that
consists of others is proved before anything of it is released.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from training_client.private_step.isolation.functions import Functions, Watcher, describe_exit
from training_client.private_step.isolation.operands import Operands
from training_client.private_step.isolation.operations import (
    MixingError,
    StateChangeError,
    UnknownError,
    calling_line,
    note_arguments,
    note_layer,
    signature_of,
    tensors_in,
)
from training_client.private_step.isolation.places import is_close
from training_client.private_step.isolation.trace import (
    Check,
    Entry,
    Trace,
    describe_backward,
    python_in_backward,
)
from training_client.private_step.model_state import RandomStates, numbers_of, restore_numbers

ROWS: Final = 5  # of the two passes
_MOST_ANSWERS: Final = 8  # that may be the other way round
_MULTIPLE: Final = 1 << 40  # marks a multiple of the number of examples
_READS: Final = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)

Key = tuple[Any, ...]
RunTraced = Callable[[torch.Tensor, Trace], None]  # runs these rows of a batch, forward and back


@dataclass
class Proof:
    """The operations of a proved pass, and what to do in each such pass.

    They are those of the forward part, and of a backward part that the program takes part in.

    Attributes:
        functions: the operations.
        answers: to questions whether all or any examples have a property, by their numbers.
        checks: conditions on operands, by the numbers of their operations.
        made_of_examples: for each operation, whether its result depends on the examples.
        given: what the operations are given, in passes of three and of two examples.
        factors: likewise.
        operands: the tensors that they are given, by name.
        added_up: the numbers of the parameters of which the gradients of such a pass were compared
            with their sum, when that was not 0.
        is_tested: whether the pass was only tested, because an operation has no rule.
        reads: the numbers that Python read.
        has_backward_part: whether the program takes part in the backward part.
    """

    functions: Key = ()
    answers: Mapping[int, bool] = field(default_factory=dict)
    checks: Mapping[int, Sequence[Check]] = field(default_factory=dict)
    made_of_examples: Sequence[bool] = ()
    given: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    factors: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    operands: Sequence[Any] = ()
    is_tested: bool = False
    added_up: set[int] = field(default_factory=set)
    reads: Sequence[Any] = ()
    has_backward_part: bool = False

    @classmethod
    def from_traces(cls, three: Trace, two: Trace) -> Proof:
        """Return what two traced passes, of three and of two examples, were."""
        functions, given, factors, operands = three.observed
        return cls(
            tuple(three.functions[:functions]),
            {at: answer for at, answer in three.answers.items() if at < functions},
            {at: checks for at, checks in three.checks.items() if at < functions},
            three.made_of_examples[:functions],
            (three.given[:given], two.given[:given]),
            (three.factors[:factors], two.factors[:factors]),
            three.operands.found[:operands],
            reads=three.reads,
            has_backward_part=three.has_backward_part,
        )

    def covers(self, comparison: Comparison) -> bool:
        """Return whether a pass has the operations of this proof, which are given the same.

        Whole numbers may differ as they do between passes of two and of three examples, in
        proportion to the number of examples.
        """
        return self.is_tested or (
            self.functions == comparison.names
            and self.operands == comparison.operands.found
            and _extrapolate(*self.given, comparison.given, comparison.count)
            and _extrapolate(*self.factors, comparison.raw_factors, comparison.count)
        )

    def is_of(self, reads: Sequence[Any]) -> bool:
        """Return whether Python read these numbers in the passes of the proof."""
        return list(self.reads) == list(reads)

    def first_difference(self, comparison: Comparison) -> str:
        """Return the first operation of a pass that is another one than in this proof."""
        pairs = zip_longest(self.functions, comparison.names)
        one, other = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        if one == other:
            are_alike = self.operands == comparison.operands.found
            return f"the same ones, which are given other {'numbers' if are_alike else 'tensors'}"
        return f"{other or 'the end'}, where the few have {one or 'the end'}"


def _extrapolate(three: Any, two: Any, found: Any, count: int) -> bool:
    """Return whether a batch is given what passes of three and of two examples imply."""
    if type(found) is list and type(three) is list and type(two) is list:
        if (len(three), len(two), len(found)) == (3, 2, count):  # a number for each example
            return len({*three, *two, *found}) == 1 or (three, found) == (
                [0, 1, 2],
                [*range(count)],
            )
        return len(three) == len(two) == len(found) and all(
            _extrapolate(*each, count) for each in zip(three, two, found, strict=True)
        )
    if type(three) is int and type(two) is int and type(found) is int:
        return found == two + (three - two) * (count - 2)
    if found != found:  # not a number
        return bool(three != three and two != two)
    if type(three) is float and math.isclose(three, two, rel_tol=1e-3):
        return math.isclose(three, found, rel_tol=1e-3) if three != two else three == found
    return bool(three == two == found or (three != two and type(three) is float))


def prove(
    run: RunTraced,
    rows: torch.Tensor,
    model: nn.Module,
    stale: Mapping[int, StorageWeakRef],
    kept: dict[int, StorageWeakRef],
    drawn: Sequence[Any] = (),
) -> Proof:
    """Prove that each example's loss, and all gradients for the clip, depend on it alone.

    Args:
        run: runs these rows of a batch under a trace, forward and back.
        rows: of the batch: three for the first pass, and two others for the second, if there are
            so many; else they are repeated.
        model: the model; numbers and flags that its modules keep are restored after each pass.
        stale: storages that earlier passes made of their examples.
        kept: gets the storages that these passes make of their examples.
        drawn: random numbers that Python read in the pass to be proved.

    Raises:
        MixingError: it does not.
        UnknownError: no rule says whether an operation keeps examples apart.
        StateChangeError: a pass writes to a parameter or buffer.
    """
    owned = [*model.parameters(), *model.buffers()]
    flipped: frozenset[int] = frozenset()
    while True:
        first = Trace(3, owned, {**stale, **kept}, flipped, drawn)
        try:
            _follow(run, rows[:3], first, model)
            break
        except (MixingError, UnknownError, StateChangeError):
            raise
        except Exception:  # the program may have refused its data by the last answer
            last = len(first.answers) - 1
            if last < 0 or last in flipped or last >= _MOST_ANSWERS:
                raise
            flipped |= {last}
        finally:
            kept.update(first.storages_of_examples())
    second = Trace(2, owned, {**stale, **kept}, flipped, first.reads)
    try:
        _follow(run, rows[-2:], second, model)
    finally:
        kept.update(second.storages_of_examples())
    _require_alike(first, second)
    return Proof.from_traces(first, second)


def _follow(run: RunTraced, rows: torch.Tensor, trace: Trace, model: nn.Module) -> None:
    """Make one pass, from the state of all random generators that there is."""
    states = RandomStates(next(model.parameters()).device, all_generators=True)
    torch.clear_autocast_cache()  # so that every pass casts the weights itself
    numbers = numbers_of(model)
    try:
        run(rows, trace)
    finally:
        states.restore()
        restore_numbers(model, numbers)


def _require_alike(first: Trace, second: Trace) -> None:
    """Raise unless two passes have the same operations and shared values."""
    for one, other in zip_longest(first.log, second.log):
        if one is None or other is None or not one.is_alike(other, first.count, second.count):
            raise MixingError(
                "other examples, or another number of them, pass other operations: "
                f"{_describe(one)} in a batch of {first.count}, {_describe(other)} in one of "
                f"{second.count}"
            )
    if first.functions != second.functions:
        raise MixingError("another number of examples passes other operations")
    one_found, other_found = (each.operands.found[: each.observed[3]] for each in (first, second))
    if one_found != other_found:
        raise MixingError("another number of examples gives operations other tensors")
    for value, another in zip_longest(first.values, second.values):
        if value is None or another is None or not _is_same(value, another):
            raise MixingError(
                "what all examples share depends on them, or on their number: "
                f"{_describe_value(value)} and {_describe_value(another)}"
            )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and is_close(one, other)


def _describe(entry: Entry | None) -> str:
    """Return an entry of a log as text."""
    if entry is None:
        return "nothing"
    return f"{entry.name}({', '.join(f'{name}={value}' for name, value in entry.given)})"


def _describe_value(value: torch.Tensor | None) -> str:
    """Return the beginning of a value as text."""
    return "nothing" if value is None else str(value.flatten()[:3].tolist())


def _is_of_operand(func: Any) -> bool:
    """Return whether an operation's result is in the memory of an operand."""
    return not isinstance(func, str) and bool(
        signature_of(func).is_view or signature_of(func).written
    )


def _in_batches(number: int, count: int) -> int:
    """Return a whole number, or if it is a multiple of the number of examples, which one."""
    return number if number % count else _MULTIPLE + number // count


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether a model, or a module in it, was compiled by `torch.compile`."""
    return any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None
        for each in model.modules()
    )


def _graphs_compiled() -> int:
    """Return how many graphs were compiled so far: a new one may have other operations."""
    from torch._dynamo.utils import counters  # slow to import, and imported by what compiles

    return int(counters["stats"]["unique_graphs"])


class Comparison(Watcher, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the forward part of a step's pass consists of, and acts as its proof says.

    It does so in the backward part too if the program takes part in it: by functions of its own, or
    by hooks.

    Attributes:
        count: the number of examples.
        functions: the operations.
        given: whole numbers, flags and names that they are given.
        raw_factors: other numbers that they are given.
        operands: the tensors that they are given.
        reads: the numbers that Python read, in their order.
        error: what is wrong with the pass; it is kept because the program may catch it.
        python: the Python code of the program in the backward part, by name.

    Args:
        given: examples and targets.
        proofs: what was proved.
        stale: storages that earlier passes made of their examples.
        owned: parameters and buffers of the model.
        is_compiled: whether the model has compiled parts, whose operations nobody sees. Then what
            was compiled takes their place.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        proofs: Sequence[Proof],
        stale: Mapping[int, StorageWeakRef],
        owned: Sequence[torch.Tensor] = (),
        *,
        is_compiled: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_compiled = is_compiled
        self.count, self._proofs = len(given[0]), proofs
        self._given = [weakref.ref(each.untyped_storage()) for each in given]
        now = {each.untyped_storage()._cdata for each in given}
        self._stale = {key: ref for key, ref in stale.items() if key not in now}
        self.error: MixingError | None = None
        self._acts = {at for proof in proofs for at in (*proof.answers, *proof.checks)}
        self.functions: list[Any] = []
        self.given: list[Any] = []
        self.raw_factors: list[Any] = []
        self.operands = Operands([*owned, *given])
        self.reads: list[Any] = []
        self._made: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []
        self._hooks, self._is_observing, self._is_own = 0, False, False
        self.python: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that no operation needs a guard against compilation, which costs as much as it."""
        return False

    @property
    def names(self) -> Key:
        """The operations."""
        return tuple(self.functions)

    @property
    def key(self) -> Key:
        """The operations, and their arguments that are tensors, whole numbers, flags or names."""
        count = self.count
        if self.is_compiled:
            return ("compiled", _graphs_compiled())
        return (
            *self.functions, None, *self.operands.found, None,
            *[
                v if (kind := type(v)) is not int and kind is not list
                else _in_batches(v, count) if kind is int
                else tuple([_in_batches(each, count) for each in v])
                for v in self.given
            ],
        )  # fmt: skip

    @property
    def factors(self) -> list[Any]:
        """The numbers that may change in every step; multiples of the count as such."""
        count = self.count
        return [_in_batches(v, count) if type(v) is int else v for v in self.raw_factors]

    def has_factors(self, factors: Sequence[Any]) -> bool:
        """Return whether these are the numbers that may change in every step."""
        pairs = zip(self.factors, factors, strict=False)
        return len(factors) == len(self.raw_factors) and all(
            one == other or one != one for one, other in pairs
        )

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note it."""
        at = len(self.functions)
        self.functions.append(func)
        note_arguments(func, args, kwargs or {}, self.given, self.raw_factors)
        self.operands.note(args, kwargs)
        if self._stale or at in self._acts:
            answer = self._act(at, args, kwargs or {})
            if answer is not None:
                return answer
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) is torch.Tensor:
            self._made.append((at, self.operands.note_result(at, result)))
        elif func in _READS:
            self.reads.append(result)
        else:
            self._note_made(at, tensors_in([result], {}))
        return result

    def _note_made(self, at: int, tensors: Iterable[torch.Tensor]) -> None:
        """Note the memory of results. A program may keep it by another tensor, as `.data` is."""
        self._made += [(at, self.operands.note_result(at, each)) for each in tensors]

    def _act(self, at: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
        """Refuse values of earlier batches; check operands, or return an answer, as proved."""
        operands = list(tensors_in(args, kwargs))
        if self._stale and any(e.untyped_storage()._cdata in self._stale for e in operands):
            raise self._wrong("uses a tensor that an earlier step computed from its examples")
        before = self.names
        for proof in self._proofs:
            if proof.functions[: at + 1] != before:
                continue
            for check in proof.checks.get(at, ()):
                if not check.holds(operands[check.operand], self.count):
                    raise self._wrong("values depend on the place of an example in its batch")
            if at in proof.answers:
                return proof.answers[at]
        return None

    def _wrong(self, problem: str) -> MixingError:
        """Return an error, which is kept."""
        self.error = MixingError(f"{self.functions[-1]} in {calling_line()}: {problem}")
        return self.error

    def require_rows(self, _: torch.Tensor) -> None:
        """Do nothing: the proof requires it."""

    def require_shared(self, _: torch.Tensor) -> None:
        """Do nothing: the proof requires it."""

    def has_rows(self, _: torch.Tensor) -> bool:
        """Return whether a tensor with B rows has one for each example, as far as is known."""
        return True

    @contextmanager
    def forward_part(self) -> Iterator[None]:
        """Context manager for the forward part of a pass."""
        hooks = RemovableHandle.next_id
        with self._observing():
            yield
        self._hooks = RemovableHandle.next_id - hooks

    @contextmanager
    def backward_part(self, losses: torch.Tensor, hooks: int) -> Iterator[None]:
        """Context manager for the backward part of a pass, in which the program may take part."""
        found = describe_backward(losses, self._hooks - hooks)
        if found is None:
            yield
            return
        self.functions.append(found)
        self.python = python_in_backward(losses, self._hooks - hooks)
        with self._observing():
            yield

    @contextmanager
    def _observing(self) -> Iterator[None]:
        if self.is_compiled:
            yield
            return
        self._is_observing = True
        try:
            with torch.compiler.set_stance("force_eager"), Functions(self), self:
                yield
        finally:
            self._is_observing = False

    def leave(self, name: str, _: torch.Tensor) -> None:
        """Note that Python gets the values of a tensor: a pass that does is another one."""
        if not self._is_own:
            self.functions.append(describe_exit(name))

    @contextmanager
    def own_part(self, layer: nn.Module, given: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
        """Context manager for a layer that the engine runs: one operation, with these results."""
        if not self._is_observing:  # it is run again in the backward part
            yield []
            return
        at, results = len(self.functions), []  # type: int, list[Any]
        self.functions.append(type(layer).__name__)
        note_layer(layer, self.given, self.raw_factors)
        self.operands.note(given)
        self._is_own = True
        try:
            with _disable_current_modes():
                yield results
        finally:
            self._is_own = False
        self._note_made(at, tensors_in([results], {}))

    def survivors(self, proof: Proof) -> dict[int, StorageWeakRef]:
        """Return the storages of examples, or made of them, that somebody still holds.

        Where the pass has other operations than the proof, anything new may be made of examples.
        """
        made = proof.made_of_examples
        if proof.functions != self.names:
            made = [not _is_of_operand(each) for each in self.functions]
        refs = [ref for at, ref in self._made if made[at]] + self._given
        return {s._cdata: StorageWeakRef(s) for ref in refs if (s := ref()) is not None}  # type: ignore[no-untyped-call]
