"""A CPU that says it is none, and counts of what an accelerator waits for and copies in double."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SYNCHRONIZING = {  # their results' values or shapes are read by the CPU
    "_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "unique_consecutive",
    "unique_dim", "_unique2", "is_nonzero",
}  # fmt: skip


@contextmanager
def no_cpu(*, pretend: bool = True, must_ask: bool = True) -> Iterator[None]:
    """Have all tensors say that they are not on a CPU; require that somebody asks, if told so.

    `Tensor.is_cpu` decides about compiled loops, oneDNN, sparse products, and the sizes of blocks
    and chunks. With it False, the engine takes the way of every other device. GPUs' own kernels and
    generators are not tried by this.
    """
    if not pretend:
        yield
        return
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "is_cpu", property(lambda _: bool(asked.append(1))), raising=False
        )
        yield
    assert asked or not must_ask


class AcceleratorCounts(TorchDispatchMode):
    """Counts operations inside a `with` block.

    Attributes:
        waits: for each operation whose result the CPU reads, how often it ran; boolean masks as
            indices are among them.
        doubles: elements of floating-point tensors that were copied in double precision.
        largest_double: elements of the largest tensor in double precision that was returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.doubles = self.largest_double = 0
        self._to_list = torch.Tensor.tolist

    def __enter__(self) -> Self:
        def counted(tensor: torch.Tensor) -> Any:
            self.waits["tolist"] += 1
            return self._to_list(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._to_list  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in _SYNCHRONIZING or (
            name in ("index", "index_put", "index_put_") and _has_mask(args[1])
        ):
            self.waits[name] += 1
        found = function(*args, **kwargs)
        if name == "_to_copy" and kwargs.get("dtype") == torch.float64:
            self.doubles += args[0].numel() if args[0].is_floating_point() else 0
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                self.largest_double = max(self.largest_double, each.numel())
        return found


def _has_mask(indices: Any) -> bool:
    """Return whether one of the indices is a mask, whose places the CPU must count."""
    return any(each is not None and each.dtype == torch.bool for each in indices)
