"""Time and accuracy of comparing compositions: `python -m benchmarks.domination`.

For each pair of mechanisms a reference and another one are compared both ways: how many steps of
the other one the second half of a fixed plan of the reference dominates, and how many reference
steps dominate half of a fixed plan of the other one. The best numbers are those next to which
`dominates` proves nothing more, found by bisection. The last line is about random plans of ordinary
mechanisms, short and long: the time of one exchange for a reference, and of one back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from accountant_service.numerics import certified_interval
from accountant_service.numerics.domination import (
    dominates,
    fewest_repetitions,
    most_repetitions,
)
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.floats.search import find_largest_integer
from accountant_service.numerics.laws import characteristic_function
from accountant_service.numerics.laws.dominating_pair import Composition, GaussianPair, Release

# ε, δ, sample rate and noise multiplier of the reference, and those of the other mechanism
PAIRS: Final = (
    (1.0, 1e-5, (0.01, 1.1), (0.01, 1.5)),
    (3.0, 1e-5, (0.01, 1.1), (0.1, 5.0)),
    (3.0, 1e-5, (0.004, 0.9), (0.01, 1.1)),
    (8.0, 1e-6, (0.02, 0.8), (0.01, 1.1)),
    (2.0, 1e-5, (0.001, 0.8), (0.002, 1.0)),
    (2.0, 1e-7, (0.01, 0.8), (0.02, 1.4)),
)
SLACK_SHARE: Final = 1e-3 / 8  # of δ, as the first exchange of a budget may use
LIMIT: Final = 10**6  # of repetitions
BUDGETS: Final = ((1.0, 1e-5), (2.0, 1e-5), (3.0, 1e-5), (4.0, 1e-6), (8.0, 1e-6))
NOISES: Final = (0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.5, 2.0, 3.0, 5.0)
RANDOM_PLANS: Final = 20


def make_steps(mechanism: tuple[float, float], count: int = 1) -> Composition:
    """Return `count` Poisson-sampled Gaussian steps as a composition."""
    rate, noise = mechanism
    return [(Release(GaussianPair(1 / noise), rate), count)]


def count_planned_steps(mechanism: tuple[float, float], epsilon: float, delta: float) -> int:
    """Return the most steps of a plan fixed in advance that is (ε, δ)-DP."""

    def violation(count: int) -> float:
        """Return δ of this many steps over the target δ, minus 1."""
        bounds = certified_interval.delta_bounds(make_steps(mechanism, count), epsilon, 1e-3)
        return bounds.upper / delta - 1.0

    return find_largest_integer(violation, LIMIT) or LIMIT


def measure_ms(function: Callable[[], int | None]) -> tuple[int, float]:
    """Call a function with empty caches; return its result and the CPU time in ms."""
    saddle_point._release_moments.cache_clear()
    characteristic_function.tilted_loss.cache_clear()
    start = time.process_time()
    found = function() or 0
    return found, 1000 * (time.process_time() - start)


def bisect_last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last integer from `low` to `high` for which `holds` is true, by bisection."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def draw_mechanism(random: np.random.Generator) -> tuple[float, float]:
    """Return the sample rate and noise multiplier of a random ordinary mechanism."""
    return 10 ** random.uniform(-3, -1), float(random.choice(NOISES))


def time_random_exchanges(seed: int = 23) -> list[float]:
    """Return the milliseconds to convert random plans to reference steps, and parts back."""
    random = np.random.default_rng(seed)
    times: list[float] = []
    while len(times) < 2 * RANDOM_PLANS:
        epsilon, delta = BUDGETS[random.integers(len(BUDGETS))]
        reference, other = draw_mechanism(random), draw_mechanism(random)
        stack, most = (count_planned_steps(each, epsilon, delta) for each in (reference, other))
        block = int(most ** random.random()) if most < LIMIT else 0
        if block < 1 or stack < 1:
            continue
        slack, held = SLACK_SHARE * delta, 2 * stack // 3
        plan, left = make_steps(other, block), make_steps(other, -(-2 * block // 3))
        needed, taken = measure_ms(
            partial(fewest_repetitions, plan, make_steps(reference), slack, held)
        )
        _, taken_back = measure_ms(
            partial(most_repetitions, make_steps(reference), left, slack, max(needed, 1))
        )
        times += [taken, taken_back]
    return times


def main() -> None:
    """Print a row of results for each pair of mechanisms, and the median times."""
    times: dict[str, list[float]] = {"most": [], "fewest": []}
    print(
        f"{'reference':>14} {'other':>14} {'search':>7} {'n':>7} {'best':>7} {'share':>7} {'ms':>8}"
    )
    for epsilon, delta, reference, other in PAIRS:
        slack = SLACK_SHARE * delta
        length = count_planned_steps(reference, epsilon, delta)
        block = make_steps(other, count_planned_steps(other, epsilon, delta) // 2)
        stack = make_steps(reference, length - length // 2)

        def fits(count: int, stack: Composition = stack, slack: float = slack) -> bool:
            """Return whether all reference steps dominate `count` steps of the other one."""
            return dominates(stack, make_steps(other, count), slack)  # noqa: B023

        def fails(count: int, block: Composition = block, slack: float = slack) -> bool:
            """Return whether `count` reference steps do not provably dominate the other."""
            return not dominates(make_steps(reference, count), block, slack)  # noqa: B023

        found, taken = measure_ms(
            lambda: most_repetitions(make_steps(other), stack, slack, LIMIT)  # noqa: B023
        )
        best = bisect_last(fits, found, 2 * found + 2)
        rows = [("most", found, best, found / max(best, 1), taken)]
        found, taken = measure_ms(
            lambda: fewest_repetitions(block, make_steps(reference), slack, LIMIT)  # noqa: B023
        )
        best = bisect_last(fails, found // 2, found) + 1
        rows.append(("fewest", found, best, best / max(found, 1), taken))
        for name, found, best, share, taken in rows:
            times[name].append(taken)
            print(
                f"{reference!s:>14} {other!s:>14} {name:>7} {found:7} {best:7} {share:7.4f} "
                f"{taken:8.0f}"
            )
    medians = ", ".join(f"{name} {statistics.median(each):.0f}" for name, each in times.items())
    print(f"median milliseconds: {medians}")
    random_times = time_random_exchanges()
    quantiles = ", ".join(f"{np.quantile(random_times, at):.0f}" for at in (0.5, 0.9, 1.0))
    print(f"random plans: {quantiles} ms at the median, the 90th percentile and the most")


if __name__ == "__main__":
    main()
