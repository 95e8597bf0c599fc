"""Names the operands of a pass's operations, so that two passes can be compared.

The same operations may be given other tensors: the mean of a batch instead of a constant, another
layer's weight, the same values with a gradient or without. So a pass is compared operand by
operand. A name does not depend on the number of examples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

_GRADIENTS_ARE_OFF: Final = "gradients are off"
_GRADIENTS_ARE_ON: Final = "gradients are on"
_ANOTHER_PART: Final = "another part of its memory"

_SEQUENCES: Final = (list, tuple)

# storage, offset, shape, strides, type
Memory = tuple[int, Any, torch.Size, tuple[int, ...], torch.dtype]


class Operands:
    """The operands of the operations of a pass, by name.

    What the pass made is named by the number of the last operation that returned a tensor of the
    same memory: the same storage, offset, shape, strides and type. What it was given has the
    numbers −1, −2, …; other tensors have the next ones, in the order in which the pass meets them.

    Attributes:
        found: for each operation, the name of every operand, followed by whether it requires a
            gradient, and None for an argument that is left out; then whether gradients are enabled.

    Args:
        given: parameters and buffers of the model, then targets and examples.
        meet: is called with each tensor that is neither made by the pass nor given to it.
    """

    def __init__(
        self,
        given: Iterable[torch.Tensor] = (),
        meet: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.found: list[Any] = []
        self._meet = meet
        self._names: dict[Memory, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._made: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._others = 0
        for each in given:
            self.name_given(each)

    def name_given(self, tensor: torch.Tensor) -> None:
        """Name a tensor that the pass did not make, unless an earlier one has the same memory."""
        self._others -= 1
        storage = tensor.untyped_storage()
        memory = _memory(tensor, storage)
        if (known := self._names.get(memory)) is None or known[1]() is None:
            self._names[memory] = self._others, weakref.ref(storage)

    def note_result(self, number: int, tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
        """Name a result of an operation after its number; return a reference to its storage."""
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage)
        self._names[_memory(tensor, storage)] = self._made[id(storage)] = number, reference
        return reference

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        """Note the operands of the next operation, and which of its arguments they are.

        Args:
            args: its arguments; lists among them may have tensors too.
            kwargs: likewise, by name.
        """
        self._note_arguments(args)
        for name, each in kwargs.items() if kwargs else ():
            if isinstance(each, (torch.Tensor, *_SEQUENCES)):
                self.found.append(name)
                self._note_arguments((each,))
        self.found.append(_GRADIENTS_ARE_ON if torch.is_grad_enabled() else _GRADIENTS_ARE_OFF)

    def _note_arguments(self, args: Sequence[Any]) -> None:
        """Note the tensors among arguments, and what is left out before them."""
        found = self.found
        for each in args:
            if isinstance(each, torch.Tensor):
                self._note_tensor(each)
            elif each is None:
                found.append(None)
            elif type(each) in _SEQUENCES and any(isinstance(e, torch.Tensor) for e in each):
                found.append(len(each))
                self._note_arguments(each)

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        """Note an operand."""
        storage = tensor.untyped_storage()
        entry = self._names.get(_memory(tensor, storage))
        if entry is not None and entry[1]() is storage:  # and not one at the same address
            self.found.append(entry[0])
        else:
            self._note_unknown(tensor, storage)
        self.found.append(tensor.requires_grad)

    def _note_unknown(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Note an operand that no operation returned."""
        made = self._made.get(id(storage))
        if made is None or made[1]() is not storage:
            self.name_given(tensor)
            self.found.append(self._others)
            if self._meet is not None:
                self._meet(tensor)
        else:  # the engine's own layers made it of their results
            self.found += made[0], _ANOTHER_PART


def _memory(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Memory:
    """Return what tells a tensor's memory from others' while its storage exists."""
    return id(storage), tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def first_alike(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the index of the first one of the same memory."""
    memory = [_memory(each, each.untyped_storage()) for each in tensors]
    return [memory.index(each) for each in memory]
