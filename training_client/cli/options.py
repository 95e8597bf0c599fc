"""Options that several commands take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from training_client.data import DATASETS
from training_client.models import MODELS


def between(low: float, high: float) -> Callable[[float | None], float | None]:
    """Lets a number through that lies between two others, or is not given."""

    def check(number: float | None) -> float | None:
        if number is None or low < number < high:
            return number
        below = f" and below {high:g}" if math.isfinite(high) else ""
        raise typer.BadParameter(f"{number:g} is not a finite number above {low:g}{below}")

    return check


def a_key(text: str | None) -> str | None:
    """An API key, as far as one can tell."""
    if text is not None and not (text.isascii() and text.isprintable()):
        raise typer.BadParameter("an API key has plain letters, digits and signs only")
    return text


def usable(device: str) -> str:
    """A device by its name; one that is not there is refused before anything is asked or held."""
    try:
        float(torch.ones(1, device=device))
    except (AssertionError, RuntimeError) as error:
        reason = re.split(r"\. |\n", str(error))[0]
        raise typer.BadParameter(
            f"torch {torch.__version__} cannot use {device!r} here ({reason}). Without a GPU leave "
            "it out; for one the README says which torch to install"
        ) from None
    return device


def a_picture(file: Path) -> Path:
    """A file of a kind that plots can be written as: known before the training, not after."""
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{file} should end in .png, .svg or .pdf")
    return file


BUDGET: Final = "Budget"
TRAINING: Final = "Training"
DATA: Final = "Data"

SERVICE: Final = "http://127.0.0.1:8000"
NOBODY: Final = "none"
Service = Annotated[str, typer.Option(help="The accounting service.", envvar="ACCOUNTANT_SERVICE")]
ServiceOrNobody = Annotated[
    str,
    typer.Option(
        help="The accounting service; `none`, with --no-guarantee, for a run without one.",
        envvar="ACCOUNTANT_SERVICE",
    ),
]
LedgerDataset = Annotated[
    str | None,
    typer.Option(help="Draw on this dataset's budget in the ledger.", rich_help_panel=BUDGET),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="ACCOUNTANT_API_KEY",
        callback=a_key,
        help="For the ledger, and for a service that asks everybody for one.",
        rich_help_panel=BUDGET,
    ),
]
Epsilon = Annotated[
    float,
    typer.Option(
        callback=between(0, math.inf),
        help="ε the run may spend, without a ledger.",
        rich_help_panel=BUDGET,
    ),
]
Delta = Annotated[
    float,
    typer.Option(
        callback=between(0, 1),
        help="δ the run may spend, without a ledger.",
        rich_help_panel=BUDGET,
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        min=1,
        help="Steps to make, and to find the noise for; fewer if the budget ends before.",
        rich_help_panel=BUDGET,
    ),
]
Noise = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        callback=between(0, math.inf),
        help="σ; by default the least that fits the budget.",
        rich_help_panel=BUDGET,
    ),
]
Optimizer = Annotated[
    str, typer.Option(help="See `accountant-train optimizers`.", rich_help_panel=TRAINING)
]
State = Annotated[
    str | None,
    typer.Option(
        help="Where its state comes from: privatised, public, or raw (as printed).",
        rich_help_panel=TRAINING,
    ),
]
Box = Annotated[
    bool,
    typer.Option(
        "--box", help="AdaDP: clamp coordinates as printed; slow.", rich_help_panel=TRAINING
    ),
]
OwnSquares = Annotated[
    bool,
    typer.Option(
        "--own-squares",
        help="PIAdam, PIRMSprop, PIAdagrad: s with an example's own g², as printed; slow.",
        rich_help_panel=TRAINING,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        callback=between(0, math.inf),
        help="η; the optimizer's own by default.",
        rich_help_panel=TRAINING,
    ),
]
Momentum = Annotated[
    float | None,
    typer.Option(min=0, max=0.9999, help="dp_sgd only; 0.9 by default.", rich_help_panel=TRAINING),
]
SideInformation = Annotated[
    bool,
    typer.Option(
        "--side-information",
        help="adadps on newsgroups: the tokens' frequencies, which count as public.",
        rich_help_panel=TRAINING,
    ),
]
NoGuarantee = Annotated[
    bool, typer.Option("--no-guarantee", help="Train what no theorem covers, or without a service.")
]
Batch = Annotated[
    int, typer.Option(min=1, help="Expected batch size, qN.", rich_help_panel=TRAINING)
]
PhysicalBatch = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="So many examples go through the model at a time; all by default.",
        rich_help_panel=TRAINING,
    ),
]
Clip = Annotated[
    float,
    typer.Option(
        min=1e-9,
        max=1e9,
        help="C, of each example's (scaled) gradient.",
        rich_help_panel=TRAINING,
    ),
]
Model = Annotated[str, typer.Option(help=", ".join(MODELS) + ".", rich_help_panel=TRAINING)]
Hidden = Annotated[
    int,
    typer.Option(min=1, max=1_000_000, help="Units of the hidden layer.", rich_help_panel=TRAINING),
]
Device = Annotated[
    str, typer.Option(help="cpu or cuda.", callback=usable, rich_help_panel=TRAINING)
]
DataName = Annotated[
    str,
    typer.Option(
        "--data",
        help=", ".join(DATASETS) + ", or a folder of your own in --data-dir.",
        rich_help_panel=DATA,
    ),
]
DataDir = Annotated[Path, typer.Option(help="Where data sets are kept.", rich_help_panel=DATA)]
Size = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Records in the training set, for data of your own: they are part of the plan, "
        "which is made before the data are touched.",
        rich_help_panel=DATA,
    ),
]
PublicExamples = Annotated[
    int,
    typer.Option(
        min=1,
        help="Examples given up as public, for --state public and --warm-start.",
        rich_help_panel=DATA,
    ),
]
PublicBatch = Annotated[
    int,
    typer.Option(min=1, help="Of these, so many a step, for --state public.", rich_help_panel=DATA),
]
WarmStart = Annotated[
    int,
    typer.Option(
        min=0,
        help="Ordinary steps on the public examples, before the private run.",
        rich_help_panel=TRAINING,
    ),
]
Pca = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Project the examples to so many dimensions, by a private PCA that is charged.",
        rich_help_panel=DATA,
    ),
]
PcaNoise = Annotated[
    float,
    typer.Option(
        min=0.01,
        callback=between(0, math.inf),
        help="σ of the noise on the PCA's matrix.",
        rich_help_panel=DATA,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[
    Path | None, typer.Option(help="Where model and guarantee go; runs/DATA by default.")
]
CheckpointEvery = Annotated[
    int, typer.Option(min=1, help="Steps between checkpoints, with --dataset.")
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --output that died; see --dataset."),
]


def say_declared_public(known: str | None, say: Callable[[str], None]) -> None:
    """Say what no guarantee covers, if there is such a thing."""
    if known is not None:
        say(f"Declared public, and covered by no guarantee: {known}.")
