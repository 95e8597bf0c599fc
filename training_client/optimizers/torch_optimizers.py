"""Any optimizer of PyTorch on the noisy gradient: DP-SGD, DP-Adam, DP-RMSProp, DP-AdaGrad."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.errors import DataError, NoGuaranteeError
from training_client.optimizers.base import PrivateOptimizer, require_same_kind
from training_client.optimizers.state_source import StepContext
from training_client.plan import Schedule
from training_client.private_step.batches import Examples, TargetLoss, Targets


class NoisyTorchOptimizer(PrivateOptimizer):
    """Clips and adds noise, then lets a PyTorch optimizer make the step.

    With `torch.optim.SGD` it is DP-SGD (papers/002; Abadi et al. 2016, Algorithm 1); with Adam,
    RMSprop and Adagrad the baselines of papers/004 (§6 and its Algorithm 2).

    Its rates may be changed by PyTorch's `lr_scheduler`s, made with `torch_optimizer`. Gradients of
    all its parameter groups are clipped together, and get the same noise.

    Attributes:
        torch_optimizer: PyTorch's optimizer.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; its plan says what a step does and costs.
        make: makes PyTorch's optimizer, given the parameters; it may divide them into groups.
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
        self._ratios: list[float] = []  # of the groups' rates to the first, when they were set
        self._is_updating = False
        self._refuse_other_steps()
        if allowance.has_claim:
            self.keep_fixed("torch_optimizer")

    @property
    def _order(self) -> list[int]:
        """The index in `parameters` of each of the groups' parameters, in their order."""
        index = {id(each): number for number, each in enumerate(self.parameters)}
        groups = self.torch_optimizer.param_groups
        return [index[id(each)] for group in groups for each in group["params"]]

    def _refuse_other_steps(self) -> None:
        """Let PyTorch's optimizer refuse steps that are not part of a private step."""
        owner = weakref.ref(self)  # a cycle of references would keep the state in memory

        def require_private_step(*_: Any) -> None:
            """Raise unless the private optimizer makes a step; PyTorch calls it before each."""
            private = owner()
            if private is None or not private._is_updating:
                raise NoGuaranteeError(
                    "torch_optimizer.step() would update the parameters with gradients that have "
                    "no noise, and no budget pays for it: call step(examples, targets, loss) of "
                    "the private optimizer"
                )

        self.torch_optimizer.register_step_pre_hook(require_private_step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; PyTorch's optimizers leave their hooks out of copies."""
        vars(self).update(state)
        self._refuse_other_steps()

    def step(self, examples: Examples, targets: Targets, loss: TargetLoss) -> float:
        """Make one private step; see `PrivateOptimizer.step`.

        Raises:
            NoGuaranteeError: PyTorch's optimizer has a gradient of another parameter.
        """
        own = {id(each) for each in self.parameters}
        for group in self.torch_optimizer.param_groups:
            for each in group["params"]:
                if id(each) not in own and each.grad is not None:
                    raise NoGuaranteeError(
                        f"PyTorch's optimizer would also update a parameter of shape "
                        f"{tuple(each.shape)}, whose gradient has no noise: give it the "
                        "parameters that `make` is called with, and no others"
                    )
        return super().step(examples, targets, loss)

    @property
    def learning_rate(self) -> float:
        """The learning rate of PyTorch's optimizer; of several parameter groups, of the first.

        Setting it changes the rates of all groups in the same ratio.
        """
        return float(self.torch_optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        """Set the learning rate of the first parameter group, and the others in proportion.

        Raises:
            ValueError: the first rate is 0 and others are not, so there is no ratio.
        """
        groups = self.torch_optimizer.param_groups
        rates = [float(group["lr"]) for group in groups]
        if rates[0] > 0:
            self._ratios = [each / rates[0] for each in rates]
        elif not self._ratios and not any(rates):
            self._ratios = [1.0] * len(rates)
        elif not self._ratios:
            raise ValueError(
                "the first parameter group has the learning rate 0, so that the others have no "
                'ratio to it: set torch_optimizer.param_groups[…]["lr"] of each'
            )
        for group, ratio in zip(groups, self._ratios, strict=True):
            group["lr"] = rate * ratio

    @contextmanager
    def _scaled_learning_rate(self, schedule: Schedule | None, step: int) -> Iterator[None]:
        """Context manager: multiply the rate of every group by the schedule's factor for a step."""
        groups = self.torch_optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if schedule is not None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * schedule.at(step)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def update(self, step: StepContext) -> None:
        """Make one step of PyTorch's optimizer with the noisy mean as its gradient."""
        for parameter, mean in zip(self.parameters, step.noisy_mean.to_tensors(), strict=True):
            parameter.grad = _match_memory_layout(parameter, mean)
        self._is_updating = True
        try:
            self.torch_optimizer.step()
        finally:
            self._is_updating = False
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
        own, order = self.torch_optimizer.state_dict(), self._order
        state = self.load_shared_state(state)
        try:
            for index, entries in state["state"].items():
                for name, given in entries.items():
                    if torch.is_tensor(given) and given.dim() > 0:
                        require_same_kind(name, given, self.parameters[order[index]])
            self.torch_optimizer.load_state_dict(self._shard(state))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self.torch_optimizer.load_state_dict(own)
            raise DataError(f"the checkpoint is not one of this optimizer: {error}") from None

    def _shard(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with the rows that this process holds of each whole tensor."""
        order = self._order
        sharded = {
            index: {
                name: self.trained.shard(order[index], value) for name, value in entries.items()
            }
            for index, entries in state["state"].items()
        }
        return state | {"state": sharded}


def _match_memory_layout(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a noisy mean in its parameter's memory layout, as PyTorch's optimizers expect."""
    if parameter.stride() == mean.stride():
        return mean
    return torch.empty_like(parameter).copy_(mean)
