"""Time and ε of each method beside other libraries, in one run, on one thread.

    python benchmarks/accounting.py [--plot docs/images/cost.svg | --quick]

Machines are noisy: read the ratios. Every row is the median of several calls after a warm-up; ours
start from empty caches each time. With --quick: every call once, the
first case only, and the tasks after it beside one other library.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py hides a library

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis import rdp as opacus_rdp
from prv_accountant import PRVAccountant as PrvAccountant
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism
from rich.console import Console
from rich.table import Table

from accountant_service import calculator, mechanisms, solver
from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.audit import Figure
from accountant_service.errors import AccountingError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.mechanisms import DpSgd
from accountant_service.numerics import (
    rare_events,
    saddle_point,
    sampled_gaussian,
    tilted_loss,
    two_sided,
    windowed_loss,
)
from accountant_service.numerics.privacy_loss import GaussianRatio, Release
from accountant_service.report import draw

QUICK = sys.argv[1:2] == ["--quick"]
Run = tuple[float, float, int]  # sample rate, noise multiplier, steps
CASES: list[tuple[str, float, float, int, float]] = [
    ("a", 0.01, 1.0, 1000, 1e-5),
    ("b", 256 / 60_000, 1.1, 14_063, 1e-5),
    ("c", 0.01, 4.0, 40_000, 1e-5),
    ("d", 1e-4, 0.6, 200_000, 1e-7),
    ("h", 1.0, 20.0, 1000, 1e-5),
]


def median_ms(call: Callable[[], Any], rounds: int = 5) -> tuple[float, Any]:
    """The median duration of a call in milliseconds, and its last answer."""
    answer = None if QUICK else call()
    times = []
    for _ in range(1 if QUICK else rounds):
        start = time.perf_counter()
        answer = call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), answer


def cold(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, from empty caches."""

    def from_nothing() -> Any:
        saddle_point._release_moments.cache_clear()
        tilted_loss.tilted_loss.cache_clear()
        windowed_loss.windowed_loss.cache_clear()
        rare_events._sketch.cache_clear()
        return call()

    return from_nothing


def event(q: float, sigma: float, steps: int) -> dp_event.DpEvent:
    """A run as dp-accounting describes it."""
    step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
    return dp_event.SelfComposedDpEvent(step, steps)


def dp_pld(run: dp_event.DpEvent, delta: float, interval: float) -> float:
    """ε by dp-accounting's connect-the-dots PLD."""
    return float(
        PLDAccountant(value_discretization_interval=interval).compose(run).get_epsilon(delta)
    )


def opacus_prv(q: float, sigma: float, steps: int, delta: float) -> float:
    """ε by opacus' PRV accountant."""
    accountant = PRVAccountant()
    accountant.history = [(sigma, q, steps)]
    return float(accountant.get_epsilon(delta))


def prv(parts: list[Run], delta: float) -> float:
    """ε's upper bound by prv-accountant, to ± 0.01 as opacus has it."""
    releases = [PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=sigma)
                for q, sigma, _ in parts]  # fmt: skip
    counts = [steps for _, _, steps in parts]
    accountant = PrvAccountant(
        prvs=releases, max_self_compositions=counts, eps_error=0.01, delta_error=delta / 1000
    )
    return float(accountant.compute_epsilon(delta=delta, num_self_compositions=counts)[2])


def peers(q: float, sigma: float, steps: int, delta: float) -> dict[str, Callable[[], float]]:
    """The same question to other libraries."""
    run = event(q, sigma, steps)
    return {
        "dp-accounting pld (1e-3)": lambda: dp_pld(run, delta, 1e-3),
        "dp-accounting pld (1e-4)": lambda: dp_pld(run, delta, 1e-4),
        "dp-accounting pld (2e-5)": lambda: dp_pld(run, delta, 2e-5),
        "dp-accounting rdp": lambda: RdpAccountant().compose(run).get_epsilon(delta),
        "opacus prv": lambda: opacus_prv(q, sigma, steps, delta),
        "prv-accountant": lambda: prv([(q, sigma, steps)], delta),
        "opacus rdp": lambda: opacus_rdp.get_privacy_spent(
            orders=ORDERS,
            rdp=opacus_rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=ORDERS),
            delta=delta,
        )[0],
    }


CONSOLE = Console(width=110, highlight=False)
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
            took, claim = median_ms(cold(lambda a=accountant: a.epsilon(question, delta)))  # type: ignore[misc]
        except AccountingError as error:
            rows.append((name, None, error.code, ""))
            continue
        interval = claim.certified
        proved = f"[{interval.lower:.5f}, {interval.upper:.5f}]" if interval else ""
        rows.append((name, took, f"{claim.epsilon:.5f}", proved))
    for name, call in peers(q, sigma, steps, delta).items():
        try:
            took, value = median_ms(call, rounds=1 if "e-5" in name else 3)
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


def compare(title: str, ours: Callable[[], float], theirs: dict[str, Callable[[], float]]) -> None:
    """One task: our time and answer, then theirs and the ratios."""
    took, value = median_ms(cold(ours))
    table = Table(title=title, title_justify="left")
    for column in ("", "ms", "time / ours", "answer"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("ours, certified", f"{took:.1f}", "1×", f"{value:.6f}")
    for name, call in list(theirs.items())[: 1 if QUICK else None]:
        try:
            their_ms, answer = median_ms(call, rounds=1)
        except Exception as error:  # a peer's failure is a result
            table.add_row(name, "–", "–", type(error).__name__)
            continue
        table.add_row(name, f"{their_ms:.1f}", f"{their_ms / took:.1f}×", f"{answer:.6f}")
    CONSOLE.print(table)


def solvers() -> None:
    """(e) and (f): noise and steps. dp-accounting has a calibration for either."""

    def noise(interval: float) -> float:
        return calibrated(lambda sigma: event(0.01, sigma, 5000), 3.0, (0.5, 4.0), interval)

    def steps(interval: float) -> float:
        return calibrated(lambda n: event(0.01, 1.0, int(n)), 2.0, (1, 10_000), interval)

    run = DpSgd(1.0, sample_rate=0.01, steps=5000)
    pld, relation = ACCOUNTANTS["pld"], NeighbouringRelation.ADD_OR_REMOVE_ONE
    for title, ours, theirs in (
        (
            "(e) σ for ε = 3, δ = 1e-5, q = .01, T = 5000",
            lambda: solver.noise_multiplier(run, solver.Target(pld, relation, 3.0, 1e-5)).value,
            noise,
        ),
        (
            "(f) steps for ε = 2, δ = 1e-5, σ = 1, q = .01",
            lambda: solver.steps(run, solver.Target(pld, relation, 2.0, 1e-5)).value,
            steps,
        ),
    ):
        peers = {
            f"dp-accounting calibrate ({interval:g})": partial(theirs, interval)
            for interval in (1e-3, 1e-4)
        }
        compare(title, ours, peers)


def calibrated(
    make: Callable[[float], dp_event.DpEvent],
    target: float,
    bracket: tuple[float, float],
    interval: float,
) -> float:
    """The value at which dp-accounting's ε at δ = 1e-5 meets the target."""
    discrete = isinstance(bracket[0], int)
    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: PLDAccountant(value_discretization_interval=interval),
            make,
            target,
            1e-5,
            dp_accounting.ExplicitBracketInterval(*bracket),
            discrete=discrete,
            tol=0.5 if discrete else 1e-4,
        )
    )


def segments() -> None:
    """(g): fifty different segments."""
    parts: list[Run] = [(0.002 + 0.0003 * i, 0.9 + 0.05 * i, 20 + 3 * i) for i in range(50)]
    described = {
        "kind": "composed",
        "mechanisms": [
            {"kind": "dp_sgd", "noise_multiplier": sigma, "sample_rate": q, "steps": steps}
            for q, sigma, steps in parts
        ],
    }
    form = mechanisms.canonical_form(mechanisms.from_json(described))
    question = Question(form, NeighbouringRelation.ADD_OR_REMOVE_ONE)
    run = dp_event.ComposedDpEvent([event(*part) for part in parts])
    history = [(sigma, q, steps) for q, sigma, steps in parts]

    def by_opacus() -> float:
        accountant = PRVAccountant()
        accountant.history = history
        return float(accountant.get_epsilon(1e-5))

    compare(
        "(g) 50 different segments, δ = 1e-5",
        lambda: ACCOUNTANTS["pld"].epsilon(question, 1e-5).epsilon,
        {
            "dp-accounting pld (1e-3)": lambda: dp_pld(run, 1e-5, 1e-3),
            "dp-accounting pld (1e-4)": lambda: dp_pld(run, 1e-5, 1e-4),
            "opacus prv": by_opacus,
            "prv-accountant": lambda: prv(parts, 1e-5),
        },
    )


def cost_by_steps(plot: Path | None) -> None:
    """Our time from a hundred to a million steps, as a ratio to the shortest run's."""
    counts = [100, 1000, 10_000, 100_000, 1_000_000]
    took = []
    for count in counts:
        releases = [(Release(GaussianRatio(1.0), 0.3 / count**0.5), count)]
        took.append(
            median_ms(cold(lambda r=releases: two_sided.epsilon_bounds(r, 1e-5, 1e-3)))[0]  # type: ignore[misc]
        )
    table = Table(title="certified ε, σ = 1, q = .3/√T, δ = 1e-5", title_justify="left")
    for column in ("T", "ms", "/ ms at T = 100"):
        table.add_column(column, justify="right")
    for count, ms in zip(counts, took, strict=True):
        table.add_row(f"{count}", f"{ms:.1f}", f"{ms / took[0]:.2f}")
    CONSOLE.print(table)
    if plot is not None:
        ratio = {"time / time at T = 100": tuple(ms / took[0] for ms in took)}
        figure = Figure(
            plot.stem, "Cost of a certified ε by steps", "steps", "ratio",
            tuple(map(float, counts)), ratio, logarithmic_x=True, lowest=0.0,
        )  # fmt: skip
        draw([figure], plot.parent)


def cost_of_curves() -> None:
    """Certified curves, as ratios to single questions asked from empty caches.

    Three runs: many steps; few steps; few improbable outcomes, where single answers are dear. A
    point is timed at the last count, and wherever it costs the most of ten along the curve.
    """
    table = Table(title="certified curves", title_justify="left")
    for column in ("run", "points", "ms", "/ last point", "/ dearest point", "/ one by one"):
        table.add_column(column, justify="right")
    for q, sigma, steps, delta in (
        (0.01, 1.1, 10_000, 1e-5),
        (0.01, 1.1, 100, 1e-5),
        (1e-4, 0.6, 200_000, 1e-7),
    ):
        single = [
            median_ms(cold(_single(q, sigma, math.ceil(steps * i / 10), delta)))[0]
            for i in range(1, 11)
        ]
        for points in (10, 50, 200):
            run = DpSgd(sigma, sample_rate=q, steps=steps)
            took, _ = median_ms(cold(partial(calculator.curve, run, delta, ["pld"], points)))
            count = min(points, steps)
            apart = count * sum(single) / len(single)
            table.add_row(
                f"q={q:g} σ={sigma} T={steps} δ={delta:g}",
                f"{count}",
                f"{took:.1f}",
                *(f"{took / of:.2g}" for of in (single[-1], max(single), apart)),
            )
    CONSOLE.print(table)


def _single(q: float, sigma: float, steps: int, delta: float) -> Callable[[], Any]:
    return partial(calculator.epsilon, DpSgd(sigma, sample_rate=q, steps=steps), delta)


def main() -> None:
    warnings.simplefilter("ignore")
    plot = Path(sys.argv[2]) if sys.argv[1:2] == ["--plot"] else None
    CONSOLE.print(curve_table())
    for case in CASES[:1] if QUICK else CASES:
        CONSOLE.print(table_of(*case))
    solvers()
    segments()
    cost_by_steps(plot)
    cost_of_curves()


if __name__ == "__main__":
    main()
