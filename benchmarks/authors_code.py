"""The programs that papers/001 and papers/004 published, written anew in our own words.

`python -m benchmarks.authors_code pigdo` trains as https://github.com/CGCL-codes/DPDLIGDO does on
MNIST: TensorFlow Privacy's DP-Adam, not PIGDO, on a network of two convolutions; lots of 600 from a
shuffled epoch, each cut into 300 pairs whose mean gradients are clipped. `adadps` trains as the
IMDB program of https://github.com/litian96/AdaDPS does, on 20 newsgroups in place of IMDB: mean
gradients of four posts are clipped, and A is computed once an epoch, as the mean of squared public
gradients. Each run writes one line of JSON per epoch to `docs/authors-code.jsonl`; epochs that are
there are not written again, and a finished run is not repeated.

Nothing here has a guarantee: the noise is drawn from a seed. `report` writes what a run costs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from accountant_service import epsilon
from scripts.page_parts import DOCS, write_part
from training_client.lab.data import Dataset, load

RESULTS, PAGE = DOCS / "authors-code.jsonl", DOCS / "comparators.md"


def main() -> None:
    """Run one of the programs, or print what is known of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("program", choices=["pigdo", "adadps", "report"])
    parser.add_argument("--noise-multiplier", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, help="100 for pigdo, 32 for adadps by default")
    parser.add_argument("--side", choices=["none", "public", "frequency"], default="public")
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.program == "report":
        write_part(PAGE, "published", report())
        return
    options.epochs = options.epochs or (100 if options.program == "pigdo" else 32)
    known = {name: value for name, value in vars(options).items() if name != "epochs"}
    done = count_epochs_done(known)
    if done >= options.epochs:
        print(f"{RESULTS} has {done} epochs of this run")
        return
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    scores = run_pigdo(options) if options.program == "pigdo" else run_adadps(options)
    with RESULTS.open("a") as file:
        for epoch, accuracy in enumerate(scores, 1):
            if epoch <= done:  # the seed makes it what it was
                continue
            file.write(json.dumps({**known, "epoch": epoch, "accuracy": round(accuracy, 4)}) + "\n")
            file.flush()


def count_epochs_done(settings: Mapping[str, Any]) -> int:
    """Return the last epoch that the results file has of a run with these settings."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = map(json.loads, lines)
    return max((e["epoch"] for e in found if settings.items() <= e.items()), default=0)


def convolutions() -> nn.Module:
    """Return the network of the published MNIST program: 16 and 32 filters, 32 units."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class NoisyGroups:
    """The mean of clipped mean gradients of small groups of records, with noise on their sum.

    Args:
        model: the model.
        clip_norm: C of a group's mean gradient.
        noise_multiplier: σ; the noise on the sum over groups has standard deviation σC.

    Attributes:
        scales: what gradients are multiplied by before the clip; nothing at first.
    """

    def __init__(self, model: nn.Module, clip_norm: float, noise_multiplier: float) -> None:
        self.model, self.clip_norm, self.noise = model, clip_norm, noise_multiplier
        self.scales: dict[str, torch.Tensor] = {}

        def loss(weights: Any, examples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(functional_call(model, weights, (examples,)), labels)

        self._gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def set_gradients(self, examples: torch.Tensor, labels: torch.Tensor) -> None:
        """Set the parameters' gradients from groups: examples [groups, records, inputs]."""
        named = {name: each.detach() for name, each in self.model.named_parameters()}
        found = self._gradients(named, examples, labels)
        found = {name: each * self.scales.get(name, 1.0) for name, each in found.items()}
        norms = torch.cat([each.flatten(1) for each in found.values()], 1).norm(dim=1)
        weights = (self.clip_norm / norms).clamp_max(1.0)
        for name, parameter in self.model.named_parameters():
            total = torch.tensordot(weights, found[name], 1)
            total += self.noise * self.clip_norm * torch.randn_like(total)
            parameter.grad = total / len(labels)


def accuracy_of(model: nn.Module, data: Dataset) -> float:
    """Return the share of test examples that are classified right."""
    with torch.no_grad():
        right = sum(
            int((model(rows).argmax(1) == labels).sum())
            for rows, labels in zip(
                data.test_examples.split(1000), data.test_labels.split(1000), strict=True
            )
        )
    return right / len(data.test_labels)


def epoch_of_groups(data: Dataset, lot: int, group: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the lots of a shuffled epoch, each as groups of records; what is left over is lost."""
    order = torch.randperm(len(data.train_labels))
    for rows in order.split(lot):
        if len(rows) == lot:
            groups = rows.view(-1, group)
            yield data.train_examples[groups], data.train_labels[groups]


def run_pigdo(options: argparse.Namespace) -> Iterator[float]:
    """Train as the code of papers/001; yield the test accuracy after each epoch."""
    data, model = load("mnist", Path("data")), convolutions()
    noisy = NoisyGroups(model, 4.0, options.noise_multiplier)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(options.epochs):
        for examples, labels in epoch_of_groups(data, 600, 2):
            noisy.set_gradients(examples, labels)
            optimizer.step()
        yield accuracy_of(model, data)


def run_adadps(options: argparse.Namespace) -> Iterator[float]:
    """Train as the IMDB program of papers/004, on newsgroups; yield accuracies after epochs.

    With `public`, A² is the mean of squared gradients of public batches of 20; with `frequency`,
    the gradients of weights are multiplied by min(10 000, largest frequency/frequency)/100, and
    those of the bias are not.
    """
    private = load("newsgroups", Path("data"))
    data, public = private.split_public(113)
    model = nn.Linear(data.inputs, data.classes)
    noisy = NoisyGroups(model, 2.0 if options.side == "public" else 0.1, options.noise_multiplier)
    if options.side == "frequency":
        assert data.frequencies is not None
        ratio = (data.frequencies.max() / data.frequencies.clamp_min(1e-20)).clamp_max(1e4)
        noisy.scales = {"weight": ratio / 100}
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    for _ in range(options.epochs):
        if options.side == "public":
            noisy.scales = _precondition(model, public)
        for examples, labels in epoch_of_groups(data, 64, 4):
            noisy.set_gradients(examples, labels)
            optimizer.step()
        yield accuracy_of(model, data)


def _precondition(
    model: nn.Module, public: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return 1/√(P + 1e-10): P is the mean of squared gradients over public batches of 20."""
    names, squares = [name for name, _ in model.named_parameters()], None
    batches = list(zip(public[0].split(20), public[1].split(20), strict=True))
    for examples, labels in batches:
        loss = functional.cross_entropy(model(examples), labels)
        found = [each.square() for each in torch.autograd.grad(loss, list(model.parameters()))]
        squares = found if squares is None else [a + b for a, b in zip(squares, found, strict=True)]
    assert squares is not None
    return {
        name: (each / len(batches) + 1e-10).rsqrt()
        for name, each in zip(names, squares, strict=True)
    }


def cost(program: str, noise: float, epochs: int) -> tuple[float, float]:
    """Return ε by the programs' own accounting, as Poisson samples at σ, and the proved lower one.

    A record that is replaced moves the mean gradient of its group by up to 2C, so σ counts half.
    """
    size, lot, delta = (60_000, 600, 1e-5) if program == "pigdo" else (11_180, 64, 1 / 11_180)
    steps = epochs * (size // lot)
    run = {"sample_rate": lot / size, "steps": steps, "delta": delta}
    claimed = epsilon(noise_multiplier=noise, method="subsampled_rdp", **run)
    truly = epsilon(noise_multiplier=noise / 2, **run)
    lower = getattr(truly, "lower", None)
    return claimed.epsilon, truly.epsilon if lower is None else lower


def report() -> str:
    """Return a table of the last epoch of each run that is known."""
    last: dict[str, dict[str, Any]] = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        found = json.loads(line)
        key = json.dumps({**found, "epoch": 0, "accuracy": 0})
        last[key] = max(last.get(key, found), found, key=lambda each: each["epoch"])
    if not last:
        return "Not run yet; the commands above do so."
    rows = [
        "| program | side information | σ | epochs | accuracy | ε as it accounts | ε at σ/2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in last.values():
        side = each["side"] if each["program"] == "adadps" else "–"
        claimed, truly = cost(each["program"], each["noise_multiplier"], each["epoch"])
        rows.append(
            f"| {each['program']} | {side} | {each['noise_multiplier']:g} | {each['epoch']} | "
            f"{each['accuracy']:.4f} | {_up(claimed)} | {_up(truly)} |"
        )
    return "\n".join(rows)


def _up(number: float) -> str:
    """Return a number rounded up to two decimals."""
    return f"{math.ceil(100 * number) / 100:.2f}"


if __name__ == "__main__":
    main()
