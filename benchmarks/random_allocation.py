"""Compare ε of balls-in-bins sampling here with PLD_accounting, in one run, on one thread.

    python benchmarks/random_allocation.py [--quick | --long]

PLD_accounting calls the scheme random allocation, and is the only other library with proved bounds
from both sides. Each case is asked of it with its default accuracy (upper/lower ≤ 1.1), after
its code has been compiled by a small case. A call here starts from empty caches; its time is the
median of seven, which lie before and after the peer's call. Times are CPU seconds of this process:
on a machine with other work they vary less than those of a clock.
With --quick, a small case only is computed, once; with --long, also cases that take the other
library minutes.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py shadows a library

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_variable] = "1"

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from PLD_accounting import gaussian_allocation_epsilon_range

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import Interval
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.laws import balls_in_bins, lognormal_sum, sum_lattices


@dataclass(frozen=True, slots=True)
class Case:
    """A balls-in-bins run, and the δ at which to compute ε.

    Attributes:
        noise_multiplier: the standard deviation of the noise over the clipping norm.
        bins: the number of batches of an epoch.
        epochs: the number of epochs.
        delta: in (0, 1).
    """

    noise_multiplier: float
    bins: int
    epochs: int
    delta: float


SMALL: Final = Case(2.0, 10, 1, 1e-5)
CASES: Final = (
    Case(2.0, 100, 10, 1e-5),
    Case(1.0, 100, 10, 1e-5),
    Case(3.0, 20, 100, 1e-5),
    Case(0.8, 500, 5, 1e-5),
)
LONG: Final = (Case(1.1, 1000, 20, 1e-6), Case(1.0, 1000, 100, 1e-6))


def empty_caches() -> None:
    """Empty every cache that computing ε of balls-in-bins sampling fills."""
    certified_interval._search_both_directions.cache_clear()
    saddle_point._release_moments.cache_clear()
    balls_in_bins._cached_sum_above.cache_clear()
    balls_in_bins._law_for_moments.cache_clear()
    lognormal_sum._block_starts.cache_clear()
    sum_lattices.ratio_limits.cache_clear()
    sum_lattices.choose_lattices.cache_clear()


def measure_seconds(call: Callable[[], Interval]) -> tuple[float, Interval]:
    """Return the CPU time of a call in seconds, and its answer."""
    start = time.process_time()
    answer = call()
    return time.process_time() - start, answer


def prove_here(case: Case) -> Interval:
    """Return this project's certified interval of ε, computed with empty caches."""
    empty_caches()
    release = {"kind": "gaussian", "noise_multiplier": case.noise_multiplier}
    epoch = {"kind": "balls_in_bins", "bins": case.bins, "mechanism": release}
    run = mechanisms.from_json({"kind": "repeated", "count": case.epochs, "mechanism": epoch})
    interval = calculator.epsilon(run, case.delta).certified
    assert interval is not None
    return interval


def prove_by_peer(case: Case) -> Interval:
    """Return the interval of ε that PLD_accounting computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upper, lower = gaussian_allocation_epsilon_range(
            delta=case.delta,
            sigma=case.noise_multiplier,
            num_steps=case.bins,
            num_epochs=case.epochs,
        )
    return Interval(lower, upper)


def print_row(case: str, library: str, *cells: str) -> None:
    """Print a row of the table at once, since the peer's results take minutes."""
    widths = (11, 12, 19, 8, 13)
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    print(case.ljust(29), library.ljust(14), *padded, flush=True)


def print_head() -> None:
    """Print the head of the table."""
    print("Balls-in-bins sampling: proved intervals of ε")
    print_row("case", "library", "CPU seconds", "time / ours", "ε", "width", "width / ours")


def compare(case: Case, rounds: int) -> None:
    """Print the table rows of a run, timed `rounds` times.

    Args:
        case: what is asked.
        rounds: calls here before the peer's call; one more follows it.
    """
    times = [measure_seconds(lambda: prove_here(case))[0] for _ in range(rounds)]
    peer_seconds, peer = measure_seconds(lambda: prove_by_peer(case))
    for _ in range(rounds + 1):
        seconds, ours = measure_seconds(lambda: prove_here(case))
        times.append(seconds)
    median, width = statistics.median(times), ours.upper - ours.lower
    label = f"σ={case.noise_multiplier:g} b={case.bins} E={case.epochs} δ={case.delta:g}"
    for name, took, interval in (("ours", median, ours), ("PLD_accounting", peer_seconds, peer)):
        gap = interval.upper - interval.lower
        print_row(
            label if name == "ours" else "",
            name,
            f"{took:.3f}",
            f"{took / median:.0f}×",
            f"[{interval.lower:.5f}, {interval.upper:.5f}]",
            f"{gap:.1e}",
            f"{gap / width:.0f}×",
        )


def main() -> None:
    """Print the table."""
    option = sys.argv[1] if len(sys.argv) > 1 else ""
    cases = {"--quick": (SMALL,), "--long": CASES + LONG}.get(option, CASES)
    prove_here(SMALL)
    prove_by_peer(SMALL)  # compiles its code
    print_head()
    for case in cases:
        compare(case, 1 if option == "--quick" else 3)


if __name__ == "__main__":
    main()
