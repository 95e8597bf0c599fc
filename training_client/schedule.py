"""Schedules: factors by which a plan's noise, clip norm or learning rate change from step to step.

A schedule is constant over stretches of steps. So a run with scheduled noise is charged as what it
is: the composition of a few runs with constant noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Self

_LEVELS: Final = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """Factors that are constant over stretches of steps; the last one holds on afterwards.

    Attributes:
        pieces: pairs of a number of steps and the factor in these steps.

    Raises:
        ValueError: there is no piece, a piece has no step, or a factor is negative or not finite.
    """

    pieces: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Refuse pieces without steps, and factors that no step can use."""
        if not self.pieces or any(steps < 1 for steps, _ in self.pieces):
            raise ValueError(
                f"expected pieces of at least one step each, (steps, factor), got {self.pieces}"
            )
        if not all(0 <= factor < math.inf for _, factor in self.pieces):
            raise ValueError(f"expected finite factors ≥ 0, got {self.pieces}")

    @classmethod
    def by_steps(cls, pieces: Sequence[tuple[int, float]]) -> Self:
        """Return the schedule with these pairs of a number of steps and a factor."""
        return cls(tuple((int(steps), float(factor)) for steps, factor in pieces))

    @classmethod
    def linear(cls, end: float, steps: int, levels: int = _LEVELS) -> Self:
        """Return a schedule from 1 to `end` in a straight line.

        Args:
            end: the last factor.
            steps: the number of steps until it is reached.
            levels: the number of different factors; each holds for about steps/levels steps.
        """
        return cls._sampled(lambda part: 1 + (end - 1) * part, steps, levels)

    @classmethod
    def cosine(cls, end: float, steps: int, levels: int = _LEVELS) -> Self:
        """Return a schedule from 1 to `end` along half a cosine wave; arguments as for `linear`."""
        return cls._sampled(
            lambda part: end + (1 - end) * (1 + math.cos(math.pi * part)) / 2, steps, levels
        )

    @classmethod
    def exponential(cls, end: float, steps: int, levels: int = _LEVELS) -> Self:
        """Return a schedule from 1 to `end` > 0 by equal ratios; arguments as for `linear`."""
        if not end > 0:
            raise ValueError(f"expected end > 0 for exponential decay, got {end}")
        return cls._sampled(lambda part: float(end**part), steps, levels)

    @classmethod
    def _sampled(cls, curve: Callable[[float], float], steps: int, levels: int) -> Self:
        """Return the schedule with a curve's values at `levels` points from 0 to 1."""
        levels = min(levels, steps)
        if levels < 1:
            raise ValueError(f"expected at least one step and one level, got {steps}, {levels}")
        ends = [steps * (level + 1) // levels for level in range(levels)]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        factors = [curve(level / max(levels - 1, 1)) for level in range(levels)]
        return cls(tuple(zip(counts, factors, strict=True)))

    def at(self, step: int) -> float:
        """Return the factor in a step, counted from 1."""
        ends = list(accumulate(steps for steps, _ in self.pieces))
        return self.pieces[min(bisect_left(ends, step), len(ends) - 1)][1]

    def divide(self, steps: int) -> Iterator[tuple[int, float]]:
        """Yield the numbers of steps, of `steps` in all, that have the same factor in a row."""
        left = steps
        for count, factor in self.pieces[:-1]:
            taken = min(count, left)
            if taken:
                yield taken, factor
            left -= taken
        if left or not steps:
            yield left, self.pieces[-1 if left else 0][1]
