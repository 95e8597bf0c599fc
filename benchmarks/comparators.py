"""The methods that papers/000, 001 and 004 compare with, and the options that follow the papers.

`python -m benchmarks.comparators run` trains what has no line in `docs/comparators.jsonl` yet, and
`python -m benchmarks.comparators report` writes `docs/comparators.md` from these lines. All methods
of a task spend the same certified ε. The learning rate of each is the best of three on a held-out
sixth of the training set, with a seed of its own; scores are of two other seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from scripts.page_parts import DOCS, write_part
from training_client.budget import NoBudget
from training_client.lab.agd import Agd, NoGate, train_agd
from training_client.lab.data import Dataset, load
from training_client.lab.models import cross_entropy, make_model, side_information
from training_client.lab.papers.store import Store
from training_client.lab.relevance import PrivateRelevance
from training_client.lab.schedules import parse_schedule
from training_client.lab.train import evaluate
from training_client.lab.warm_start import warm_start
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.optimizers.adppl import Adppl
from training_client.plan import Plan
from training_client.private_step.sampling import PoissonSampler

RESULTS, PAGE = DOCS / "comparators.jsonl", DOCS / "comparators.md"
DELTA: Final = 1e-5
RATES: Final = (0.3, 1.0, 3.0)  # times a method's own
SEEDS: Final = (1, 2)
SIDE: Final = {"cap": 20.0, "others": 20.0}


@dataclass(frozen=True)
class Task:
    """A data set with a model and the plan of DP-SGD on it.

    Attributes:
        title: for the page.
        data: the name of the data set.
        model: the name of the model, with `hidden` units.
        batch: expected batch size.
        noise: σ of DP-SGD.
        steps: its steps.
        public: training examples given up by methods that need public ones.
    """

    title: str
    data: str
    model: str
    batch: int
    noise: float
    steps: int
    public: int
    hidden: int = 100


@dataclass(frozen=True)
class Method:
    """A method with its own learning rate and clip norm.

    Attributes:
        name: on the page.
        optimizer: in the registry; `adppl` and `agd` are made here.
        rate: the middle of its learning rates.
        clip_norm: C.
        options: of the optimizer.
        side: arguments of `side_information`; None without.
        warm_start: whether it first trains on the public examples.
        decay: the rate of EXP's noise per tenth of the steps; 0 for constant noise.
        factors: of `rate`, which are tried.
    """

    name: str
    optimizer: str
    rate: float
    clip_norm: float
    options: Mapping[str, Any] = field(default_factory=dict)
    side: Mapping[str, Any] | None = None
    warm_start: bool = False
    decay: float = 0.0
    factors: tuple[float, ...] = RATES


TASKS: Final = {
    "text": Task("20 newsgroups, linear, 2 epochs", "newsgroups", "linear", 64, 1.0, 353, 113),
    "images": Task("MNIST, 784-100-10, 3 epochs", "mnist", "mlp", 600, 4.0, 300, 600),
}
_ADAM: Final = {"statistic": "adam", "first": 0.9}
METHODS: Final = {
    "text": (
        Method("dp_sgd", "dp_sgd", 10.0, 0.1),
        Method("dp_sgd, warm start", "dp_sgd", 1.0, 0.1, warm_start=True),
        Method("pda_dpmd", "pda_dpmd", 10.0, 0.1),
        Method("adadps", "adadps", 1.5, 1.0),
        Method("adadps, current", "adadps", 1.5, 1.0, {"current_statistic": True}),
        Method("adadps, adam with m", "adadps", 1.5, 1.0, _ADAM),
        Method("adadps, adam with m, current", "adadps", 1.5, 1.0,
               {**_ADAM, "current_statistic": True}),
        Method("frequency", "adadps", 1.5, 1.0, side={}),
        Method("frequency, capped, bias / 20", "adadps", 3.0, 1.0, side=SIDE),
        Method("tf-idf, capped, bias / 20", "adadps", 3.0, 1.0,
               side={**SIDE, "statistic": "tf-idf"}),
        Method("common, bias / 20", "adadps", 3.0, 1.0, side={**SIDE, "statistic": "common"}),
        Method("equal, bias / 20: the control", "adadps", 3.0, 1.0,
               side={**SIDE, "statistic": "equal"}),
        Method("dp_opt, public", "dp_opt", 10.0, 0.1, {"state": "public"}),
    ),
    "images": (
        Method("dp_sgd", "dp_sgd", 0.5, 4.0),
        Method("EXP", "dp_sgd", 0.5, 4.0, decay=0.1),
        Method("adppl", "adppl", 0.5, 4.0),
        Method("dp_opt", "dp_opt", 0.5, 4.0),
        Method("dp_opt, public", "dp_opt", 0.5, 4.0, {"state": "public"}),
        Method("pda_dpmd", "pda_dpmd", 0.5, 4.0),
        Method("dp_sgd, warm start", "dp_sgd", 0.1, 4.0, warm_start=True),
        Method("pi_adam", "pi_adam", 0.75, 4.0),
        Method("pi_adam, constant 1e-8", "pi_adam", 0.02, 4.0, {"epsilon": 1e-8}),
        Method("agd", "agd", 1.0, 4.0, factors=(1.0,)),
    ),
}  # fmt: skip


@cache
def dataset(task: str, tuning: bool) -> Dataset:
    """Return a task's data; for tuning, a sixth of the training set takes the test set's place."""
    data = load(TASKS[task].data, Path("data"))
    if not tuning:
        return data
    rows = len(data.train_labels) * 5 // 6
    return replace(
        data.select(slice(rows)),
        test_examples=data.train_examples[rows:], test_labels=data.train_labels[rows:],
    )  # fmt: skip


def proved(mechanism: Mapping[str, Any]) -> float:
    """Return the certified ε of a mechanism."""
    return calculator.epsilon(mechanisms.from_json(dict(mechanism)), DELTA).epsilon


def least_noise_within(target: float, cost: Callable[[float], float]) -> float:
    """Return about the least σ whose ε is at most the target, by bisection to 0.1 %."""
    low, high = 0.1, 1000.0
    if cost(high) > target:
        raise ValueError(f"no noise up to {high:g} costs at most ε = {target:g}")
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > target else (low, middle)
    return high


def planned(task: str, method: Method, size: int) -> Plan:
    """Return a method's plan, with the noise that costs what DP-SGD's costs on all records."""
    before = (RELEVANCE.noise_multiplier,) if method.optimizer == "adppl" else ()
    return replace(_planned(task, method.decay, size, before), clip_norm=method.clip_norm)


@cache
def _planned(task: str, decay: float, size: int, before: tuple[float, ...]) -> Plan:
    """Return a plan with clip norm 1, after Gaussian releases of these noise multipliers."""
    given = TASKS[task]
    plan = Plan(size, given.batch / size, 1.0, given.noise)
    if decay:
        text = f"decay:{decay}:{max(1, given.steps // 10)}"
        plan = replace(plan, noise_schedule=parse_schedule("noise_schedule", text, given.steps))
    releases = [{"kind": "gaussian", "noise_multiplier": each} for each in before]

    def cost(noise: float) -> float:
        """Return ε of the whole run."""
        steps = replace(plan, noise_multiplier=noise).mechanism(given.steps)
        return proved({"kind": "composed", "mechanisms": [*releases, steps]} if before else steps)

    return replace(plan, noise_multiplier=least_noise_within(target_of(task), cost))


RELEVANCE: Final = PrivateRelevance(30.0)


@cache
def target_of(task: str) -> float:
    """Return the certified ε of DP-SGD on all records, which every method may spend."""
    given = TASKS[task]
    size = len(dataset(task, tuning=False).train_labels)
    return proved(Plan(size, given.batch / size, 1.0, given.noise).mechanism(given.steps))


def score(task: str, method: Method, rate: float, seed: int) -> float:
    """Train with a learning rate and a seed; return the test accuracy."""
    torch.manual_seed(seed)
    given, data = TASKS[task], dataset(task, tuning=seed == 0)
    needs_public = method.warm_start or method.options.get("state") == "public"
    needs_public |= method.optimizer in ("pda_dpmd", "adadps") and method.side is None
    data, public = data.split_public(given.public) if needs_public else (data, None)
    model = make_model(given.model, data, given.hidden)
    if method.optimizer == "agd":
        return _score_agd(task, method, rate, data, model)
    if method.warm_start and public is not None:
        warm_start(model, public, cross_entropy, 100)
    plan = planned(task, method, len(data.train_labels))
    optimizer = _make(method, rate, seed, plan, given.steps, data, model, public)
    sampler = PoissonSampler(plan.dataset_size, plan.sample_rate)
    for _ in range(given.steps):
        rows = sampler.draw()
        optimizer.step(data.train_examples[rows], data.train_labels[rows], cross_entropy)
    return evaluate(model, data)


def _make(
    method: Method, rate: float, seed: int, plan: Plan, steps: int, data: Dataset,
    model: nn.Module, public: tuple[torch.Tensor, torch.Tensor] | None,
) -> PrivateOptimizer:  # fmt: skip
    """Return the optimizer of a run; its noise is seeded, so nothing is claimed."""
    budget = NoBudget(plan, steps, "it is seeded")
    shared: dict[str, Any] = {
        "learning_rate": rate,
        "generator": torch.Generator().manual_seed(1000 + seed),
        "sparse_inputs": True,
    }
    if method.optimizer == "adppl":
        relevance = RELEVANCE.fit(data.train_examples, data.train_labels, data.classes)
        return Adppl(model, budget, shares=RELEVANCE.shares(model, relevance), **shared)
    options = dict(method.options)
    if method.side is not None and data.frequencies is not None:
        known = side_information(model, data.frequencies, **method.side)
        options |= {"side_information": known, "state": "privatised"}
    if method.optimizer == "pda_dpmd":
        options["horizon"] = steps
    return make_optimizer(method.optimizer, model, budget, public=public, **shared, **options)


def _score_agd(task: str, method: Method, rate: float, data: Dataset, model: nn.Module) -> float:
    """Train with AGD, by the ρ whose (ε, δ) is the task's: ε = ρ + 2√(ρ·ln(1/δ))."""
    log = math.log(1 / DELTA)
    rho = (math.sqrt(log + target_of(task)) - math.sqrt(log)) ** 2
    share = rho / 60  # a gradient and a selection have as much each: thirty steps, or fewer
    agd = Agd(
        clip_norm=method.clip_norm,
        noise_multiplier=(2 * share) ** -0.5,
        selection_epsilon=(2 * share) ** 0.5,
        step_sizes=tuple(rate * size for size in (0.1, 0.3, 1.0)),
    )
    train_agd(model, data.train_examples, data.train_labels, cross_entropy, NoGate(rho), agd)
    return evaluate(model, data)


def known_lines() -> list[dict[str, Any]]:
    """Return the lines of the results file."""
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def run(only: str | None) -> None:
    """Train what is missing, one line a run: first the rates of a method, then its seeds."""
    torch.set_num_threads(1)
    known = {(e["task"], e["method"], e["rate"], e["seed"]): e["score"] for e in known_lines()}
    for task, methods in METHODS.items():
        if only not in (None, task):
            continue
        for method in methods:
            rates = [float(f"{factor * method.rate:.4g}") for factor in method.factors]

            def scored(rate: float, seed: int, task: str = task, method: Method = method) -> float:
                """Return the score of a run, which is made unless it is known."""
                key = task, method.name, rate, seed
                if key not in known:
                    known[key] = round(score(task, method, rate, seed), 5)
                    line = {"task": task, "method": method.name, "rate": rate, "seed": seed,
                            "score": known[key], "epsilon": target_of(task)}  # fmt: skip
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                return known[key]

            best = max(rates, key=lambda rate: scored(rate, 0))
            for seed in SEEDS:
                scored(best, seed)


def render(lines: list[dict[str, Any]]) -> str:
    """Return the page's tables: mean and standard deviation of each method's scores."""
    text = []
    for task, methods in METHODS.items():
        found = {
            method.name: [e for e in lines if (e["task"], e["method"]) == (task, method.name)]
            for method in methods
        }
        scores = {
            name: [each["score"] for each in runs if each["seed"]] for name, runs in found.items()
        }
        base = scores[methods[0].name]
        rows = sorted(
            (-statistics.mean(ended), _row(name, ended, base, found[name]))
            for name, ended in scores.items() if ended
        )  # fmt: skip
        known = next((e["epsilon"] for e in lines if e["task"] == task), None)
        cost = "" if known is None else f"; ε = {math.ceil(1000 * known) / 1000:.3f} at δ = 1e-5"
        text += [f"### {TASKS[task].title}{cost}", ""]
        text += ["| method | accuracy | points ahead of dp_sgd | η |", "|---|---|---|---|"]
        text += [row for _, row in rows]
        constant = Store(DOCS / "training-results.jsonl").find_trivial_score(TASKS[task].data)
        if constant is not None:
            text.append(f"| the best constant answer | {constant:.3f} | – | – |")
        text += [
            f"| {name} | not run | – | – |"
            for name, ended in scores.items() if not ended
        ] + [""]  # fmt: skip
    return "\n".join(text)


def _row(name: str, ended: list[float], base: list[float], found: list[dict[str, Any]]) -> str:
    """Return a method's row, with its lead over the scores `base` of DP-SGD."""
    mean = statistics.mean(ended)
    spread = f" ± {statistics.stdev(ended):.3f}" if len(ended) > 1 else " (one seed)"
    lead = f"{100 * (mean - statistics.mean(base)):+.1f}" if base else "–"
    rate = next(each["rate"] for each in found if each["seed"])
    tried = sorted({each["rate"] for each in found})
    edge = ", the end of its grid" if len(tried) > 1 and rate in (tried[0], tried[-1]) else ""
    return f"| {name} | {mean:.3f}{spread} | {lead} | {rate:g}{edge} |"


def main() -> None:
    """Train, or write the page's tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--only", choices=list(TASKS))
    options = parser.parse_args()
    if options.command == "run":
        run(options.only)
        return
    write_part(PAGE, "comparison", render(known_lines()))


if __name__ == "__main__":
    main()
