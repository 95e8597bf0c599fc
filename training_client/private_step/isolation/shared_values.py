"""Shared values of examples: constants from outside of a pass, and those that their number decides.

Passes of three and of two examples may share the same values although the number of examples
decides them: of `max(8, n)`, few show nothing. So a pass of two is compared with that of three
operation by operation. Where the number of examples decides what an operation is given, it may
decide what that makes, and whatever is computed from it. Where such values meet examples, every
step compares them with those of the proof.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from training_client.private_step.isolation.operations import Call, tensors_in
from training_client.private_step.isolation.places import Place, is_close, rows_of_examples
from training_client.private_step.isolation.rules import SHAPE_ONLY

_MOST_NUMBERS: Final = 64  # of a constant, each of which is noted
_CONSTANT: Final = ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "fill", "zero")

KeepsRows = Callable[[Sequence[torch.Size]], bool]

# Views that take the same part of each row, however many rows there are.
_VIEWS_OF_ROWS: Final = frozenset([
    "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "slice", "select", "detach",
    "alias", "lift_fresh",
])  # fmt: skip
_RESHAPED: Final = frozenset(["view", "_unsafe_view", "_reshape_alias", "repeat"])


class Constant(NamedTuple):
    """The values of a tensor that no operation of the pass made.

    Attributes:
        shape: of the tensor.
        whole: a checksum of its values.
        first: a checksum of its first row.
        numbers: the values, if they are few.
    """

    shape: tuple[int, ...]
    whole: int
    first: int
    numbers: list[Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        """Return the values of a tensor."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            value = tensor.detach()
            is_few = value.is_cpu and value.numel() <= _MOST_NUMBERS
            numbers = value.flatten().tolist() if is_few else None
            first = value[:1] if value.dim() else value
            return cls(tuple(value.shape), _checksum(value), _checksum(first), numbers)

    @classmethod
    def note(cls, found: list[Any], tensor: torch.Tensor) -> None:
        """Note the values of a tensor, unless it may be a parameter that is gathered."""
        if not tensor.requires_grad:
            found.append(cls.of(tensor))

    def folded(self, count: int) -> Constant:
        """Return what does not depend on how many rows there are, if there is one per example."""
        if self.shape[:1] != (count,):
            return self
        return Constant(self.shape[1:], self.first, self.first, None)


def _checksum(value: torch.Tensor) -> int:
    """Return a checksum of the bytes of a tensor."""
    if value.is_sparse or value.layout is not torch.strided or value.is_quantized:
        return 0
    plain = value.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(plain.numpy().data) if plain.is_cpu else int(plain.sum(dtype=torch.int64))


class SharedValue(NamedTuple):
    """Values that all examples share in a proved pass, where these meet examples.

    Attributes:
        operand: which of the operation's tensors.
        dim: along which there is one row for each example; None if there is none.
        place: where the examples are along it; None if one row is all that matters.
        value: the values.
    """

    operand: int
    dim: int | None
    place: Place | None
    value: torch.Tensor

    def is_in(self, tensor: torch.Tensor, count: int) -> bool:
        """Return whether all examples share these values in a batch of `count` examples."""
        found = tensor
        if self.dim is not None and self.place is None:
            found = tensor[:1]
        elif self.dim is not None and self.place is not None:
            if tensor.size(self.dim) != self.place.size(count):
                return False
            rows = rows_of_examples(tensor, self.dim, self.place, count)
            found = rows.select(self.dim + 1, 0)
        is_same_kind = found.shape == self.value.shape and found.dtype == self.value.dtype
        return is_same_kind and is_close(found, self.value)


class Inputs(NamedTuple):
    """Arguments of an operation, apart from the values of tensors.

    Attributes:
        given: whole numbers, flags and names.
        factors: other numbers.
        shapes: of the tensors.
    """

    given: list[Any]
    factors: list[Any]
    shapes: list[torch.Size]


class Counted:
    """Finds what the number of examples may decide, of what a pass computes for all of them.

    Attributes:
        inputs: what each operation was given, by its number.

    Args:
        first: that of a pass of another number of examples; None if this is the first.
    """

    def __init__(self, first: Counted | None) -> None:
        self.inputs: dict[int, Inputs] = {}
        self._first = {} if first is None else first.inputs
        self._storages: dict[int, StorageWeakRef] = {}  # the reference keeps the key in use
        self._views: dict[Any, StorageWeakRef] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether the number of examples may decide values of a tensor."""
        return (
            tensor.untyped_storage()._cdata in self._storages or _memory_of(tensor) in self._views
        )

    def note(self, number: int, inputs: Inputs, constants: Sequence[torch.Tensor]) -> None:
        """Note what an operation is given, and the constants that it is the first to use."""
        self.inputs[number] = inputs
        there = self._first.get(number)
        if there is not None and there.factors != inputs.factors:
            self.add(constants)

    def note_view(self, number: int, name: str, tensors: Sequence[torch.Tensor], out: Any) -> None:
        """Note the views that an operation made of tensors."""
        sizes = self.inputs[number].given[:1]
        is_by_rows = name in _VIEWS_OF_ROWS or (
            name in _RESHAPED and type(sizes[0]) is list and -1 not in sizes[0][1:]
        )
        if self._is_decided(number, name, tensors, lambda _: is_by_rows):
            for each in tensors_in([out], {}):
                self._views[_memory_of(each)] = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]

    def note_results(self, number: int, call: Call, keeps_rows: KeepsRows) -> None:
        """Note the results of an operation.

        Args:
            number: of the operation.
            call: the operation.
            keeps_rows: tells whether each row of a result is made of the rows at its place, where
                operands had these shapes in the other pass.
        """
        if self._is_decided(number, call.name, call.tensors, keeps_rows):
            self.add(call.outs)

    def pass_on(self, call: Call) -> None:
        """Note the results of an operation on examples."""
        if any(each in self for each in call.tensors):
            self.add(call.outs)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add tensors of which the number of examples may decide the values."""
        for each in tensors:
            storage = each.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _is_decided(
        self, number: int, name: str, tensors: Sequence[torch.Tensor], keeps_rows: KeepsRows
    ) -> bool:
        """Return whether the number of examples may decide what an operation makes."""
        here, there = self.inputs.get(number), self._first.get(number)
        if any(each in self for each in tensors):
            return True
        if here is None or there is None or here == there:
            return False
        if here.factors != there.factors or len(here.shapes) != len(there.shapes):
            return True
        if here.given == there.given:
            return not keeps_rows(there.shapes)
        if name == "expand" or (is_constant(name) and keeps_rows(there.shapes)):
            return False
        has_rows = here.shapes != there.shapes or name == "repeat"
        return not (name in _RESHAPED and has_rows and _differ_in_the_first(here, there))


def is_constant(name: str) -> bool:
    """Return whether an operation makes a tensor of one value, or of none yet."""
    return name in _CONSTANT or name in SHAPE_ONLY or "empty" in name


def _differ_in_the_first(here: Inputs, there: Inputs) -> bool:
    """Return whether sizes that two operations are given differ in the first number alone."""
    pairs = list(zip(here.given, there.given, strict=False))
    return len(here.given) == len(there.given) and all(
        one == other or (type(one) is type(other) is list and one[1:] == other[1:])
        for one, other in pairs
    )


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return what tells the memory of a view from others of its storage."""
    key = tensor.untyped_storage()._cdata
    return key, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
