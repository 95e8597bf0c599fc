"""Compare what each privacy filter admits with what a plan that is fixed in advance may release.

    python -m benchmarks.filter_shares [--python PYTHON] [--write]

Releases of each workload come one after the other, in random orders. A filter's share is the number
that it admits before it first refuses one, over the number in the longest plan that begins with the
same releases and is proved to be within the budget. PYTHON is of an environment with OpenDP, Tumult
or diffprivlib, whose own accountants are offered the same; `--write` writes the table into
docs/accountants/filters.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.errors import CodedError, NoFiniteEpsilonError
from accountant_service.ledger import plans
from accountant_service.ledger.filters import AdditionFilter, PrivacyFilter
from accountant_service.ledger.filters.base import add
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.step_plan import StepPlan, charged_form
from accountant_service.mechanisms import Composed
from accountant_service.numerics.floats.search import find_largest_integer
from scripts.page_parts import DOCS, write_part
from scripts.peer_jobs import find_program

PAGE: Final = DOCS / "accountants" / "filters.md"
PEERS: Final = {"opendp": "OpenDP", "tmlt.core": "Tumult", "diffprivlib": "diffprivlib"}
RELATION: Final = NeighbouringRelation.ADD_OR_REMOVE_ONE
MOST: Final = 1000  # releases of an order; no plan has so many
FILTERS: Final = ("reference", "renyi", "either", "addition")
Json = dict[str, Any]
Orders = list[list[Json]]


@dataclass(frozen=True)
class Workload:
    """Releases of one kind.

    Attributes:
        title: of its row.
        epsilon: ε of the budget.
        delta: δ of the budget.
        kinds: mechanisms of which each release is drawn.
        first: releases that come before them.
        measure: how other libraries count them: pure, approximate or zcdp; empty if they cannot.
        orders: the number of random orders.
    """

    title: str
    epsilon: float
    delta: float
    kinds: tuple[Json, ...]
    first: tuple[Json, ...] = ()
    measure: str = ""
    orders: int = 5


def laplace(epsilon: str) -> Json:
    return {"kind": "laplace", "noise_multiplier": float(1 / Fraction(epsilon))}


def approximate(epsilon: float, delta: float) -> Json:
    return {"kind": "approximate_dp", "epsilon": epsilon, "delta": delta}


def gaussian(sigma: float) -> Json:
    return {"kind": "gaussian", "noise_multiplier": sigma}


def training(rate: float, sigma: float, steps: int) -> Json:
    return {"kind": "dp_sgd", "sample_rate": rate, "noise_multiplier": sigma, "steps": steps}


QUERIES: Final = (1.0, 1e-6)
TRAINING: Final = (3.0, 1e-5)
RUN: Final = training(0.01, 1.1, 100)
WORKLOADS: Final = (
    Workload("pure ε of 0.05 to 0.3", *QUERIES,
             tuple(approximate(each, 0) for each in (0.05, 0.1, 0.2, 0.3)), measure="pure"),
    Workload("Laplace, ε of 0.05 to 0.25", *QUERIES,
             tuple(map(laplace, ("0.05", "0.1", "0.2", "0.25"))), measure="pure"),
    Workload("Laplace, ε of 0.01", *QUERIES, (laplace("0.01"),), measure="pure"),
    Workload("(ε, 1e-8), ε of 0.05 to 0.3", *QUERIES,
             tuple(approximate(each, 1e-8) for each in (0.05, 0.1, 0.2, 0.3)),
             measure="approximate"),
    Workload("Gaussian, σ of 10 to 30", *QUERIES, tuple(map(gaussian, (10, 15, 20, 30))),
             measure="zcdp"),
    Workload("ρ of 0.0005 to 0.004", *QUERIES,
             tuple({"kind": "zcdp", "rho": each} for each in (0.0005, 0.001, 0.002, 0.004)),
             measure="zcdp"),
    Workload("DP-SGD, runs of 100 steps, q = 0.01, σ = 1.1", *TRAINING, (RUN,)),
    Workload("DP-SGD, q of 0.005 to 0.02, σ of 0.9 to 1.5", *TRAINING,
             (RUN, training(0.02, 1.5, 100), training(0.005, 0.9, 100))),
    Workload("a tiny run first, then the same runs", *TRAINING, (RUN,),
             (training(1e-7, 1000.0, 1),)),
    Workload("ten counts of ε = 0.01 first, then the same runs", *TRAINING, (RUN,),
             (laplace("0.01"),) * 10),
    Workload("Laplace 0.05, Gaussian σ = 20 and DP-SGD runs", *TRAINING,
             (RUN, laplace("0.05"), gaussian(20)), orders=3),  # each release takes seconds
)  # fmt: skip


def choose(name: str, epsilon: float, delta: float) -> PrivacyFilter:
    """Return a filter of a budget, as for a new dataset."""
    new = NewDataset("d", 60_000, epsilon, delta, RELATION, "record", None, name)
    return plans.choose_policy(new)


def draw_orders(workload: Workload) -> Orders:
    """Return random sequences of releases of a workload."""
    rng = random.Random(workload.title)
    orders = workload.orders if len(workload.kinds) > 1 else 1
    return [
        [*workload.first, *(rng.choice(workload.kinds) for _ in range(MOST))] for _ in range(orders)
    ]


def count_planned(releases: Sequence[Json], epsilon: float, delta: float) -> int:
    """Return how many of the releases, from the first on, a fixed plan may make."""
    parsed = [mechanisms.from_json(each) for each in releases]

    def excess(count: int) -> float:
        form = charged_form(Composed(tuple(parsed[:count])))
        try:
            found = ACCOUNTANTS["pld"].epsilon_bound(Question(form, RELATION), delta).value
        except NoFiniteEpsilonError:
            return 1.0
        return found / epsilon - 1.0

    composed = find_largest_integer(excess, len(parsed))
    if composed is None:
        raise ValueError("all releases fit a plan: draw more of them")
    return max(composed, count_admitted(AdditionFilter(epsilon, delta, RELATION), releases))


def count_admitted(policy: PrivacyFilter, releases: Sequence[Json]) -> int:
    """Return how many releases a filter admits, each reserved and granted, until it refuses one."""
    taken = policy.nothing
    for admitted, each in enumerate(releases):
        plan = StepPlan.of(mechanisms.from_json(each))
        try:
            policy = policy.after_reserving(plan, taken)
            taken = add(taken, policy.compute_charge(plan, taken).reserved)
        except CodedError:
            return admitted
        if not policy.admits(taken):
            return admitted
    return len(releases)


def find_rho(epsilon: float, delta: float) -> float:
    """Return the largest ρ that is (ε, δ)-DP by the proved conversion, with six digits."""

    def excess(units: int) -> float:
        form = charged_form(mechanisms.from_json({"kind": "zcdp", "rho": units / 1e6}))
        return ACCOUNTANTS["pld"].epsilon_bound(Question(form, RELATION), delta).value - epsilon

    return (find_largest_integer(excess, 10**6) or 0) / 1e6


def ask_peers(python: str, asked: list[Json]) -> dict[str, list[list[int] | None]]:
    """Return how many releases of each order the accountants of other libraries admit."""
    program = Path(__file__).with_name("peer_filters.py")
    return json.loads(  # type: ignore[no-any-return]
        subprocess.run(
            [python, "-P", program], input=json.dumps(asked), stdout=subprocess.PIPE, text=True,
            check=True,
        ).stdout
    )  # fmt: skip


def compare(python: str | None) -> Iterator[list[str]]:
    """Yield the rows of the table, the titles first."""
    drawn, planned = [], []
    for each in WORKLOADS:
        sequences = draw_orders(each)
        plans = [count_planned(one, each.epsilon, each.delta) for one in sequences]
        # one release more than the plan: a filter that admits it counts more than the plan
        drawn.append([one[: count + 1] for one, count in zip(sequences, plans, strict=True)])
        planned.append(plans)
    asked = [
        {"measure": each.measure, "epsilon": each.epsilon, "delta": each.delta,
         "rho": find_rho(each.epsilon, each.delta) if each.measure == "zcdp" else None,
         "orders": sequences}
        for each, sequences in zip(WORKLOADS, drawn, strict=True)
    ]  # fmt: skip
    peers = ask_peers(python, asked) if python else {}
    yield ["workload", "budget", *(f"`{name}`" for name in FILTERS), *peers]
    for at, (each, sequences, plans) in enumerate(zip(WORKLOADS, drawn, planned, strict=True)):
        filters = [choose(name, each.epsilon, each.delta) for name in FILTERS]
        cells = [
            write_shares([count_admitted(policy, one) for one in sequences], plans)
            for policy in filters
        ]
        cells += [write_shares(found[at], plans) for found in peers.values()]
        budget = f"({each.epsilon:g}, {each.delta:g})".replace("e-0", "e-")
        yield [each.title, budget, *cells]


def write_shares(admitted: Sequence[int] | None, planned: Sequence[int]) -> str:
    """Return the mean share, and the least and the most if they differ; a dash without any."""
    if not admitted or not any(admitted):
        return "–"
    shares = [count / plan for count, plan in zip(admitted, planned, strict=True)]
    extremes = f" ({min(shares):.2f} to {max(shares):.2f})" if min(shares) < max(shares) else ""
    return f"{mean(shares):.2f}{extremes}"


def main() -> None:
    """Print the table, and write it if asked to."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.filter_shares", description=__doc__.splitlines()[0]
    )  # fmt: skip
    options.add_argument("--python", type=find_program, help="with other libraries")
    options.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    asked = options.parse_args()
    lines: list[str] = []
    for row in compare(asked.python):
        rule = [] if lines else [f"|{'---|' * len(row)}\n"]
        lines += [f"| {' | '.join(row)} |\n", *rule]
        print(*lines[-1 - len(rule) :], sep="", end="", flush=True)
    if asked.write:
        if not all(title in lines[0] for title in PEERS.values()):
            sys.exit(f"to write the table, pass --python with {', '.join(PEERS)}")
        write_part(PAGE, "shares", "".join(lines))


if __name__ == "__main__":
    main()
