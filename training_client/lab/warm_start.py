"""Ordinary training on public examples before the private run (papers/004, Appendix C)."""

from __future__ import annotations

import torch
from torch import nn

from training_client.private_step import Loss


def warm_start(
    model: nn.Module,
    public: tuple[torch.Tensor, torch.Tensor],
    loss: Loss,
    steps: int,
    *,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
) -> None:
    """Train a model with Adam on public examples, without noise and at no privacy cost.

    Args:
        model: the model to train, in place.
        public: examples and targets; they are not part of the private training set.
        loss: returns one value per example.
        steps: the number of steps, each on a random batch.
        batch_size: examples per step; all of them if there are fewer.
        learning_rate: Adam's learning rate.
    """
    examples, targets = public
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        rows = torch.randperm(len(examples), device=examples.device)[:batch_size]
        optimizer.zero_grad()
        torch.autograd.backward(loss(model(examples[rows]), targets[rows]).mean())
        optimizer.step()
    optimizer.zero_grad()
