"""Measure the share of a run that its calls to the ledger take, up to the certificate.

    python benchmarks/budget_calls.py [--steps 1000]

The service runs on SQLite and is called over HTTP; a short run before warms it up. DP-SGD at batch
600 on one thread. Each run has its own dataset.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # replaces this folder: its http.py shadows the standard library's

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from scripts.demo import PROGRAMS, create_dataset, find_free_port, wait_until_healthy
from training_client.client import AccountingService
from training_client.lab.models import cross_entropy, mlp
from training_client.lab.plan_run import RunSpec, reserve_budget
from training_client.optimizers import make_optimizer

DELTA = 1e-5
INPUTS_BY_MODEL = {"784-1000-10": 784, "60-1000-10": 60}


@contextmanager
def start_service() -> Iterator[AccountingService]:
    """Context manager: start a service with a dataset per run; yield a client for it."""
    url = f"http://127.0.0.1:{find_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ACCOUNTANT_DATABASE_URL": f"sqlite:///{folder}/accountant.db"}
        program = [PROGRAMS / "accountant"]
        make = [*program, "keys", "create", "--scope", "admin"]
        key = subprocess.run(make, env=environment, text=True, stdout=subprocess.PIPE, check=True)
        port = url.rsplit(":", 1)[1]
        server = subprocess.Popen([*program, "serve", "--port", port], env=environment)
        try:
            wait_until_healthy(url)
            for name in ("rehearsal", *INPUTS_BY_MODEL):
                create_dataset(url, key.stdout.strip(), {"epsilon": 8.0, "delta": DELTA}, name)
            with AccountingService(url, api_key=key.stdout.strip()) as found:
                yield found
        finally:
            server.terminate()
            server.wait(20)


def time_run(
    accounting: AccountingService, dataset: str, inputs: int, steps: int
) -> tuple[float, float]:
    """Train for some steps; return the total seconds, and those spent in calls to the ledger."""
    spec = RunSpec(60_000, 0.01, 1.0, steps)
    examples, labels = torch.rand(600, inputs), torch.randint(0, 10, (600,))
    start = time.perf_counter()
    budget = reserve_budget(accounting, spec, dataset, lambda _: None)
    calling = time.perf_counter() - start
    optimizer = make_optimizer("dp_sgd", mlp(inputs, 1000, 10), budget)
    for _ in range(steps):
        call_start = time.perf_counter()
        optimizer.take()
        calling += time.perf_counter() - call_start
        optimizer.expect_examples(len(labels))
        optimizer.step(examples, labels, cross_entropy)
    call_start = time.perf_counter()
    budget.guarantee(steps)
    budget.commit()
    return time.perf_counter() - start, calling + time.perf_counter() - call_start


def main(steps: Annotated[int, typer.Option(min=1, help="steps of each run")] = 1000) -> None:
    """Print the time of each run and the share of its calls to the ledger."""
    torch.set_num_threads(1)
    table = Table(title=f"{steps} steps", title_justify="left")
    for column in ("model", "seconds", "ledger calls", "share"):
        table.add_column(column, justify="left" if column == "model" else "right")
    with start_service() as accounting:
        time_run(accounting, "rehearsal", 60, 100)
        for name, inputs in INPUTS_BY_MODEL.items():
            total, calling = time_run(accounting, name, inputs, steps)
            table.add_row(name, f"{total:.1f}", f"{calling:.3f}", f"{calling / total:.2%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
