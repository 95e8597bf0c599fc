"""Time and ε of each method beside dp-accounting and opacus, in one run, on one thread.

    python benchmarks/accounting.py

Machines are noisy: read the ratios. Every row is the median of several calls after a warm-up.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py hides a library

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis import rdp as opacus_rdp
from rich.console import Console
from rich.table import Table

from accountant_service import mechanisms
from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.errors import AccountingError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.numerics import sampled_gaussian

CASES: list[tuple[str, float, float, int, float]] = [
    ("a", 0.01, 1.0, 1000, 1e-5),
    ("b", 256 / 60_000, 1.1, 14_063, 1e-5),
    ("c", 0.01, 4.0, 40_000, 1e-5),
    ("d", 1e-4, 0.6, 200_000, 1e-7),
    ("h", 1.0, 20.0, 1000, 1e-5),
]


def median_ms(call: Callable[[], Any], rounds: int = 5) -> tuple[float, Any]:
    """The median duration of a call in milliseconds, and its last answer."""
    answer = call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        answer = call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), answer


def event(q: float, sigma: float, steps: int) -> dp_event.DpEvent:
    """A run as dp-accounting describes it."""
    step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
    return dp_event.SelfComposedDpEvent(step, steps)


def opacus_prv(q: float, sigma: float, steps: int, delta: float) -> float:
    """ε by opacus' PRV accountant."""
    accountant = PRVAccountant()
    accountant.history = [(sigma, q, steps)]
    return float(accountant.get_epsilon(delta))


def peers(q: float, sigma: float, steps: int, delta: float) -> dict[str, Callable[[], float]]:
    """The same question to other libraries."""
    run = event(q, sigma, steps)
    return {
        "dp-accounting pld (1e-3)": lambda: (
            PLDAccountant(value_discretization_interval=1e-3).compose(run).get_epsilon(delta)
        ),
        "dp-accounting rdp": lambda: RdpAccountant().compose(run).get_epsilon(delta),
        "opacus prv": lambda: opacus_prv(q, sigma, steps, delta),
        "opacus rdp": lambda: opacus_rdp.get_privacy_spent(
            orders=ORDERS,
            rdp=opacus_rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=ORDERS),
            delta=delta,
        )[0],
    }


ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))  # opacus' own


def table_of(label: str, q: float, sigma: float, steps: int, delta: float) -> Table:
    """One case: ours, then theirs, each as a ratio to our certified interval's time."""
    described = {
        "kind": "dp_sgd",
        "noise_multiplier": sigma,
        "sample_rate": q,
        "steps": steps,
    }
    form = mechanisms.canonical_form(mechanisms.from_json(described))
    question = Question(form, NeighbouringRelation.ADD_OR_REMOVE_ONE)
    rows: list[tuple[str, float | None, str, str]] = []
    for name, accountant in ACCOUNTANTS.items():
        try:
            took, claim = median_ms(lambda a=accountant: a.epsilon(question, delta))  # type: ignore[misc]
        except AccountingError as error:
            rows.append((name, None, error.code, ""))
            continue
        interval = claim.certified
        proved = f"[{interval.lower:.5f}, {interval.upper:.5f}]" if interval else ""
        rows.append((name, took, f"{claim.epsilon:.5f}", proved))
    for name, call in peers(q, sigma, steps, delta).items():
        try:
            took, value = median_ms(call, rounds=3)
        except Exception as error:  # a peer's failure is a result
            rows.append((name, None, type(error).__name__, ""))
            continue
        rows.append((name, took, f"{value:.5f}", ""))
    base = next(took for name, took, _, _ in rows if name == "pld" and took)
    title = f"({label}) q={q:.4g} σ={sigma:g} T={steps} δ={delta:g}"
    table = Table(title=title, title_justify="left")
    for column in ("method", "ms", "time / ours (pld)", "ε", "proved interval"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, took, value, proved in rows:
        shown = ("–", "–") if took is None else (f"{took:.2f}", f"{took / base:.2f}×")
        table.add_row(name, *shown, value, proved)
    return table


def curve_table() -> Table:
    """An RDP curve over opacus' 151 orders."""
    orders = np.array(ORDERS)
    table = Table(title=f"RDP curve over {len(ORDERS)} orders", title_justify="left")
    for column in ("q", "σ", "ours ms", "opacus ms", "opacus / ours", "largest difference"):
        table.add_column(column, justify="right")
    for q, sigma in ((0.01, 1.0), (0.01, 4.0), (0.001, 2.0)):
        ours, moments = median_ms(
            lambda q=q, s=sigma: sampled_gaussian.log_moments(orders, q, s),  # type: ignore[misc]
            rounds=50,
        )
        theirs, rdp = median_ms(
            lambda q=q, s=sigma: opacus_rdp.compute_rdp(  # type: ignore[misc]
                q=q, noise_multiplier=s, steps=1, orders=ORDERS
            ),
            rounds=9,
        )
        gap = float(np.max(np.abs(np.asarray(rdp) / (moments / (orders - 1)) - 1)))
        table.add_row(
            f"{q:g}", f"{sigma:g}", f"{ours:.3f}", f"{theirs:.2f}", f"{theirs / ours:.0f}×",
            f"{gap:.1e}",
        )  # fmt: skip
    return table


def main() -> None:
    warnings.simplefilter("ignore")
    console = Console(width=110, highlight=False)
    console.print(curve_table())
    for case in CASES:
        console.print(table_of(*case))


if __name__ == "__main__":
    main()
