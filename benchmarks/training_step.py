"""One training step of every optimizer beside an ordinary one: time and peak memory, as ratios.

    python benchmarks/training_step.py [--device cuda] [--case 784-1000-10] [--only adadp]

Every case runs in a process of its own. Time: an ordinary step and the private one in turn, and the
median of their ratios; of processor time on a CPU, where other programs may be at work. Memory: the
most that tensors took at once, model, batch and optimizer among them. Opacus is measured with
per-example hooks and with ghost clipping.
"""

from __future__ import annotations

import sys

sys.path = [p for p in sys.path if not p.endswith("benchmarks")]  # http.py hides a library

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
from training_client.distributed import Participant, train_together
from training_client.optimizers import OPTIMIZERS, PUBLIC_BATCH_SIZE, AdaDp, make_optimizer
from training_client.plan import Plan
from training_client.processor import fit_for_training
from training_client.train import cross_entropy

CONSOLE = Console(width=100)
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model and the size of its batches.

    Attributes:
        name: of the model.
        shape: of an example.
        layers: makes the model.
        classes: of the labels.
        batch: examples.
        filled: share of an example's numbers that are not 0.
    """

    name: str
    shape: tuple[int, ...]
    layers: Callable[[], nn.Module]
    classes: int
    batch: int
    filled: float

    @property
    def sparse(self) -> bool:
        """Whether zeros are left out; said, as of MNIST and of bags of words."""
        return self.filled < 0.25

    def model(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        return self.layers().to(device)

    def data(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        examples = torch.rand(self.batch, *self.shape, device=device)
        examples *= torch.rand_like(examples) < self.filled
        return examples, torch.randint(0, self.classes, (self.batch,), device=device)


def mlp(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 1000), nn.ReLU(), nn.Linear(1000, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


CASES = [
    *(Case("784-1000-10", (784,), partial(mlp, 784), 10, batch, 0.2) for batch in (600, 256)),
    *(Case("60-1000-10", (60,), partial(mlp, 60), 10, batch, 1.0) for batch in (600, 256)),
    Case("10000-20", (10_000,), partial(nn.Linear, 10_000, 20), 20, 600, 0.01),
    Case("small CNN, 28×28", (1, 28, 28), cnn, 10, 256, 0.2),
]
BESIDE = ("opacus hooks", "opacus ghost")
PRINTED = ("adadp box", "pi_adam own squares")  # every example's gradient is gone through
STATES = ("adadp public", "adadp raw", "pi_adam public", "pi_adam raw")
A_DDP = "a_ddp"  # a round of one participant, all of whose records are drawn
BF16, COMPILED = "dp_sgd bf16", "dp_sgd compiled"


def ordinary(case: Case, device: str) -> Step:
    net, (examples, targets) = case.model(device), case.data(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(examples), targets).mean().backward()
        optimizer.step()

    return step


def _measured(plan: Plan) -> NoBudget:
    return NoBudget(plan, 10**9, "it is measured")


def private(name: str, case: Case, device: str) -> Step:
    net, (examples, targets) = case.model(device), case.data(device)
    known, _, kind = name.partition(" ")
    local = OPTIMIZERS[known].printed == "box"
    state = {"": OPTIMIZERS[known].states[0], "box": "privatised", "own squares": "public"}
    # so little noise that half axes take the ball's place from the second step on
    plan = Plan(60_000, case.batch / 60_000, 1.0, 1e-5 * case.batch if local else 1.0)
    options: dict[str, Any] = {"threshold": 0.0} if local else {}
    if name in PRINTED:
        options[str(OPTIMIZERS[known].printed)] = True
    public = None
    if state.get(kind, kind) == "public":
        public = tuple(each[:PUBLIC_BATCH_SIZE].clone() for each in case.data(device))
    options["sparse_inputs"] = case.sparse
    options |= {"state": state.get(kind, kind), "public": public}
    optimizer = make_optimizer(known, net, _measured(plan), **options)
    for _ in range(2 if isinstance(optimizer, AdaDp) else 0):
        optimizer.step(examples, targets, cross_entropy)
    assert not local or optimizer.half_axes is not None
    return lambda: optimizer.step(examples, targets, cross_entropy)


def differently(name: str, case: Case, device: str) -> Step:
    """DP-SGD with the model's passes in half the bits, or compiled by PyTorch."""
    net, (examples, targets) = case.model(device), case.data(device)
    model = torch.compile(net) if name == COMPILED else net
    allowance = _measured(Plan(60_000, case.batch / 60_000, 1.0, 1.0))
    optimizer = make_optimizer("dp_sgd", model, allowance, sparse_inputs=case.sparse)  # type: ignore[arg-type]

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=name == BF16):
            optimizer.step(examples, targets, cross_entropy)

    return step


def opacus(name: str, case: Case, device: str) -> Step:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    net, (examples, targets) = case.model(device), case.data(device)
    given: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": case.batch
    }  # fmt: skip
    descent = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if name == "opacus hooks":
        wrapped = GradSampleModule(net)
        optimizer = DPOptimizer(descent, **given)
        criterion: Any = nn.CrossEntropyLoss()
    else:
        wrapped = GradSampleModuleFastGradientClipping(
            net, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(descent, **given)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(examples), targets).backward()
        optimizer.step()

    return step


def together(case: Case, device: str) -> Step:
    net, (examples, targets) = case.model(device), case.data(device)
    allowance = _measured(Plan(case.batch, 1.0, 1.0, 1.0))
    people = [Participant("one", net, examples, targets, allowance, sparse_inputs=case.sparse)]
    return lambda: train_together(net, people, cross_entropy, learning_rate=0.1, rounds_max=1)


def made(name: str, case: Case, device: str) -> Step:
    if name == "sgd":
        return ordinary(case, device)
    if name == A_DDP:
        return together(case, device)
    if name in (BF16, COMPILED):
        return differently(name, case, device)
    return opacus(name, case, device) if name in BESIDE else private(name, case, device)


def apart(act: Callable[..., Any], *of: Any) -> Any:
    """What a function returns, run in a process of its own."""
    context = multiprocessing.get_context("fork" if of[-1] == "cpu" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, act, of))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    if isinstance(found, Exception):
        raise found
    return found


def _send(sender: Connection, act: Callable[..., Any], of: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        sender.send(act(*of))
    except Exception as error:
        sender.send(error)
    os._exit(0) if of[-1] == "cpu" else None


def timed(step: Step, device: str) -> float:
    """Milliseconds."""
    if device == "cpu":
        start = time.process_time()
        step()
        return 1e3 * (time.process_time() - start)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def times(name: str, case: Case, rounds: int, device: str) -> tuple[float, float]:
    """Milliseconds of a step, and the median ratio to an ordinary one made just before."""
    plain, step = ordinary(case, device), made(name, case, device)
    ours, ratios = [], []
    with fit_for_training():  # as `train` does, and for both
        for each in (plain, step, plain, step):
            each()
        for _ in range(rounds):
            base = timed(plain, device)
            ours.append(timed(step, device))
            ratios.append(ours[-1] / base)
    return statistics.median(ours), statistics.median(ratios)


def peak(name: str, case: Case, device: str) -> float:
    """MiB of all tensors of a training run at once: model, batch, state, and what a step takes."""
    if device != "cpu":
        step = made(name, case, device)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        return float(torch.cuda.max_memory_allocated()) / 2**20
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        step = made(name, case, device)
        for _ in range(3):
            step()
    changes = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(changes)) / 2**20


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="steps of each kind")] = 21,
    case: Annotated[list[str] | None, typer.Option(help="models; all by default")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="batch sizes; all by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="steps; all by default")] = None,
) -> None:
    """Print one table for each model and batch size."""
    CONSOLE.print(f"{device}, torch {torch.__version__}, one thread" if device == "cpu" else device)
    for each in CASES:
        if each.name in (case or [each.name]) and each.batch in (batch or [each.batch]):
            CONSOLE.print(
                table(
                    each,
                    only or ["sgd", *BESIDE, *OPTIMIZERS, A_DDP, *STATES, *PRINTED, BF16, COMPILED],
                    rounds,
                    device,
                )
            )


def table(case: Case, names: list[str], rounds: int, device: str) -> Table:
    found = Table(title=f"{case.name}, batch {case.batch}", title_justify="left")
    for column in ("step", "ms", "time / SGD", "MiB", "memory / SGD"):
        found.add_column(column, justify="left" if column == "step" else "right")
    base = apart(peak, "sgd", case, device)
    for name in names:
        slow = name in ("opacus hooks", *PRINTED)
        ms, ratio = apart(times, name, case, 3 if slow else rounds, device)
        memory = apart(peak, name, case, device)
        found.add_row(
            name, f"{ms:.1f}", f"{ratio:.2f}", f"{memory:.0f}", f"{memory / max(base, 1):.2f}"
        )
    return found


if __name__ == "__main__":
    typer.run(main)
