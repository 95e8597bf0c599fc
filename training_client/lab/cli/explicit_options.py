"""Options set explicitly on the command line, as opposed to defaults."""

from __future__ import annotations

import math
from typing import Any, Final

import typer

from training_client.errors import DataError
from training_client.lab.checkpoint import Checkpoint
from training_client.lab.recipe import Recipe
from training_client.lab.schedules import (
    SMALLEST_FACTORS,
    format_schedule,
    parse_schedule,
    schedules_of,
)
from training_client.optimizers import PUBLIC_BATCH_SIZE
from training_client.plan import BALLS_IN_BINS, Plan

NOT_WITH_DATASET: Final = (
    "--epsilon and --delta cannot be used with --dataset, whose budget is in the ledger: use "
    "--noise-multiplier to say how much of it the run takes"
)


def explicit_options(context: typer.Context) -> dict[str, Any]:
    """Return, by parameter name, the options that were set on the command line."""
    return {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def require_unchanged(
    explicit: dict[str, Any], recipe: Recipe, checkpoint: Checkpoint, steps: int
) -> None:
    """Raise if an explicit option contradicts the run that is resumed.

    Folders, the device and the service may change.

    Args:
        explicit: the options set on the command line.
        recipe: the run's recipe.
        checkpoint: the run's checkpoint.
        steps: the number of steps reserved for the run.

    Raises:
        DataError: an option differs; the message names it with the run's value.
    """
    if explicit.keys() & {"epsilon", "delta"}:
        raise DataError(NOT_WITH_DATASET)
    original = _original_options(recipe, checkpoint, steps)
    planned = explicit | _as_planned(explicit, checkpoint.plan, steps)
    changed = [name for name, value in planned.items() if original.get(name, value) != value]
    if changed:
        values = ", ".join(f"--{name.replace('_', '-')} {original[name]}" for name in changed)
        raise DataError(
            f"a resumed run keeps the options that its budget is reserved for, here {values}: "
            "leave out those that differ"
        )


def _as_planned(explicit: dict[str, Any], plan: Plan, steps: int) -> dict[str, Any]:
    """Return explicit options in the form that a plan has: schedules by steps, rounded sizes."""
    rounded: dict[str, Any] = {
        name: format_schedule(
            parse_schedule(name, explicit[name], steps, _steps_per_level(name, plan))
        )
        for name in SMALLEST_FACTORS
        if name in explicit
    }
    if plan.sampling == BALLS_IN_BINS and "steps" in explicit:
        rounded["steps"] = plan.whole_charges(explicit["steps"])
    if plan.sampling == BALLS_IN_BINS and "batch_size" in explicit:
        bins = math.ceil(plan.dataset_size / explicit["batch_size"])
        rounded["batch_size"] = round(plan.dataset_size / bins)
    return rounded


def _steps_per_level(name: str, plan: Plan) -> int:
    """Return the number of steps that a schedule's levels are made of, as in `RunSpec`."""
    return plan.steps_per_charge if name == "noise_schedule" else 1


def _original_options(recipe: Recipe, checkpoint: Checkpoint, steps: int) -> dict[str, Any]:
    """Return, by parameter name, the options with which the resumed run was started."""
    plan, options, pca = checkpoint.plan, recipe.options, recipe.pca
    return {
        **dict.fromkeys(SMALLEST_FACTORS),
        **schedules_of(plan),
        "dataset": checkpoint.dataset,
        "steps": steps,
        "noise_multiplier": plan.noise_multiplier,
        "batch_size": round(plan.expected_batch_size),
        "sampling": plan.sampling,
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
        **{
            f"side_{name}": recipe.side_options.get(name) for name in ("statistic", "cap", "others")
        },
        "statistic": options.get("statistic"),
        "first_moment": options.get("first"),
        "current_statistic": options.get("current_statistic", False),
        "small_constant": options.get("epsilon", options.get("eps")),
        "box": options.get("box", False),
        "example_squares": options.get("example_squares", False),
        "own_squares": options.get("own_squares", False),
        "learning_rate": options["learning_rate"],
        "momentum": options.get("momentum"),
        "physical_batch_size": options.get("physical_batch_size"),
        "public_batch_size": options.get("public_batch_size", PUBLIC_BATCH_SIZE),
        "pca": None if pca is None else pca.components,
        "pca_noise": None if pca is None else pca.noise_multiplier,
        "no_guarantee": False,
    }
