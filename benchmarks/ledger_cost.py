"""Compute the cost of the filter's soundness under adaptive choice: steps and certified ε.

python benchmarks/ledger_cost.py
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import privacy_filter
from accountant_service.ledger.privacy_filter import RenyiFilter
from accountant_service.mechanisms import CanonicalForm, DpSgd, canonical_form

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
BUDGETS = ((1.0, 1e-5), (3.0, 1e-5), (10.0, 1e-7))
RUNS = ((0.01, 1.1), (0.001, 0.8), (0.01, 0.7), (0.1, 2.0), (1.0, 20.0))


def compute_certified_epsilon(step: CanonicalForm, steps: int, delta: float) -> float:
    """Return the certified ε of a number of equal steps."""
    return ACCOUNTANTS["pld"].epsilon(Question(step.repeated(steps), RELATION), delta).epsilon


def find_affordable_steps(policy: RenyiFilter, step: CanonicalForm) -> tuple[int, str]:
    """Return the number of steps that the filter admits, and their certified ε as text."""
    steps = privacy_filter.count_affordable_steps(policy.step_cost(step), policy.budget) or 0
    return steps, f"{compute_certified_epsilon(step, steps, policy.delta):.3f}" if steps else "–"


def main() -> None:
    table = Table(title="Steps that the filter admits", title_justify="left")
    for column in ("ε", "δ", "q", "σ", "order", "steps", "certified ε", "own order", "steps", "ε"):
        table.add_column(column, justify="right")
    for epsilon, delta in BUDGETS:
        general = privacy_filter.choose_filter(epsilon, delta, RELATION)
        for rate, sigma in RUNS:
            step = canonical_form(DpSgd(sigma, sample_rate=rate, steps=1))
            own = privacy_filter.choose_filter(epsilon, delta, RELATION, step)
            steps, seen = find_affordable_steps(general, step)
            own_steps, own_seen = find_affordable_steps(own, step)
            table.add_row(
                f"{epsilon:g}", f"{delta:g}", f"{rate:g}", f"{sigma:g}", f"{general.order:.1f}",
                f"{steps}", seen, f"{own.order:.1f}", f"{own_steps}", own_seen,
            )  # fmt: skip
    Console(width=110).print(table)
    runs = Table(title="ε = 3 split over equal runs, q = .01, σ = 1.1", title_justify="left")
    for column in (
        "runs",
        "steps per run",
        "ε of the filter",
        "certified ε of all, fixed in advance",
    ):
        runs.add_column(column, justify="right")
    policy = privacy_filter.choose_filter(3.0, 1e-5, RELATION)
    step = canonical_form(DpSgd(1.1, sample_rate=0.01, steps=1))
    unit = policy.step_cost(step)
    total = privacy_filter.count_affordable_steps(unit, policy.budget) or 0
    for count in (1, 10, 100):
        each = total // count
        spent = count * privacy_filter.compute_cost(unit, each)
        runs.add_row(
            f"{count}", f"{each}", f"{policy.epsilon_of(spent):.4f}",
            f"{compute_certified_epsilon(step, count * each, 1e-5):.4f}",
        )  # fmt: skip
    Console(width=110).print(runs)


if __name__ == "__main__":
    main()
