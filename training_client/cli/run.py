"""`accountant-train run`: one private run, from the quote to the certificate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from training_client import train as training
from training_client.budget import Budget, LedgerBudget, NoBudget
from training_client.checkpoint import Checkpoint, understood
from training_client.claims import CERTIFICATE, PCA_CERTIFICATE, PRIVACY, clear, write_json
from training_client.cli import options as take
from training_client.cli.app import EXITS, app, stopping
from training_client.cli.folders import held, require_free, require_writable
from training_client.cli.given import OF_ITS_OWN, given, require_same
from training_client.cli.progress import in_words, interrupted, shown, signals
from training_client.digits import up
from training_client.errors import DataError, NoGuaranteeError
from training_client.keeping import Keeping
from training_client.optimizers import PUBLIC_BATCH_SIZE
from training_client.pca import PrivatePca, Projection
from training_client.preflight import Say, Wanted, asked, reserved, resumed
from training_client.recipe import Ingredients, Recipe, choose
from training_client.service import AccountingService

_STOPPED_BY_SIGNAL = 130


@dataclass(frozen=True)
class _Approved:
    """A run that may begin.

    Attributes:
        recipe: what is trained.
        budget: that allows its steps.
        kept: what it goes on from, if it began before.
    """

    recipe: Recipe
    budget: Budget | LedgerBudget | NoBudget
    kept: Checkpoint | None = None


@app.command(
    epilog=f"{EXITS}, 130 stopped by a signal (what was trained is accounted for and kept). "
    "Example: accountant-train run --data adult --model logistic --epsilon 1 --steps 500"
)
def run(
    context: typer.Context,
    service: take.ServiceOrNobody = take.SERVICE,
    dataset: take.LedgerDataset = None,
    api_key: take.ApiKey = None,
    epsilon: take.Epsilon = 2.0,
    delta: take.Delta = 1e-5,
    steps: take.Steps = 1000,
    noise_multiplier: take.Noise = None,
    optimizer: take.Optimizer = "dp_sgd",
    state: take.State = None,
    box: take.Box = False,
    own_squares: take.OwnSquares = False,
    no_guarantee: take.NoGuarantee = False,
    batch_size: take.Batch = 600,
    physical_batch_size: take.PhysicalBatch = None,
    clip_norm: take.Clip = 1.0,
    learning_rate: take.LearningRate = None,
    momentum: take.Momentum = None,
    model: take.Model = "mlp",
    hidden: take.Hidden = 1000,
    warm_start: take.WarmStart = 0,
    side_information: take.SideInformation = False,
    device: take.Device = "cpu",
    data_name: take.DataName = "mnist",
    data_dir: take.DataDir = Path("data"),
    size: take.Size = None,
    public_examples: take.PublicExamples = 600,
    public_batch_size: take.PublicBatch = PUBLIC_BATCH_SIZE,
    pca: take.Pca = None,
    pca_noise: take.PcaNoise = 16.0,
    output: take.Output = None,
    checkpoint_every: take.CheckpointEvery = 50,
    resume: take.Resume = False,
    as_json: take.AsJson = False,
) -> None:
    """Train until the privacy budget is used up.

    The plan is quoted before any data is touched, every block of steps is
    allowed before it is made, and without an answer nothing is trained.
    """
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    folder = output or Path("runs") / data_name
    with stopping(), interrupted(), AccountingService(service, api_key=api_key) as accounting:
        require_writable(folder)
        require_free(folder)
        if resume:
            approved = _resumed(accounting, folder, given(context), console.print)
        else:
            Checkpoint.require_none(folder)
            recipe = choose(
                data_name, optimizer, state, size=size, learning_rate=learning_rate,
                momentum=momentum, box=box, own_squares=own_squares, model=model, hidden=hidden,
                physical_batch_size=physical_batch_size, public_examples=public_examples,
                public_batch_size=public_batch_size, warm_start=warm_start,
                side_information=side_information,
                pca=None if pca is None else PrivatePca(pca, pca_noise),
            )  # fmt: skip
            wanted = Wanted.of(recipe, batch_size, clip_norm, steps)
            said = bool(given(context).keys() & {"epsilon", "delta"})
            spending = _Spending(service, dataset, epsilon, delta, noise_multiplier, said)
            budget = (
                _without_claim(accounting, recipe, wanted, spending, console.print)
                if no_guarantee
                else _allowed(accounting, recipe, wanted, spending, console.print)
            )
            approved = _Approved(recipe, budget)
        take.say_declared_public(approved.recipe.declared_public, console.print)
        with ExitStack() as until_settled:
            with _given_back(approved):
                found = _rehearsed(approved, folder, data_dir, device)
                until_settled.enter_context(held(folder))
                keeping, known = _begun(approved, found, folder, checkpoint_every, console.print)
            planned = _planned(approved.budget, steps)
            result = _trained(keeping, known, console, planned, accounting)
            keeping.settle(result)
    _tell(console, keeping, result, planned)
    if as_json:
        print(json.dumps(_document(keeping, result, planned)))
    if result.stopped_by_request:
        raise typer.Exit(_STOPPED_BY_SIGNAL)


@dataclass(frozen=True)
class _Spending:
    """What a run may spend, and who says so.

    Attributes:
        service: its address, or nobody.
        dataset: whose budget in the ledger, if any.
        epsilon, delta: without a ledger.
        noise: σ, if it is not to be found.
        said: whether ε or δ was asked for.
    """

    service: str
    dataset: str | None
    epsilon: float
    delta: float
    noise: float | None
    said: bool


def _allowed(
    accounting: AccountingService, recipe: Recipe, wanted: Wanted, of: _Spending, say: Say
) -> Budget | LedgerBudget:
    """A budget that covers the run, with a guarantee at its end."""
    why_not = _why_not(recipe, of)
    if why_not is not None:
        raise NoGuaranteeError(
            f"{why_not}. Add --no-guarantee to train it all the same, without a ledger"
        )
    if of.dataset is not None:
        if of.said:
            raise DataError(OF_ITS_OWN)
        return reserved(accounting, wanted, of.dataset, say, of.noise)
    return asked(accounting, wanted, of.epsilon, of.delta, say, of.noise)


def _without_claim(
    accounting: AccountingService, recipe: Recipe, wanted: Wanted, of: _Spending, say: Say
) -> Budget | NoBudget:
    """Steps of which nothing is claimed; a budget all the same, if nothing speaks against one."""
    if of.dataset is not None:
        raise NoGuaranteeError("a ledger charges no run without a guarantee: leave out --dataset")
    why_not = _why_not(recipe, of)
    if of.service == take.NOBODY and of.noise is None:
        raise NoGuaranteeError("nobody is asked how much noise it takes: say --noise-multiplier")
    if of.service == take.NOBODY and of.said:
        raise DataError("nobody is asked what a run spends: leave out --epsilon and --delta")
    if of.service == take.NOBODY:
        return NoBudget(wanted.plan(of.noise or 0.0), wanted.steps, why_not or "")
    budget = asked(accounting, wanted, of.epsilon, of.delta, say, of.noise)
    return budget if why_not is None else NoBudget(budget.plan, wanted.steps, why_not)


def _why_not(recipe: Recipe, of: _Spending) -> str | None:
    """Why there can be no guarantee."""
    nobody = "no accounting service was asked" if of.service == take.NOBODY else None
    return recipe.objection or nobody


def _resumed(
    accounting: AccountingService, folder: Path, asked: dict[str, Any], say: Say
) -> _Approved:
    kept = Checkpoint.read(folder)
    recipe = Recipe.of(kept.recipe)
    if recipe.objection is not None:
        raise NoGuaranteeError(recipe.objection)
    said: list[str] = []
    budget = resumed(accounting, kept, recipe.before, said.append)
    require_same(asked, recipe, kept, budget.reservation.steps_reserved)
    for each in said:
        say(each)
    return _Approved(recipe, budget, kept)


def _rehearsed(approved: _Approved, folder: Path, data_dir: Path, device: str) -> Ingredients:
    """The data, of which model and optimizer can be made."""
    found = approved.recipe.ingredients(data_dir, device)
    with understood(folder) if approved.kept is not None else nullcontext():
        approved.recipe.rehearse(approved.budget.plan, found)
    return found


def _begun(
    approved: _Approved, found: Ingredients, folder: Path, every: int, say: Say
) -> tuple[Keeping, Ingredients]:
    """The run before its next step: projection, model and optimizer."""
    recipe, kept = approved.recipe, approved.kept
    if kept is None:
        Checkpoint.require_none(folder)  # again: another run may have died here since
        if (earlier := clear(folder)) is not None:
            say(f"What an earlier run was charged for is in {escape(str(earlier))}")
    projection = _projection(approved, found, folder)
    known = found.projected(projection).aimed(recipe.objective)
    model, optimizer = recipe.make(approved.budget, known)
    if kept is not None:
        with understood(folder):
            model.load_state_dict(kept.model)
            optimizer.load_state_dict(kept.kept)
    keeping = Keeping(recipe, approved.budget, model, optimizer, projection, folder, every)
    if kept is None:
        keeping.checkpoint(0)  # what was released so far is never released again
    return keeping, known


@contextmanager
def _given_back(approved: _Approved) -> Iterator[None]:
    """A new run that cannot begin gives back what is held for it."""
    try:
        yield
    except BaseException:  # an interrupt too: nothing could resume it yet
        if approved.kept is None:
            approved.budget.give_up()
        raise


def _projection(approved: _Approved, known: Ingredients, folder: Path) -> Projection | None:
    """The directions that were released before, or new ones, charged before they are."""
    pca, kept = approved.recipe.pca, approved.kept
    if kept is not None:
        device = known.private.train_examples.device
        return None if kept.directions is None else Projection(kept.directions.to(device))
    if pca is None:
        return None
    for certificate in approved.budget.begin():
        write_json(folder / PCA_CERTIFICATE, certificate)
    return pca.fit(known.private.train_examples)


def _planned(budget: Budget | LedgerBudget | NoBudget, steps: int) -> int:
    """The steps of the whole run, whatever was asked for when it is resumed."""
    return budget.reservation.steps_reserved if isinstance(budget, LedgerBudget) else steps


def _trained(
    keeping: Keeping,
    known: Ingredients,
    console: Console,
    steps: int,
    accounting: AccountingService,
) -> training.Result:
    """Train, and keep the model before anything else may fail."""
    with (
        shown(console, steps, "step") as bar,
        signals() as stop,
        accounting.giving_up_when(stop),
        keeping.kept_if_it_stops(),
    ):
        result = training.train(
            keeping.model,
            known.private,
            keeping.optimizer,
            objective=keeping.recipe.objective,
            steps_max=steps,
            report=keeping.reporting(lambda now: bar(now.step, in_words(now))),
            stop=stop,
        )
    keeping.keep_model()
    return result


def _tell(console: Console, keeping: Keeping, result: training.Result, planned: int) -> None:
    made = (
        f"{result.steps} steps" if result.steps == planned else f"{result.steps} of {planned} steps"
    )
    console.print(f"Stopped after {made}: {_why(keeping, result)}.")
    shown_score = f"{result.test_score:.4g}"
    if result.test_accuracy is not None:
        shown_score = f"{result.test_accuracy:.2%}"
    console.print(f"Test {result.measure} [bold]{shown_score}[/]")
    claim = result.guarantee
    if isinstance(keeping.budget, NoBudget):
        console.print(f"[bold red]No guarantee[/]: {keeping.budget.reason}.")
        return
    console.print(
        f"Guarantee: ε = [bold]{up(claim.epsilon)}[/] at δ = {claim.delta:g}, {claim.status} by "
        f"{claim.method}; written with the model to {escape(str(keeping.folder))}/"
    )
    reserved = claim.document["steps_planned"]
    if result.steps < reserved:
        console.print(
            f"It is of all {reserved} steps planned: where a run ends may depend on what it showed."
        )


def _why(keeping: Keeping, result: training.Result) -> str:
    if result.stopped_by_request:
        return "it was asked to end"
    if not result.stopped_by_budget:
        return "all steps are done"
    held_for = "reservation" if isinstance(keeping.budget, LedgerBudget) else "budget"
    return f"the {held_for} allows no further step"


def _document(keeping: Keeping, result: training.Result, planned: int) -> dict[str, Any]:
    """The result for programs."""
    certificate = keeping.folder / CERTIFICATE
    return {
        "steps": result.steps,
        "steps_planned": planned,
        "stopped": _why(keeping, result),
        "measure": result.measure,
        "score": result.test_score,
        "accuracy": result.test_accuracy,
        "guarantee": json.loads((keeping.folder / PRIVACY).read_text()),
        "model": str(keeping.folder / "model.pt"),
        "privacy": str(keeping.folder / PRIVACY),
        "certificate": str(certificate) if isinstance(keeping.budget, LedgerBudget) else None,
    }
