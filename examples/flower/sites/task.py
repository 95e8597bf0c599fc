"""The model and the loss, which all sites and the server share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn


def make_model(inputs: int, classes: int) -> nn.Module:
    model = nn.Linear(inputs, classes)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    return model


def load_records(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(file) as saved:
        return torch.from_numpy(saved["examples"]), torch.from_numpy(saved["targets"])
