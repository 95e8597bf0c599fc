"""Compare Poisson and balls-in-bins sampling on MNIST at one budget: noise, accuracy, time.

    python benchmarks/sampling.py [--steps 1000] [--batch-size 600] [--seeds 3]

Both have the same batches on average and the same number of steps; the noise multiplier is the
least that the service finds for the budget. A seed sets the initial weights, the batches and the
noise. Runs of the two alternate, and time is the mean CPU time of a step with its batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # replaces this folder: http.py shadows a library

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import httpx
import torch
import typer
from fastapi.testclient import TestClient
from rich.console import Console
from rich.table import Table

from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from training_client.budget import NoBudget
from training_client.client import AccountingService
from training_client.lab.data import Dataset, load
from training_client.lab.models import mlp
from training_client.lab.train import train
from training_client.optimizers import OPTIMIZERS, make_optimizer
from training_client.plan import SAMPLINGS, Plan
from training_client.private_step.sampling import BallsInBinsSampler, PoissonSampler, Sampler

CONSOLE = Console(width=100)
DELTA = 1e-5
MOMENTUM = 0.9  # that of `accountant-train run`


@contextmanager
def serve() -> Iterator[AccountingService]:
    """Context manager: run the accounting service in this process; yield a client for it."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/accountant.db"
        settings = Settings(database_url=url, computation_seconds_max=300.0)  # nobody else waits
        with TestClient(create_app(settings)) as server:

            def answer(request: httpx.Request) -> httpx.Response:
                """Answer a client's request by the service in this process."""
                kind = {"Content-Type": "application/json"}
                found = server.post(request.url.path, content=request.content, headers=kind)
                return httpx.Response(found.status_code, content=found.content)

            with AccountingService("http://here", transport=httpx.MockTransport(answer)) as service:
                yield service


def make_sampler(plan: Plan, seed: int) -> Sampler:
    """Return a plan's sampler with a seed, for measurements only: batches must be secret."""
    generator = torch.Generator().manual_seed(seed)
    if plan.sampling == BallsInBinsSampler.sampling:
        return BallsInBinsSampler(plan.dataset_size, plan.steps_per_charge, generator)
    return PoissonSampler(plan.dataset_size, plan.sample_rate, generator)


def measure_run(
    plan: Plan, data: Dataset, steps: int, hidden: int, seed: int
) -> tuple[float, float]:
    """Train once; return the test accuracy and the milliseconds of CPU time per step."""
    torch.manual_seed(seed)
    model = mlp(data.inputs, hidden, data.classes)
    noise = torch.Generator().manual_seed(1000 + seed)
    rate = OPTIMIZERS["dp_sgd"].learning_rate
    allowance = NoBudget(plan, steps, "it is seeded")
    optimizer = make_optimizer(
        "dp_sgd", model, allowance, learning_rate=rate, momentum=MOMENTUM, generator=noise
    )
    started = time.process_time()
    result = train(model, data, optimizer, sampler=make_sampler(plan, seed))
    return result.test_score, 1000 * (time.process_time() - started) / steps


def main(
    steps: Annotated[int, typer.Option(help="steps of each run, in whole epochs")] = 1000,
    batch_size: Annotated[int, typer.Option(help="divides 60 000")] = 600,
    hidden: Annotated[int, typer.Option(help="units of the hidden layer")] = 256,
    seeds: Annotated[int, typer.Option(help="runs of each sampling")] = 3,
    epsilon: Annotated[float, typer.Option(help="ε of each run at δ = 1e-5")] = 2.0,
    data_dir: Annotated[Path, typer.Option(help="folder of the data")] = Path("data"),
) -> None:
    """Print the comparison."""
    torch.set_num_threads(1)
    data = load("mnist", data_dir)
    records = len(data.train_labels)
    noise, spent = {}, {}
    with serve() as service:
        for sampling in SAMPLINGS:
            rate, budget = batch_size / records, {"epsilon": epsilon, "delta": DELTA}
            noise[sampling] = service.noise_multiplier(
                sample_rate=rate, steps=steps, sampling=sampling, **budget
            )
            plan = Plan(records, rate, 1.0, noise[sampling], sampling)
            spent[sampling] = service.epsilon(plan.mechanism(steps), DELTA).epsilon
    runs: dict[str, list[tuple[float, float]]] = {sampling: [] for sampling in SAMPLINGS}
    for seed in range(1, seeds + 1):
        for sampling in SAMPLINGS:
            plan = Plan(records, batch_size / records, 1.0, noise[sampling], sampling)
            runs[sampling].append(measure_run(plan, data, steps, hidden, seed))
    table = Table("sampling", "σ", "ε", "accuracy", "of each seed", "time per step")
    for sampling, results in runs.items():
        scores = [score for score, _ in results]
        ratios = [
            own / first for (_, own), (_, first) in zip(results, runs[SAMPLINGS[0]], strict=True)
        ]
        table.add_row(
            sampling,
            f"{noise[sampling]:.4f}",
            f"{spent[sampling]:.4f}",
            f"{100 * statistics.mean(scores):.2f} %",
            ", ".join(f"{100 * score:.2f}" for score in scores),
            f"× {statistics.median(ratios):.2f}",
        )
    CONSOLE.print(
        f"MNIST, 784-{hidden}-10, dp_sgd, {steps} steps of {batch_size} records on average, "
        f"budget ε = {epsilon:g} at δ = {DELTA:g}"
    )
    CONSOLE.print(table)


if __name__ == "__main__":
    typer.run(main)
