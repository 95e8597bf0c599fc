"""Compute the cost of the filter's soundness under adaptive choice: steps and certified ε.

python benchmarks/ledger_cost.py
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger.filters import PrivacyFilter, ReferenceFilter, renyi
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm, DpSgd, canonical_form

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
BUDGETS = ((1.0, 1e-5), (3.0, 1e-5), (10.0, 1e-7))
RUNS = ((0.01, 1.1), (0.001, 0.8), (0.01, 0.7), (0.1, 2.0), (1.0, 20.0))


def compute_certified_epsilon(step: CanonicalForm, steps: int, delta: float) -> float:
    """Return the certified ε of a number of equal steps."""
    return ACCOUNTANTS["pld"].epsilon(Question(step.repeated(steps), RELATION), delta).epsilon


def find_affordable_steps(policy: PrivacyFilter, run: DpSgd) -> tuple[int, str]:
    """Return the number of steps that the filter admits, and their certified ε as text."""
    plan = StepPlan.of(run)
    policy = policy.replaced_by(plan, policy.nothing)
    steps = policy.count_affordable_steps(plan, policy.nothing) or 0
    certified = compute_certified_epsilon(plan.step, steps, policy.delta) if steps else 0.0
    return steps, f"{certified:.3f}" if steps else "–"


def main() -> None:
    table = Table(title="Steps that each filter admits", title_justify="left")
    for column in (
        "ε", "δ", "q", "σ", "reference", "certified ε", "one order", "certified ε", "own order",
        "certified ε",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for epsilon, delta in BUDGETS:
        general = renyi.choose_filter(epsilon, delta, RELATION)
        for rate, sigma in RUNS:
            run = DpSgd(sigma, sample_rate=rate, steps=1)
            own = renyi.choose_filter(epsilon, delta, RELATION, canonical_form(run))
            cells: list[str] = []
            for policy in (ReferenceFilter(epsilon, delta, RELATION), general, own):
                steps, seen = find_affordable_steps(policy, run)
                cells += [f"{steps}", seen]
            table.add_row(f"{epsilon:g}", f"{delta:g}", f"{rate:g}", f"{sigma:g}", *cells)
    Console(width=110).print(table)
    runs = Table(title="ε = 3 split over equal runs, q = .01, σ = 1.1", title_justify="left")
    for column in (
        "runs",
        "filter",
        "steps per run",
        "ε of the filter",
        "certified ε of all, fixed in advance",
    ):
        runs.add_column(column, justify="right")
    plan = StepPlan.of(DpSgd(1.1, sample_rate=0.01, steps=1))
    open_filter = ReferenceFilter(3.0, 1e-5, RELATION)
    for policy in (
        open_filter.replaced_by(plan, open_filter.nothing),
        renyi.choose_filter(3.0, 1e-5, RELATION),
    ):
        total = policy.count_affordable_steps(plan, policy.nothing) or 0
        for count in (1, 10, 100):
            each = total // count
            charge = policy.compute_charge(plan.with_steps(each), policy.nothing)
            spent = tuple(count * amount for amount in charge.reserved)
            runs.add_row(
                f"{count}", policy.name, f"{each}", f"{policy.epsilon_of(spent):.4f}",
                f"{compute_certified_epsilon(plan.step, count * each, 1e-5):.4f}",
            )  # fmt: skip
    Console(width=110).print(runs)


if __name__ == "__main__":
    main()
