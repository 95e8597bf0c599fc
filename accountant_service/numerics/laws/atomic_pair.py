"""Pairs of discrete distributions, without (N₀) and with (N₁) a record, by their outcomes.

A subclass says which outcomes there are. Outcomes that only one of the laws has count as infinite
privacy loss. An infinite range of outcomes is cut where less than 1e-300 of either law is
left.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np
from scipy import special

from accountant_service.numerics.floats.special_functions import Array, log_sum_exp
from accountant_service.numerics.laws.dominating_pair import Direction, IntervalMasses
from accountant_service.numerics.laws.sampled_gaussian import privacy_loss

OUTCOMES_MAX: Final = 1 << 20  # of one pair: 24 MiB
_MOMENT_ATOMS: Final = 2048  # for moments: more outcomes are merged
_RANGE_MIN: Final = 1e-6  # of the losses that cells cover
_EPS: Final = float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """The possible outcomes of two discrete distributions, with each outcome's probabilities.

    Attributes:
        log_ratios: Λ = log(dN₁/dN₀) of the outcomes that both laws have, increasing.
        log_without: logs of their N₀-masses.
        log_with: logs of their N₁-masses.
        error: a bound of the relative error of every mass, with that of e^Λ.
        only_without: the N₀-mass of outcomes that N₁ excludes.
        only_with: the N₁-mass of outcomes that N₀ excludes.
    """

    log_ratios: Array
    log_without: Array
    log_with: Array
    error: float
    only_without: float = 0.0
    only_with: float = 0.0


class AtomicPair(ABC):
    """Base of pairs of discrete output distributions: N₀ without and N₁ with the record."""

    is_symmetric: ClassVar[bool] = True

    @abstractmethod
    def list_atoms(self) -> Atoms:
        """Return all outcomes, with their probabilities without and with the record."""

    @property
    def infinite_masses(self) -> tuple[float, float]:
        """The probabilities of outputs possible only without the record, and only with it."""
        atoms = _atoms_of(self)
        return atoms.only_without, atoms.only_with

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the record."""
        atoms, intervals = _atoms_of(self), len(edges) - 1
        index = np.searchsorted(edges, atoms.log_ratios, side="left") - 1
        without_record = np.bincount(index, np.exp(atoms.log_without), intervals).astype(float)
        with_record = np.bincount(index, np.exp(atoms.log_with), intervals).astype(float)
        without_record[np.searchsorted(edges, -math.inf, side="right") - 1] += atoms.only_without
        with_record[-1] += atoms.only_with
        return IntervalMasses.with_relative_error(
            atoms.error, without_record, with_record, edge_error=atoms.error
        )

    def limits(self, tail_deviations: float) -> tuple[float, float]:
        """Return limits of the log-likelihood ratio; `tail_deviations` sets the mass outside."""
        atoms, tail = _atoms_of(self), float(special.ndtr(-tail_deviations))
        if not len(atoms.log_ratios):
            return -_RANGE_MIN, _RANGE_MIN
        mass = np.exp(np.maximum(atoms.log_without, atoms.log_with))
        first = int(np.searchsorted(np.cumsum(mass), tail))
        last = len(mass) - 1 - int(np.searchsorted(np.cumsum(mass[::-1]), tail))
        low, high = (float(atoms.log_ratios[max(0, min(i, len(mass) - 1))]) for i in (first, last))
        return low - _RANGE_MIN, high + _RANGE_MIN

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] of outputs without the record, per order a."""
        loss, log_mass, error = _moment_atoms(self, sample_rate)
        exponent = np.multiply.outer(orders, loss) + log_mass
        largest = float(np.abs(exponent).max()) if exponent.size else 0.0
        moments = log_sum_exp(exponent) if exponent.size else np.full(len(orders), -np.inf)
        growth = np.abs(orders) * error + 8 * _EPS * (len(loss) + largest)
        upper: Array = np.maximum(moments + error + growth, 0.0)
        return upper

    def outcomes(self, sample_rate: float, direction: Direction) -> tuple[Array, Array, float]:
        """Return the finite privacy losses, ascending, their probabilities and an error bound.

        The error of masses is relative, that of losses absolute.
        """
        atoms, q = _atoms_of(self), sample_rate
        losses = privacy_loss(atoms.log_ratios, q)
        without, present = np.exp(atoms.log_without), np.exp(atoms.log_with)
        p = (1 - q) * without + q * present if direction == "removing" else without
        if q < 1.0 and atoms.only_without > 0:
            lost = (1 - q) * atoms.only_without if direction == "removing" else atoms.only_without
            losses, p = np.append(math.log1p(-q), losses), np.append(lost, p)
        order = slice(None) if direction == "removing" else slice(None, None, -1)
        sign = 1.0 if direction == "removing" else -1.0
        error = atoms.error + 8 * _EPS * (1 + float(np.abs(losses).max(initial=0.0)))
        return sign * losses[order], p[order], error

    def count_nodes(self, tilt: float) -> float:  # noqa: ARG002
        """Return how many terms a log-moment at this `tilt` sums, which measures its cost."""
        return float(min(len(_atoms_of(self).log_ratios), 2 * _MOMENT_ATOMS) + 1)

    def total_variation(self) -> float:
        """Return an upper bound on the total variation distance of the two distributions."""
        atoms = _atoms_of(self)
        with_record, without_record = np.exp(atoms.log_with), np.exp(atoms.log_without)
        excess = with_record - without_record + atoms.error * (with_record + without_record)
        above = excess[atoms.log_ratios > 0]
        return min(1.0, math.fsum(above) + atoms.only_with)


@lru_cache(maxsize=32)
def _atoms_of(pair: AtomicPair) -> Atoms:
    """Return the outcomes of a pair; the list is cached."""
    return pair.list_atoms()


@lru_cache(maxsize=32)
def _moment_atoms(pair: AtomicPair, sample_rate: float) -> tuple[Array, Array, float]:
    """Merge outcomes into a few, without lowering any exponential moment of the loss.

    Neighbouring outcomes are merged if there are many. A block's mass moves to its two ends with
    its mean kept, which by convexity of e^{a·loss} can only raise a moment.
    """
    atoms = _atoms_of(pair)
    loss, log_mass = privacy_loss(atoms.log_ratios, sample_rate), atoms.log_without
    error = atoms.error
    if len(loss) > 2 * _MOMENT_ATOMS:
        starts = np.arange(0, len(loss), -(-len(loss) // _MOMENT_ATOMS))
        sizes = np.diff(np.append(starts, len(loss)))
        low, high = loss[starts], loss[starts + sizes - 1]
        top = np.maximum.reduceat(log_mass, starts)
        weight = np.exp(log_mass - np.repeat(top, sizes))
        total = np.add.reduceat(weight, starts)
        offset = np.add.reduceat(weight * (loss - np.repeat(low, sizes)), starts)
        upward = np.clip(offset * (1 + 1e-12) / np.maximum(high - low, 1e-300), 0.0, total)
        with np.errstate(divide="ignore"):
            log_mass = np.concatenate([top + np.log(total - upward), top + np.log(upward)])
        loss, error = np.concatenate([low, high]), error + 1e-12
        loss, log_mass = loss[log_mass > -np.inf], log_mass[log_mass > -np.inf]
    if sample_rate < 1.0 and atoms.only_without > 0:
        loss = np.append(loss, math.log1p(-sample_rate))
        log_mass = np.append(log_mass, math.log(atoms.only_without))
    return loss, log_mass, error
