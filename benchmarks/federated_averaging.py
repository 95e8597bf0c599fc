"""DP-FedAvg beside Flower's `LocalDpMod`: noise, ε and accuracy where a site is the privacy unit.

`python -m benchmarks.federated_averaging` divides data among sites, which train a linear model in
one process (`make data` fetches Adult). Both clip a site's update to norm C and add Gaussian noise
at the site; only the noise differs:

* ours: the least noise whose proved ε of the whole run is the target's;
* `LocalDpMod`, ε per round: the target's ε and δ in each round, as its arguments suggest;
* `LocalDpMod`, ε shared: ε and δ of a round are the target's over the number of rounds, because
  Flower does not compose rounds.

`LocalDpMod` adds noise of standard deviation s·√(2·ln(1.25/δ))/ε, s its argument `sensitivity`. Two
updates of norm C are up to 2C apart, so s = 2C here. The proved ε is for `replace_one`: all records
of a site in place of others.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from accountant_service import epsilon, noise_multiplier
from scripts.demo_federated import load_data
from training_client.budget import NoBudget
from training_client.lab.federated import train_federated
from training_client.lab.federated_averaging import FedAvgParticipant
from training_client.lab.models import cross_entropy
from training_client.plan import Plan

DELTA: Final = 1e-5
RELATION: Final = "replace_one"


@dataclass(frozen=True)
class Noise:
    """One way to choose the noise.

    Attributes:
        name: in the table.
        multiplier: its standard deviation over C.
        claimed: ε that its arguments state for a round; empty for ours.
    """

    name: str
    multiplier: float
    claimed: str = ""


def local_dp_noise(epsilon_of_round: float, delta: float) -> float:
    """Return the noise multiplier of `LocalDpMod`, with `sensitivity` 2C."""
    return 2 * math.sqrt(2 * math.log(1.25 / delta)) / epsilon_of_round


def ways(target: float, rounds: int) -> list[Noise]:
    """Return the three ways to choose the noise of a run."""
    ours = noise_multiplier(
        epsilon=target, delta=DELTA, steps=rounds, sampling="none", neighbouring_relation=RELATION
    ).noise_multiplier
    shared = target / rounds
    return [
        Noise("ours", ours),
        Noise("LocalDpMod, ε per round", local_dp_noise(target, DELTA), f"{target:g}"),
        Noise("LocalDpMod, ε shared", local_dp_noise(shared, DELTA / rounds), f"{shared:.3g}"),
    ]


def accuracy(given: tuple[Any, Any], noise: float, options: argparse.Namespace) -> float:
    """Train at all sites with some noise; return the test accuracy."""
    (examples, targets), (tests, answers) = given
    model = nn.Linear(examples.shape[1], int(targets.max()) + 1)
    for each in model.parameters():
        nn.init.zeros_(each)
    plan = Plan(1, 1.0, options.clip_norm, noise)
    size = len(targets) // options.sites
    sites = [
        FedAvgParticipant(
            str(number), model, examples[rows], targets[rows],
            NoBudget(plan, options.rounds, "a benchmark"),
            learning_rate=options.learning_rate, local_epochs=options.local_epochs,
        )
        for number in range(options.sites)
        for rows in [slice(number * size, (number + 1) * size)]
    ]  # fmt: skip
    train_federated(model, sites, cross_entropy, learning_rate=1.0, rounds_max=options.rounds)
    with torch.no_grad():
        return float((model(tests).argmax(1) == answers).float().mean())


def main() -> None:
    """Print a row for each way to choose the noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="adult", choices=("generated", "adult", "mnist"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--local-epochs", type=int, default=5)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)  # steps are small
    given = load_data(options)
    frequent = float(given[1][1].bincount().max()) / len(given[1][1])
    table = Table(
        title=f"{options.data}, {options.sites} sites, {options.rounds} rounds, δ = {DELTA:g}; "
        f"the most frequent class: {frequent:.3f}"
    )
    for column in (
        "noise",
        "noise multiplier",
        "ε stated per round",
        "proved ε of the run",
        "accuracy",
    ):
        table.add_column(column, justify="left" if column == "noise" else "right")
    for way in ways(options.epsilon, options.rounds):
        proved = epsilon(
            delta=DELTA, noise_multiplier=way.multiplier, steps=options.rounds, sampling="none",
            neighbouring_relation=RELATION,
        )  # fmt: skip
        found = [accuracy(given, way.multiplier, options) for _ in range(options.times)]
        table.add_row(
            way.name, f"{way.multiplier:.2f}", way.claimed, f"{proved.epsilon:.2f}",
            f"{np.mean(found):.3f} ± {np.std(found):.3f}",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
