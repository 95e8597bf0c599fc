"""Trains each experiment with each seed, in processes of one thread, and keeps what comes out."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from benchmarks.results.experiments import FIRST_SEED, TUNING_SEED, Experiment, Method
from benchmarks.results.store import Store, identity
from benchmarks.results.tasks import TASKS, Task, held_out
from training_client.budget import NoBudget
from training_client.data import Dataset
from training_client.distributed import Participant, train_together
from training_client.models import side_information
from training_client.optimizers import (
    OPTIMIZERS,
    AdaDp,
    PiGdo,
    PrivateOptimizer,
    make_optimizer,
)
from training_client.plan import Plan
from training_client.sampling import PoissonSampler
from training_client.train import score
from training_client.warm_start import warm_start

POINTS = 20  # of a curve
WARM_STEPS = 100  # without noise, on public examples
PUBLIC_BATCH_SIZE = 256


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
        task, method = self.experiment.task, self.experiment.method.label
        return {"kind": "tuning", "task": task, "method": method, **known}


def train(job: Job) -> dict[str, Any]:
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


def _trained(job: Job, task: Task, data: Dataset) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Steps and scores along a run, and what else is to be known of it."""
    method, steps = job.experiment.method, job.experiment.steps
    data, public = _with_public(method, task, data)
    model = task.new_model(data)
    if method.warm_start and public:
        warm_start(model, public, task.objective.loss, WARM_STEPS)
    stepper = None if method.apart else _stepper(job, task, model, data, public)
    advance = (
        _together(job, task, model, data) if stepper is None else _alone(job, task, data, stepper)
    )
    every, curve, local = max(1, steps // POINTS), [], 0
    for step in range(1, steps + 1):
        if method.schedule is not None and isinstance(stepper, PrivateOptimizer):
            stepper.learning_rate = job.learning_rate * method.schedule.factor(step - 1)
        advance()
        local += isinstance(stepper, AdaDp) and stepper.half_axes is not None
        if step % every == 0 or step == steps:
            curve.append((step, task.factor * score(model, data, task.objective)))
    return curve, _inside(stepper, local)


def _alone(
    job: Job, task: Task, data: Dataset, stepper: Ordinary | PrivateOptimizer
) -> Callable[[], object]:
    """A step on a batch of everybody's records."""
    sampler = _sampler(job, task, len(data.train_labels))

    def advance() -> None:
        batch = sampler.draw()
        stepper.step(data.train_examples[batch], data.train_labels[batch], task.objective.loss)

    return advance


def _together(job: Job, task: Task, model: nn.Module, data: Dataset) -> Callable[[], object]:
    """A round of A-DDP, to which each user gives a noisy mean of their own records."""
    method, noise = job.experiment.method, job.experiment.noise_multiplier
    size = len(data.train_labels) // task.users
    plan = Plan(size, task.sample_rate, method.clip_norm, noise)
    people = []
    for user in range(task.users):
        own = data.rows(slice(user * size, (user + 1) * size))
        noises, batches = (torch.Generator().manual_seed(each) for each in _seeds(job, user))
        allowance = _seeded(job, plan)
        people.append(
            Participant(
                f"user {user}", model, own.train_examples, own.train_labels, allowance,
                noises, PoissonSampler(size, task.sample_rate, batches),
            )
        )  # fmt: skip
    loss, rate = task.objective.loss, job.learning_rate
    return lambda: train_together(model, people, loss, learning_rate=rate, rounds_max=1)


def _seeded(job: Job, plan: Plan) -> NoBudget:
    """Steps whose noise is seeded: never a release, so there is nothing to ask a service about."""
    return NoBudget(plan, job.experiment.steps, "it is seeded")


def _seeds(job: Job, user: int) -> tuple[int, int]:
    """Of a user's noise and of their batches."""
    first = 10_000 * job.seed + 2 * user
    return first, first + 1


def _inside(stepper: Ordinary | PrivateOptimizer | None, local_steps: int) -> dict[str, Any]:
    """What the state had become, where a result is to be explained by it; null is ∞.

    AdaDP: in how many steps half axes took the ball's place. PIGDO: the largest √s at the end, to
    which ε is added.
    """
    if isinstance(stepper, AdaDp) and stepper.adaptive_noise:
        return {"local_steps": local_steps}
    if isinstance(stepper, PiGdo):
        return {"largest_root": _finite(math.sqrt(max(0.0, float(stepper.squares.max()))))}
    return {}


def _finite(number: float) -> float | None:
    return float(f"{number:.4g}") if math.isfinite(number) else None


Public = tuple[torch.Tensor, torch.Tensor]


def _with_public(method: Method, task: Task, data: Dataset) -> tuple[Dataset, Public | None]:
    """Give public examples up, if the method needs any."""
    known = OPTIMIZERS.get(method.optimizer)
    state = method.state or (known.states[0] if known else "")
    if state != "public" and not method.warm_start:
        return data, None
    return data.without_public(task.public_rows)


def _sampler(job: Job, task: Task, rows: int) -> PoissonSampler | InTurn:
    if job.experiment.method.in_passes:
        return InTurn(rows, round(1 / task.sample_rate))
    return PoissonSampler(rows, task.sample_rate, torch.Generator().manual_seed(job.seed))


class InTurn:
    """Takes every record once in so many steps, and then again."""

    def __init__(self, rows: int, steps: int) -> None:
        self._rows, self._steps, self._at = torch.arange(rows), steps, -1

    def draw(self) -> torch.Tensor:
        """The next batch."""
        self._at = (self._at + 1) % self._steps
        return self._rows[self._at :: self._steps]


def _stepper(
    job: Job, task: Task, model: nn.Module, data: Dataset, public: Public | None
) -> Ordinary | PrivateOptimizer:
    """What makes the steps. Seeded noise can be repeated: it is for measuring only.

    Users who add noise of their own to a mean of their own are, together, one mean with the root
    of their number times the noise.
    """
    method = job.experiment.method
    if method.optimizer == "non_private":
        return Ordinary(model, job.learning_rate)
    noise = job.experiment.noise_multiplier * math.sqrt(task.users)
    options = dict(method.options)
    if method.side_information and data.frequencies is not None:
        options["side_information"] = side_information(model, data.frequencies)
    plan = Plan(len(data.train_labels), task.sample_rate, method.clip_norm, noise)
    return make_optimizer(
        method.optimizer,
        model,
        _seeded(job, plan),
        learning_rate=job.learning_rate,
        state=method.state,
        public=public,
        public_batch_size=PUBLIC_BATCH_SIZE,
        generator=torch.Generator().manual_seed(1000 + job.seed),
        **options,
    )


class Ordinary:
    """Descent without privacy: the dashed line that the others are measured against."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._model, self._descent = model, torch.optim.SGD(model.parameters(), lr=learning_rate)

    def step(self, examples: torch.Tensor, targets: torch.Tensor, loss: Any) -> None:
        self._descent.zero_grad()
        loss(self._model(examples), targets).mean().backward()
        self._descent.step()


def tunings(experiments: Sequence[Experiment]) -> Iterator[Job]:
    """Every learning rate of every method's grid, on data that no result is measured on.

    As short as the experiment, if that is shorter than what the task tunes for.
    """
    for experiment in experiments:
        task, method = TASKS[experiment.task], experiment.method
        if task.tuned_on or experiment.part != "main" or experiment.column != task.tuned_at:
            continue
        tried = replace(experiment, steps=min(experiment.steps, task.tuning_steps))
        for factor in task.grid:
            yield Job(tried, float(f"{factor * method.learning_rate:.6g}"), TUNING_SEED, True)


def runs(experiments: Sequence[Experiment], seeds: int, store: Store) -> Iterator[Job]:
    """Every seed of every experiment whose learning rate is known; seed by seed."""
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for experiment in experiments:
            rate = store.chosen_rate(experiment.task, experiment.method.label)
            if rate is not None:
                yield Job(experiment, rate, seed)


def execute(jobs: Sequence[Job], store: Store, workers: int, title: str) -> None:
    """Do what is not done yet, and keep each result as it comes."""
    wanted = {identity(job.line): job for job in jobs}
    left = [job for name, job in wanted.items() if name not in store.lines]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar,
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as pool,
    ):
        shown = bar.add_task(title, total=len(wanted), completed=len(wanted) - len(left))
        for done in as_completed([pool.submit(train, job) for job in left]):
            store.add(done.result())
            bar.advance(shown)


def _begin() -> None:
    """Each worker process: one thread, and behind everybody else."""
    for library in ("NUMBA", "OMP"):  # numba would otherwise give PyTorch its threads back
        os.environ[f"{library}_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.nice(10)
