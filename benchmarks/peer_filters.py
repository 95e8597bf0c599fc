"""Offer releases to the accountants of other libraries; see `filter_shares`.

It runs in an environment that has some of them, without this project. Standard input has a list of
workloads; standard output has, for each library that is installed, how many releases of each order
its accountant admits before it refuses one, or null for workloads that it cannot count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

Json = dict[str, Any]
Spend = Callable[[Any], None]  # raises an exception if the release does not fit


def read_cost(release: Json, measure: str) -> Any:
    """Return a release's ε, its (ε, δ) or its ρ."""
    kind = release["kind"]
    if measure == "zcdp":
        return release["rho"] if kind == "zcdp" else 1 / (2 * release["noise_multiplier"] ** 2)
    epsilon = release["epsilon"] if kind == "approximate_dp" else 1 / release["noise_multiplier"]
    epsilon = float(f"{epsilon:.12g}")  # the decimal that a person writes
    return epsilon if measure == "pure" else (epsilon, release["delta"])


def read_budget(workload: Json) -> Any:
    """Return a budget's ε, its (ε, δ) or its ρ."""
    epsilon, delta = workload["epsilon"], workload["delta"]
    return {"pure": epsilon, "approximate": (epsilon, delta), "zcdp": workload["rho"]}[
        workload["measure"]
    ]


def count_admitted(spend: Spend, costs: Iterable[Any]) -> int:
    """Return how many costs can be spent, one after the other."""
    admitted = 0
    for cost in costs:
        try:
            spend(cost)
        except Exception:  # each library has its own
            return admitted
        admitted += 1
    return admitted


def open_opendp(workload: Json) -> Spend:
    """Return how OpenDP's privacy filter spends a cost."""
    import opendp.prelude as dp

    dp.enable_features("contrib", "honest-but-curious")
    measures = {
        "pure": dp.max_divergence(),
        "approximate": dp.approximate(dp.max_divergence()),
        "zcdp": dp.zero_concentrated_divergence(),
    }
    measure = measures[workload["measure"]]
    space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
    odometer = dp.c.make_fully_adaptive_composition(*space, measure)
    queryable = dp.c.make_privacy_filter(odometer, d_in=1.0, d_out=read_budget(workload))(0.0)

    def spend(cost: Any) -> None:
        queryable(
            dp.m.make_user_measurement(
                *space, measure, function=lambda value: value, privacy_map=lambda _: cost, TO=float
            )
        )

    return spend


def open_tumult(workload: Json) -> Spend:
    """Return how Tumult's accountant spends a cost."""
    import numpy as np
    from tmlt.core.domains.numpy_domains import NumpyIntegerDomain
    from tmlt.core.measurements.base import Measurement
    from tmlt.core.measurements.interactive_measurements import (
        PrivacyAccountant,
        SequentialComposition,
    )
    from tmlt.core.measures import ApproxDP, PureDP, RhoZCDP
    from tmlt.core.metrics import AbsoluteDifference
    from tmlt.core.utils.exact_number import ExactNumber

    kinds = {"pure": PureDP(), "approximate": ApproxDP(), "zcdp": RhoZCDP()}
    measure = kinds[workload["measure"]]

    def read(cost: Any) -> Any:  # decimals, as a text is read exactly
        return tuple(map(read, cost)) if isinstance(cost, tuple) else ExactNumber(repr(cost))

    class Release(Measurement):  # type: ignore[misc]
        """A measurement with a given cost."""

        def __init__(self, cost: Any) -> None:
            super().__init__(NumpyIntegerDomain(), AbsoluteDifference(), measure, False)
            self.cost = read(cost)

        def privacy_function(self, d_in: Any) -> Any:  # noqa: ARG002
            return self.cost

        def __call__(self, value: Any) -> Any:
            return value

    composition = SequentialComposition(
        NumpyIntegerDomain(), AbsoluteDifference(), measure, 1, read(read_budget(workload))
    )
    accountant = PrivacyAccountant.launch(composition, np.int64(1))
    return lambda cost: accountant.measure(Release(cost))


def open_diffprivlib(workload: Json) -> Spend | None:
    """Return how diffprivlib's accountant spends a cost; it counts ε and δ only."""
    from diffprivlib.accountant import BudgetAccountant

    if workload["measure"] == "zcdp":
        return None
    accountant = BudgetAccountant(workload["epsilon"], workload["delta"], workload["delta"] / 2)
    return lambda cost: accountant.spend(*(cost if isinstance(cost, tuple) else (cost, 0.0)))


LIBRARIES: dict[str, tuple[str, Callable[[Json], Spend | None]]] = {
    "opendp": ("OpenDP", open_opendp),
    "tmlt.core": ("Tumult", open_tumult),
    "diffprivlib": ("diffprivlib", open_diffprivlib),
}


def count_orders(workload: Json, start: Callable[[Json], Spend | None]) -> list[int] | None:
    """Return how many releases of each order are admitted; None if they cannot be counted."""
    if not workload["measure"]:
        return None
    counts = []
    for order in workload["orders"]:
        spend = start(workload)
        if spend is None:
            return None
        costs = (read_cost(each, workload["measure"]) for each in order)
        counts.append(count_admitted(spend, costs))
    return counts


def main() -> None:
    """Answer standard input."""
    workloads = json.load(sys.stdin)
    found = {}
    for distribution, (title, start) in LIBRARIES.items():
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        found[f"{title} {version}"] = [count_orders(each, start) for each in workloads]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
