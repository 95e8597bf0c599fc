"""Options that were asked for, where they could be passed over."""

from __future__ import annotations

from typing import Any, Final

import typer

from training_client.checkpoint import Checkpoint
from training_client.errors import DataError
from training_client.optimizers import PUBLIC_BATCH_SIZE
from training_client.recipe import Recipe

OF_ITS_OWN: Final = (
    "--epsilon and --delta are of runs without a ledger: with --dataset the budget is the "
    "dataset's, and --noise-multiplier says how much of it a run takes"
)


def given(context: typer.Context) -> dict[str, Any]:
    """Those that were asked for, not those that are so by default; by their names on the line."""
    found = {}
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            found[option.opts[0].strip("-").replace("-", "_")] = context.params[option.name or ""]
    return found


def require_same(asked: dict[str, Any], recipe: Recipe, kept: Checkpoint, steps: int) -> None:
    """Return if a run that goes on is asked to do so as it began.

    Args:
        asked: what `given` gave.
        recipe: of the run.
        kept: of it.
        steps: that it holds budget for.

    Raises:
        DataError: it is not; where things lie and who is asked may change.
    """
    if asked.keys() & {"epsilon", "delta"}:
        raise DataError(OF_ITS_OWN)
    before = _as_before(recipe, kept, steps)
    other = [name for name, value in asked.items() if before.get(name, value) != value]
    if other:
        said = ", ".join(f"--{name.replace('_', '-')} {before[name]}" for name in other)
        raise DataError(
            f"a run goes on as it holds budget for, here {said}: leave out what is to be otherwise"
        )


def _as_before(recipe: Recipe, kept: Checkpoint, steps: int) -> dict[str, Any]:
    """The options that a run was begun with."""
    plan, options, pca = kept.plan, recipe.options, recipe.pca
    return {
        "dataset": kept.dataset,
        "steps": steps,
        "noise_multiplier": plan.noise_multiplier,
        "batch_size": round(plan.expected_batch_size),
        "clip_norm": plan.clip_norm,
        "optimizer": recipe.optimizer,
        "state": recipe.state,
        "model": recipe.model,
        "hidden": recipe.hidden,
        "data": recipe.data,
        "size": recipe.size,
        "public_examples": recipe.public_examples,
        "warm_start": recipe.warm_start,
        "side_information": recipe.side_information,
        "box": options.get("box", False),
        "own_squares": options.get("own_squares", False),
        "learning_rate": options["learning_rate"],
        "momentum": options.get("momentum"),
        "physical_batch_size": options.get("physical_batch_size"),
        "public_batch_size": options.get("public_batch_size", PUBLIC_BATCH_SIZE),
        "pca": None if pca is None else pca.components,
        "pca_noise": None if pca is None else pca.noise_multiplier,
        "no_guarantee": False,
    }
