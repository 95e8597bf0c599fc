"""The command line of the training client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training_client import train as training
from training_client.budget import Budget, LedgerBudget
from training_client.data import TRAIN_SIZE, mnist
from training_client.errors import TrainingStoppedError
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.service import AccountingService

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Differentially private training that asks the accounting service before every step.",
)


@app.callback()
def main() -> None:
    """Keep `run` a command of its own: others will join it."""


@app.command(epilog="Exit codes: 0 done, 2 wrong input, 3 refused by budget, 4 no service.")
def run(
    service: Annotated[str, typer.Option(help="The accounting service.")] = "http://127.0.0.1:8000",
    dataset: Annotated[
        str | None, typer.Option(help="Draw on this dataset's budget in the ledger.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ACCOUNTANT_API_KEY", help="For the ledger.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="ε the run may spend, without a ledger.")] = 2.0,
    delta: Annotated[float, typer.Option(help="δ the run may spend, without a ledger.")] = 1e-5,
    steps: Annotated[int, typer.Option(min=1, help="Steps to plan the noise for.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Expected batch size, qN.")] = 600,
    clip_norm: Annotated[float, typer.Option(help="C, of each example's gradient.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="η.")] = 0.5,
    momentum: Annotated[float, typer.Option(help="Of the noisy gradient.")] = 0.9,
    hidden: Annotated[int, typer.Option(min=1, help="Units of the hidden layer.")] = 1000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    data_dir: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("data"),
    output: Annotated[Path, typer.Option(help="Where model and guarantee go.")] = Path(
        "runs/mnist"
    ),
) -> None:
    """Train DP-SGD on MNIST until the privacy budget is used up."""
    console = Console(highlight=False, soft_wrap=True)
    certificate = None
    try:
        with AccountingService(service, api_key=api_key) as accounting:
            wanted = _Wanted(TRAIN_SIZE, batch_size / TRAIN_SIZE, clip_norm, steps)
            budget: Budget | LedgerBudget
            if dataset is None:
                budget = _asked(accounting, wanted, epsilon, delta, console)
            else:
                budget = _reserved(accounting, wanted, dataset, console)
            data = mnist(data_dir).to(torch.device(device))
            model = training.mlp(784, hidden, 10).to(device)
            optimizer = make_optimizer(
                "dp_sgd", model, budget.plan, learning_rate=learning_rate, momentum=momentum
            )
            with _progress(console, steps) as report:
                result = training.train(model, data, optimizer, budget, report=report)
            if isinstance(budget, LedgerBudget):
                certificate = accounting.certificate(accounting.commit(budget.reservation))
    except TrainingStoppedError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]Stopped:[/] {error}")
        raise typer.Exit(error.exit_code) from None
    claim = result.guarantee
    output.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), output / "model.pt")
    (output / "privacy.json").write_text(json.dumps(claim.document, indent=2) + "\n")
    if certificate is not None:
        (output / "certificate.json").write_text(json.dumps(certificate, indent=2) + "\n")
    why = "all steps are done"
    if result.stopped_by_budget:
        why = "the budget allows no further step" if dataset is None else "the plan is done"
    console.print(f"Stopped after {result.steps} steps: {why}.")
    console.print(f"Test accuracy [bold]{result.test_accuracy:.2%}[/]")
    console.print(
        f"Guarantee: ε = [bold]{claim.epsilon:.6f}[/] at δ = {claim.delta:g}, {claim.status} by "
        f"{claim.method}; written with the model to {output}/"
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A run whose noise is still to be found."""

    size: int
    sample_rate: float
    clip_norm: float
    steps: int

    def plan(self, noise_multiplier: float) -> Plan:
        return Plan(self.size, self.sample_rate, self.clip_norm, noise_multiplier)


def _asked(
    accounting: AccountingService, wanted: _Wanted, epsilon: float, delta: float, console: Console
) -> Budget:
    """A budget of this run's own."""
    sigma = accounting.noise_multiplier(
        sample_rate=wanted.sample_rate, steps=wanted.steps, epsilon=epsilon, delta=delta
    )
    console.print(
        f"Budget ε = {epsilon:g} at δ = {delta:g}: {wanted.steps} steps at q = "
        f"{wanted.sample_rate:g} need noise multiplier σ = {sigma:.4f}"
    )
    return Budget(accounting, wanted.plan(sigma), epsilon, delta)


def _reserved(
    accounting: AccountingService, wanted: _Wanted, dataset: str, console: Console
) -> LedgerBudget:
    """A dataset's budget: quote, then reserve the whole plan."""
    budget = accounting.dataset(dataset).get("budget") or {}
    sigma = accounting.affordable_noise(dataset, wanted.plan(1.0).mechanism(wanted.steps))
    plan = wanted.plan(sigma)
    reservation = accounting.reserve(dataset, plan.mechanism(wanted.steps), "accountant-train")
    console.print(
        f"Dataset {dataset!r} allows {wanted.steps} steps at q = {wanted.sample_rate:g} with noise "
        f"multiplier σ = {sigma:.4f}: reserved as {reservation.identifier}"
    )
    return LedgerBudget(accounting, plan, dataset, float(budget["delta"]), reservation)


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[training.Progress], None]]:
    """A bar with step, loss, ε allowed and the time left; lines where there is no terminal."""
    if not console.is_terminal:
        yield (
            lambda now: (
                console.print(
                    f"step {now.step}: loss {now.loss:.3f}, ε ≤ {now.epsilon_allowed:.4f}"
                )
                if now.step % max(1, steps // 10) == 0
                else None
            )
        )
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  ε ≤ {task.fields[epsilon]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps, loss=float("nan"), epsilon=0.0)
        yield lambda now: bar.update(
            task, completed=now.step, loss=now.loss, epsilon=now.epsilon_allowed
        )
