"""Training of each experiment with each seed, in processes of one thread."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numba
import torch
from torch import nn

from training_client.budget import NoBudget
from training_client.errors import DataError, TrainingStoppedError
from training_client.lab.agd import Agd, NoGate, train_agd
from training_client.lab.data import Dataset
from training_client.lab.federated import Participant, train_federated
from training_client.lab.models import side_information
from training_client.lab.papers.experiments import FIRST_SEED, TUNING_SEED, Experiment, Method
from training_client.lab.papers.published import ALL_EXPERIMENTS
from training_client.lab.papers.store import Store, describe_settings, identify
from training_client.lab.papers.tasks import TASKS, Task, hold_out_validation
from training_client.lab.relevance import PrivateRelevance
from training_client.lab.train import evaluate
from training_client.lab.warm_start import warm_start
from training_client.optimizers import OPTIMIZERS, AdaDp, PiGdo, PrivateOptimizer, make_optimizer
from training_client.optimizers.adppl import Adppl
from training_client.plan import Plan
from training_client.private_step.sampling import PoissonSampler

DATA_FOLDER: Final = Path("data")
BY_NAME: Final = {each.name: each for each in ALL_EXPERIMENTS}
POINTS = 20  # per curve
WARM_STEPS = 100  # without noise, on public examples
PUBLIC_BATCH_SIZE = 256


@dataclass(frozen=True)
class Job:
    """One training run to make: an experiment, a learning rate and a seed, and where data are."""

    experiment: Experiment
    learning_rate: float
    seed: int
    tuning: bool = False
    folder: Path = DATA_FOLDER

    @property
    def is_ready(self) -> bool:
        """Return whether the learning rate is known."""
        return math.isfinite(self.learning_rate)

    @property
    def line(self) -> dict[str, Any]:
        """The fields of the run's result line that are known before the run."""
        steps = self.experiment.steps
        known = {"learning_rate": self.learning_rate, "seed": self.seed, "steps": steps}
        if not self.tuning:
            return {"kind": "run", "experiment": self.experiment.name, **known}
        task, method = self.experiment.task, self.experiment.method.label
        return {"kind": "tuning", "task": task, "method": method, **known}


def count_epochs(experiment: Experiment, steps: int) -> float:
    """Return the number of epochs of an experiment's first steps."""
    return round(steps * (experiment.sample_rate or TASKS[experiment.task].sample_rate), 6)


def train(job: Job) -> dict[str, Any]:
    """Make a training run, and return its result line, with the CPU seconds of its steps."""
    torch.manual_seed(job.seed)
    task = _find_task(job.experiment)
    data = task.prepare(job.folder, job.experiment.noise_multiplier, job.seed)
    data = hold_out_validation(data) if job.tuning else data
    started = time.process_time()
    curve, facts = _train_model(job, task, data)
    is_whole = bool(curve) and curve[-1][0] == job.experiment.steps
    final = curve[-1][1] if is_whole and math.isfinite(curve[-1][1]) else None
    if job.tuning:
        return job.line | {"score": final}
    seconds = round(time.process_time() - started, 1)
    points = [[step, round(score, 6)] for step, score in curve if math.isfinite(score)]
    known = {"score": final, "curve": points, "seconds": seconds}
    return job.line | known | facts | {"settings": describe_settings(job.experiment)}


def compute_trivial_score(name: str, folder: Path = DATA_FOLDER) -> dict[str, Any]:
    """Return the result line of a task's best constant answer.

    It is the commonest class of the training set, or the mean image.
    """
    task = TASKS[name]
    data = task.prepare(folder, 4.0, FIRST_SEED)
    if task.objective.reconstructs:
        mean = data.train_labels.mean(0, keepdim=True)
        scores = task.objective.score(mean, data.test_labels)
    elif task.measures_objective:
        share = data.train_labels.float().mean()
        scores = torch.special.entr(torch.stack([share, 1 - share])).sum()
    else:
        scores = (data.test_labels == data.train_labels.mode().values).float()
    return {"kind": "trivial", "task": name, "score": task.factor * float(scores.mean())}


def _find_task(experiment: Experiment) -> Task:
    """Return an experiment's task, with the experiment's own sample rate."""
    task = TASKS[experiment.task]
    return replace(task, sample_rate=experiment.sample_rate or task.sample_rate)


def _train_model(
    job: Job, task: Task, data: Dataset
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Train a model; return the steps and scores, and facts about the optimizer state.

    The curve ends early if the run breaks down.
    """
    method, steps = job.experiment.method, job.experiment.steps
    data, public = _split_off_public_examples(method, task, data)
    model = task.build_model(data, job.experiment.hidden)
    if method.warm_start and public:
        warm_start(model, public, task.objective.loss, WARM_STEPS)
    if method.rho:
        return _train_agd(job, task, model, data)
    stepper = None if method.separate_users else _make_stepper(job, task, model, data, public)
    advance = (
        _make_federated_round(job, task, model, data)
        if stepper is None
        else _make_pooled_step(job, task, data, stepper)
    )
    every, curve, local = max(1, steps // POINTS), [], 0
    watched: dict[str, dict[str, float]] = {}
    for step in range(1, steps + 1):
        if method.schedule is not None and isinstance(stepper, PrivateOptimizer):
            stepper.learning_rate = job.learning_rate * method.schedule.factor(step - 1)
        try:
            advance()
        except DataError:  # the loss of raw or public examples is no longer finite
            break
        local += isinstance(stepper, AdaDp) and stepper.half_axes is not None
        if step in job.experiment.watched and isinstance(stepper, AdaDp):
            watched[str(step)] = _describe_estimate(job, task, model, data, stepper)
        if step % every == 0 or step == steps:
            curve.append((step, task.factor * evaluate(model, data, task.objective)))
    return curve, _summarize_state(stepper, local) | ({"watched": watched} if watched else {})


def _describe_estimate(
    job: Job, task: Task, model: nn.Module, data: Dataset, stepper: AdaDp
) -> dict[str, float]:
    """Return the mean of √E′[g²] and of |g| on a batch, and shares of σᵢ = σ√m·β√E′[g²]ᵢ."""
    batch = _make_sampler(job, task, len(data.train_labels)).draw()
    mean = task.objective.loss(model(data.train_examples[batch]), data.train_labels[batch]).mean()
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    roots = stepper.prior_squares.sqrt()
    noise = stepper.beta * roots * stepper.plan.noise_multiplier * math.sqrt(len(roots))
    return {
        "estimate": float(roots.mean()),
        "gradient": float(torch.cat([each.flatten() for each in gradients]).abs().mean()),
        "below 10": float((noise < 10).float().mean()),
        "10 to 20": float(((noise >= 10) & (noise < 20)).float().mean()),
    }


def _train_agd(
    job: Job, task: Task, model: nn.Module, data: Dataset
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Train with AGD; return the number of steps and score, and how often a direction failed.

    A step without a failed direction spends one of equal shares of ρ, half of it on the gradient
    and half on the selection of its size. Failures spend more, so that fewer steps are made.
    """
    experiment, method = job.experiment, job.experiment.method
    half = method.rho / experiment.steps / 2
    agd = Agd(
        clip_norm=method.clip_norm,
        noise_multiplier=(2 * half) ** -0.5,
        selection_epsilon=(2 * half) ** 0.5,
        step_sizes=tuple(job.learning_rate * each for each in Agd.step_sizes),
        steps_max=experiment.steps,
    )
    rows = experiment.sample_rate or task.sample_rate
    data = data.select(slice(round(rows * len(data.train_labels))))
    run = train_agd(
        model, data.train_examples, data.train_labels, task.objective.loss, NoGate(method.rho), agd
    )
    curve = [(experiment.steps, task.factor * evaluate(model, data, task.objective))]
    return curve, {"steps_made": run.steps, "failures": run.failures}


def _make_pooled_step(
    job: Job, task: Task, data: Dataset, stepper: NonPrivate | PrivateOptimizer
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
    stepper: NonPrivate | PrivateOptimizer | None, local_steps: int
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
    if method.has_raw_public:
        return data, (data.train_examples, data.train_labels)
    if state != "public" and not method.warm_start and method.label != _ADAS:
        return data, None
    return data.split_public(task.public_rows if method.public_rows is None else method.public_rows)


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
) -> NonPrivate | PrivateOptimizer:
    """Return the optimizer of a training run, with seeded noise (for measurements only).

    Users who each add noise to their own mean are equivalent to one mean whose noise is larger by
    the square root of their number.
    """
    method = job.experiment.method
    if method.optimizer == "non_private":
        if method.label == _ADAS and public is not None:
            return AdaS(model, public, job.learning_rate, task.objective.loss, job.seed)
        descent = _DESCENTS[method.label.removeprefix("non_private")]
        return NonPrivate(model, descent(model.parameters(), lr=job.learning_rate))
    noise = job.experiment.noise_multiplier * math.sqrt(task.users)
    options: dict[str, Any] = {
        "learning_rate": job.learning_rate,
        "generator": torch.Generator().manual_seed(1000 + job.seed),
        **method.options,
    }
    plan = Plan(
        len(data.train_labels), task.sample_rate, method.clip_norm, noise,
        noise_schedule=job.experiment.noise_schedule,
    )  # fmt: skip
    budget = _make_seeded_budget(job, plan)
    if method.relevance_noise:
        release = PrivateRelevance(method.relevance_noise)
        relevance = release.fit(
            data.train_examples, data.train_labels, data.classes, options["generator"]
        )
        return Adppl(model, budget, shares=release.shares(model, relevance), **options)
    if method.side_information and data.frequencies is not None:
        options["side_information"] = side_information(model, data.frequencies)
    if method.optimizer == "pda_dpmd":
        options["horizon"] = job.experiment.steps
    return make_optimizer(
        method.optimizer,
        model,
        budget,
        state=method.state,
        public=public,
        public_batch_size=PUBLIC_BATCH_SIZE,
        **options,
    )


class NonPrivate:
    """An optimizer of PyTorch without privacy, the baseline of the other methods."""

    def __init__(self, model: nn.Module, descent: torch.optim.Optimizer) -> None:
        self._model, self._descent = model, descent

    def step(self, examples: torch.Tensor, targets: torch.Tensor, loss: Any) -> None:
        """Take a step on the batch's mean gradient."""
        self._descent.zero_grad()
        loss(self._model(examples), targets).mean().backward()
        self.change_gradient()
        self._descent.step()

    def change_gradient(self) -> None:
        """Change the mean gradient before the step; not at all by default."""


class AdaS(NonPrivate):
    """AdaDPS without clipping and noise: gradients divided by a statistic of public ones.

    With the batch's own gradients as the statistic's it is RMSProp (papers/004, Appendix C).
    """

    def __init__(
        self, model: nn.Module, public: PublicExamples, learning_rate: float, loss: Any, seed: int
    ) -> None:
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=learning_rate))
        self._public, self._loss = public, loss
        self._parameters = list(model.parameters())
        self._squares = [torch.zeros_like(each) for each in self._parameters]
        self._draws = torch.Generator().manual_seed(seed)

    def change_gradient(self) -> None:
        """Divide the mean gradient by the root of the moving mean of squared public gradients."""
        examples, targets = self._public
        rows = torch.randint(len(targets), (PUBLIC_BATCH_SIZE,), generator=self._draws)
        mean = self._loss(self._model(examples[rows]), targets[rows]).mean()
        found = torch.autograd.grad(mean, self._parameters)
        for each, square, gradient in zip(self._parameters, self._squares, found, strict=True):
            square.lerp_(gradient.square(), 0.1)
            if each.grad is not None:
                each.grad /= square.sqrt() + 1e-3  # β and ε of `AdaDps`


_ADAS: Final = "non_private adas"
_DESCENTS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "": torch.optim.SGD,
    " adam": torch.optim.Adam,
    " rmsprop": torch.optim.RMSprop,
}


def list_tuning_jobs(
    experiments: Sequence[Experiment], folder: Path = DATA_FOLDER
) -> Iterator[Job]:
    """Yield a run per learning rate to try and method, scored on held-out training data.

    A tuning run is never longer than the experiment itself.
    """
    for experiment in experiments:
        task, method = TASKS[experiment.task], experiment.method
        if experiment.learning_rate is not None or task.tuned_on or method.tuned_as:
            continue
        if experiment.section != "main" or experiment.column != task.tuned_at:
            continue
        tried = replace(experiment, steps=min(experiment.steps, task.tuning_steps))
        for factor in task.grid:
            rate = float(f"{factor * method.learning_rate:.6g}")
            yield Job(tried, rate, TUNING_SEED, True, folder)


def find_tuning_experiments(
    experiments: Sequence[Experiment], among: Sequence[Experiment]
) -> list[Experiment]:
    """Return the experiments whose tuned learning rates the given ones need."""
    needed = {
        (TASKS[each.task].tuned_on or each.task, each.method.tuned_as or each.method.label)
        for each in experiments
        if each.learning_rate is None
    }
    return [each for each in among if (each.task, each.method.label) in needed]


def list_missing_jobs(
    experiments: Sequence[Experiment], seeds: int, store: Store, folder: Path = DATA_FOLDER
) -> list[Job]:
    """Return the runs that have no result yet, one seed after another, the shortest first.

    The learning rate of a run is NaN until it is tuned.
    """
    found = {each.name: {run["seed"] for run in store.list_runs(each)} for each in experiments}
    jobs = {
        (each.name, seed): Job(each, store.find_rate(each) or math.nan, seed, folder=folder)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for each in sorted(experiments, key=lambda each: each.steps)
        if seed not in found[each.name]
    }
    return list(jobs.values())


def keep_missing(jobs: Iterable[Job], store: Store) -> list[Job]:
    """Return the jobs that have no result yet, without duplicates."""
    return list({identify(job.line): job for job in jobs if job.line not in store}.values())


def run_jobs(
    jobs: Sequence[Job], store: Store, workers: int, report: Callable[[int, str], None]
) -> None:
    """Run jobs, and store each result as it arrives.

    Args:
        jobs: the jobs to run.
        store: the results file to append to.
        workers: the number of processes, of one thread each; with one, this process trains.
        report: called after each job with the number of jobs done and a short text.
    """
    for done, line in enumerate(_train_all(jobs, workers), 1):
        store.add(line)
        report(done, f"{line.get('experiment') or line['task']}, seed {line['seed']}")


def _train_all(jobs: Sequence[Job], workers: int) -> Iterator[dict[str, Any]]:
    """Yield the result lines of jobs as they are finished."""
    if workers == 1:
        with _one_thread():
            yield from map(train, jobs)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_limit_threads) as pool:
        try:
            for done in as_completed([pool.submit(train, job) for job in jobs]):
                yield done.result()
        except BrokenProcessPool:
            raise TrainingStoppedError(
                "a process of --workers ended, perhaps because memory ran out: use fewer of them"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _limit_threads() -> None:
    """Let this new process train with one thread."""
    for library in ("NUMBA", "OMP"):  # numba would otherwise reset PyTorch's number of threads
        os.environ[f"{library}_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Train with one thread in this process, in which numba may have started more."""
    before = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def estimate_seconds(job: Job, store: Store) -> float | None:
    """Estimate how long a job takes, from the measured time per step of the most similar runs.

    Returns:
        The median over runs of the same experiment, else of the same task and optimizer, else of
        the same task, times the job's steps. None if no such run was measured.
    """
    experiment = job.experiment
    measured = [
        (BY_NAME[line["experiment"]], line["seconds"] / line["steps"])
        for line in store.list_kind("run")
        if line["experiment"].startswith(f"{experiment.task}/") and line["experiment"] in BY_NAME
    ]
    optimizer = experiment.method.optimizer
    for like in (
        [cost for each, cost in measured if each.name == experiment.name],
        [cost for each, cost in measured if each.method.optimizer == optimizer],
        [cost for _, cost in measured],
    ):
        if like:
            return float(statistics.median(like)) * experiment.steps
    return None
