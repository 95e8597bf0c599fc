"""Sums of several examples' gradients at once, each in double precision.

Where examples are vectorised (`torch.func.vmap`), a library adds up the terms of one example in an
order that depends on how many there are. In single precision the terms of a gradient may cancel,
and what is left then depends on the other examples of the batch. In double precision it does so by
2⁻⁵² of the terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Final = torch.ops.aten
_SUMS: Final = frozenset([
    _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default, _aten.addmv.default,
    _aten.dot.default, _aten.sum.default, _aten.sum.dim_IntList,
])  # fmt: skip


class DoubleSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of the factors of each example, and sums, in double precision on a CPU.

    Results are rounded to the precision of the operands. A product of all examples with one matrix
    is left as it is: so are the layers' own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; see the class."""
        kwargs = kwargs or {}
        if func not in _SUMS or not all(map(_is_single, _tensors(args))) or kwargs.get("dtype"):
            return func(*args, **kwargs)
        wide = [each.double() if isinstance(each, torch.Tensor) else each for each in args]
        return func(*wide, **kwargs).to(torch.float32)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in args if isinstance(each, torch.Tensor)]


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_cpu
