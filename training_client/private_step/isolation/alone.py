"""Follows a pass of one example, so that the program has no other in its reach.

Nothing of another example is in a pass of one, unless the program holds it: the batch that it was
taken from, or what an earlier pass left. So those must not be used, what a pass computes from its
example must not be written elsewhere, and Python may not read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from training_client.private_step.isolation.functions import Functions, Watcher
from training_client.private_step.isolation.operands import Operands
from training_client.private_step.isolation.operations import (
    Call,
    MixingError,
    StateChangeError,
    calling_line,
    note_arguments,
    tensors_in,
)
from training_client.private_step.isolation.rules import ANSWERS, READ_BY_PYTHON

Storages = dict[int, StorageWeakRef]  # by their numbers, which the references keep in use


def storages_of(tensors: Sequence[torch.Tensor]) -> Storages:
    """Return the storages of tensors."""
    return {
        _key(each): StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
        for each in tensors
    }


@contextmanager
def followed_alone(
    owned: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    others: Storages,
    kept: Storages,
    *,
    is_noted: bool = False,
    first: Alone | None = None,
) -> Iterator[Alone]:
    """Context manager for a pass of one example, or of each of several alone; see `Alone`.

    Args:
        owned: parameters and buffers of the model.
        given: the example, in memory of its own.
        others: the storages of the batch that it was taken from.
        kept: those that earlier passes computed from their examples; this pass's are added.
        is_noted: whether to note the operations and what they are given.
        first: the noted pass of another example, to compare this one with.

    Raises:
        MixingError: the pass uses another example, or Python reads its own.
        StateChangeError: it writes to a parameter or buffer.
    """
    for key in [key for key, each in kept.items() if each.expired()]:  # type: ignore[no-untyped-call]
        del kept[key]
    alone = Alone(owned, given, {**others, **kept}, is_noted=is_noted, first=first)
    try:
        with torch.compiler.set_stance("force_eager"), Functions(alone), alone:
            yield alone
    finally:
        kept.update(alone.made)
    if alone.error is not None:  # the program may have caught it
        raise alone.error


class Alone(Watcher, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what a pass computes from its example, so that no other pass gets it.

    Attributes:
        made: the storages that depend on the example.
        error: what is wrong with the pass.
        has_read: whether Python read a number that no example decides.
        is_shaped: whether values of the example decide a shape.
        has_written: whether the pass wrote to a tensor that outlives it.

    Args:
        owned: parameters and buffers of the model, which may not change.
        given: the example, in memory of its own.
        others: storages of other examples, and what earlier passes computed from theirs.
        is_noted: see `followed_alone`.
        first: likewise.
    """

    def __init__(
        self,
        owned: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        others: Storages,
        *,
        is_noted: bool = False,
        first: Alone | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_noted, self._first = is_noted, first
        self._constants: list[torch.Tensor] = []
        self._met = 0
        self._has_other_constants = self.is_shaped = self.has_written = False
        self._functions: list[Any] = []
        self._numbers: list[frozenset[Any]] = []  # each by what it may be
        self._sizes: dict[int, set[str]] = {}  # that values of the example decide, by name
        self._operands = Operands([*owned, *given], self._meet)
        self._owned = {_key(each): each for each in owned}
        self._others = dict(others)
        self._new: Storages = {}
        self._answers: dict[int, bool] = {}  # to whether all or any values have a property
        self._counts: dict[int, int] = {}  # of the values of a mask, by the storage of its sum
        self.made: Storages = {}
        self.error: Exception | None = None
        self.has_read = False
        for each in given:
            self._note(self.made, each)

    def _note(self, storages: Storages, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        storages.setdefault(_key(tensor), reference)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; see the class."""
        call = Call(func, args, kwargs or {})
        keys = [_key(each) for each in call.tensors]
        if any(key in self._others for key in keys):
            raise self._wrong("uses another example, or what was computed from another example")
        depends = any(key in self.made for key in keys)
        if depends and call.name in READ_BY_PYTHON and not self.is_one_hot:
            if keys[0] not in self._answers:
                raise self._wrong("Python, and so what it does next, depends on values of examples")
            return self._answers[keys[0]]
        self.has_read |= call.name in READ_BY_PYTHON
        is_shaped = depends and torch.Tag.dynamic_output_shape in func.tags
        self.is_shaped |= is_shaped
        self._require_allowed_writes(call, depends=depends)
        if self._is_noted:
            self._functions.append(func)
            numbers: list[Any] = []
            note_arguments(func, args, kwargs or {}, numbers, numbers)
            self._numbers += self._meanings(numbers)
            self._operands.note(args, kwargs)
        result = func(*args, **(kwargs or {}))
        for each in tensors_in([result] if self._is_noted else [], {}):
            self._operands.note_result(len(self._functions), each)
            for dim, size in enumerate(each.shape if is_shaped else ()):
                name = f"size {dim} of result {len(self._functions)}"
                self._sizes.setdefault(size, set()).add(name)
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, torch.Tensor) and _key(each) not in self._owned:
                self._note(self.made if depends else self._new, each)
        if depends and isinstance(result, torch.Tensor) and result.numel() == 1:
            self._note_answer(call, keys[0], result)
        return result

    def _meanings(self, numbers: Sequence[Any]) -> Iterator[frozenset[Any]]:
        """Yield what each number may be: itself, or a size that the example decides."""
        for each in numbers:
            if type(each) is list:
                yield frozenset([f"{len(each)} numbers"])
                yield from self._meanings(each)
            else:
                sizes = self._sizes.get(each, ()) if type(each) is int else ()
                yield frozenset([repr(each), *sizes])

    def _require_allowed_writes(self, call: Call, *, depends: bool) -> None:
        """Raise if an operation writes to the model, or values of the example to what outlives it.

        Args:
            call: the operation.
            depends: whether it is given values of the example.
        """
        for each in () if call.signature.is_view else call.given(call.signature.written):
            if _key(each) in self._owned:
                self.error = StateChangeError(self._owned[_key(each)])
                raise self.error
            if _key(each) not in self._new and _key(each) not in self.made:
                if depends:
                    raise self._wrong(
                        "writes values of an example to a tensor that outlives the pass"
                    )
                self.has_written = True

    def _meet(self, tensor: torch.Tensor) -> None:
        """Note a constant that no operation of the pass made; compare it with the first pass's."""
        if self._first is None:
            self._constants.append(tensor.detach().clone())
        else:
            expected = self._first._constants[self._met : self._met + 1]
            self._has_other_constants |= not (expected and torch.equal(expected[0], tensor))
        self._met += 1

    def is_as_first(self) -> bool:
        """Return whether the pass is the same function of its example as the first pass.

        Then it has the same operations, which are given the same constants and numbers, and each
        the results of the same earlier ones: no state of the program decides anything.
        """
        first = self._first
        if first is None or first.has_written or self.has_written or not (
            not self._has_other_constants
            and self._functions == first._functions
            and self._operands.found == first._operands.found
            and len(self._numbers) == len(first._numbers)
        ):  # fmt: skip
            return False
        common = [a & b for a, b in zip(self._numbers, first._numbers, strict=True)]
        if not all(common):
            return False
        first._numbers = common  # one meaning must be that of all passes
        return True

    def _note_answer(self, call: Call, given: int, result: torch.Tensor) -> None:
        """Note whether all or any values have a property, which is the same for all examples."""
        first = call.tensors[0]
        if call.name in ANSWERS:
            self._answers[_key(result)] = ANSWERS[call.name]
        elif call.name == "sum" and first.dtype is torch.bool:
            self._counts[_key(result)] = first.numel()
        elif call.name == "eq" and call.get("other") == self._counts.get(given):
            self._answers[_key(result)] = ANSWERS["all"]

    def _wrong(self, problem: str) -> Exception:
        """Return an error, which is kept because the program may catch it."""
        self.error = MixingError(f"{calling_line()}: {problem}")
        return self.error

    def leave(self, name: str, tensor: torch.Tensor) -> None:
        """Raise if Python gets the values of a tensor of the example."""
        if isinstance(tensor, torch.Tensor) and _key(tensor) in self.made:
            raise self._wrong(
                f"{name}: Python, and so what it does next, depends on values of examples"
            )


def _key(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)
