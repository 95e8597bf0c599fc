"""Replacements of functions of PyTorch, with which the private step is guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch._functorch import autograd_function
from torch.autograd.graph import saved_tensors_hooks

from training_client.errors import UnsupportedModelError
from training_client.private_step.isolation.shared_values import Constant

_RULE: Final = "custom_function_call_vmap_helper"  # applies a rule
_HOOKS_OF_TORCH: Final = ("torch.autograd.graph", "torch.utils.checkpoint")
_WRONG_HOOKS: Final = (
    "hooks of the program change tensors that are saved for the backward pass "
    "(torch.autograd.graph.saved_tensors_hooks), so gradients may depend on other examples: remove "
    "them; torch.autograd.graph.save_on_cpu and torch.utils.checkpoint are allowed"
)
_is_guarded: ContextVar[bool] = ContextVar("_is_guarded", default=False)
_are_hooks_checked: ContextVar[bool] = ContextVar("_are_hooks_checked", default=False)


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


@contextmanager
def checked_saved_tensors() -> Iterator[None]:
    """Context manager for a pass whose saved tensors the program may move, but not change.

    Hooks of PyTorch's own, such as those of checkpoints, are not checked.

    Raises:
        UnsupportedModelError: hooks are set around the pass, or give back other values.
    """
    _check_hooks()
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if around and not _are_hooks_checked.get() and not _are_of_torch(*around):
        raise UnsupportedModelError(_WRONG_HOOKS)
    token = _are_hooks_checked.set(True)
    try:
        yield
    finally:
        _are_hooks_checked.reset(token)


@cache
def _check_hooks() -> None:
    """Let hooks of the program compare what they give back with what they were given."""
    enter = saved_tensors_hooks.__enter__

    def enter_checked(hooks: saved_tensors_hooks) -> None:
        """Set hooks; in a private step, those that compare values."""
        if not _are_hooks_checked.get() or _are_of_torch(hooks.pack_hook, hooks.unpack_hook):
            enter(hooks)
        else:
            enter(saved_tensors_hooks(*_compared(hooks.pack_hook, hooks.unpack_hook)))

    saved_tensors_hooks.__enter__ = enter_checked  # type: ignore[method-assign]


def _are_of_torch(*hooks: Any) -> bool:
    """Return whether hooks are those of `save_on_cpu` or of a checkpoint."""
    return all(getattr(each, "__module__", None) in _HOOKS_OF_TORCH for each in hooks)


def _compared(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
    """Return hooks that raise unless a tensor is given back as it was."""

    def pack_and_note(tensor: torch.Tensor) -> Any:
        """Return what stands for a tensor, and a checksum of its values."""
        return Constant.of(tensor)._replace(numbers=None), pack(tensor)

    def unpack_and_compare(packed: Any) -> torch.Tensor:
        """Return the tensor; raise if it has other values."""
        found = unpack(packed[1])
        if Constant.of(found)._replace(numbers=None) != packed[0]:
            raise UnsupportedModelError(_WRONG_HOOKS)
        return found

    return pack_and_note, unpack_and_compare
