"""Training of each experiment with each seed, in processes of one thread."""

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
from benchmarks.results.store import Store, identify
from benchmarks.results.tasks import TASKS, Task, hold_out_validation
from training_client.budget import NoBudget
from training_client.lab.data import Dataset
from training_client.lab.federated import Participant, train_federated
from training_client.lab.models import side_information
from training_client.lab.train import evaluate
from training_client.lab.warm_start import warm_start
from training_client.optimizers import OPTIMIZERS, AdaDp, PiGdo, PrivateOptimizer, make_optimizer
from training_client.plan import Plan
from training_client.private_step.sampling import PoissonSampler

POINTS = 20  # per curve
WARM_STEPS = 100  # without noise, on public examples
PUBLIC_BATCH_SIZE = 256


@dataclass(frozen=True)
class Job:
    """One training run to make: an experiment, a learning rate and a seed."""

    experiment: Experiment
    learning_rate: float
    seed: int
    tuning: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """The fields of the run's result line that are known before the run."""
        steps = self.experiment.steps
        known = {"learning_rate": self.learning_rate, "seed": self.seed, "steps": steps}
        if not self.tuning:
            return {"kind": "run", "experiment": self.experiment.name, **known}
        task, method = self.experiment.task, self.experiment.method.label
        return {"kind": "tuning", "task": task, "method": method, **known}


def train(job: Job) -> dict[str, Any]:
    """Make a training run, and return its result line."""
    torch.manual_seed(job.seed)
    started, task = time.perf_counter(), TASKS[job.experiment.task]
    data = task.prepare(job.experiment.noise_multiplier, job.seed)
    data = hold_out_validation(data) if job.tuning else data
    curve, facts = _train_model(job, task, data)
    final = curve[-1][1] if math.isfinite(curve[-1][1]) else None
    if job.tuning:
        return job.line | {"score": final}
    seconds = round(time.perf_counter() - started, 1)
    points = [[step, round(score, 6)] for step, score in curve if math.isfinite(score)]
    return job.line | {"score": final, "curve": points, "seconds": seconds} | facts


def _train_model(
    job: Job, task: Task, data: Dataset
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Train a model; return the steps and scores, and facts about the optimizer state."""
    method, steps = job.experiment.method, job.experiment.steps
    data, public = _split_off_public_examples(method, task, data)
    model = task.build_model(data)
    if method.warm_start and public:
        warm_start(model, public, task.objective.loss, WARM_STEPS)
    stepper = None if method.separate_users else _make_stepper(job, task, model, data, public)
    advance = (
        _make_federated_round(job, task, model, data)
        if stepper is None
        else _make_pooled_step(job, task, data, stepper)
    )
    every, curve, local = max(1, steps // POINTS), [], 0
    for step in range(1, steps + 1):
        if method.schedule is not None and isinstance(stepper, PrivateOptimizer):
            stepper.learning_rate = job.learning_rate * method.schedule.factor(step - 1)
        advance()
        local += isinstance(stepper, AdaDp) and stepper.half_axes is not None
        if step % every == 0 or step == steps:
            curve.append((step, task.factor * evaluate(model, data, task.objective)))
    return curve, _summarize_state(stepper, local)


def _make_pooled_step(
    job: Job, task: Task, data: Dataset, stepper: NonPrivateSgd | PrivateOptimizer
) -> Callable[[], object]:
    """Return a function that trains one step on a batch from all users' records."""
    sampler = _make_sampler(job, task, len(data.train_labels))

    def advance() -> None:
        """Train one step."""
        batch = sampler.draw()
        stepper.step(data.train_examples[batch], data.train_labels[batch], task.objective.loss)

    return advance


def _make_federated_round(
    job: Job, task: Task, model: nn.Module, data: Dataset
) -> Callable[[], object]:
    """Return a function that runs one A-DDP round, with a noisy mean gradient from each user."""
    method, noise = job.experiment.method, job.experiment.noise_multiplier
    size = len(data.train_labels) // task.users
    plan = Plan(size, task.sample_rate, method.clip_norm, noise)
    people = []
    for user in range(task.users):
        own = data.select(slice(user * size, (user + 1) * size))
        noises, batches = (torch.Generator().manual_seed(each) for each in _derive_seeds(job, user))
        allowance = _make_seeded_budget(job, plan)
        people.append(
            Participant(
                f"user {user}", model, own.train_examples, own.train_labels, allowance,
                noises, PoissonSampler(size, task.sample_rate, batches),
            )
        )  # fmt: skip
    loss, rate = task.objective.loss, job.learning_rate
    return lambda: train_federated(model, people, loss, learning_rate=rate, rounds_max=1)


def _make_seeded_budget(job: Job, plan: Plan) -> NoBudget:
    """Return a budget without a privacy claim, since seeded noise can be reproduced."""
    return NoBudget(plan, job.experiment.steps, "it is seeded")


def _derive_seeds(job: Job, user: int) -> tuple[int, int]:
    """Return the seeds of one user's noise and of the user's batches."""
    first = 10_000 * job.seed + 2 * user
    return first, first + 1


def _summarize_state(
    stepper: NonPrivateSgd | PrivateOptimizer | None, local_steps: int
) -> dict[str, Any]:
    """Return a statistic of the optimizer state that explains the result, if there is one.

    AdaDP: the number of steps in which half axes replaced the ball. PIGDO: the largest √s at the
    end, to which ε is added.
    """
    if isinstance(stepper, AdaDp) and stepper.adaptive_noise:
        return {"local_steps": local_steps}
    if isinstance(stepper, PiGdo):
        return {"largest_root": _round_if_finite(math.sqrt(max(0.0, float(stepper.squares.max()))))}
    return {}


def _round_if_finite(number: float) -> float | None:
    """Return a number with 4 digits; None if it is NaN or infinite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


PublicExamples = tuple[torch.Tensor, torch.Tensor]


def _split_off_public_examples(
    method: Method, task: Task, data: Dataset
) -> tuple[Dataset, PublicExamples | None]:
    """Set examples aside as public if the method needs them; return private and public data."""
    known = OPTIMIZERS.get(method.optimizer)
    state = method.state or (known.states[0] if known else "")
    if state != "public" and not method.warm_start:
        return data, None
    return data.split_public(task.public_rows)


def _make_sampler(job: Job, task: Task, rows: int) -> PoissonSampler | CyclicSampler:
    """Return the sampler of an experiment's batches: Poisson or cyclic."""
    if job.experiment.method.in_passes:
        return CyclicSampler(rows, round(1 / task.sample_rate))
    return PoissonSampler(rows, task.sample_rate, torch.Generator().manual_seed(job.seed))


class CyclicSampler:
    """A sampler that goes through all records in a fixed number of steps, again and again."""

    def __init__(self, rows: int, steps: int) -> None:
        self._rows, self._steps, self._at = torch.arange(rows), steps, -1

    def draw(self) -> torch.Tensor:
        """Return the record indices of the next batch."""
        self._at = (self._at + 1) % self._steps
        return self._rows[self._at :: self._steps]


def _make_stepper(
    job: Job, task: Task, model: nn.Module, data: Dataset, public: PublicExamples | None
) -> NonPrivateSgd | PrivateOptimizer:
    """Return the optimizer of a training run, with seeded noise (for measurements only).

    Users who each add noise to their own mean are equivalent to one mean whose noise is larger by
    the square root of their number.
    """
    method = job.experiment.method
    if method.optimizer == "non_private":
        return NonPrivateSgd(model, job.learning_rate)
    noise = job.experiment.noise_multiplier * math.sqrt(task.users)
    options = dict(method.options)
    if method.side_information and data.frequencies is not None:
        options["side_information"] = side_information(model, data.frequencies)
    plan = Plan(len(data.train_labels), task.sample_rate, method.clip_norm, noise)
    return make_optimizer(
        method.optimizer,
        model,
        _make_seeded_budget(job, plan),
        learning_rate=job.learning_rate,
        state=method.state,
        public=public,
        public_batch_size=PUBLIC_BATCH_SIZE,
        generator=torch.Generator().manual_seed(1000 + job.seed),
        **options,
    )


class NonPrivateSgd:
    """SGD without privacy, the baseline of the other methods."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._model, self._descent = model, torch.optim.SGD(model.parameters(), lr=learning_rate)

    def step(self, examples: torch.Tensor, targets: torch.Tensor, loss: Any) -> None:
        """Take a step on the batch's mean gradient."""
        self._descent.zero_grad()
        loss(self._model(examples), targets).mean().backward()
        self._descent.step()


def list_tuning_jobs(experiments: Sequence[Experiment]) -> Iterator[Job]:
    """Yield a run per learning rate to try and method, scored on held-out training data.

    A tuning run is never longer than the experiment itself.
    """
    for experiment in experiments:
        task, method = TASKS[experiment.task], experiment.method
        if task.tuned_on or experiment.section != "main" or experiment.column != task.tuned_at:
            continue
        tried = replace(experiment, steps=min(experiment.steps, task.tuning_steps))
        for factor in task.grid:
            yield Job(tried, float(f"{factor * method.learning_rate:.6g}"), TUNING_SEED, True)


def list_result_jobs(experiments: Sequence[Experiment], seeds: int, store: Store) -> Iterator[Job]:
    """Yield a run per seed and experiment, with tuned learning rates, one seed after another."""
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for experiment in experiments:
            rate = store.find_best_rate(experiment.task, experiment.method.label)
            if rate is not None:
                yield Job(experiment, rate, seed)


def run_jobs(jobs: Sequence[Job], store: Store, workers: int, title: str) -> None:
    """Run the jobs that have no result yet, and store each result as it arrives."""
    wanted = {identify(job.line): job for job in jobs}
    left = [job for name, job in wanted.items() if name not in store.lines]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar,
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_set_up_worker) as pool,
    ):
        shown = bar.add_task(title, total=len(wanted), completed=len(wanted) - len(left))
        for done in as_completed([pool.submit(train, job) for job in left]):
            store.add(done.result())
            bar.advance(shown)


def _set_up_worker() -> None:
    """Set up a worker process: one thread and low priority."""
    for library in ("NUMBA", "OMP"):  # numba would otherwise reset PyTorch's number of threads
        os.environ[f"{library}_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.nice(10)
