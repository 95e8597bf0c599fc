"""Ordinary training on public examples, before the private run (papers/004, Appendix C)."""

from __future__ import annotations

import torch
from torch import nn

from training_client.clipping import Loss


def warm_start(
    model: nn.Module,
    public: tuple[torch.Tensor, torch.Tensor],
    loss: Loss,
    steps: int,
    *,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
) -> None:
    """Train a model without noise: nothing of this is private, and nothing of it is charged.

    Args:
        model: what is trained, with Adam.
        public: examples and targets that no private step may see again.
        loss: one value an example.
        steps: each on a random batch.
        batch_size: of them; all if there are fewer.
        learning_rate: of Adam.
    """
    examples, targets = public
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        rows = torch.randperm(len(examples), device=examples.device)[:batch_size]
        optimizer.zero_grad()
        torch.autograd.backward(loss(model(examples[rows]), targets[rows]).mean())
        optimizer.step()
    optimizer.zero_grad()
