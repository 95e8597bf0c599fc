"""Dominating pairs with finitely many outcomes, and their privacy profiles, on a lattice of losses.

A mechanism is a pair (P, Q) of distributions whose privacy losses log(P/Q) are multiples of log 2,
+∞ (Q is 0) or −∞ (P is 0). Its masses are multiples of a power of 2, so that sums and products of
a few masses are exact in float64. `REMOVING` compares P with Q, and `ADDING` compares Q with P.

A profile is H(x) = sup over events A of P(A) − e^x·Q(A), for both directions, at x = k·log 2 for
all |k| ≤ `REACH`. As a function of e^x it is linear between these points, so an inequality at the
lattice points is an inequality at all real x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REMOVING: Final = 0
ADDING: Final = 1
REACH: Final = 24  # no sum of finite losses in these tests exceeds it
LATTICE: Final = np.arange(-REACH, REACH + 1)
ZERO: Final = REACH  # the index of x = 0
# (gain, loss): a pair of outcomes with the losses gain and −loss; None stands for infinity
ATOMS: Final = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (1, None), (None, 1), (None, None))


# Pairs of outcomes, each with its unit of mass; `mass_of` says how many units it takes.
Weights = Sequence[tuple[tuple[int | None, int | None], float]]


@dataclass(frozen=True)
class Mechanism:
    """A dominating pair.

    Attributes:
        losses: the finite privacy losses in units of log 2, each with its mass under P.
        infinite: the mass under P of outcomes that are impossible under Q.
    """

    losses: tuple[tuple[int, float], ...]
    infinite: float = 0.0

    def __post_init__(self) -> None:
        """Check that the masses under P add up to 1, and those under Q to at most 1."""
        assert math.fsum(mass for _, mass in self.losses) + self.infinite == 1
        assert self.infinite >= 0
        assert self.impossible >= 0

    @property
    def impossible(self) -> float:
        """The mass under Q of outcomes that are impossible under P."""
        return 1 - math.fsum(mass * 2.0**-loss for loss, mass in self.losses)

    def swapped(self) -> Mechanism:
        """Return the pair (Q, P)."""
        losses = tuple((-loss, mass * 2.0**-loss) for loss, mass in self.losses)
        return Mechanism(losses, self.impossible)

    def before(self, rest: Array) -> Array:
        """Return the profile of this release followed by releases with the profile `rest`.

        The rest may be the best of several for every x and direction. Then this is what an
        adversary attains who sees the release's privacy loss and chooses the rest by it.
        """
        matrix, constant = self._operator
        return np.asarray((matrix @ rest[:, :, None])[:, :, 0] + constant)

    def power(self, steps: int) -> Array:
        """Return the profile of a number of independent releases."""
        profile = NOTHING
        for _ in range(steps):
            profile = self.before(profile)
        return profile

    @cached_property
    def _operator(self) -> tuple[Array, Array]:
        """The expectation E[W(x − loss)] in both directions: a matrix for W, and a constant."""
        both = [each._one_direction() for each in (self, self.swapped())]
        return np.stack([matrix for matrix, _ in both]), np.stack([rest for _, rest in both])

    def _one_direction(self) -> tuple[Array, Array]:
        """Return the matrix and the constant of `_operator` in the direction of this pair."""
        size = LATTICE.size
        matrix = np.zeros((size, size))
        constant = np.full(size, self.infinite)  # the profile at −∞ is 1
        rows = np.arange(size)
        for loss, mass in self.losses:
            columns = rows - loss
            inside = columns >= 0  # above the lattice a profile is constant
            matrix[rows[inside], np.minimum(columns[inside], size - 1)] += mass
            scale = mass * 2.0 ** columns[~inside]  # below it, 1 − H is proportional to e^x
            matrix[rows[~inside], 0] += scale
            constant[~inside] += mass - scale
        return matrix, constant


NOTHING: Final[Array] = np.tile(np.maximum(1 - 2.0**LATTICE, 0.0), (2, 1))  # nothing is released


def mixture(weights: Weights) -> Mechanism:
    """Return the mechanism with these pairs of outcomes; the rest of the mass has loss 0.

    A pair of outcomes with finite losses is randomised response on a sample: where gain and loss
    differ, removing a record differs from adding one.
    """
    masses, infinite, nothing = dict[int, float](), 0.0, 1.0
    for (gain, loss), unit in weights:
        # Masses for which P and Q both add up: p(1 − 2^−gain) = p′(2^loss − 1).
        up = unit if loss is None else unit * (2**loss - 1)
        up *= 1 if gain is None or loss is None else 2**gain
        down = 0.0 if loss is None else unit * (1 if gain is None else 2**gain - 1)
        if gain is None:
            infinite += up
        else:
            masses[gain] = masses.get(gain, 0.0) + up
        if loss is not None:
            masses[-loss] = masses.get(-loss, 0.0) + down
        nothing -= up + down
    masses[0] = nothing
    return Mechanism(tuple(sorted(each for each in masses.items() if each[1] > 0)), infinite)


def mass_of(gain: int | None, loss: int | None) -> int:
    """Return the number of units of mass that a pair of outcomes takes."""
    if loss is None:
        return 1
    if gain is None:
        return 2**loss
    return 2**gain * (2**loss - 1) + 2**gain - 1


def random_weights(random: np.random.Generator, bits: int = 5) -> Weights:
    """Return one or two pairs of outcomes, with masses of a few bits."""
    left, weights = 2**bits, []
    for _ in range(random.integers(1, 3)):
        atom = ATOMS[int(random.integers(len(ATOMS) if random.random() < 0.3 else 6))]
        most = left // mass_of(*atom)
        if most:
            units = int(random.integers(1, most + 1))
            left -= units * mass_of(*atom)
            weights.append((atom, units * 2.0**-bits))
    return weights


def weaken(weights: Weights, random: np.random.Generator) -> Weights:
    """Return the same pairs of outcomes, some of them less likely."""
    return [(atom, unit * float(random.choice((0.5, 0.75, 1.0)))) for atom, unit in weights]
