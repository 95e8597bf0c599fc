"""`accountant-train compare`: several optimizers at one budget."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from training_client.cli import options as take
from training_client.cli.app import EXITS, app, stopping
from training_client.cli.folders import require_writable
from training_client.cli.listing import show
from training_client.cli.progress import Report, in_words, shown
from training_client.compare import Curve, draw, figure_class, run_all
from training_client.errors import NoGuaranteeError
from training_client.optimizers import PUBLIC_BATCH_SIZE
from training_client.pca import PrivatePca
from training_client.preflight import Wanted, asked
from training_client.recipe import Ingredients, Recipe, choose
from training_client.service import AccountingService
from training_client.train import Progress

_USUAL = ("dp_sgd", "dp_adam", "adadp", "pi_rmsprop", "adadps")


@app.command(
    epilog=f"{EXITS}. Example: accountant-train compare dp_sgd adadp adadp:public --seeds 3"
)
def compare(
    optimizers: Annotated[
        list[str] | None,
        typer.Argument(help="NAME or NAME:STATE, such as adadp:public; a few by default."),
    ] = None,
    service: take.Service = take.SERVICE,
    api_key: take.ApiKey = None,
    epsilon: take.Epsilon = 2.0,
    delta: take.Delta = 1e-5,
    steps: take.Steps = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each; means are shown.")] = 1,
    batch_size: take.Batch = 600,
    physical_batch_size: take.PhysicalBatch = None,
    no_guarantee: take.NoGuarantee = False,
    clip_norm: take.Clip = 1.0,
    model: take.Model = "mlp",
    hidden: take.Hidden = 1000,
    warm_start: take.WarmStart = 0,
    device: take.Device = "cpu",
    data_name: take.DataName = "mnist",
    data_dir: take.DataDir = Path("data"),
    size: take.Size = None,
    public_examples: take.PublicExamples = 600,
    public_batch_size: take.PublicBatch = PUBLIC_BATCH_SIZE,
    pca: take.Pca = None,
    pca_noise: take.PcaNoise = 16.0,
    output: Annotated[Path, typer.Option(callback=take.a_picture, help="The plot.")] = Path(
        "runs/compare.png"
    ),
    as_json: take.AsJson = False,
) -> None:
    """Train several optimizers at one budget: a table, and a plot against ε and epochs."""
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    curves = []
    with stopping():
        figure_class()  # or say so before the training
        require_writable(output.parent)
        projected = None if pca is None else PrivatePca(pca, pca_noise)
        recipes = {
            name: choose(
                data_name, *_parted(name), size=size, model=model, hidden=hidden,
                physical_batch_size=physical_batch_size, public_examples=public_examples,
                public_batch_size=public_batch_size, warm_start=warm_start, pca=projected,
            )
            for name in optimizers or _USUAL
        }  # fmt: skip
        if not no_guarantee:
            _require_guarantees(recipes)
        for public in {recipe.declared_public for recipe in recipes.values()}:
            take.say_declared_public(public, console.print)
        with AccountingService(service, api_key=api_key) as accounting:
            for name, recipe in recipes.items():
                wanted = Wanted.of(recipe, batch_size, clip_norm, steps)
                budget = asked(accounting, wanted, epsilon, delta, console.print)
                known = _known(recipe, data_dir, device)
                make = partial(recipe.make, known=known)
                with shown(console, steps * seeds, f"{name}, step") as bar:

                    def report(before: int, now: Progress, bar: Report = bar) -> None:
                        bar(before + now.step, in_words(now))

                    curves.append(
                        run_all(
                            name, make, known.private, budget, steps, seeds,
                            objection=recipe.objection, objective=recipe.objective, report=report,
                        )
                    )  # fmt: skip
                console.print(f"{name}: {_shown(curves[-1], curves[-1].final)}")
        runs = "one run" if seeds == 1 else f"mean of {seeds} runs"
        title = f"{model} on {data_name}, δ = {delta:g}, clip norm {clip_norm:g}, {runs}"
        draw(curves, output, title)
    if as_json:
        print(json.dumps([curve.document for curve in curves]))
        return
    _table(curves, epsilon, delta, console)
    console.print(
        "Each run has this guarantee alone: together they spend more, and none is charged"
    )
    console.print(f"The plot is in {escape(str(output))}")


def _require_guarantees(recipes: dict[str, Recipe]) -> None:
    for name, recipe in recipes.items():
        if recipe.objection is not None:
            raise NoGuaranteeError(
                f"{name}: {recipe.objection}. Add --no-guarantee to compare it all the same"
            )


def _known(recipe: Recipe, data_dir: Path, device: str) -> Ingredients:
    """The data, projected by a release of this optimizer's own: each is compared at one budget."""
    found = recipe.ingredients(data_dir, device)
    pca = recipe.pca
    projection = None if pca is None else pca.fit(found.private.train_examples)
    return found.projected(projection).aimed(recipe.objective)


def _parted(name: str) -> tuple[str, str | None]:
    known, _, state = name.partition(":")
    return known, state or None


def _shown(curve: Curve, value: float) -> str:
    return f"{value:.2%}" if curve.measure == "accuracy" else f"{value:.4g}"


def _table(curves: list[Curve], epsilon: float, delta: float, console: Console) -> None:
    measure = curves[0].measure
    rows = [
        (
            each.name,
            "as stated" if each.proven else "none",
            _shown(each, each.final),
            "–" if each.deviation is None else _shown(each, each.deviation),
        )
        for each in sorted(curves, key=lambda each: each.rank)
    ]
    title = f"Test {measure} at ε = {epsilon:g}, δ = {delta:g}"
    show(title, ("optimizer", "guarantee", measure, "deviation"), rows, console)
