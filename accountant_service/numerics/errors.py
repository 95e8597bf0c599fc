"""Errors of the numerical layer.

    ArithmeticError
    └─ ContradictionError     a proved lower bound lies above a proved upper bound
    ValueError
    ├─ SlowDecayError         a line integral cannot be computed; another engine is tried
    └─ LatticeTooLargeError   a lattice does not fit into memory; a coarser one is tried

Only `ContradictionError` leaves this package: it means that one of the proofs is wrong. The two
others tell `certified_interval` and its callers to try something else.
"""

from __future__ import annotations


class ContradictionError(ArithmeticError):
    """A proved lower bound lies above a proved upper bound: one of the proofs is wrong."""


class SlowDecayError(ValueError):
    """An integral for δ(ε) would cost too much, since its integrand decays too slowly."""


class LatticeTooLargeError(ValueError):
    """A grid of losses of the requested spacing would have more points than the limit allows.

    Attributes:
        size_ratio: the number of points, divided by the limit.
    """

    def __init__(self, points: int, limit: int) -> None:
        self.size_ratio = points / limit
        super().__init__(f"the lattice needs {points} points, and the limit is {limit}")
