"""accountant-train on a small data set, which counts its steps in a file before it makes them.

python counting_trainer.py COUNT ARGUMENT...

The variable PATIENCE_SECONDS is how long it waits for a service, if not for two minutes.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from training_client.client import AccountingService
from training_client.lab import cli
from training_client.lab.data import DATASETS, Dataset
from training_client.optimizers import PrivateOptimizer


def tiny(*_: Any) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    examples = torch.rand(600, 784, generator=generator)
    labels = (10 * examples[:, 0]).long()
    return Dataset(examples, labels, examples[:50], labels[:50], classes=10)


def main() -> None:
    count = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    genuine = PrivateOptimizer.step

    def step(self: PrivateOptimizer, *of: Any) -> float:
        os.write(count, b".")
        os.fsync(count)
        time.sleep(0.01)
        return genuine(self, *of)

    PrivateOptimizer.step = step  # type: ignore[method-assign]
    if "PATIENCE_SECONDS" in os.environ:
        defaults = AccountingService.__init__.__kwdefaults__
        defaults["patience_seconds"] = float(os.environ["PATIENCE_SECONDS"])
    DATASETS["mnist"] = replace(DATASETS["mnist"], load=tiny, train_size=600)
    cli.app(sys.argv[2:])


if __name__ == "__main__":
    main()
