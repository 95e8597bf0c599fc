"""The server's update in federated training, shared by all that carry the contributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def descend_along_mean(
    parameters: Sequence[torch.Tensor],
    contributions: Sequence[Sequence[torch.Tensor]],
    learning_rate: float,
) -> None:
    """Subtract η times the mean of the participants' contributions from the parameters.

    Args:
        parameters: the trained parameters, changed in place.
        contributions: of each participant that took part, one tensor per parameter.
        learning_rate: η.
    """
    for parameter, column in zip(parameters, zip(*contributions, strict=True), strict=True):
        parameter.sub_(torch.stack(column).mean(0), alpha=learning_rate)


class ServerMomentum:
    """A moving average of the rounds' means: m ← βm + (1 − β)·mean (papers/004, Appendix B).

    Args:
        momentum: β in [0, 1); 0 leaves the means as they are.

    Raises:
        ValueError: β is out of range.
    """

    def __init__(self, momentum: float) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"expected a server momentum in [0, 1), got {momentum}")
        self._momentum = momentum
        self._averages: list[torch.Tensor] = []

    def average(self, contributions: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the moving average that includes these contributions, one tensor per parameter."""
        means = [torch.stack(column).mean(0) for column in zip(*contributions, strict=True)]
        self._averages = self._averages or [torch.zeros_like(each) for each in means]
        for average, mean in zip(self._averages, means, strict=True):
            average.lerp_(mean, 1 - self._momentum)
        return self._averages
