"""Trains each experiment with each seed, in processes of one thread, and keeps what comes out."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from benchmarks.results.experiments import FIRST_SEED, GRID, TUNING_SEED, Experiment, Method
from benchmarks.results.store import Line, Store
from benchmarks.results.tasks import TASKS, Task, held_out
from training_client.data import Dataset
from training_client.optimizers import OPTIMIZERS, make_optimizer
from training_client.plan import Plan
from training_client.sampling import PoissonSampler

POINTS = 20  # of a curve
WARM_STEPS = 100  # without noise, on public examples


@dataclass(frozen=True)
class Job:
    """One training run."""

    experiment: Experiment
    learning_rate: float
    seed: int
    tuning: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """What is known of its result beforehand."""
        steps = self.experiment.steps
        known = {"learning_rate": self.learning_rate, "seed": self.seed, "steps": steps}
        if not self.tuning:
            return {"kind": "run", "experiment": self.experiment.name, **known}
        task, method = self.experiment.task, self.experiment.method.tuning
        return {"kind": "tuning", "task": task, "method": method, **known}


def train(job: Job) -> Line:
    """The finished line of a job."""
    torch.manual_seed(job.seed)
    started, task = time.perf_counter(), TASKS[job.experiment.task]
    data = task.prepare(job.experiment.noise_multiplier, job.seed)
    data = held_out(data) if job.tuning else data
    curve, facts = _trained(job, task, data)
    final = curve[-1][1] if math.isfinite(curve[-1][1]) else None
    if job.tuning:
        return job.line | {"score": final}
    seconds = round(time.perf_counter() - started, 1)
    points = [[step, round(score, 6)] for step, score in curve if math.isfinite(score)]
    return job.line | {"score": final, "curve": points, "seconds": seconds} | facts


def _trained(job: Job, task: Task, data: Dataset) -> tuple[list[tuple[int, float]], Line]:
    """Steps and scores along a run, and what else is to be known of it."""
    method, steps = job.experiment.method, job.experiment.steps
    data, public = _with_public(method, task, data)
    model = task.model(data)
    if method.warm_start:
        _warm_up(model, task, public)
    rows = len(data.train_examples)
    sampler = PoissonSampler(rows, task.sample_rate, torch.Generator().manual_seed(job.seed))
    stepper = _stepper(job, task, model, public, rows)
    every, curve = max(1, steps // POINTS), []
    for step in range(1, steps + 1):
        batch = sampler.draw()
        stepper.step(data.train_examples[batch], data.train_labels[batch], task.loss)
        if step % every == 0 or step == steps:
            curve.append((step, task.score(model, data)))
    return curve, {"half_axes": bool(getattr(stepper, "noise_varies", False))}


Public = tuple[torch.Tensor, torch.Tensor]


def _with_public(method: Method, task: Task, data: Dataset) -> tuple[Dataset, Public | None]:
    """Give public examples up, if the method needs any."""
    known = OPTIMIZERS.get(method.optimizer)
    state = method.state or (known.states[0] if known else "")
    if state != "public" and not method.warm_start:
        return data, None
    return data.without_public(task.public_rows)


def _stepper(job: Job, task: Task, model: nn.Module, public: Public | None, rows: int) -> Any:
    """What makes the steps. Seeded noise can be repeated: it is for measuring only."""
    method = job.experiment.method
    if method.optimizer == "non_private":
        return Ordinary(model, job.learning_rate)
    plan = Plan(rows, task.sample_rate, method.clip_norm, job.experiment.noise_multiplier)
    return make_optimizer(
        method.optimizer,
        model,
        plan,
        learning_rate=job.learning_rate,
        state=method.state,
        public=public,
        generator=torch.Generator().manual_seed(1000 + job.seed),
        **method.options,
    )


class Ordinary:
    """Descent without privacy: the dashed line that the others are measured against."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._model, self._descent = model, torch.optim.SGD(model.parameters(), lr=learning_rate)

    def step(self, examples: torch.Tensor, targets: torch.Tensor, loss: Any) -> None:
        self._descent.zero_grad()
        loss(self._model(examples), targets).mean().backward()
        self._descent.step()


def _warm_up(model: nn.Module, task: Task, public: Public | None) -> None:
    """Train on the public examples alone, as papers/004 Appendix C."""
    assert public is not None
    descent = torch.optim.Adam(model.parameters())
    for _ in range(WARM_STEPS):
        descent.zero_grad()
        task.loss(model(public[0]), public[1]).mean().backward()
        descent.step()


def tunings(experiments: Sequence[Experiment]) -> Iterator[Job]:
    """Every learning rate of every method's grid, on data that no result is measured on.

    As short as the experiment, if that is shorter than what the task tunes for.
    """
    groups = {(each.task, each.method.tuning): each for each in reversed(experiments)}
    for (name, label), experiment in reversed(groups.items()):
        task = TASKS[name]
        if experiment.method.label != label:
            continue
        steps = min(experiment.steps, task.tuning_steps)
        tried = replace(experiment, noise_multiplier=task.tuned_at, steps=steps)
        for factor in GRID:
            rate = float(f"{factor * experiment.method.learning_rate:.6g}")
            yield Job(tried, rate, TUNING_SEED, tuning=True)


def runs(experiments: Sequence[Experiment], seeds: int, store: Store) -> Iterator[Job]:
    """Every seed of every experiment whose learning rate is known; seed by seed."""
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for experiment in experiments:
            rate = store.chosen_rate(experiment.task, experiment.method.tuning)
            if rate is not None:
                yield Job(experiment, rate, seed)


def execute(jobs: Sequence[Job], store: Store, workers: int, title: str) -> None:
    """Do what is not done yet, and keep each result as it comes."""
    left = [job for job in jobs if job.line not in store]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar,
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as pool,
    ):
        shown = bar.add_task(title, total=len(jobs), completed=len(jobs) - len(left))
        for done in as_completed([pool.submit(train, job) for job in left]):
            store.add(done.result())
            bar.advance(shown)


def _begin() -> None:
    """Each worker process: one thread, and behind everybody else."""
    torch.set_num_threads(1)
    os.nice(10)
