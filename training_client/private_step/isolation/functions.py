"""Functions of PyTorch that no operation shows, or whose operations say too much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode

# Functions that hand the values of a tensor to Python or NumPy, by no operation of PyTorch's.
_EXITS: Final = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "numpy",
        "tolist",
        "__array__",
        "__dlpack__",
        "data_ptr",
        "__reduce_ex__",
        "__deepcopy__",
        "apply_",
        "map_",
        "map2_",
    )
)


def describe_exit(name: str) -> str:
    """Return what stands for such a function among the operations of a pass."""
    return f"Tensor.{name}"


class Watcher:
    """Base of what follows a pass through its operations.

    Attributes:
        is_one_hot: whether the operations are those of `one_hot`, which reads the classes only to
            check their range.
    """

    is_one_hot = False

    def leave(self, name: str, tensor: torch.Tensor) -> None:
        """Raise if Python gets the values of a tensor of examples.

        Args:
            name: of the function.
            tensor: what it is given.
        """
        raise NotImplementedError

    @contextmanager
    def one_hot_part(self) -> Iterator[None]:
        """Context manager for `one_hot`."""
        self.is_one_hot = True
        try:
            yield
        finally:
            self.is_one_hot = False


class Functions(TorchFunctionMode):
    """Tells a watcher of the functions of PyTorch that no operation shows.

    Args:
        watcher: is told.
    """

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function; see the class."""
        if func in _EXITS:
            self._watcher.leave(func.__name__, args[0])
        elif func is one_hot:
            number = args[1] if len(args) > 1 else (kwargs or {}).get("num_classes", -1)
            if number != -1:
                with self._watcher.one_hot_part():
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
