"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from training_client.data import DATASETS
from training_client.models import MODELS

BUDGET: Final = "Budget"
TRAINING: Final = "Training"
DATA: Final = "Data"

SERVICE: Final = "http://127.0.0.1:8000"
Service = Annotated[str, typer.Option(help="The accounting service.", envvar="ACCOUNTANT_SERVICE")]
Epsilon = Annotated[
    float, typer.Option(help="ε the run may spend, without a ledger.", rich_help_panel=BUDGET)
]
Delta = Annotated[
    float, typer.Option(help="δ the run may spend, without a ledger.", rich_help_panel=BUDGET)
]
Steps = Annotated[
    int, typer.Option(min=1, help="Steps to plan the noise for.", rich_help_panel=BUDGET)
]
Batch = Annotated[
    int, typer.Option(min=1, help="Expected batch size, qN.", rich_help_panel=TRAINING)
]
Clip = Annotated[
    float,
    typer.Option(
        min=1e-9, help="C, of each example's (scaled) gradient.", rich_help_panel=TRAINING
    ),
]
Model = Annotated[str, typer.Option(help=", ".join(MODELS) + ".", rich_help_panel=TRAINING)]
Hidden = Annotated[
    int, typer.Option(min=1, help="Units of the hidden layer.", rich_help_panel=TRAINING)
]
Device = Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=TRAINING)]
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
    typer.Option(min=0.01, help="σ of the noise on the PCA's matrix.", rich_help_panel=DATA),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
