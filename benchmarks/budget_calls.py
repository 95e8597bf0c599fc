"""What asking for the budget takes of a run: from the dataset's budget to the certificate.

    python benchmarks/budget_calls.py [--steps 1000]

A service of its own on SQLite, over HTTP, which was asked the same for a short run before; DP-SGD
at batch 600 on one thread. Each run has a dataset of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # in the place of this folder, whose http.py hides a library

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

from scripts.demo import PROGRAMS, free_port, give_budget, wait_until_healthy
from training_client.models import cross_entropy, mlp
from training_client.optimizers import make_optimizer
from training_client.preflight import Wanted, reserved
from training_client.service import AccountingService

DELTA = 1e-5
RUNS = {"784-1000-10": 784, "60-1000-10": 60}  # inputs


@contextmanager
def service() -> Iterator[AccountingService]:
    """One with a ledger and a budget for each run."""
    url = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ACCOUNTANT_DATABASE_URL": f"sqlite:///{folder}/accountant.db"}
        program = [PROGRAMS / "accountant"]
        make = [*program, "keys", "create", "--scope", "admin"]
        key = subprocess.run(make, env=environment, text=True, stdout=subprocess.PIPE, check=True)
        port = url.rsplit(":", 1)[1]
        server = subprocess.Popen([*program, "serve", "--port", port], env=environment)
        try:
            wait_until_healthy(url)
            for name in ("rehearsal", *RUNS):
                give_budget(url, key.stdout.strip(), {"epsilon": 8.0, "delta": DELTA}, name)
            with AccountingService(url, api_key=key.stdout.strip()) as found:
                yield found
        finally:
            server.terminate()
            server.wait(20)


def measured(
    accounting: AccountingService, dataset: str, inputs: int, steps: int
) -> tuple[float, float]:
    """Seconds in all, and seconds of asking."""
    wanted = Wanted(60_000, 0.01, 1.0, steps)
    examples, labels = torch.rand(600, inputs), torch.randint(0, 10, (600,))
    start = time.perf_counter()
    budget = reserved(accounting, wanted, dataset, lambda _: None)
    asking = time.perf_counter() - start
    optimizer = make_optimizer("dp_sgd", mlp(inputs, 1000, 10), budget)
    for _ in range(steps):
        asked = time.perf_counter()
        optimizer.take()
        asking += time.perf_counter() - asked
        optimizer.step(examples, labels, cross_entropy)
    asked = time.perf_counter()
    budget.guarantee(steps)
    budget.commit()
    return time.perf_counter() - start, asking + time.perf_counter() - asked


def main(steps: Annotated[int, typer.Option(min=1, help="of each run")] = 1000) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    table = Table(title=f"{steps} steps", title_justify="left")
    for column in ("model", "seconds", "asking", "share"):
        table.add_column(column, justify="left" if column == "model" else "right")
    with service() as accounting:
        measured(accounting, "rehearsal", 60, 100)
        for name, inputs in RUNS.items():
            total, asking = measured(accounting, name, inputs, steps)
            table.add_row(name, f"{total:.1f}", f"{asking:.3f}", f"{asking / total:.2%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
