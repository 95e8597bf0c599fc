"""Run a function in several processes of one torch.distributed group, on CPUs with gloo."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

import training_client.lab.models
import training_client.optimizers  # noqa: F401 - loaded once, in the process that is forked

_SECONDS_MAX: Final = 100
_CONTEXT: Final = multiprocessing.get_context("forkserver")


def _run_rank(
    rank: int, size: int, folder: Path, timeout: float, function: Callable[..., Any], given: Any
) -> None:
    """Join the group, call the function, and write its result or exception to a file."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        outcome = function(rank, *given)
    except Exception as error:
        outcome = error
    _outcome_file(folder, rank).write_bytes(pickle.dumps(outcome))
    distributed.destroy_process_group()


def _outcome_file(folder: Path, rank: int) -> Path:
    """Return the file that a process writes its result or exception to."""
    return folder / f"outcome-{rank}.pickle"


def start_processes(
    size: int, folder: Path, function: Callable[..., Any], *given: Any, timeout: float = 60
) -> list[Any]:
    """Start a function in several processes; return them.

    Args:
        size: the number of processes.
        folder: an empty folder, where they meet and write their results.
        function: called with the rank and `given`; it must be a module's own.
        given: further arguments.
        timeout: the group's timeout, in seconds.
    """
    _CONTEXT.set_forkserver_preload([__name__, "torch.distributed.fsdp"])
    processes = [
        _CONTEXT.Process(target=_run_rank, args=(rank, size, folder, timeout, function, given))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def outcomes_of(processes: list[Any], folder: Path) -> list[Any]:
    """Wait for processes; return each rank's result or exception, None of one that was killed."""
    try:
        for process in processes:
            process.join(_SECONDS_MAX)
            assert process.exitcode is not None, "the process does not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [_outcome_file(folder, rank) for rank in range(len(processes))]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def run_in_processes(
    size: int, folder: Path, function: Callable[..., Any], *given: Any, timeout: float = 60
) -> list[Any]:
    """Run a function in several processes; return each rank's result or exception, by rank."""
    return outcomes_of(start_processes(size, folder, function, *given, timeout=timeout), folder)
