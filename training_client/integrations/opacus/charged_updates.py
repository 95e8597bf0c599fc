"""Lets the optimizer inside Opacus' update the parameters only in steps that a hook allowed.

Opacus' optimizer clips, adds noise, calls its step hook, and has PyTorch's optimizer, its
`original_optimizer`, make the update. A program can also call `original_optimizer.step()`: that
update has no noise, and no step hook is called for it.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from opacus.optimizers import DPOptimizer

from training_client.errors import NoGuaranteeError

_IS_ALLOWED: Final = WeakKeyDictionary[torch.optim.Optimizer, bool]()


def refuse_other_updates(optimizer: DPOptimizer) -> None:
    """Let PyTorch's optimizer inside Opacus' refuse every update that is not allowed before it.

    Args:
        optimizer: an optimizer of Opacus; it may be guarded already.
    """
    inner = optimizer.original_optimizer
    if inner not in _IS_ALLOWED:
        _IS_ALLOWED[inner] = False
        inner.register_step_pre_hook(_require_allowed)
        inner.register_step_post_hook(_end_update)


def allow_update(optimizer: DPOptimizer) -> None:
    """Allow the one update of the step that an optimizer of Opacus is making."""
    refuse_other_updates(optimizer)
    _IS_ALLOWED[optimizer.original_optimizer] = True


def _require_allowed(inner: torch.optim.Optimizer, *_: Any) -> None:
    """Raise unless the update is allowed.

    PyTorch calls it before an update: twice for a subclass whose `step` calls its parent's.
    """
    if not _IS_ALLOWED[inner]:
        raise NoGuaranteeError(
            "original_optimizer.step() would update the parameters with gradients that may have "
            "no noise, and no budget pays for it: call step() of the optimizer that make_private "
            "returned"
        )


def _end_update(inner: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse further updates: the allowed one is made."""
    _IS_ALLOWED[inner] = False
