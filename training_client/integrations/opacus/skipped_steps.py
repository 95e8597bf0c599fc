"""Refuses settings and gradients that would skip a step after its batch was drawn.

A step that is skipped because of a record (its gradient overflowed, or its batch was empty) reveals
that record: the parameters stay as they were, and no noise hides that.

A `GradScaler` skips a step if a gradient is not finite. Importing this module makes every
`GradScaler` refuse Opacus' optimizers, whichever framework uses it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from opacus.optimizers import DPOptimizer

from training_client.errors import NoGuaranteeError
from training_client.integrations.patches import check_before_grad_scaler

_ADVICE: Final = "train in float32, or mixed with bfloat16 (bf16=True, bf16-mixed)"
_FULL_PRECISION: Final = (torch.float32, torch.float64)


def require_no_grad_scaler(scaler: Any, option: str) -> None:
    """Raise if a framework uses a gradient scaler, which skips steps on overflow.

    Args:
        scaler: the framework's scaler; None if it has none.
        option: the framework's option that turns it on, for the message.

    Raises:
        NoGuaranteeError: there is a scaler.
    """
    if scaler is not None:
        raise NoGuaranteeError(
            f"{option} trains with a GradScaler, which skips a step where one record's gradient "
            f"overflows, and no noise hides that: {_ADVICE}"
        )


def require_full_precision(optimizer: DPOptimizer) -> None:
    """Raise if parameters have half precision, in which rounding would remove noise.

    Raises:
        NoGuaranteeError: a parameter is neither float32 nor float64.
    """
    kinds = {each.dtype for each in optimizer.params} - set(_FULL_PRECISION)
    if kinds:
        raise NoGuaranteeError(
            f"parameters are of {', '.join(sorted(map(str, kinds)))}, in which gradients overflow "
            f"and noise is lost by rounding: keep them in float32, and {_ADVICE}"
        )


def require_finite_gradients(optimizer: DPOptimizer) -> None:
    """Raise if a clipped sum has a NaN or infinite entry: noise on a grid would hide it.

    Raises:
        NoGuaranteeError: a gradient is infinite or NaN.
    """
    if not all(bool(each.summed_grad.isfinite().all()) for each in optimizer.params):
        raise NoGuaranteeError(
            "the gradient of a record is not finite, which makes the whole step non-finite, and no "
            f"noise hides that: lower the learning rate or bound the loss, and {_ADVICE}"
        )


def _refuse_private_optimizer(scaler: Any, optimizer: Any) -> None:
    """Raise if a `GradScaler` is about to make an Opacus optimizer's step."""
    wrapped = getattr(optimizer, "optimizer", optimizer)  # a framework's wrapper
    if scaler.is_enabled() and isinstance(wrapped, DPOptimizer):
        require_no_grad_scaler(scaler, "this loop")


check_before_grad_scaler(_refuse_private_optimizer)
