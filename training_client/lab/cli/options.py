"""The options of the commands, each declared once, and the decorator that gives them to typer."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import torch
import typer

from training_client.lab.data import DATASETS
from training_client.lab.models import MODELS, SIDE_STATISTICS
from training_client.lab.pca import PrivatePca
from training_client.lab.plan_run import RunSpec
from training_client.lab.recipe import Recipe, RecipeOptions, make_recipe
from training_client.lab.schedules import SMALLEST_FACTORS, parse_schedule
from training_client.optimizers import PUBLIC_BATCH_SIZE
from training_client.plan import POISSON, SAMPLINGS

BUDGET: Final = "Budget"
TRAINING: Final = "Training"
SCHEDULES: Final = "Schedules"
DATA: Final = "Data"
NO_SERVICE: Final = "none"  # the value of --service for a run without one


def require_between(low: float, high: float) -> Callable[[float | None], float | None]:
    """Return an option callback that refuses numbers outside the open interval (low, high)."""

    def check(number: float | None) -> float | None:
        """Return the option's number; raise unless it is inside the interval."""
        if number is None or low < number < high:
            return number
        below = f" and below {high:g}" if math.isfinite(high) else ""
        raise typer.BadParameter(f"{number:g} is not a finite number above {low:g}{below}")

    return check


def _check_api_key(text: str | None) -> str | None:
    """Return the API key; raise if an HTTP header cannot carry it."""
    if text is not None and not (text.isascii() and text.isprintable()):
        raise typer.BadParameter("an API key contains only printable ASCII characters")
    return text


def _check_sampling(sampling: str) -> str:
    """Return the name of a sampling; raise if it is unknown."""
    if sampling not in SAMPLINGS:
        raise typer.BadParameter(f"{sampling!r} is not one of {', '.join(SAMPLINGS)}")
    return sampling


def _check_schedule(name: str) -> Callable[[str | None], str | None]:
    """Return an option callback that rejects text which does not parse as this schedule."""

    def check(text: str | None) -> str | None:
        """Return the text; raise if it is not a valid schedule."""
        try:
            if text is not None:
                parse_schedule(name, text, 1)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    return check


def _check_device(device: str) -> str:
    """Return the device's name; raise if the device cannot be used."""
    try:
        float(torch.ones(1, device=device))
    except (AssertionError, RuntimeError) as error:
        reason = re.split(r"\. |\n", str(error))[0]
        raise typer.BadParameter(
            f"torch {torch.__version__} cannot use {device!r} here ({reason}). Without a GPU leave "
            "it out; for a GPU the README says which torch to install"
        ) from None
    return device


DataDir = Annotated[
    Path, typer.Option(help="The folder in which data sets are kept.", rich_help_panel=DATA)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command-line options of a private training run; commands take all or some of them."""

    service: Annotated[
        str,
        typer.Option(
            help="URL of the accounting service; `run` takes `none` too, with --no-guarantee.",
            envvar="ACCOUNTANT_SERVICE",
        ),
    ] = "http://127.0.0.1:8000"
    dataset: Annotated[
        str | None,
        typer.Option(
            help="The dataset in the ledger whose budget is charged.", rich_help_panel=BUDGET
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ACCOUNTANT_API_KEY",
            callback=_check_api_key,
            help="API key, for the ledger or a service that requires one.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    epsilon: Annotated[
        float,
        typer.Option(
            callback=require_between(0, math.inf),
            help="Privacy budget ε; `run --dataset` has the ledger's instead.",
            rich_help_panel=BUDGET,
        ),
    ] = 2.0
    delta: Annotated[
        float,
        typer.Option(
            callback=require_between(0, 1),
            help="Privacy budget δ; `run --dataset` has the ledger's instead.",
            rich_help_panel=BUDGET,
        ),
    ] = 1e-5
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Planned steps; the run ends earlier if its budget is spent. With --sampling "
            "balls_in_bins they are rounded up to whole epochs.",
            rich_help_panel=BUDGET,
        ),
    ] = 1000
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            callback=require_between(0, math.inf),
            help="Noise multiplier σ; by default the smallest that fits the budget.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    optimizer: Annotated[
        str,
        typer.Option(
            help="The optimizer; `accountant-train optimizers` lists them.",
            rich_help_panel=TRAINING,
        ),
    ] = "dp_sgd"
    state: Annotated[
        str | None,
        typer.Option(
            help="Source of the optimizer's state: privatised, public, or raw (as in the papers).",
            rich_help_panel=TRAINING,
        ),
    ] = None
    box: Annotated[
        bool,
        typer.Option(
            "--box",
            help="adadp, adan: clamp each coordinate instead of the norm, as in the paper; slow.",
            rich_help_panel=TRAINING,
        ),
    ] = False
    example_squares: Annotated[
        bool,
        typer.Option(
            "--example-squares",
            help="adadp, adan: E′[g²] is of per-example gradients, not of their mean, the other "
            "reading of the paper's line 23.",
            rich_help_panel=TRAINING,
        ),
    ] = False
    own_squares: Annotated[
        bool,
        typer.Option(
            "--own-squares",
            help="pi_adam, pi_rmsprop, pi_adagrad: include the example's own g² in the mean "
            "squares, as in the paper; slow.",
            rich_help_panel=TRAINING,
        ),
    ] = False
    statistic: Annotated[
        str | None,
        typer.Option(
            help="adadps: the statistic of public gradients: rmsprop (the default), adam or "
            "adagrad.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    first_moment: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.9999,
            help="adadps, dp_r_pub, dp_adam_pub: β₁ of the first moment; 0.9 in papers/004's Adam.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    current_statistic: Annotated[
        bool,
        typer.Option(
            "--current-statistic",
            help="adadps: the statistic includes this step's public gradient, as in the paper.",
            rich_help_panel=TRAINING,
        ),
    ] = False
    small_constant: Annotated[
        float | None,
        typer.Option(
            callback=require_between(0, math.inf),
            help="Adaptive optimizers: what is added to a root before it divides; each has its "
            "own default.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    no_guarantee: Annotated[
        bool,
        typer.Option(
            "--no-guarantee",
            help="Train without a privacy guarantee; `run` also without a service.",
        ),
    ] = False
    batch_size: Annotated[
        int, typer.Option(min=1, help="Expected batch size qN.", rich_help_panel=TRAINING)
    ] = 600
    sampling: Annotated[
        str,
        typer.Option(
            callback=_check_sampling,
            help="poisson, or balls_in_bins: each record is in one batch of each epoch.",
            rich_help_panel=TRAINING,
        ),
    ] = POISSON
    physical_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples per forward pass; all by default.", rich_help_panel=TRAINING
        ),
    ] = None
    clip_norm: Annotated[
        float,
        typer.Option(
            min=1e-9,
            max=1e9,
            metavar="NUMBER",
            help="Clip norm C of each example's (scaled) gradient.",
            rich_help_panel=TRAINING,
        ),
    ] = 1.0
    noise_schedule: Annotated[
        str | None,
        typer.Option(
            callback=_check_schedule("noise_schedule"),
            help="Factors of σ from step to step: CURVE:END from 1 to END along a linear, cosine "
            "or exponential curve, decay:RATE:STEPS for e^(-RATE) after every STEPS, or "
            "STEPS:FACTOR pairs with commas; charged as what runs.",
            rich_help_panel=SCHEDULES,
        ),
    ] = None
    clip_schedule: Annotated[
        str | None,
        typer.Option(
            callback=_check_schedule("clip_schedule"),
            help="Factors of C, as for --noise-schedule; the noise of a step follows its C.",
            rich_help_panel=SCHEDULES,
        ),
    ] = None
    learning_rate_schedule: Annotated[
        str | None,
        typer.Option(
            callback=_check_schedule("learning_rate_schedule"),
            help="Factors of η, as for --noise-schedule; costs no privacy.",
            rich_help_panel=SCHEDULES,
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            callback=require_between(0, math.inf),
            help="Learning rate η; each optimizer has its own default.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    momentum: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.9999, help="Momentum of dp_sgd; 0.9 by default.", rich_help_panel=TRAINING
        ),
    ] = None
    model: Annotated[str, typer.Option(help=", ".join(MODELS) + ".", rich_help_panel=TRAINING)] = (
        "mlp"
    )
    hidden: Annotated[
        int,
        typer.Option(
            min=1, max=1_000_000, help="Units of the hidden layer.", rich_help_panel=TRAINING
        ),
    ] = 1000
    warm_start: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps without noise on the public examples before the private run.",
            rich_help_panel=TRAINING,
        ),
    ] = 0
    side_information: Annotated[
        bool,
        typer.Option(
            "--side-information",
            help="adadps on newsgroups: use the token frequencies, which count as public.",
            rich_help_panel=TRAINING,
        ),
    ] = False
    side_statistic: Annotated[
        str | None,
        typer.Option(
            help="With --side-information: " + ", ".join(SIDE_STATISTICS) + " (the control).",
            rich_help_panel=TRAINING,
        ),
    ] = None
    side_cap: Annotated[
        float | None,
        typer.Option(
            help="With --side-information: the largest ratio to its mean.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    side_others: Annotated[
        float | None,
        typer.Option(
            help="With --side-information: what the gradients of all other parameters are divided "
            "by, such as the bias; 1 by default.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            help="PyTorch device, such as cpu, cuda or cuda:1.",
            callback=_check_device,
            rich_help_panel=TRAINING,
        ),
    ] = "cpu"
    data: Annotated[
        str,
        typer.Option(
            help=", ".join(DATASETS) + ", or a folder of your own in --data-dir.",
            rich_help_panel=DATA,
        ),
    ] = "mnist"
    data_dir: DataDir = Path("data")
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Records in your own training set; the plan is made before they are read.",
            rich_help_panel=DATA,
        ),
    ] = None
    public_examples: Annotated[
        int,
        typer.Option(
            min=1,
            help="Training examples declared public, for --state public and --warm-start.",
            rich_help_panel=DATA,
        ),
    ] = 600
    public_batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Public examples per step, for --state public.", rich_help_panel=DATA
        ),
    ] = PUBLIC_BATCH_SIZE
    pca: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Project the examples on this many components of a private PCA; it is charged.",
            rich_help_panel=DATA,
        ),
    ] = None
    pca_noise: Annotated[
        float,
        typer.Option(
            min=0.01,
            callback=require_between(0, math.inf),
            help="Noise multiplier σ of --pca.",
            rich_help_panel=DATA,
        ),
    ] = 16.0
    output: Annotated[
        Path | None,
        typer.Option(help="The folder for the model and its guarantee; by default runs/DATA."),
    ] = None
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints, with --dataset.")
    ] = 50
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the interrupted run in the folder --output; needs --dataset."
        ),
    ] = False
    as_json: AsJson = False

    def recipe(self) -> Recipe:
        """Return the run configuration that these options describe.

        Raises:
            DataError: a name is unknown, or an option does not belong to the optimizer.
        """
        own: dict[str, Any] = {
            "pca": None if self.pca is None else PrivatePca(self.pca, self.pca_noise),
            "horizon": self.steps,
        }
        names = [each.name for each in fields(RecipeOptions) if each.name not in own]
        return make_recipe(RecipeOptions(**{name: getattr(self, name) for name in names}, **own))

    def run_spec(self, recipe: Recipe) -> RunSpec:
        """Return the run specification: configuration, batch size, clip norm, steps, schedules.

        Raises:
            DataError: the batch is larger than the data, or a schedule does not fit the steps.
        """
        return RunSpec.from_recipe(
            recipe, self.batch_size, self.clip_norm, self.steps, self.sampling, self.schedules
        )

    @property
    def schedules(self) -> dict[str, str]:
        """The texts of the schedules that were given, by the names of the plan's attributes."""
        given = {name: getattr(self, name) for name in SMALLEST_FACTORS}
        return {name: text for name, text in given.items() if text is not None}


def expand_options(
    command: Callable[..., None], *, only: Collection[str] | None = None, **defaults: Any
) -> Callable[..., None]:
    """Replace a command's dataclass parameters by one parameter for each of their fields.

    Typer reads options from a function's parameters, not from dataclasses.

    Args:
        command: a function with dataclass parameters.
        only: the fields of `RunOptions` that the command takes; all by default.
        defaults: the command's own defaults of these.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        taken = [
            each for each in fields(group)
            if group is not RunOptions or only is None or each.name in only
        ]  # fmt: skip
        groups[parameter.name] = group, [each.name for each in taken]
        parameters += [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(each.name, each.default),
                annotation=hints[each.name],
            )
            for each in taken
        ]

    def expanded(**values: Any) -> None:
        """Group the options' values into dataclasses, and call the command."""
        grouped = {
            name: group(**{each: values.pop(each) for each in names})
            for name, (group, names) in groups.items()
        }
        command(**values, **grouped)

    expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded
