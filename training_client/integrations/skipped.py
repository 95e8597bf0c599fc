"""Refusals of whatever leaves a step out that a batch was drawn for.

A step that is left out because of a record, for its gradient overflowed or its batch was empty,
tells of that record: parameters stay as they were, and no noise hides that.

A GradScaler leaves a step out where a gradient is not finite. When this module is imported every
`GradScaler` refuses Opacus' optimizers, whichever framework calls it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from opacus.optimizers import DPOptimizer

from training_client.errors import NoGuaranteeError

_WAY_OUT: Final = "train in float32, or mixed with bfloat16 (bf16=True, bf16-mixed)"
_FULL: Final = (torch.float32, torch.float64)


def require_no_scaler(scaler: Any, option: str) -> None:
    """Refuse a framework that scales the loss, and skips a step where a gradient overflows.

    Args:
        scaler: the framework's; None if it has none.
        option: what asks for it.

    Raises:
        NoGuaranteeError: there is one.
    """
    if scaler is not None:
        raise NoGuaranteeError(
            f"{option} trains with a GradScaler, which skips a step where one record's gradient "
            f"overflows, and no noise hides that: {_WAY_OUT}"
        )


def require_usual_precision(optimizer: DPOptimizer) -> None:
    """Refuse parameters in half precision, in which noise is lost by rounding.

    Raises:
        NoGuaranteeError: some are.
    """
    kinds = {each.dtype for each in optimizer.params} - set(_FULL)
    if kinds:
        raise NoGuaranteeError(
            f"parameters are of {', '.join(sorted(map(str, kinds)))}, in which gradients overflow "
            f"and noise is lost by rounding: keep them in float32, and {_WAY_OUT}"
        )


def require_finite(optimizer: DPOptimizer) -> None:
    """Refuse a step whose noisy gradient is not finite: that of one record is in all parameters.

    Raises:
        NoGuaranteeError: it is not.
    """
    if not all(bool(each.grad.isfinite().all()) for each in optimizer.params):
        raise NoGuaranteeError(
            "the gradient of a record is not finite, and with it the whole step, which no noise "
            f"hides: lower the learning rate or bound the loss, and {_WAY_OUT}"
        )


def _refusing(genuine: Any) -> Any:
    """Return a GradScaler's method that refuses Opacus' optimizers."""

    def method(scaler: Any, optimizer: Any, *more: Any, **named: Any) -> Any:
        own = getattr(optimizer, "optimizer", optimizer)  # a framework wraps it
        if scaler.is_enabled() and isinstance(own, DPOptimizer):
            require_no_scaler(scaler, "this loop")
        return genuine(scaler, optimizer, *more, **named)

    return method


for _name in ("unscale_", "step"):
    setattr(torch.amp.GradScaler, _name, _refusing(getattr(torch.amp.GradScaler, _name)))
