"""Replacements of functions of PyTorch, with which the private step is guarded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch._functorch import autograd_function

_RULE: Final = "custom_function_call_vmap_helper"  # applies a rule
_is_guarded: ContextVar[bool] = ContextVar("_is_guarded", default=False)


@contextmanager
def without_own_rules() -> Iterator[None]:
    """Context manager in which no function of the program is vectorised by its own rule.

    Such a rule (`vmap` of an `autograd.Function`) is given all examples at once.

    Raises:
        RuntimeError: this version of PyTorch applies such rules in another way, or one is applied.
    """
    _guard_rules()
    token = _is_guarded.set(True)
    try:
        yield
    finally:
        _is_guarded.reset(token)


@cache
def _guard_rules() -> None:
    """Let PyTorch ask whether a program's own rule is allowed before it applies one."""
    apply = getattr(autograd_function, _RULE, None)
    if apply is None:
        raise RuntimeError(f"PyTorch {torch.__version__} has no {_RULE}")

    def apply_if_allowed(*args: Any, **kwargs: Any) -> Any:
        """Apply a rule; raise where none is allowed."""
        if _is_guarded.get():
            raise RuntimeError("an autograd.Function has a vmap rule of its own")
        return apply(*args, **kwargs)

    setattr(autograd_function, _RULE, apply_if_allowed)
