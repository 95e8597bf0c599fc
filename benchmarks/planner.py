"""Time of a plan's frontier, and its noise against the general solver's.

`python benchmarks/planner.py` solves 40 batch sizes for Poisson sampling, and 20 for each sampling,
at several budgets; it prints the CPU time and the evaluations of ε. `--compare N` also solves every
N-th run with the solver of `POST /v1/noise-multiplier`, and prints its time and how much larger
the planner's noise multiplier is: the least and the largest relative difference. Both are proved;
for balls in bins they come from different lattices, so the planner's may be slightly smaller.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

from accountant_service.accounting import noise_frontier, planner, solver
from accountant_service.accounting.planner import BatchRange, Goal, PlannedSampling

EPOCHS: Final = 20
RECORDS: Final = 60_000
BUDGETS: Final = ((0.5, 1e-6), (2.0, 1e-5), (8.0, 1e-5))
CASES: Final[tuple[tuple[int, tuple[PlannedSampling, ...]], ...]] = (
    (40, ("poisson",)),
    (20, planner.SAMPLINGS),
)
COLUMNS: Final = ("ε", "δ", "sampling", "runs", "evaluations", "seconds", "solver s", "noise")


class CountedEvaluations:
    """Context manager that counts the evaluations of ε inside."""

    def __enter__(self) -> CountedEvaluations:
        """Start to count."""
        self.count = 0
        self._bound = bound = noise_frontier._FrontierSearch._bound

        def counted(search: Any, trial: Any) -> float:
            """Count an evaluation, and make it."""
            self.count += 1
            return bound(search, trial)

        noise_frontier._FrontierSearch._bound = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        noise_frontier._FrontierSearch._bound = self._bound  # type: ignore[method-assign]


def compare(
    goal: Goal, runs: tuple[planner.PlannedRun, ...], every: int
) -> tuple[float, list[float]]:
    """Return the general solver's CPU seconds, and by how much each planned noise exceeds its."""
    started, excess = time.process_time(), []
    for run in runs[::every]:
        least = solver.noise_multiplier(run.run, goal.target).value
        excess.append(run.noise_multiplier / least - 1)
    return time.process_time() - started, excess


def main() -> None:
    """Print a row for each budget and sampling."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--compare", type=int, default=0, metavar="N")
    options.add_argument("--points", type=int, help="batch sizes, instead of 40 and 20")
    chosen = options.parse_args()
    planner.plan(Goal(1.0, 1e-5, 1000, 5000), batches=BatchRange(2))  # imports and caches
    print(" | ".join(COLUMNS))
    for epsilon, delta in BUDGETS:
        goal = Goal(epsilon, delta, RECORDS, EPOCHS * RECORDS)
        for points, samplings in CASES:
            started = time.process_time()
            with CountedEvaluations() as counted:
                plan = planner.plan(goal, samplings, BatchRange(chosen.points or points))
            seconds = time.process_time() - started
            row = [f"{epsilon:g}", f"{delta:g}", "+".join(samplings), str(len(plan.runs))]
            row += [str(counted.count), f"{seconds:.2f}"]
            if chosen.compare:
                took, excess = compare(goal, plan.runs, chosen.compare)
                row += [f"{took:.2f}", f"{min(excess):+.1e} to {max(excess):+.1e}"]
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
