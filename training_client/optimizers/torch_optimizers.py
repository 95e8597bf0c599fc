"""Any optimizer of PyTorch on the noisy gradient: DP-SGD, DP-Adam, DP-RMSProp, DP-AdaGrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.errors import DataError
from training_client.optimizers.base import PrivateOptimizer, require_same_kind
from training_client.optimizers.state_source import StepContext


class NoisyTorchOptimizer(PrivateOptimizer):
    """Clips and adds noise, then lets a PyTorch optimizer make the step.

    With `torch.optim.SGD` it is DP-SGD (papers/002; Abadi et al. 2016, Algorithm 1); with Adam,
    RMSprop and Adagrad the baselines of papers/004 (§6 and its Algorithm 2).

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; its plan says what a step does and costs.
        make: makes PyTorch's optimizer, given the parameters.
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
        self.torch_optimizer = make(self.parameters)

    @property
    def learning_rate(self) -> float:
        """The learning rate of PyTorch's optimizer."""
        return float(self.torch_optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = rate

    def update(self, step: StepContext) -> None:
        """Make one step of PyTorch's optimizer with the noisy mean as its gradient."""
        for parameter, mean in zip(self.parameters, step.noisy_mean.to_tensors(), strict=True):
            parameter.grad = _match_memory_layout(parameter, mean)
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of PyTorch's optimizer, and what every private optimizer has.

        For a model that `fully_shard` sharded, all of them must call it. Rank 0 gets
        whole tensors, as for an unsharded model, and the others an empty state.
        """
        found = self.torch_optimizer.state_dict() | self.shared_state()
        return self.trained.gather_state(found)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            DataError: another optimizer or model returned it.
            NoGuaranteeError: the checkpoint's steps were made under another plan or reservation or
                after other releases, or the ledger has granted fewer of them.
        """
        own = self.torch_optimizer.state_dict()
        state = self.load_shared_state(state)
        try:
            for index, entries in state["state"].items():
                for name, given in entries.items():
                    if torch.is_tensor(given) and given.dim() > 0:
                        require_same_kind(name, given, self.parameters[index])
            self.torch_optimizer.load_state_dict(self._shard(state))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self.torch_optimizer.load_state_dict(own)
            raise DataError(f"the checkpoint is not one of this optimizer: {error}") from None

    def _shard(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with the rows that this process holds of each whole tensor."""
        sharded = {
            index: {name: self.trained.shard(index, value) for name, value in entries.items()}
            for index, entries in state["state"].items()
        }
        return state | {"state": sharded}


def _match_memory_layout(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a noisy mean in its parameter's memory layout, as PyTorch's optimizers expect."""
    if parameter.stride() == mean.stride():
        return mean
    return torch.empty_like(parameter).copy_(mean)
