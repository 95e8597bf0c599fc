"""Any optimizer of PyTorch on the noisy gradient: DP-SGD, DP-Adam, DP-RMSProp, DP-AdaGrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.errors import DataError
from training_client.optimizers.base import PrivateOptimizer, require_alike
from training_client.optimizers.source import Step


class AfterNoise(PrivateOptimizer):
    """Clip to C, add noise, and let an ordinary optimizer have the noisy mean gradient.

    With `torch.optim.SGD` it is DP-SGD (papers/002; Abadi et al. 2016, Algorithm 1); with Adam,
    RMSprop and Adagrad the baselines of papers/004 (§6 and its Algorithm 2).

    Args:
        model: the model to train.
        allowance: allows each step, and says by its plan what a step does and costs.
        make: the ordinary optimizer, given the parameters.
        options: see `PrivateOptimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        self.ordinary = make(self.parameters)

    @property
    def learning_rate(self) -> float:
        """The ordinary optimizer's learning rate."""
        return float(self.ordinary.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for group in self.ordinary.param_groups:
            group["lr"] = rate

    def update(self, step: Step) -> None:
        """The ordinary optimizer's step."""
        for parameter, mean in zip(self.parameters, step.released.whole(), strict=True):
            parameter.grad = _laid_out_like(parameter, mean)
        self.ordinary.step()
        self.ordinary.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """See `PrivateOptimizer`: that of the ordinary optimizer."""
        return self.ordinary.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PrivateOptimizer`."""
        own = self.ordinary.state_dict()
        try:
            for at, kept in state["state"].items():
                for name, given in kept.items():
                    if torch.is_tensor(given) and given.dim() > 0:
                        require_alike(name, given, self.parameters[at])
            self.ordinary.load_state_dict(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self.ordinary.load_state_dict(own)
            raise DataError(f"the checkpoint is not one of this optimizer: {error}") from None


def _laid_out_like(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """In the parameter's order of memory, in which PyTorch's optimizers go over both."""
    if parameter.stride() == mean.stride():
        return mean
    return torch.empty_like(parameter).copy_(mean)
