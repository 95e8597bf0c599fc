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
