"""Calls of PyTorch's operations, as their schemas describe them."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tag

_OWN_FOLDER: Final = str(Path(__file__).parents[1])
_TORCH_FOLDER: Final = str(Path(torch.__file__).parent)
# views of the same memory that are not marked as such, and the values of constants
_UNMARKED_VIEWS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "unsafe_split",
        "unsafe_split_with_sizes", "unsafe_chunk",
    )
)  # fmt: skip
_SHAPING_TYPES: Final = ("int", "bool", "str")
_NUMBERS: Final = (int, float, bool, complex)
_GIVEN: Final = (int, bool, str, list, complex, torch.dtype, torch.layout, torch.memory_format)
_KEPT: Final = (int, bool, str, tuple)  # by layers
_MOST_VALUES: Final = 64  # of a constant that Python computed, which are compared


class MixingError(Exception):
    """An operation makes one example depend on others, on its place, or on their number."""


class DrawnError(MixingError):
    """Random numbers that were worked on meet examples: perhaps each example has its own."""


class UnknownError(Exception):
    """No rule says whether an operation keeps examples apart."""


class StateChangeError(Exception):
    """A pass writes to a parameter or buffer of the model.

    Attributes:
        tensor: the parameter or buffer.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("writes to a parameter or buffer")
        self.tensor = tensor


class Signature(NamedTuple):
    """The part of an operation's schema that rules need.

    Attributes:
        name: the same for its in-place variant.
        arguments: their names.
        defaults: of the arguments that have any.
        written: the names of the arguments that it writes to.
        is_view: whether it only makes a view of its operand.
        is_out: whether it writes its result to an argument of its own.
        is_pointwise: whether each element of the result depends on the elements at its place.
        is_random: whether it draws random numbers.
        shaping: places of the arguments that are whole numbers, flags or names; not those that are
            factors, which may change in every step.
        factors: places of the arguments that are tensors or numbers.
    """

    name: str
    arguments: tuple[str, ...]
    defaults: Mapping[str, Any]
    written: tuple[str, ...]
    is_view: bool
    is_out: bool
    is_pointwise: bool
    is_random: bool
    shaping: tuple[int, ...]
    factors: tuple[int, ...]


@cache
def signature_of(func: Any) -> Signature:
    """Return what the schema of an operation says."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operation on functions
        return Signature(str(func), (), {}, (), False, False, False, False, (), ())
    written = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    full = schema.name
    name = full.removeprefix("aten::")
    is_view = func.is_view or Tag.inplace_view in func.tags or full in _UNMARKED_VIEWS
    types = [str(each.type) for each in schema.arguments if not each.kwarg_only]
    shaping = tuple(
        at for at, each in enumerate(types) if any(kind in each for kind in _SHAPING_TYPES)
    )
    factors = tuple(
        at for at, each in enumerate(types)
        if at not in shaping and not ("List" in each and "Tensor" in each)
    )  # fmt: skip
    return Signature(
        name.rstrip("_"), tuple(a.name for a in schema.arguments),
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()}, written,
        is_view, bool(written) and not name.endswith("_"), Tag.pointwise in func.tags,
        Tag.nondeterministic_seeded in func.tags, shaping, factors,
    )  # fmt: skip


def note_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[Any], factors: list[Any]
) -> None:
    """Note an operation's arguments that are no tensors.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: likewise, by name.
        given: gets whole numbers, flags, names, and lists of them; None for what is left out.
        factors: gets other numbers.
    """
    signature, size = signature_of(func), len(args)
    given += [args[at] if at < size else None for at in signature.shaping]
    for at in signature.factors:
        if at >= size:
            break
        value = args[at]
        if type(value) in _NUMBERS:
            factors.append(value)
        elif type(value) is list:
            factors += value
        elif type(value) in _GIVEN:
            given.append(value)
    if signature.name == "lift_fresh" and args[0].is_cpu and args[0].numel() <= _MOST_VALUES:
        values = args[0].tolist()  # numbers that Python computed
        factors.append(values if args[0].dim() < 2 else args[0].flatten().tolist())
    for name, value in kwargs.items():
        if type(value) is float:
            factors.append(value)
        elif type(value) in _GIVEN:
            given += name, value


def note_layer(layer: torch.nn.Module, given: list[Any], factors: list[Any]) -> None:
    """Note what a layer that the engine runs keeps, such as the number of its groups and its ε.

    Args:
        layer: the layer.
        given: gets its whole numbers, flags, names and sizes, as text.
        factors: gets its other numbers.
    """
    kept = vars(layer)
    given.append(repr([each for each in kept.items() if type(each[1]) in _KEPT]))
    factors += [each for each in kept.values() if type(each) is float]


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments, also those in lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))


class Call:
    """One call of an operation.

    Attributes:
        func: the operation.
        signature: its schema's.
        bound: the arguments that were given, by name.
        tensors: those among the arguments.
        outs: the results that are tensors, once they are known.
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func, self.signature = func, signature_of(func)
        self.bound = {**dict(zip(self.signature.arguments, args, strict=False)), **kwargs}
        self.tensors = list(tensors_in(args, kwargs))
        self.outs: tuple[torch.Tensor, ...] = ()

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.signature.name

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or its default."""
        return self.bound.get(name, self.signature.defaults.get(name, default))

    def given(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the tensors among the named arguments."""
        return [v for name in names if isinstance(v := self.get(name), torch.Tensor)]

    def others(self, chosen: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that are not among these."""
        return [each for each in self.tensors if not any(each is one for one in chosen)]


def calling_line() -> str:
    """Return the innermost line of the program that PyTorch and this engine do not run."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN_FOLDER, _TORCH_FOLDER, "<")):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f"{Path(file).name}:{frame.f_lineno} ({line})" if line else Path(file).name
        frame = frame.f_back  # type: ignore[assignment]
    return "PyTorch"
