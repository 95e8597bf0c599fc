"""`accountant-train run`: one private run, from the quote to the certificate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from training_client.budget import GRANTS, Budget, NoBudget
from training_client.client import AccountingService
from training_client.errors import DataError, NoGuaranteeError
from training_client.lab.checkpoint import Checkpoint, report_unreadable
from training_client.lab.cli.app import (
    EXITS,
    announce_public_data,
    command,
    exit_on_error,
    make_console,
)
from training_client.lab.cli.explicit_options import (
    NOT_WITH_DATASET,
    explicit_options,
    require_unchanged,
)
from training_client.lab.cli.options import NO_SERVICE, RunOptions, expand_options
from training_client.lab.cli.output_folders import lock_folder, require_unlocked, require_writable
from training_client.lab.cli.progress import (
    catch_signals,
    describe_progress,
    progress_bar,
    sigterm_as_interrupt,
)
from training_client.lab.number_format import format_score, format_upper_bound
from training_client.lab.pca import Projection
from training_client.lab.plan_run import RunSpec, plan_budget, reserve_budget, resume_budget
from training_client.lab.recipe import Recipe, TrainingData
from training_client.lab.run_folder import RunFolder
from training_client.lab.schedules import schedules_of
from training_client.lab.train import Result, train
from training_client.phased_budget import ChargedBudget
from training_client.plan import Plan
from training_client.run_report import (
    CERTIFICATE,
    PCA_CERTIFICATE,
    PRIVACY,
    clear_earlier_run,
    write_json,
)

_STOPPED_BY_SIGNAL = 130


def run(context: typer.Context, options: RunOptions) -> None:
    """Train a model privately until the privacy budget or the steps are used up.

    The plan is quoted before any data is read, the data are checked before
    budget is reserved, every block of steps is allowed before it is made,
    and without an answer nothing is trained.
    """
    console = make_console(as_json=options.as_json)
    folder = options.output or Path("runs") / options.data
    with (
        exit_on_error(),
        sigterm_as_interrupt(),
        AccountingService(options.service, api_key=options.api_key) as accounting,
    ):
        require_writable(folder)
        require_unlocked(folder)
        command = _RunCommand(options, explicit_options(context), accounting, folder, console)
        with ExitStack() as until_finished:
            if options.resume and folder.is_dir():  # another resume must not read the same state
                until_finished.enter_context(lock_folder(folder))
            approved = command.resume() if options.resume else command.start()
            announce_public_data(approved.recipe.declared_public, console)
            with _release_on_failure(approved):
                data = approved.load_data()
                if not options.resume:  # a refused run leaves no folder
                    until_finished.enter_context(lock_folder(folder))
                run_folder, data = command.prepare(approved, data)
            result = command.train(run_folder, data, approved.steps)
            run_folder.finish(result)
    _print_result(console, run_folder, result, approved.steps)
    if options.as_json:
        print(json.dumps(_result_document(run_folder, result, approved.steps)))
    if result.stopped_by_request:
        raise typer.Exit(_STOPPED_BY_SIGNAL)


command(
    "run",
    epilog=f"{EXITS}, 130 stopped by a signal (what was trained is accounted for and kept). "
    "Example: accountant-train run --data adult --model logistic --epsilon 1 --steps 500",
)(expand_options(run))


@dataclass(frozen=True)
class _ApprovedRun:
    """A run with a planned or reserved budget, which may start.

    Attributes:
        recipe: the run's configuration.
        budget: the budget that its steps draw on.
        steps: the number of steps of the whole run.
        load_data: loads the data once; raises if they do not fit the run.
        checkpoint: the state to resume from, if any.
    """

    recipe: Recipe
    budget: Budget | ChargedBudget | NoBudget
    steps: int
    load_data: Callable[[], TrainingData]
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class _RunCommand:
    """One execution of the command `accountant-train run`.

    Attributes:
        options: the options of the command.
        explicit: those that were set on the command line.
        accounting: the accounting service.
        folder: the output folder.
        console: where messages are printed.
    """

    options: RunOptions
    explicit: dict[str, Any]
    accounting: AccountingService
    folder: Path
    console: Console

    def start(self) -> _ApprovedRun:
        """Set up a new run: plan its own budget, or reserve one in the ledger."""
        Checkpoint.require_none(self.folder)
        options, recipe = self.options, self.options.recipe()
        spec = options.run_spec(recipe)
        spec.announce_epochs(self.console.print)
        plan = spec.plan(options.noise_multiplier or 1.0)  # any σ: no model depends on it
        load_data = cache(partial(self._load_data, recipe, plan))
        if options.no_guarantee:
            budget: Budget | ChargedBudget | NoBudget = self._budget_without_claim(recipe, spec)
        else:
            budget = self._budget_with_guarantee(recipe, spec, load_data)
        return _ApprovedRun(recipe, budget, spec.steps, load_data)

    def resume(self) -> _ApprovedRun:
        """Set up the run in the folder's checkpoint, with the rest of its reservation."""
        checkpoint = Checkpoint.read(self.folder)
        recipe = Recipe.from_document(checkpoint.recipe)
        if recipe.objection is not None:
            raise NoGuaranteeError(recipe.objection)
        messages: list[str] = []
        budget = resume_budget(
            self.accounting,
            checkpoint,
            recipe.initial_releases,
            messages.append,
            self.folder / GRANTS,
        )
        require_unchanged(self.explicit, recipe, checkpoint, budget.reserved)
        for message in messages:
            self.console.print(message)
        load_data = partial(self._load_data, recipe, budget.plan)
        return _ApprovedRun(recipe, budget, budget.reserved, load_data, checkpoint)

    def _load_data(self, recipe: Recipe, plan: Plan) -> TrainingData:
        """Load the data; raise if the model cannot be built or trained privately."""
        data = recipe.load_data(self.options.data_dir, self.options.device)
        with report_unreadable(self.folder) if self.options.resume else nullcontext():
            recipe.require_buildable(plan, data)
        return data

    def prepare(self, approved: _ApprovedRun, data: TrainingData) -> tuple[RunFolder, TrainingData]:
        """Make or restore PCA projection, model and optimizer; project the data."""
        recipe, checkpoint = approved.recipe, approved.checkpoint
        if checkpoint is None:
            Checkpoint.require_none(self.folder)  # again: another run may have died here since
            if (earlier := clear_earlier_run(self.folder)) is not None:
                self.console.print(
                    f"Files of an earlier run with a certificate are now in {escape(str(earlier))}"
                )
        projection = self._projection(approved, data)
        data = data.project(projection).with_targets(recipe.objective)
        model, optimizer = recipe.build(approved.budget, data)
        if checkpoint is not None:
            with report_unreadable(self.folder):
                model.load_state_dict(checkpoint.model)
                optimizer.load_state_dict(checkpoint.optimizer_state(optimizer))
        run_folder = RunFolder(
            recipe, approved.budget, model, optimizer, projection, self.folder,
            self.options.checkpoint_every,
        )  # fmt: skip
        if checkpoint is None:
            run_folder.write_checkpoint(0)  # what was released so far is never released again
        return run_folder, data

    def train(self, run_folder: RunFolder, data: TrainingData, steps: int) -> Result:
        """Train the model, and save it before anything else can fail."""
        with (
            progress_bar(self.console, steps, "step") as bar,
            catch_signals() as stop,
            self.accounting.giving_up_when(stop),
            run_folder.save_on_error(),
        ):
            result = train(
                run_folder.model,
                data.private,
                run_folder.optimizer,
                objective=run_folder.recipe.objective,
                steps_max=steps,
                report=run_folder.with_checkpoints(
                    lambda now: bar(now.step, describe_progress(now))
                ),
                stop=stop,
            )
        run_folder.save_model()
        return result

    def _budget_with_guarantee(
        self, recipe: Recipe, spec: RunSpec, check_data: Callable[[], object]
    ) -> Budget | ChargedBudget:
        """Return a ledger reservation if a dataset is named, else a budget of this run alone."""
        objection = self._objection(recipe)
        if objection is not None:
            raise NoGuaranteeError(
                f"{objection}. Add --no-guarantee to train without a guarantee and a ledger"
            )
        options, notify = self.options, self.console.print
        if options.dataset is None:
            return self._planned_budget(spec)
        if self._budget_is_explicit:
            raise DataError(NOT_WITH_DATASET)
        return reserve_budget(
            self.accounting,
            spec,
            options.dataset,
            notify,
            options.noise_multiplier,
            self.folder / GRANTS,
            check_data,
        )

    def _budget_without_claim(self, recipe: Recipe, spec: RunSpec) -> Budget | NoBudget:
        """Return a budget for --no-guarantee; it claims an ε only if a guarantee holds."""
        options, objection = self.options, self._objection(recipe)
        if options.dataset is not None:
            raise NoGuaranteeError(
                "--no-guarantee cannot be used with --dataset: a ledger charges only runs with a "
                "guarantee; leave out --dataset"
            )
        if options.service != NO_SERVICE:
            budget = self._planned_budget(spec)
            return budget if objection is None else NoBudget(budget.plan, spec.steps, objection)
        if options.noise_multiplier is None:
            raise NoGuaranteeError("--service none needs --noise-multiplier")
        if self._budget_is_explicit:
            raise DataError(
                "--epsilon and --delta cannot be used with --service none, which computes no ε"
            )
        return NoBudget(spec.plan(options.noise_multiplier), spec.steps, objection or "")

    def _planned_budget(self, spec: RunSpec) -> Budget:
        """Return a budget with the (ε, δ) of the options, without a ledger."""
        options, notify = self.options, self.console.print
        return plan_budget(
            self.accounting, spec, options.epsilon, options.delta, notify, options.noise_multiplier
        )

    def _objection(self, recipe: Recipe) -> str | None:
        """Return why the run can have no privacy guarantee; None if it can."""
        no_service = self.options.service == NO_SERVICE
        return recipe.objection or ("no accounting service was asked" if no_service else None)

    @property
    def _budget_is_explicit(self) -> bool:
        """Return whether an option that sets the budget was given on the command line."""
        return bool(self.explicit.keys() & {"epsilon", "delta"})

    def _projection(self, approved: _ApprovedRun, data: TrainingData) -> Projection | None:
        """Return the resumed run's PCA projection, or spend budget and release a new one."""
        pca, checkpoint = approved.recipe.pca, approved.checkpoint
        if checkpoint is not None:
            if checkpoint.directions is None:
                return None
            return Projection(checkpoint.directions.to(data.private.train_examples.device))
        if pca is None:
            return None
        for certificate in approved.budget.begin():
            write_json(self.folder / PCA_CERTIFICATE, certificate)
        return pca.fit(data.private.train_examples)


@contextmanager
def _release_on_failure(approved: _ApprovedRun) -> Iterator[None]:
    """Context manager: release a new run's reservations if an exception is raised."""
    try:
        yield
    except BaseException:  # an interrupt too: there is no checkpoint to resume from yet
        if approved.checkpoint is None:
            approved.budget.give_up()
        raise


def _print_result(console: Console, run_folder: RunFolder, result: Result, planned: int) -> None:
    """Print the run's score, its guarantee and the files it wrote."""
    steps = str(result.steps) if result.steps == planned else f"{result.steps} of {planned}"
    console.print(f"Stopped after {steps} steps: {_stop_reason(run_folder, result)}.")
    console.print(
        f"Test {result.measure} [bold]{format_score(result.measure, result.test_score)}[/]"
    )
    if isinstance(run_folder.budget, NoBudget):
        console.print(f"[bold red]No guarantee[/]: {run_folder.budget.reason}.")
        return
    claim = result.guarantee
    console.print(
        f"Guarantee: ε = [bold]{format_upper_bound(claim.epsilon)}[/] "
        f"at δ = {format_upper_bound(claim.delta)}, "
        f"{claim.status} by {claim.method}; written with the model to "
        f"{escape(str(run_folder.folder))}/"
    )
    claimed = claim.document["steps_planned"]
    if result.steps < claimed:
        console.print(
            f"It covers all {claimed} steps planned, because the end of a run may depend on its "
            "results."
        )


def _stop_reason(run_folder: RunFolder, result: Result) -> str:
    """Return as text why training ended."""
    if result.stopped_by_request:
        return "it was asked to end"
    if not result.stopped_by_budget:
        return "all steps are done"
    source = "reservation" if isinstance(run_folder.budget, ChargedBudget) else "budget"
    return f"the {source} allows no further step"


def _result_document(run_folder: RunFolder, result: Result, planned: int) -> dict[str, Any]:
    """Return the run's result as a JSON document."""
    folder = run_folder.folder
    has_certificate = isinstance(run_folder.budget, ChargedBudget)
    return {
        "steps": result.steps,
        "steps_planned": planned,
        "stopped": _stop_reason(run_folder, result),
        "schedules": schedules_of(run_folder.budget.plan),
        "measure": result.measure,
        "score": result.test_score,
        "accuracy": result.test_accuracy,
        "guarantee": json.loads((folder / PRIVACY).read_text()),
        "model": str(folder / "model.pt"),
        "privacy": str(folder / PRIVACY),
        "certificate": str(folder / CERTIFICATE) if has_certificate else None,
    }
