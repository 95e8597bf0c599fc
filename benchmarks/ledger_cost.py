"""Compute the cost of the filter's soundness under adaptive choice: steps and certified ε.

python benchmarks/ledger_cost.py
"""

from __future__ import annotations

import math
import time
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.ledger.filters import PrivacyFilter, ReferenceFilter, renyi, renyi_mixture
from accountant_service.ledger.filters.renyi import RenyiFilter
from accountant_service.ledger.filters.renyi_mixture import RenyiMixtureFilter
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm, DpSgd, canonical_form
from accountant_service.numerics.floats.search import find_largest_integer

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
BUDGETS = ((1.0, 1e-5), (3.0, 1e-5), (10.0, 1e-7))
RUNS = ((0.01, 1.1), (0.001, 0.8), (0.01, 0.7), (0.1, 2.0), (1.0, 20.0))

SMALL_BUDGETS = ((0.5, 1e-5), (1.0, 1e-5), (2.0, 1e-5), (3.0, 1e-5), (8.0, 1e-6))
PLANS = (
    (1.0, 1e-5, 0.01, 1.1),
    (1.0, 1e-5, 0.004, 0.9),
    (2.0, 1e-5, 0.01, 0.8),
    (3.0, 1e-5, 0.01, 1.1),
    (8.0, 1e-6, 0.01, 1.1),
)


# ε, δ, (q, σ) of the reference, and (q, σ) of the run after it
PAIRS = (
    (1.0, 1e-5, (0.01, 1.1), (0.01, 1.5)),
    (3.0, 1e-5, (0.01, 1.1), (0.1, 5.0)),
    (3.0, 1e-5, (0.004, 0.9), (0.01, 1.1)),
    (8.0, 1e-6, (0.02, 0.8), (0.01, 1.1)),
    (2.0, 1e-5, (0.001, 0.8), (0.002, 1.0)),
)


def compute_certified_epsilon(step: CanonicalForm, steps: int, delta: float) -> float:
    """Return the certified ε of `steps` equal steps at δ."""
    return ACCOUNTANTS["pld"].epsilon(Question(step.repeated(steps), RELATION), delta).epsilon


def count_affordable(policy: RenyiFilter, step: CanonicalForm) -> int:
    """Return the number of steps that a Rényi filter of one order admits."""
    return renyi.count_affordable_steps(policy.step_costs(step)[0], policy.budget) or 0


def find_affordable_steps(policy: PrivacyFilter, run: DpSgd) -> tuple[int, str]:
    """Return the number of a run's steps that a filter admits, and their certified ε as text."""
    plan = StepPlan.of(run)
    policy = policy.after_reserving(plan, policy.nothing)
    steps = policy.count_affordable_steps(plan, policy.nothing) or 0
    certified = compute_certified_epsilon(plan.step, steps, policy.delta) if steps else 0.0
    return steps, f"{certified:.3f}" if steps else "–"


def count_mixture_steps(policy: RenyiMixtureFilter, step: CanonicalForm) -> int:
    """Return the number of steps that a filter of several orders admits."""
    nothing = (0,) * len(policy.orders)
    return policy.count_steps(policy.step_costs(step), nothing) or 0


def make_step(rate: float, sigma: float) -> CanonicalForm:
    """Return one DP-SGD step with this sample rate and noise multiplier σ."""
    return canonical_form(DpSgd(sigma, sample_rate=rate, steps=1))


def describe(policy: RenyiMixtureFilter) -> str:
    """Return a mixture filter's orders and weights as text."""
    pairs = zip(policy.orders, policy.weights, strict=True)
    return ", ".join(f"{order:.1f} ({weight:.2f})" for order, weight in pairs)


def make_policies(
    epsilon: float, delta: float, step: CanonicalForm
) -> tuple[RenyiFilter, RenyiMixtureFilter, RenyiFilter]:
    """Return three filters: with one order, with several, and with the order best for `step`."""
    return (
        renyi.choose_filter(epsilon, delta, RELATION),
        renyi_mixture.choose_mixture(epsilon, delta, RELATION),
        renyi.choose_filter(epsilon, delta, RELATION, step),
    )


def compare_mixtures() -> Table:
    """Return a table of steps admitted with several orders relative to one order, for many runs.

    Means are geometric, over the runs of which one order admits a step. A run's own order admits
    the most steps that any mixture can.
    """
    gains = Table(title="Several orders: steps over the steps of one order", title_justify="left")
    for column in ("ε", "orders (weights)", "runs", "mean", "least", "most", "own order", "others"):
        gains.add_column(column, justify="right")
    ratios: list[list[float]] = []
    for epsilon, delta in SMALL_BUDGETS:
        found, ceiling, others = [], [], []
        for rate, sigma in product((0.001, 0.004, 0.01, 0.03, 0.1), (0.7, 0.9, 1.1, 1.5, 2.5, 5.0)):
            step = make_step(rate, sigma)
            single, mixture, own = make_policies(epsilon, delta, step)
            steps, several = count_affordable(single, step), count_mixture_steps(mixture, step)
            if steps:
                found.append(math.log(max(several, 0.5) / steps))
                ceiling.append(math.log(count_affordable(own, step) / steps))
            else:
                others.append(several)
        ratios.append(found)
        mean, least, most = (math.exp(f(found)) for f in (np.mean, min, max))
        gains.add_row(
            f"{epsilon:g}", describe(mixture), f"{len(found)}", f"{mean:.3f}", f"{least:.2f}",
            f"{most:.2f}", f"{math.exp(np.mean(ceiling)):.3f}",
            f"{len(others)}: {max(others, default=0)} steps",
        )  # fmt: skip
    over_budgets = math.exp(np.mean([np.mean(each) for each in ratios]))
    over_runs = math.exp(np.mean(np.concatenate(ratios)))
    gains.caption = f"Geometric mean over budgets {over_budgets:.3f}, over all runs {over_runs:.3f}"
    return gains


def count_planned_steps(
    spent: CanonicalForm | None, step: CanonicalForm, epsilon: float, delta: float
) -> int:
    """Return the most steps that a plan fixed in advance may add to those already spent."""
    parts = [] if spent is None else list(spent.atom_counts)

    def violation(count: int) -> float:
        """Return ε of the whole plan over the target ε, minus 1."""
        counts = tuple(parts + list(step.repeated(count).atom_counts))
        question = Question(CanonicalForm(counts, ""), RELATION)
        return ACCOUNTANTS["pld"].epsilon(question, delta).epsilon / epsilon - 1.0

    return find_largest_integer(violation, 10**8) or 0


def compare_plans() -> Table:
    """Return a table of the steps that each filter admits, and that a fixed plan may make."""
    plans = Table(title="Steps of the first plan, by filter", title_justify="left")
    for column in ("ε", "δ", "q", "σ", "fixed plan", "reference", "several orders", "one order",
                   "own order"):  # fmt: skip
        plans.add_column(column, justify="right")
    for epsilon, delta, rate, sigma in PLANS:
        step = make_step(rate, sigma)
        single, mixture, own = make_policies(epsilon, delta, step)
        best = count_planned_steps(None, step, epsilon, delta)
        run = DpSgd(sigma, sample_rate=rate, steps=1)
        reference, _ = find_affordable_steps(ReferenceFilter(epsilon, delta, RELATION), run)
        steps = (
            reference, count_mixture_steps(mixture, step), count_affordable(single, step),
            count_affordable(own, step),
        )  # fmt: skip
        plans.add_row(
            f"{epsilon:g}", f"{delta:g}", f"{rate:g}", f"{sigma:g}", f"{best}",
            *(f"{each} ({each / best:.1%})" for each in steps),
        )  # fmt: skip
    return plans


def compare_second_mechanisms() -> Table:
    """Return a table of the steps a second mechanism gets after a first used half the budget."""
    table = Table(title="Another mechanism after half of the steps", title_justify="left")
    for column in ("ε", "δ", "reference", "then", "fixed plan", "reference filter", "share", "ms"):
        table.add_column(column, justify="right")
    for epsilon, delta, first, other in PAIRS:
        step, run = make_step(*first), DpSgd(other[1], sample_rate=other[0], steps=1)
        half = count_planned_steps(None, step, epsilon, delta) // 2
        planned = StepPlan.of(DpSgd(first[1], sample_rate=first[0], steps=1))
        policy = ReferenceFilter(epsilon, delta, RELATION).with_reference(planned, is_planned=True)
        start = time.process_time()
        found = policy.count_affordable_steps(StepPlan.of(run), (half, 0)) or 0
        milliseconds = 1e3 * (time.process_time() - start)
        best = count_planned_steps(step.repeated(half), make_step(*other), epsilon, delta)
        table.add_row(
            f"{epsilon:g}", f"{delta:g}", f"q {first[0]:g}, σ {first[1]:g}",
            f"q {other[0]:g}, σ {other[1]:g}", f"{best}", f"{found}", f"{found / best:.3f}",
            f"{milliseconds:.0f}",
        )  # fmt: skip
    return table


def measure_times() -> str:
    """Return, as text, the CPU times to choose a mixture filter and to decide by it."""
    start = time.thread_time()
    policy = renyi_mixture.choose_mixture(3.0, 1.1e-5, RELATION)
    chosen = time.thread_time() - start
    taken = tuple(1_000_000 for _ in policy.orders)
    start = time.thread_time()
    for _ in range(1000):
        policy.admits(taken)
    decided = (time.thread_time() - start) / 1000
    return f"choose_mixture {1e3 * chosen:.0f} ms, admits {1e6 * decided:.0f} µs"


def main() -> None:
    """Print all tables."""
    table = Table(title="Steps that each filter admits", title_justify="left")
    for column in (
        "ε", "δ", "q", "σ", "reference", "certified ε", "several orders", "certified ε",
        "own order", "certified ε",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for epsilon, delta in BUDGETS:
        mixture = renyi_mixture.choose_mixture(epsilon, delta, RELATION)
        for rate, sigma in RUNS:
            run = DpSgd(sigma, sample_rate=rate, steps=1)
            own = renyi.choose_filter(epsilon, delta, RELATION, canonical_form(run))
            cells: list[str] = []
            for policy in (ReferenceFilter(epsilon, delta, RELATION), mixture, own):
                steps, seen = find_affordable_steps(policy, run)
                cells += [f"{steps}", seen]
            table.add_row(f"{epsilon:g}", f"{delta:g}", f"{rate:g}", f"{sigma:g}", *cells)
    Console(width=110).print(table)
    Console(width=110).print(compare_mixtures())
    Console(width=120).print(compare_plans())
    Console(width=110).print(compare_second_mechanisms())
    Console(width=110).print(measure_times())
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
        open_filter.after_reserving(plan, open_filter.nothing),
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
