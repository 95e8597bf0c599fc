"""Measure the memory of each process that trains a replicated or a sharded model with others.

    python benchmarks/sharded_memory.py [--processes 2 4]

It is the process's resident memory, less that before the model was made, relative to the memory of
the model's parameters: between steps, and at the peak of a step. The model has four layers of 2048
units, and a batch 16 examples on average. Linux only.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py shadows a library

import argparse
import gc
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from training_client.budget import NoBudget
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer, private_batches, share_budget
from training_client.plan import Plan

WIDTH, LAYERS = 2048, 4
PLAN = Plan(dataset_size=64, sample_rate=0.25, clip_norm=1.0, noise_multiplier=1.0)
OPTIMIZERS = ("dp_sgd", "dp_adam", "adadp")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors are returned to the system at once


def read_memory(name: str) -> int:
    """Return VmRSS, this process's memory in bytes, or VmHWM, its peak since `measure_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(name))
    return 1024 * int(line.split()[1])


def measure_peak(work: Callable[[], object]) -> int:
    """Return the peak memory of this process in bytes while it runs a function."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present memory
    work()
    return read_memory("VmHWM")


def train(optimizer: str, *, is_sharded: bool, width: int = WIDTH) -> tuple[float, float]:
    """Train, and return the memory between steps and at a step's peak, over the parameters'."""
    records = torch.utils.data.TensorDataset(torch.randn(64, width), torch.zeros(64).long())
    gc.collect()
    before = read_memory("VmRSS")
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    if is_sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    budget = share_budget(lambda: NoBudget(PLAN, 4, "a benchmark"))
    made = make_optimizer(optimizer, model, budget)
    batches = private_batches(made, records)

    def step() -> None:
        """Make a step."""
        made.step(*next(batches), cross_entropy)

    for _ in range(3):
        step()
    gc.collect()
    between = read_memory("VmRSS") - before
    peak = measure_peak(step) - before
    size = 4 * sum(each.numel() for each in model.parameters())
    return between / size, peak / size


def run_rank(rank: int, size: int, folder: str, queue: Any) -> None:
    """Train in one process; put the optimizer, whether the model is sharded, and the memory."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    for optimizer in OPTIMIZERS:
        for is_sharded in (False, True):
            train(optimizer, is_sharded=is_sharded, width=64)  # loads what all runs need
            queue.put((optimizer, is_sharded, train(optimizer, is_sharded=is_sharded)))
    distributed.destroy_process_group()


def measure(size: int) -> dict[tuple[str, bool], tuple[float, float]]:
    """Return the largest memory of any of `size` processes, between steps and at the peak."""
    os.environ.update(MALLOC)
    context = multiprocessing.get_context("spawn")
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        processes = [
            context.Process(target=run_rank, args=(rank, size, folder, queue))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _ in range(2 * size * len(OPTIMIZERS)):
            optimizer, is_sharded, (between, peak) = queue.get(timeout=600)
            before = found.get((optimizer, is_sharded), (0.0, 0.0))
            found[optimizer, is_sharded] = max(before[0], between), max(before[1], peak)
        for process in processes:
            process.join()
    return found


def main() -> None:
    """Print a table of the memory of one of several processes."""
    parser = argparse.ArgumentParser(description="Memory of a process, replicated or sharded.")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    table = Table(title=f"memory over that of the parameters, torch {torch.__version__}")
    for column in ("optimizer", "processes", "model", "between steps", "in a step"):
        table.add_column(column, justify="left" if column in ("optimizer", "model") else "right")
    for size in parser.parse_args().processes:
        for (optimizer, is_sharded), (between, peak) in measure(size).items():
            model = "sharded" if is_sharded else "replicated"
            table.add_row(optimizer, str(size), model, f"{between:.2f}", f"{peak:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
