"""The command line of the training client."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from training_client import train as training
from training_client.budget import Budget, LedgerBudget
from training_client.checkpoint import NAME as CHECKPOINT
from training_client.checkpoint import Checkpoint
from training_client.compare import Curve, draw, run_all
from training_client.data import DATASETS, Dataset, check, load, train_size
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceError,
    TrainingStoppedError,
)
from training_client.optimizers import OPTIMIZERS, PrivateOptimizer, make_optimizer
from training_client.plan import Plan
from training_client.service import AccountingService

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Differentially private training that asks the accounting service before every step.",
)
Public = tuple[torch.Tensor, torch.Tensor] | None
_STOPPED_BY_SIGNAL = 130
_NO_GUARANTEE = (
    "state 'raw' is made of private gradients as the papers print it: no theorem covers it. Add "
    "--no-guarantee to train it all the same, or take --state privatised"
)

ServiceOption = Annotated[str, typer.Option(help="The accounting service.")]
EpsilonOption = Annotated[float, typer.Option(help="ε the run may spend, without a ledger.")]
DeltaOption = Annotated[float, typer.Option(help="δ the run may spend, without a ledger.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Steps to plan the noise for.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Expected batch size, qN.")]
ClipOption = Annotated[float, typer.Option(help="C, of each example's (scaled) gradient.")]
HiddenOption = Annotated[int, typer.Option(min=1, help="Units of the hidden layer.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
NameOption = Annotated[str, typer.Option("--data", help=", ".join(DATASETS) + ".")]
DataOption = Annotated[Path, typer.Option(help="Where data sets are kept.")]
PublicOption = Annotated[
    int, typer.Option(min=1, help="Examples given up as public, for --state public.")
]


@app.command("optimizers")
def list_optimizers() -> None:
    """Show every optimizer: what it does, where it comes from, where its state may come from."""
    table = Table(title="Optimizers", title_justify="left")
    for column in ("name", "what it does", "source", "states", "learning rate"):
        table.add_column(column)
    for name, entry in OPTIMIZERS.items():
        states = ", ".join(entry.states)
        table.add_row(name, entry.title, entry.source, states, f"{entry.learning_rate:g}")
    Console().print(table)


@app.command(
    epilog="Exit codes: 0 done, 2 wrong input, 3 refused by budget, 4 no service, 130 stopped by a "
    "signal (what was trained is accounted for and kept)."
)
def run(
    service: ServiceOption = "http://127.0.0.1:8000",
    dataset: Annotated[
        str | None, typer.Option(help="Draw on this dataset's budget in the ledger.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ACCOUNTANT_API_KEY", help="For the ledger.")
    ] = None,
    epsilon: EpsilonOption = 2.0,
    delta: DeltaOption = 1e-5,
    steps: StepsOption = 1000,
    noise_multiplier: Annotated[
        float | None, typer.Option(min=0.01, help="σ; by default the least that fits the budget.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="See `accountant-train optimizers`.")] = "dp_sgd",
    state: Annotated[
        str | None,
        typer.Option(help="Where its state comes from: privatised, public, or raw (as printed)."),
    ] = None,
    box: Annotated[
        bool, typer.Option("--box", help="AdaDP: clamp coordinates as printed; slow.")
    ] = False,
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Train what no theorem covers.")
    ] = False,
    public_examples: PublicOption = 600,
    batch_size: BatchOption = 600,
    clip_norm: ClipOption = 1.0,
    learning_rate: Annotated[
        float | None, typer.Option(help="η; the optimizer's own by default.")
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="dp_sgd only; 0.9 by default.")] = None,
    hidden: HiddenOption = 1000,
    device: DeviceOption = "cpu",
    data_name: NameOption = "mnist",
    data_dir: DataOption = Path("data"),
    output: Annotated[Path, typer.Option(help="Where model and guarantee go.")] = Path(
        "runs/mnist"
    ),
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints, with --dataset.")
    ] = 50,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --output that died; see --dataset."),
    ] = False,
) -> None:
    """Train until the privacy budget is used up."""
    console = Console(highlight=False, soft_wrap=True)
    certificate = None
    try:
        with AccountingService(service, api_key=api_key) as accounting:
            budget: Budget | LedgerBudget
            kept: Checkpoint | None = None
            if resume:
                kept = Checkpoint.read(output)
                recipe, budget = _Recipe.of(kept), _resumed(accounting, kept, console)
            else:
                recipe = _recipe(
                    data_name,
                    optimizer,
                    state,
                    learning_rate,
                    momentum,
                    hidden,
                    public_examples,
                    box=box,
                )
                if not recipe.proven and (dataset is not None or not no_guarantee):
                    raise NoGuaranteeError(_NO_GUARANTEE)
                wanted = _Wanted(recipe.size, batch_size / recipe.size, clip_norm, steps)
                if dataset is None:
                    budget = _asked(accounting, wanted, epsilon, delta, console, noise_multiplier)
                else:
                    budget = _reserved(accounting, wanted, dataset, console, noise_multiplier)
            data, public = recipe.data(data_dir, device)
            model, private = recipe.make(budget.plan, data, public, device)
            if kept is not None:
                model.load_state_dict(kept.model)
                private.load_state_dict(kept.kept)
            saving = _Saving(recipe, budget, model, private, output, checkpoint_every)
            with _progress(console, steps) as shown, _signals() as stop, saving.kept_if_it_stops():
                report = saving.reporting(shown)
                result = training.train(model, data, private, budget, report=report, stop=stop)
            _keep_model(output, model)  # before anything else may fail
            if isinstance(budget, LedgerBudget):
                certificate = accounting.certificate(accounting.commit(budget.reservation))
                (output / CHECKPOINT).unlink(missing_ok=True)
    except TrainingStoppedError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        Console(stderr=True, highlight=False).print(f"[bold red]Stopped:[/] {said}")
        raise typer.Exit(error.exit_code) from None
    _keep_claims(output, result, certificate, proven=recipe.proven)
    of_ledger = isinstance(budget, LedgerBudget)
    _tell(console, result, output, of_ledger=of_ledger, proven=recipe.proven)
    if result.stopped_by_request:
        raise typer.Exit(_STOPPED_BY_SIGNAL)


@app.command(epilog="Exit codes: 0 done, 2 wrong input, 4 no service.")
def compare(
    optimizers: Annotated[
        list[str] | None,
        typer.Argument(help="NAME or NAME:STATE, such as adadp:public; a few by default."),
    ] = None,
    service: ServiceOption = "http://127.0.0.1:8000",
    epsilon: EpsilonOption = 2.0,
    delta: DeltaOption = 1e-5,
    steps: StepsOption = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each; means are shown.")] = 1,
    batch_size: BatchOption = 600,
    clip_norm: ClipOption = 1.0,
    hidden: HiddenOption = 1000,
    public_examples: PublicOption = 600,
    device: DeviceOption = "cpu",
    data_name: NameOption = "mnist",
    data_dir: DataOption = Path("data"),
    output: Annotated[Path, typer.Option(help="The plot.")] = Path("runs/compare.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train several optimizers at one budget: a table, and a plot against ε and epochs."""
    console = Console(highlight=False, stderr=as_json)
    names = optimizers or ["dp_sgd", "dp_adam", "adadp", "pi_rmsprop", "adadps"]
    curves = []
    try:
        recipes = {
            name: _recipe(data_name, *_parted(name), None, None, hidden, public_examples)
            for name in names
        }
        with AccountingService(service) as accounting:
            for name, recipe in recipes.items():
                wanted = _Wanted(recipe.size, batch_size / recipe.size, clip_norm, steps)
                budget = _asked(accounting, wanted, epsilon, delta, console)
                data, public = recipe.data(data_dir, device)
                make = partial(recipe.make, budget.plan, data, public, device)
                curves.append(run_all(name, make, data, budget, steps, seeds, proven=recipe.proven))
                console.print(f"{name}: {curves[-1].final:.2%}")
        draw(curves, output)
    except TrainingStoppedError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]Stopped:[/] {error}")
        raise typer.Exit(error.exit_code) from None
    if as_json:
        print(json.dumps([curve.document for curve in curves]))
        return
    _table(curves, epsilon, delta, console)
    console.print(f"The plot is in {output}")


def _parted(name: str) -> tuple[str, str | None]:
    known, _, state = name.partition(":")
    return known, state or None


@dataclass(frozen=True)
class _Recipe:
    """Data, a model and its optimizer, before the noise is known."""

    data_name: str
    optimizer: str
    state: str
    options: dict[str, Any]
    hidden: int
    public_examples: int

    @classmethod
    def of(cls, kept: Checkpoint) -> _Recipe:
        return cls(
            kept.data, kept.optimizer, kept.state, kept.options, kept.hidden, kept.public_examples
        )

    @property
    def proven(self) -> bool:
        return self.state != "raw"

    @property
    def size(self) -> int:
        """Private examples."""
        return train_size(self.data_name) - (self.public_examples if self.state == "public" else 0)

    def data(self, folder: Path, device: str) -> tuple[Dataset, Public]:
        """A data set, and the part of it that counts as public if the state asks for one."""
        found = check(load(self.data_name, folder), train_size(self.data_name))
        data = found.to(torch.device(device))
        return data.without_public(self.public_examples) if self.state == "public" else (data, None)

    def make(
        self, plan: Plan, data: Dataset, public: Public, device: str
    ) -> tuple[torch.nn.Module, PrivateOptimizer]:
        model = training.mlp(data.inputs, self.hidden, data.classes).to(device)
        made = make_optimizer(
            self.optimizer, model, plan, state=self.state, public=public, **self.options
        )
        return model, made

    def checkpoint(
        self, budget: LedgerBudget, model: torch.nn.Module, optimizer: PrivateOptimizer, steps: int
    ) -> Checkpoint:
        return Checkpoint(
            self.data_name, budget.dataset, budget.reservation.identifier, budget.delta,
            budget.plan, self.optimizer, self.state, self.options, self.hidden,
            self.public_examples, steps, model.state_dict(), optimizer.state_dict(),
        )  # fmt: skip


def _recipe(
    data_name: str,
    name: str,
    state: str | None,
    learning_rate: float | None,
    momentum: float | None,
    hidden: int,
    public_examples: int,
    *,
    box: bool = False,
) -> _Recipe:
    """What was asked for, or a sentence about what there is."""
    entry = OPTIMIZERS.get(name)
    if entry is None:
        known = ", ".join(OPTIMIZERS)
        raise typer.BadParameter(f"there is no optimizer {name!r}; there are {known}")
    if state is not None and state not in entry.states:
        raise typer.BadParameter(f"{name} has no state {state!r}; it has {', '.join(entry.states)}")
    if momentum is not None and name != "dp_sgd":
        raise typer.BadParameter(f"--momentum is of dp_sgd, not of {name}")
    if box and not entry.local:
        raise typer.BadParameter(f"--box is of adadp and adan, not of {name}")
    options: dict[str, Any] = {
        "learning_rate": entry.learning_rate if learning_rate is None else learning_rate
    }
    if name == "dp_sgd":
        options["momentum"] = 0.9 if momentum is None else momentum
    if box:
        options["box"] = True
    return _Recipe(data_name, name, state or entry.states[0], options, hidden, public_examples)


def _resumed(accounting: AccountingService, kept: Checkpoint, console: Console) -> LedgerBudget:
    """What is left of a run that died: the steps that were never granted."""
    held = accounting.reservation(kept.reservation)
    if held.state != "open":
        raise BudgetExhaustedError(
            f"reservation {held.identifier} is {held.state}: nothing is left of it to resume"
        )
    steps = held.steps_reserved
    if dict(held.mechanism) != kept.plan.mechanism(steps):
        raise DataError(
            f"the checkpoint's plan is not what reservation {held.identifier} holds budget for"
        )
    console.print(
        f"Resuming {held.identifier} from a checkpoint after {kept.steps} steps; "
        f"{held.steps_granted} of {held.steps_reserved} were granted and stay spent"
    )
    return LedgerBudget(accounting, kept.plan, kept.dataset, kept.delta, held)


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Whether the run was asked to end, by Ctrl-C or SIGTERM; it ends between two steps."""
    asked: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda number, _: asked.append(number)) for kind in kinds]
    try:
        yield lambda: bool(asked)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


@dataclass(frozen=True)
class _Saving:
    """What is written while a run lasts."""

    recipe: _Recipe
    budget: Budget | LedgerBudget
    model: torch.nn.Module
    optimizer: PrivateOptimizer
    output: Path
    every: int

    def reporting(
        self, shown: Callable[[training.Progress], None]
    ) -> Callable[[training.Progress], None]:
        """The same reports, with a checkpoint now and then."""

        def report(now: training.Progress) -> None:
            shown(now)
            if now.step % self.every == 0:
                self._checkpoint(now.step)

        return report

    def _checkpoint(self, steps: int) -> None:
        if isinstance(self.budget, LedgerBudget):
            kept = self.recipe.checkpoint(self.budget, self.model, self.optimizer, steps)
            kept.write(self.output)

    @contextmanager
    def kept_if_it_stops(self) -> Iterator[None]:
        """What was trained before the service went away is charged already, so it is kept."""
        try:
            yield
        except ServiceError as error:
            _keep_model(self.output, self.model)
            if isinstance(self.budget, LedgerBudget):
                self._checkpoint(self.budget.reservation.steps_granted)
                error.add_note("the run can go on with --resume when there is a service")
            raise


def _keep_model(output: Path, model: torch.nn.Module) -> None:
    output.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), output / "model.pt")


def _keep_claims(output: Path, result: training.Result, certificate: Any, *, proven: bool) -> None:
    """What may be said of the model."""
    document: Any = result.guarantee.document
    if not proven:
        document = {
            "guarantee": "none",
            "reason": _NO_GUARANTEE.split(".")[0],
            "steps": result.steps,
        }
    (output / "privacy.json").write_text(json.dumps(document, indent=2) + "\n")
    if certificate is not None:
        (output / "certificate.json").write_text(json.dumps(certificate, indent=2) + "\n")


def _tell(
    console: Console, result: training.Result, output: Path, *, of_ledger: bool, proven: bool
) -> None:
    why = "all steps are done"
    if result.stopped_by_request:
        why = "it was asked to end"
    elif result.stopped_by_budget:
        why = "the plan is done" if of_ledger else "the budget allows no further step"
    console.print(f"Stopped after {result.steps} steps: {why}.")
    console.print(f"Test accuracy [bold]{result.test_score:.2%}[/]")
    claim = result.guarantee
    if not proven:
        console.print(f"[bold red]No guarantee[/]: {_NO_GUARANTEE.split('.')[0]}.")
        return
    console.print(
        f"Guarantee: ε = [bold]{claim.epsilon:.6f}[/] at δ = {claim.delta:g}, {claim.status} by "
        f"{claim.method}; written with the model to {output}/"
    )


def _table(curves: list[Curve], epsilon: float, delta: float, console: Console) -> None:
    table = Table(title=f"Test accuracy at ε = {epsilon:g}, δ = {delta:g}", title_justify="left")
    for column in ("optimizer", "guarantee", "accuracy", "deviation"):
        table.add_column(
            column, justify="left" if column in ("optimizer", "guarantee") else "right"
        )
    for curve in sorted(curves, key=lambda each: -each.final):
        claim = "as stated" if curve.proven else "none"
        table.add_row(curve.name, claim, f"{curve.final:.2%}", f"{curve.deviation:.2%}")
    console.print(table)


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
    accounting: AccountingService,
    wanted: _Wanted,
    epsilon: float,
    delta: float,
    console: Console,
    noise: float | None = None,
) -> Budget:
    """A budget of this run's own."""
    if noise is None:
        noise = accounting.noise_multiplier(
            sample_rate=wanted.sample_rate, steps=wanted.steps, epsilon=epsilon, delta=delta
        )
        console.print(
            f"Budget ε = {epsilon:g} at δ = {delta:g}: {wanted.steps} steps at q = "
            f"{wanted.sample_rate:g} need noise multiplier σ = {noise:.4f}"
        )
    return Budget(accounting, wanted.plan(noise), epsilon, delta)


def _reserved(
    accounting: AccountingService,
    wanted: _Wanted,
    dataset: str,
    console: Console,
    noise: float | None = None,
) -> LedgerBudget:
    """A dataset's budget: quote, then reserve the whole plan, before any data is touched.

    Raises:
        BudgetExhaustedError: the plan does not fit; the message says what would.
    """
    budget = accounting.dataset(dataset).get("budget") or {}
    if noise is None:
        noise = accounting.affordable_noise(dataset, wanted.plan(1.0).mechanism(wanted.steps))
    plan = wanted.plan(noise)
    quote = accounting.quote(dataset, plan.mechanism(wanted.steps))
    if not quote.fits:
        least = quote.noise_multiplier
        raise BudgetExhaustedError(
            f"{wanted.steps} steps with σ = {noise:g} do not fit what is left of the budget of "
            f"{dataset!r}. {quote.steps or 'No'} such steps would"
            + ("" if least is None else f"; all of them would with σ = {least:.4g}")
        )
    reservation = accounting.reserve(dataset, plan.mechanism(wanted.steps), "accountant-train")
    console.print(
        f"Dataset {dataset!r} allows {wanted.steps} steps at q = {wanted.sample_rate:g} with noise "
        f"multiplier σ = {noise:.4f}: reserved as {reservation.identifier}"
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
