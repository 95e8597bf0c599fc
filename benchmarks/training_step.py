"""Compare a training step of every optimizer with an ordinary one: time and memory.

    python benchmarks/training_step.py [--device cuda] [--case 784-1000-10] [--only adadp]

Every case runs in its own process. Time: an ordinary step and the private one run alternately, and
the median of their ratios is shown; on a CPU it is the ratio of CPU times, because other programs
may run. Memory: the peak of all tensors, including model, batch and optimizer. Opacus is measured
with per-example hooks and with ghost clipping.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py shadows a library

import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from training_client.budget import NoBudget
from training_client.integrations.patches import tune_process
from training_client.lab.federated import Participant, train_federated
from training_client.lab.models import cross_entropy
from training_client.optimizers import OPTIMIZERS, PUBLIC_BATCH_SIZE, AdaDp, make_optimizer
from training_client.plan import Plan

CONSOLE = Console(width=100)
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A benchmark case: a model and its batches.

    Attributes:
        name: the model's name.
        shape: shape of an example.
        layers: builds the model.
        classes: number of classes.
        batch: examples per batch.
        filled: share of nonzero values in an example.
    """

    name: str
    shape: tuple[int, ...]
    layers: Callable[[], nn.Module]
    classes: int
    batch: int
    filled: float

    @property
    def is_sparse(self) -> bool:
        """Return whether the examples are sparse, like MNIST and bags of words."""
        return self.filled < 0.25

    def build_model(self, device: str) -> nn.Module:
        """Return the model with seeded parameters."""
        torch.manual_seed(0)
        return self.layers().to(device)

    def draw_batch(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random examples and labels."""
        examples = torch.rand(self.batch, *self.shape, device=device)
        examples *= torch.rand_like(examples) < self.filled
        return examples, torch.randint(0, self.classes, (self.batch,), device=device)


def build_mlp(inputs: int) -> nn.Module:
    """Return a multilayer perceptron."""
    return nn.Sequential(nn.Linear(inputs, 1000), nn.ReLU(), nn.Linear(1000, 10))


def build_cnn() -> nn.Module:
    """Return a convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


CASES = [
    *(Case("784-1000-10", (784,), partial(build_mlp, 784), 10, batch, 0.2) for batch in (600, 256)),
    *(Case("60-1000-10", (60,), partial(build_mlp, 60), 10, batch, 1.0) for batch in (600, 256)),
    Case("10000-20", (10_000,), partial(nn.Linear, 10_000, 20), 20, 600, 0.01),
    Case("small CNN, 28×28", (1, 28, 28), build_cnn, 10, 256, 0.2),
]
OPACUS_STEPS = ("opacus hooks", "opacus ghost")
PAPER_VARIANTS = ("adadp box", "pi_adam own squares")  # they need every per-example gradient
STATES = ("adadp public", "adadp raw", "pi_adam public", "pi_adam raw")
A_DDP = "a_ddp"  # a round of one participant with all its records
BF16, COMPILED = "dp_sgd bf16", "dp_sgd compiled"
STEPS = ["sgd", *OPACUS_STEPS, *OPTIMIZERS, A_DDP, *STATES, *PAPER_VARIANTS, BF16, COMPILED]


def make_ordinary_step(case: Case, device: str) -> Step:
    """Return a function that takes a step of SGD with momentum, without privacy."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(examples), targets).mean().backward()
        optimizer.step()

    return step


def _make_budget(plan: Plan) -> NoBudget:
    """Return a budget without a privacy claim."""
    return NoBudget(plan, 10**9, "it is measured")


def make_private_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes a step of a registered optimizer or a variant of it."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    known, _, kind = name.partition(" ")
    local = OPTIMIZERS[known].paper_option == "box"
    state = {"": OPTIMIZERS[known].states[0], "box": "privatised", "own squares": "public"}
    # with so little noise, half axes replace the ball from the second step on
    plan = Plan(60_000, case.batch / 60_000, 1.0, 1e-5 * case.batch if local else 1.0)
    options: dict[str, Any] = {"threshold": 0.0} if local else {}
    if name in PAPER_VARIANTS:
        options[str(OPTIMIZERS[known].paper_option)] = True
    public = None
    if state.get(kind, kind) == "public":
        public = tuple(each[:PUBLIC_BATCH_SIZE].clone() for each in case.draw_batch(device))
    options["sparse_inputs"] = case.is_sparse
    options |= {"state": state.get(kind, kind), "public": public}
    optimizer = make_optimizer(known, net, _make_budget(plan), **options)
    for _ in range(2 if isinstance(optimizer, AdaDp) else 0):
        optimizer.step(examples, targets, cross_entropy)
    assert not local or optimizer.half_axes is not None
    return lambda: optimizer.step(examples, targets, cross_entropy)


def make_dp_sgd_variant_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes a step of DP-SGD in bfloat16, or compiled."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    model = torch.compile(net) if name == COMPILED else net
    allowance = _make_budget(Plan(60_000, case.batch / 60_000, 1.0, 1.0))
    optimizer = make_optimizer("dp_sgd", model, allowance, sparse_inputs=case.is_sparse)  # type: ignore[arg-type]

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=name == BF16):
            optimizer.step(examples, targets, cross_entropy)

    return step


def make_opacus_step(name: str, case: Case, device: str) -> Step:
    """Return a function that takes a step of Opacus, with hooks or ghost clipping."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": case.batch
    }  # fmt: skip
    descent = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if name == "opacus hooks":
        wrapped = GradSampleModule(net)
        optimizer = DPOptimizer(descent, **settings)
        criterion: Any = nn.CrossEntropyLoss()
    else:
        wrapped = GradSampleModuleFastGradientClipping(
            net, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(descent, **settings)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(examples), targets).backward()
        optimizer.step()

    return step


def make_federated_step(case: Case, device: str) -> Step:
    """Return a function that runs a round of federated training with one participant."""
    net, (examples, targets) = case.build_model(device), case.draw_batch(device)
    allowance = _make_budget(Plan(case.batch, 1.0, 1.0, 1.0))
    people = [Participant("one", net, examples, targets, allowance, sparse_inputs=case.is_sparse)]
    return lambda: train_federated(net, people, cross_entropy, learning_rate=0.1, rounds_max=1)


def make_step(name: str, case: Case, device: str) -> Step:
    """Return the function that takes a step of the named kind."""
    if name == "sgd":
        return make_ordinary_step(case, device)
    if name == A_DDP:
        return make_federated_step(case, device)
    if name in (BF16, COMPILED):
        return make_dp_sgd_variant_step(name, case, device)
    return (
        make_opacus_step(name, case, device)
        if name in OPACUS_STEPS
        else make_private_step(name, case, device)
    )


def run_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own process; return its result or raise its exception."""
    context = multiprocessing.get_context("fork" if arguments[-1] == "cpu" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    if isinstance(found, Exception):
        raise found
    return found


def _send_result(
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Send the result or the exception of a function to the parent process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        sender.send(function(*arguments))
    except Exception as error:
        sender.send(error)
    os._exit(0) if arguments[-1] == "cpu" else None


def measure_step_ms(step: Step, device: str) -> float:
    """Return the duration of a step in milliseconds; CPU time on a CPU."""
    if device == "cpu":
        start = time.process_time()
        step()
        return 1e3 * (time.process_time() - start)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure_time(name: str, case: Case, rounds: int, device: str) -> tuple[float, float]:
    """Return a step's median milliseconds, and its ratio to an ordinary step taken just before."""
    plain, step = make_ordinary_step(case, device), make_step(name, case, device)
    ours, ratios = [], []
    with tune_process():  # as `train` does; for both steps
        for each in (plain, step, plain, step):
            each()
        for _ in range(rounds):
            base = measure_step_ms(plain, device)
            ours.append(measure_step_ms(step, device))
            ratios.append(ours[-1] / base)
    return statistics.median(ours), statistics.median(ratios)


def measure_memory_mib(name: str, case: Case, device: str) -> float:
    """Return the peak memory of a step in MiB: model, batch, state and temporaries."""
    if device != "cpu":
        step = make_step(name, case, device)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        return float(torch.cuda.max_memory_allocated()) / 2**20
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step = make_step(name, case, device)
        for _ in range(3):
            step()
    changes = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(accumulate(changes)) / 2**20


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="steps to time, of each kind")] = 21,
    case: Annotated[
        list[str] | None, typer.Option(help="models to measure; all by default")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="batch sizes to measure; all by default")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="steps to measure; all by default")] = None,
) -> None:
    """Print one table for each model and batch size."""
    CONSOLE.print(f"{device}, torch {torch.__version__}, one thread" if device == "cpu" else device)
    for each in CASES:
        if each.name in (case or [each.name]) and each.batch in (batch or [each.batch]):
            CONSOLE.print(
                build_table(
                    each,
                    only or STEPS,
                    rounds,
                    device,
                )
            )


def build_table(case: Case, names: list[str], rounds: int, device: str) -> Table:
    """Return the table of a case, with a row for each step."""
    table = Table(title=f"{case.name}, batch {case.batch}", title_justify="left")
    for column in ("step", "ms", "time / SGD", "MiB", "memory / SGD"):
        table.add_column(column, justify="left" if column == "step" else "right")
    base = run_in_process(measure_memory_mib, "sgd", case, device)
    for name in names:
        slow = name in ("opacus hooks", *PAPER_VARIANTS)
        ms, ratio = run_in_process(measure_time, name, case, 3 if slow else rounds, device)
        memory = run_in_process(measure_memory_mib, name, case, device)
        table.add_row(
            name, f"{ms:.1f}", f"{ratio:.2f}", f"{memory:.0f}", f"{memory / max(base, 1):.2f}"
        )
    return table


if __name__ == "__main__":
    typer.run(main)
