"""`accountant-train compare`: several optimizers at one budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from training_client.client import AccountingService
from training_client.errors import NoGuaranteeError
from training_client.lab.cli.app import (
    EXITS,
    CommandOfNames,
    announce_public_data,
    command,
    exit_on_error,
    make_console,
)
from training_client.lab.cli.lists import print_table
from training_client.lab.cli.options import RunOptions, expand_options
from training_client.lab.cli.output_folders import require_writable
from training_client.lab.cli.progress import Report, describe_progress, progress_bar
from training_client.lab.compare import LearningCurve, import_figure_class, plot, train_seeds
from training_client.lab.number_format import format_score, format_upper_bound
from training_client.lab.plan_run import plan_budget
from training_client.lab.recipe import Recipe, TrainingData
from training_client.lab.train import Progress

_DEFAULT_OPTIMIZERS: Final = ("dp_sgd", "dp_adam", "adadp", "pi_rmsprop", "adadps")
_OPTIONS: Final = (
    "service", "api_key", "epsilon", "delta", "steps", "batch_size", "sampling",
    "physical_batch_size", "no_guarantee", "clip_norm", "noise_schedule", "clip_schedule",
    "learning_rate_schedule", "model", "hidden", "warm_start", "device",
    "data", "data_dir", "size", "public_examples", "public_batch_size", "pca", "pca_noise",
    "as_json",
)  # fmt: skip


def _check_plot_file(file: Path) -> Path:
    """Return a plot file's path; raise unless its suffix is .png, .svg or .pdf."""
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{file} should end in .png, .svg or .pdf")
    return file


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The command-line options that only the command `compare` has."""

    optimizers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="NAME or NAME:STATE, such as adadp:public; a few by default."
        ),
    ] = None
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each optimizer; their mean is shown.")
    ] = 1
    output: Annotated[
        Path, typer.Option(callback=_check_plot_file, help="The file of the plot.")
    ] = Path("runs/compare.png")


def compare(comparison: ComparisonOptions, options: RunOptions) -> None:
    """Train several optimizers at one budget; print a table, and plot scores against ε."""
    console = make_console(as_json=options.as_json)
    with exit_on_error():
        import_figure_class()  # fail before the training if matplotlib is missing
        require_writable(comparison.output.parent)
        recipes = {
            name: replace(options, optimizer=optimizer, state=state or None).recipe()
            for name in comparison.optimizers or _DEFAULT_OPTIMIZERS
            for optimizer, _, state in [name.partition(":")]
        }
        if not options.no_guarantee:
            _require_guarantees(recipes)
        for declared_public in {recipe.declared_public for recipe in recipes.values()}:
            announce_public_data(declared_public, console)
        with AccountingService(options.service, api_key=options.api_key) as accounting:
            curves = [
                _train_one(accounting, name, recipe, options, comparison.seeds, console)
                for name, recipe in recipes.items()
            ]
        plot(curves, comparison.output, _title(options, comparison.seeds))
    if options.as_json:
        print(json.dumps([curve.document for curve in curves]))
        return
    _print_curves(curves, options, console)
    console.print(
        "Each guarantee covers one run. Together the runs spend more, and no ledger is charged"
    )
    console.print(f"The plot is in {escape(str(comparison.output))}")


command(
    "compare",
    cls=CommandOfNames,
    epilog=f"{EXITS}. Example: accountant-train compare dp_sgd adadp adadp:public --seeds 3",
)(expand_options(compare, only=_OPTIONS))


def _require_guarantees(recipes: dict[str, Recipe]) -> None:
    """Raise if one of the run configurations cannot have a privacy guarantee."""
    for name, recipe in recipes.items():
        if recipe.objection is not None:
            raise NoGuaranteeError(
                f"{name}: {recipe.objection}. Add --no-guarantee to compare it without a guarantee"
            )


def _train_one(
    accounting: AccountingService,
    name: str,
    recipe: Recipe,
    options: RunOptions,
    seeds: int,
    console: Console,
) -> LearningCurve:
    """Plan one optimizer's budget, train with each seed, and print the score."""
    spec = options.run_spec(recipe)
    spec.announce_epochs(console.print)
    budget = plan_budget(accounting, spec, options.epsilon, options.delta, console.print)
    data = _load_data(recipe, options)
    with progress_bar(console, spec.steps * seeds, f"{name}, step") as bar:

        def report(steps_before: int, now: Progress, bar: Report = bar) -> None:
            """Show one seed's progress, counted on from the steps of earlier seeds."""
            bar(steps_before + now.step, describe_progress(now))

        curve = train_seeds(
            name, partial(recipe.build, data=data), data.private, budget, spec.steps, seeds,
            objection=recipe.objection, objective=recipe.objective, report=report,
        )  # fmt: skip
    console.print(f"{name}: {format_score(curve.measure, curve.final)}")
    return curve


def _load_data(recipe: Recipe, options: RunOptions) -> TrainingData:
    """Load the data for one optimizer, projected by its own private PCA if it has one."""
    data = recipe.load_data(options.data_dir, options.device)
    projection = None if recipe.pca is None else recipe.pca.fit(data.private.train_examples)
    return data.project(projection).with_targets(recipe.objective)


def _title(options: RunOptions, seeds: int) -> str:
    """Return a plot title with the settings that all compared runs share."""
    runs = "one run" if seeds == 1 else f"mean of {seeds} runs"
    return (
        f"{options.model} on {options.data}, δ = {format_upper_bound(options.delta)}, "
        f"clip norm {options.clip_norm:g}, {runs}"
    )


def _print_curves(curves: Sequence[LearningCurve], options: RunOptions, console: Console) -> None:
    """Print a table of the optimizers' final scores, the best first."""
    measure = curves[0].measure
    rows = [
        (
            each.name,
            "as stated" if each.proven else "none",
            format_score(measure, each.final),
            "–" if each.deviation is None else format_score(measure, each.deviation),
        )
        for each in sorted(curves, key=lambda each: each.rank)
    ]
    title = f"Test {measure} at ε = {options.epsilon:g}, δ = {format_upper_bound(options.delta)}"
    print_table(title, ("optimizer", "guarantee", measure, "deviation"), rows, console)
