"""Compare the certified δ of balls-in-bins sampling with simulations, for random runs.

    python benchmarks/balls_in_bins_simulation.py [--cases 50] [--draws 10000000] [--seed 1]

Each case draws a noise multiplier, a number of bins, one or two epochs, and an ε where δ is between
1e-3 and 1e-9. The simulation draws outputs of an epoch with the record, in the first bin without
loss of generality, and averages (1 − e^{ε − loss})₊. Importance sampling draws the output of that
bin, of any bin or of all bins further out in most draws, and weights each draw by the ratio of
densities. A row has the interval, the mean, its relative standard error, and its distance from the
interval in standard errors; the last line has the number of cases further off than 5. The exit
status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics import certified_interval
from accountant_service.numerics.laws.balls_in_bins import BallsInBins

_CHUNK: Final = 2_000_000  # normal variables drawn at once
_ERRORS_MAX: Final = 5.0
_FIRST: Final = 0.25  # share of draws in which the output of the first bin is shifted
_ANY: Final = 0.2  # share of draws in which that of a bin drawn uniformly is shifted
_ALL: Final = 0.4  # share of draws in which all are shifted


@dataclass(frozen=True, slots=True)
class Case:
    """A balls-in-bins run, the ε at which to estimate δ, and the shift for importance sampling."""

    mu: float
    bins: int
    epochs: int
    epsilon: float
    shift: float


def choose_case(rng: random.Random) -> Case:
    """Return a random run and ε to simulate."""
    mu, epochs = 1 / rng.uniform(0.5, 4.0), rng.choice([1, 2])
    bins, delta = round(math.exp(rng.uniform(math.log(2), math.log(30)))), 10 ** rng.uniform(-9, -3)
    found = certified_interval.epsilon_bounds([(BallsInBins(mu, bins), epochs)], delta, 1e-2)
    shift = math.sqrt(-2 * math.log(delta)) / math.sqrt(epochs)
    return Case(mu, bins, epochs, found.upper, shift)


def simulate_epochs(case: Case, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return importance-weighted samples of (1 − e^{ε − loss})₊, whose mean is δ, one per draw."""
    loss, log_weight, rows = np.zeros(draws), np.zeros(draws), np.arange(draws)
    for _ in range(case.epochs):
        noise = rng.standard_normal((draws, case.bins))
        # the first bin, any bin or all bins are drawn further out, or none
        kind, bin_drawn = rng.random(draws), rng.integers(0, case.bins, draws)
        bin_drawn[kind < _FIRST] = 0
        shift = np.full(case.bins, case.shift + case.mu)
        shift[0] = case.shift
        each = case.shift / math.sqrt(case.bins)
        noise[rows, bin_drawn] += np.where(kind < _FIRST + _ANY, shift[bin_drawn], 0.0)
        noise += np.where(kind > 1 - _ALL, each, 0.0)[:, None]
        ratio = np.exp(noise * shift - 0.5 * shift**2)
        log_weight -= np.log(
            1 - _FIRST - _ANY - _ALL
            + _FIRST * ratio[:, 0]
            + _ANY * ratio.mean(axis=1)
            + _ALL * np.exp(each * noise.sum(axis=1) - 0.5 * case.shift**2)
        )  # fmt: skip
        noise[:, 0] += case.mu
        loss += np.log(np.exp(case.mu * noise - 0.5 * case.mu**2).mean(axis=1))
    value: np.ndarray = np.exp(log_weight) * np.maximum(-np.expm1(case.epsilon - loss), 0.0)
    return value


def simulate(case: Case, draws: int, seed: int) -> tuple[float, float]:
    """Estimate δ of removing a record by simulation; return the mean and its standard error."""
    rng, done, total, squares = np.random.default_rng(seed), 0, 0.0, 0.0
    while done < draws:
        count = min(draws - done, max(1, _CHUNK // case.bins))
        value = simulate_epochs(case, count, rng)
        done, total, squares = done + count, total + value.sum(), squares + (value**2).sum()
    mean = total / draws
    return mean, math.sqrt(max(squares / draws - mean * mean, 0.0) / draws)


def main() -> int:
    """Print a row for each simulated run; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=int, default=50)
    options.add_argument("--draws", type=int, default=10_000_000)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    rng, off = random.Random(chosen.seed), 0
    print("σ | bins | epochs | ε | certified δ | simulated δ | relative error | off")
    for number in range(chosen.cases):
        case = choose_case(rng)
        law = [(BallsInBins(case.mu, case.bins), case.epochs)]
        # removing a record costs more in nearly all runs; an upper bound covers both directions
        bounds = certified_interval.delta_bounds(law, case.epsilon, 1e-3)
        mean, error = simulate(case, chosen.draws, chosen.seed + number)
        errors = max(mean - bounds.upper, bounds.lower - mean, 0.0) / error
        off += errors > _ERRORS_MAX
        print(
            f"{1 / case.mu:.3f} | {case.bins} | {case.epochs} | {case.epsilon:.4f} | "
            f"[{bounds.lower:.5e}, {bounds.upper:.5e}] | {mean:.5e} | {error / mean:.1e} | "
            f"{errors:.1f}",
            flush=True,
        )
    print(f"{off} of {chosen.cases} cases are off by more than {_ERRORS_MAX:g} standard errors")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
