"""The noise of earlier steps, and what a step with banded noise takes back of it.

With m_t the clipped sum and Y_t the release of step t, both whole numbers of steps of the grid
(`rounded_gaussian`), and E_t = m_t − Y_t, which is the release's noise with the other sign,

    Y_t = m_t + Σᵢ rint(cᵢE_{t−i}) + N_t.

Whole numbers are added, so nothing is rounded but the products. Given the releases, a record of
step t moves m_t and E_t by the same x, and what is rounded in step t + i by at most cᵢx + 1.25 a
coordinate: 1 for `rint`, and 2⁻³ for each of two products below 2⁵¹. Clamping moves nothing apart.
A round of a record's steps is therefore moved by at most ‖c‖·‖x‖ + 1.25·√(d(k−1)) with k
coefficients, and ‖c‖ ≥ 1: its noise is that of a sum whose rounding moves it by
√d·(1 + 1.25·√(k−1)) (`rounded_coordinates`).

The shift vₜ of a row depends on earlier rows, by their rounding. Its squares add up to at most B².
Let further rows, which nobody sees, shift by what is left to B². Under both hypotheses the
likelihood ratio is then a function of Σ⟨vₜ, rowₜ⟩, which is exactly normal, with deviation B and
means B² apart. So the rows are as hard to tell apart as one Gaussian release of sensitivity B, and
one kernel makes them of it under both hypotheses, also if a coin decides whether the record is
there. Other releases between the rows are made of them and of what does not depend on the record.

The sums are as private as the records, so nothing of them is stored. A copy, a new assignment of
records to groups, or a step that does not follow the last one begins without earlier noise: that
only leaves out contributions of earlier records.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import torch

from training_client.errors import NoGuaranteeError
from training_client.plan import BandedNoise
from training_client.private_step.rounded_gaussian import LARGEST, NoiseGrid

_PRODUCT_MOVES: Final = 1.25  # in steps of the grid


def rounded_coordinates(coordinates: int, noise: BandedNoise | None) -> int:
    """Return of how many coordinates the rounding moves a round as far as all of its steps do."""
    if noise is None:
        return coordinates
    share = 1 + _PRODUCT_MOVES * math.sqrt(len(noise.coefficients) - 1)
    return math.ceil(coordinates * share**2 * (1 + 1e-14))


class EarlierNoise:
    """The noise of a run's last steps, with the other sign, one block of coordinates at a time.

    Args:
        noise: says how much of it later steps add.
    """

    def __init__(self, noise: BandedNoise) -> None:
        self._noise, self._weights = noise, noise.coefficients[1:]
        self.forget()

    def __reduce__(self) -> tuple[type[EarlierNoise], tuple[BandedNoise]]:
        """Copy without the noise: two runs that add the same would reveal a record's share twice.

        Pickles hold none of it either.
        """
        return type(self), (self._noise,)

    def forget(self) -> None:
        """Begin anew: the next step's noise is independent of all before."""
        self._place: tuple[str | None, int] | None = None  # the groups' name, the step's number
        self._grid: NoiseGrid | None = None
        self._errors: dict[
            int, deque[torch.Tensor]
        ] = {}  # the last steps' E by block, newest first
        self._inverse = deque([1.0], len(self._weights))  # of C: its last entries, newest first
        self._variance = 1.0  # of the release's noise, over that of the noise drawn

    def begin(self, step: int, groups: str | None, grid: NoiseGrid) -> float:
        """Begin a step; return its noise's standard deviation over that of the noise drawn for it.

        Args:
            step: its number.
            groups: identifies the assignment of records to groups that its batch is of.
            grid: what its sum is rounded to.

        Raises:
            NoGuaranteeError: the grid is not that of the step before.
        """
        before, self._place = self._place, (groups, step)
        if before != (groups, step - 1):
            self.forget()
            self._place = groups, step
        elif grid != self._grid:
            raise NoGuaranteeError(
                "banded noise needs the same clip norm and noise in each step, and the optimizer "
                "changed them: use one of dp_sgd, dp_adam and the like with a constant clip norm"
            )
        else:
            pairs = zip(self._weights, self._inverse, strict=False)
            self._inverse.appendleft(-sum(weight * entry for weight, entry in pairs))
            self._variance += self._inverse[0] ** 2 if self._inverse else 0.0
        self._grid = grid
        return math.sqrt(self._variance)

    def take_back(self, block: int, steps: torch.Tensor, shares: int) -> None:
        """Add what a step takes back to its sum on a block; both in whole steps of the grid.

        Args:
            block: the block's number.
            steps: the sum, rounded to the grid; overwritten.
            shares: how many processes add up such sums, which must be exact.
        """
        most = float(math.floor(LARGEST / shares / (len(self._weights) + 1)))
        for weight, error in zip(self._weights, self._errors.get(block, ()), strict=False):
            steps += (error * weight).round_().clamp_(-most, most)

    def keep(self, block: int, errors: torch.Tensor) -> None:
        """Keep a step's sum less its release on a block, for the steps after it."""
        self._errors.setdefault(block, deque(maxlen=len(self._weights))).appendleft(errors)
