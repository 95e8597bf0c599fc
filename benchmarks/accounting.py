"""Compare the time and ε of each method with other libraries, in one run, on one thread.

    python benchmarks/accounting.py [--plot docs/images/cost.svg | --quick]

Compare the ratios, because machines are noisy. Every row is the median of several calls after a
warm-up; calls to this project start from empty caches. With --quick, every call is made once, and
only the first case and one other library per task are measured.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py shadows a library

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

from accountant_service import mechanisms
from accountant_service.accounting import calculator, solver
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.errors import AccountingError
from accountant_service.mechanisms import DpSgd
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import rare_events, saddle_point
from accountant_service.numerics.laws import (
    characteristic_function,
    sampled_gaussian,
    windowed_loss,
)
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from accountant_service.papers.audit_report import draw
from accountant_service.papers.claims import Figure

QUICK = sys.argv[1:2] == ["--quick"]
RunParameters = tuple[float, float, int]  # sample rate, noise multiplier, steps
CASES: list[tuple[str, float, float, int, float]] = [
    ("a", 0.01, 1.0, 1000, 1e-5),
    ("b", 256 / 60_000, 1.1, 14_063, 1e-5),
    ("c", 0.01, 4.0, 40_000, 1e-5),
    ("d", 1e-4, 0.6, 200_000, 1e-7),
    ("h", 1.0, 20.0, 1000, 1e-5),
]


def measure_median_ms(call: Callable[[], Any], rounds: int = 5) -> tuple[float, Any]:
    """Return the median duration of a call in milliseconds, and the call's last result."""
    answer = None if QUICK else call()
    times = []
    for _ in range(1 if QUICK else rounds):
        start = time.perf_counter()
        answer = call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), answer


def clear_caches_before(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that empties all caches and then makes the call."""

    def call_with_empty_caches() -> Any:
        """Empty all caches, and make the call."""
        saddle_point._release_moments.cache_clear()
        characteristic_function.tilted_loss.cache_clear()
        windowed_loss.cached_windowed_loss.cache_clear()
        rare_events._approximate_law.cache_clear()
        certified_interval._search_both_directions.cache_clear()
        return call()

    return call_with_empty_caches


def describe_dp_event(q: float, sigma: float, steps: int) -> dp_event.DpEvent:
    """Return dp-accounting's description of a DP-SGD run."""
    step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
    return dp_event.SelfComposedDpEvent(step, steps)


def compute_dp_accounting_pld(run: dp_event.DpEvent, delta: float, interval: float) -> float:
    """Return ε of a run by dp-accounting's connect-the-dots PLD."""
    return float(
        PLDAccountant(value_discretization_interval=interval).compose(run).get_epsilon(delta)
    )


def compute_opacus_prv(q: float, sigma: float, steps: int, delta: float) -> float:
    """Return ε of a DP-SGD run by Opacus' PRV accountant."""
    accountant = PRVAccountant()
    accountant.history = [(sigma, q, steps)]
    return float(accountant.get_epsilon(delta))


def compute_prv_accountant(runs: list[RunParameters], delta: float) -> float:
    """Return the upper bound on ε of some runs by prv-accountant, with an error of 0.01."""
    releases = [PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=sigma)
                for q, sigma, _ in runs]  # fmt: skip
    counts = [steps for _, _, steps in runs]
    accountant = PrvAccountant(
        prvs=releases, max_self_compositions=counts, eps_error=0.01, delta_error=delta / 1000
    )
    return float(accountant.compute_epsilon(delta=delta, num_self_compositions=counts)[2])


def list_peers(q: float, sigma: float, steps: int, delta: float) -> dict[str, Callable[[], float]]:
    """Return, by name, other libraries' functions that compute ε of the same run."""
    run = describe_dp_event(q, sigma, steps)
    return {
        "dp-accounting pld (1e-3)": lambda: compute_dp_accounting_pld(run, delta, 1e-3),
        "dp-accounting pld (1e-4)": lambda: compute_dp_accounting_pld(run, delta, 1e-4),
        "dp-accounting pld (2e-5)": lambda: compute_dp_accounting_pld(run, delta, 2e-5),
        "dp-accounting rdp": lambda: RdpAccountant().compose(run).get_epsilon(delta),
        "opacus prv": lambda: compute_opacus_prv(q, sigma, steps, delta),
        "prv-accountant": lambda: compute_prv_accountant([(q, sigma, steps)], delta),
        "opacus rdp": lambda: opacus_rdp.get_privacy_spent(
            orders=ORDERS,
            rdp=opacus_rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=ORDERS),
            delta=delta,
        )[0],
    }


CONSOLE = Console(width=110, highlight=False)
ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))  # Opacus' defaults


def build_case_table(label: str, q: float, sigma: float, steps: int, delta: float) -> Table:
    """Return a table of the time and ε of every method and library for one run."""
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
            took, claim = measure_median_ms(
                clear_caches_before(lambda a=accountant: a.epsilon(question, delta))  # type: ignore[misc]
            )
        except AccountingError as error:
            rows.append((name, None, error.code, ""))
            continue
        interval = claim.certified
        proved = f"[{interval.lower:.5f}, {interval.upper:.5f}]" if interval else ""
        rows.append((name, took, f"{claim.epsilon:.5f}", proved))
    for name, call in list_peers(q, sigma, steps, delta).items():
        try:
            took, value = measure_median_ms(call, rounds=1 if "e-5" in name else 3)
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


def build_rdp_table() -> Table:
    """Return a table of the time to compute RDP at 151 orders, here and by Opacus."""
    orders = np.array(ORDERS)
    table = Table(title=f"RDP curve over {len(ORDERS)} orders", title_justify="left")
    for column in ("q", "σ", "ours ms", "opacus ms", "opacus / ours", "largest difference"):
        table.add_column(column, justify="right")
    for q, sigma in ((0.01, 1.0), (0.01, 4.0), (0.001, 2.0)):
        ours, moments = measure_median_ms(
            lambda q=q, s=sigma: sampled_gaussian.log_moments(orders, q, s),  # type: ignore[misc]
            rounds=50,
        )
        theirs, rdp = measure_median_ms(
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


def print_comparison(
    title: str, ours: Callable[[], float], theirs: dict[str, Callable[[], float]]
) -> None:
    """Print the time and the answer of a task here and in other libraries."""
    took, value = measure_median_ms(clear_caches_before(ours))
    table = Table(title=title, title_justify="left")
    for column in ("", "ms", "time / ours", "answer"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("ours, certified", f"{took:.1f}", "1×", f"{value:.6f}")
    for name, call in list(theirs.items())[: 1 if QUICK else None]:
        try:
            their_ms, answer = measure_median_ms(call, rounds=1)
        except Exception as error:  # a peer's failure is a result
            table.add_row(name, "–", "–", type(error).__name__)
            continue
        table.add_row(name, f"{their_ms:.1f}", f"{their_ms / took:.1f}×", f"{answer:.6f}")
    CONSOLE.print(table)


def compare_solvers() -> None:
    """Print times to solve for noise (e) and for steps (f), here and by dp-accounting."""

    def calibrate_noise(interval: float) -> float:
        """Return the noise multiplier that dp-accounting finds for the target ε."""
        return calibrate_with_dp_accounting(
            lambda sigma: describe_dp_event(0.01, sigma, 5000), 3.0, (0.5, 4.0), interval
        )

    def calibrate_steps(interval: float) -> float:
        """Return the number of steps that dp-accounting finds for the target ε."""
        return calibrate_with_dp_accounting(
            lambda n: describe_dp_event(0.01, 1.0, int(n)), 2.0, (1, 10_000), interval
        )

    run = DpSgd(1.0, sample_rate=0.01, steps=5000)
    pld, relation = ACCOUNTANTS["pld"], NeighbouringRelation.ADD_OR_REMOVE_ONE
    for title, ours, theirs in (
        (
            "(e) σ for ε = 3, δ = 1e-5, q = .01, T = 5000",
            lambda: solver.noise_multiplier(run, solver.Target(pld, relation, 3.0, 1e-5)).value,
            calibrate_noise,
        ),
        (
            "(f) steps for ε = 2, δ = 1e-5, σ = 1, q = .01",
            lambda: solver.steps(run, solver.Target(pld, relation, 2.0, 1e-5)).value,
            calibrate_steps,
        ),
    ):
        peers = {
            f"dp-accounting calibrate ({interval:g})": partial(theirs, interval)
            for interval in (1e-3, 1e-4)
        }
        print_comparison(title, ours, peers)


def calibrate_with_dp_accounting(
    make: Callable[[float], dp_event.DpEvent],
    target: float,
    bracket: tuple[float, float],
    interval: float,
) -> float:
    """Return the parameter for which dp-accounting's ε at δ = 1e-5 meets the target."""
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


def compare_segments() -> None:
    """Compare the time to compute ε of a run with fifty different segments (g)."""
    runs: list[RunParameters] = [
        (0.002 + 0.0003 * i, 0.9 + 0.05 * i, 20 + 3 * i) for i in range(50)
    ]
    described = {
        "kind": "composed",
        "mechanisms": [
            {"kind": "dp_sgd", "noise_multiplier": sigma, "sample_rate": q, "steps": steps}
            for q, sigma, steps in runs
        ],
    }
    form = mechanisms.canonical_form(mechanisms.from_json(described))
    question = Question(form, NeighbouringRelation.ADD_OR_REMOVE_ONE)
    run = dp_event.ComposedDpEvent([describe_dp_event(*each) for each in runs])
    history = [(sigma, q, steps) for q, sigma, steps in runs]

    def compute_by_opacus() -> float:
        """Return ε of the run by Opacus."""
        accountant = PRVAccountant()
        accountant.history = history
        return float(accountant.get_epsilon(1e-5))

    print_comparison(
        "(g) 50 different segments, δ = 1e-5",
        lambda: ACCOUNTANTS["pld"].epsilon(question, 1e-5).epsilon,
        {
            "dp-accounting pld (1e-3)": lambda: compute_dp_accounting_pld(run, 1e-5, 1e-3),
            "dp-accounting pld (1e-4)": lambda: compute_dp_accounting_pld(run, 1e-5, 1e-4),
            "opacus prv": compute_by_opacus,
            "prv-accountant": lambda: compute_prv_accountant(runs, 1e-5),
        },
    )


def print_cost_by_steps(plot: Path | None) -> None:
    """Print the time of a certified ε from 100 to 10⁶ steps, relative to the shortest run."""
    counts = [100, 1000, 10_000, 100_000, 1_000_000]
    took = []
    for count in counts:
        releases = [(Release(GaussianPair(1.0), 0.3 / count**0.5), count)]
        took.append(
            measure_median_ms(
                clear_caches_before(
                    lambda r=releases: certified_interval.epsilon_bounds(r, 1e-5, 1e-3)  # type: ignore[misc]
                )
            )[0]
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


def print_cost_of_curves() -> None:
    """Print the time of certified curves of ε, relative to computing single points.

    The three runs have many steps, few steps, and rare events, where a single ε is slow. Single
    computations are timed at ten points of the curve; the last and the slowest are shown.
    """
    table = Table(title="certified curves", title_justify="left")
    for column in ("run", "points", "ms", "/ last point", "/ slowest point", "/ one by one"):
        table.add_column(column, justify="right")
    for q, sigma, steps, delta in (
        (0.01, 1.1, 10_000, 1e-5),
        (0.01, 1.1, 100, 1e-5),
        (1e-4, 0.6, 200_000, 1e-7),
    ):
        single = [
            measure_median_ms(
                clear_caches_before(_make_epsilon_call(q, sigma, math.ceil(steps * i / 10), delta))
            )[0]
            for i in range(1, 11)
        ]
        for points in (10, 50, 200):
            run = DpSgd(sigma, sample_rate=q, steps=steps)
            took, _ = measure_median_ms(
                clear_caches_before(partial(calculator.curve, run, delta, ["pld"], points))
            )
            count = min(points, steps)
            separately = count * sum(single) / len(single)
            table.add_row(
                f"q={q:g} σ={sigma} T={steps} δ={delta:g}",
                f"{count}",
                f"{took:.1f}",
                *(f"{took / of:.2g}" for of in (single[-1], max(single), separately)),
            )
    CONSOLE.print(table)


def _make_epsilon_call(q: float, sigma: float, steps: int, delta: float) -> Callable[[], Any]:
    """Return a function that computes the certified ε of a run."""
    return partial(calculator.epsilon, DpSgd(sigma, sample_rate=q, steps=steps), delta)


def main() -> None:
    """Print all comparisons."""
    warnings.simplefilter("ignore")
    plot = Path(sys.argv[2]) if sys.argv[1:2] == ["--plot"] else None
    CONSOLE.print(build_rdp_table())
    for case in CASES[:1] if QUICK else CASES:
        CONSOLE.print(build_case_table(*case))
    compare_solvers()
    compare_segments()
    print_cost_by_steps(plot)
    print_cost_of_curves()


if __name__ == "__main__":
    main()
