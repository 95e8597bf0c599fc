"""Comparisons of tensors."""

from __future__ import annotations

import torch

EPS = float(torch.finfo(torch.float32).eps)


def require_close(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Require a matrix product to be correct up to the rounding that clipped norms allow for."""
    exact = left.double() @ right.double()
    most = left.double().abs() @ right.double().abs()
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= (left.shape[1] + 64) * EPS * most).all())
