"""Flat ℓ2 clipping for models whose parameters all belong to Linear layers.

The gradient of one example in a Linear layer is the outer product of its output gradient g and its
input a, so its squared norm is ‖g‖²·(‖a‖² + 1) with a bias, and a weighted sum over examples is
one matrix product. Neither needs a per-example gradient in memory ("book-keeping", Bu et al. 2023,
arXiv 2210.00038), and one backward pass to the layers' outputs is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from training_client.errors import UnsupportedModelError

_ROUNDING: Final = 1e-6  # a norm summed in single precision is this good: clip a little below C


class LinearClipper:
    """Computes Σᵢ clip(∇ᵢ) of a batch for one model.

    Args:
        model: parameters only in `nn.Linear` layers, each applied once to a matrix of examples.
        clip_norm: C > 0.

    Raises:
        UnsupportedModelError: another layer has parameters; the message names it.
    """

    def __init__(self, model: nn.Module, clip_norm: float) -> None:
        self.clip_norm = clip_norm
        self._model = model
        self._layers = _linear_layers(model)
        self._inputs: dict[nn.Linear, torch.Tensor] = {}
        self._outputs: dict[nn.Linear, torch.Tensor] = {}

    def sum_clipped(
        self,
        examples: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[list[torch.Tensor], float]:
        """The sum over the batch of each example's gradient, scaled to norm at most C.

        Args:
            examples: one row an example.
            targets: one entry an example.
            loss: maps predictions and targets to one loss an example; it must not mix examples.

        Returns:
            A tensor per trainable parameter in the order of `model.parameters()`, and the mean
            loss of the batch (not private: for the progress bar of the data's owner only).
        """
        if len(examples) == 0:
            return [torch.zeros_like(p) for p in self._parameters()], 0.0
        with self._remembering():
            losses = loss(self._model(examples), targets)
        if losses.shape != (len(examples),):
            raise UnsupportedModelError(
                f"the loss must give one value an example, not a tensor of shape "
                f"{tuple(losses.shape)}: use reduction='none'"
            )
        outputs = [self._outputs[layer] for layer in self._layers]
        gradients = dict(zip(self._layers, torch.autograd.grad(losses.sum(), outputs), strict=True))
        weights = self._weights(gradients)
        sums = self._weighted_sums(gradients, weights)
        self._inputs.clear()
        self._outputs.clear()
        return [sums[p] for p in self._parameters()], float(losses.detach().mean())

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Keep each layer's input and output during one forward pass, and no other."""
        self._inputs.clear()
        self._outputs.clear()
        hooks = [layer.register_forward_hook(self._remember) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _remember(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        if layer in self._inputs:
            raise UnsupportedModelError(f"{layer} is applied twice in one forward pass")
        if inputs[0].dim() != 2:
            raise UnsupportedModelError(f"{layer} is applied to more than one row an example")
        self._inputs[layer], self._outputs[layer] = inputs[0].detach(), output

    def _weights(self, gradients: dict[nn.Linear, torch.Tensor]) -> torch.Tensor:
        """min(1, C/‖∇ᵢ‖) for each example; 0 for an example whose gradient is not finite."""
        first = next(iter(gradients.values()))
        squared = first.new_zeros(len(first))
        for layer, gradient in gradients.items():
            size = self._inputs[layer].square().sum(1)
            size = size + 1.0 if layer.bias is not None else size
            squared += gradient.square().sum(1) * size
        limit = self.clip_norm * (1 - _ROUNDING)
        weights = (limit / squared.sqrt().clamp_min(1e-30)).clamp_max(1.0)
        return torch.where(torch.isfinite(squared), weights, torch.zeros_like(weights))

    def _weighted_sums(
        self, gradients: dict[nn.Linear, torch.Tensor], weights: torch.Tensor
    ) -> dict[torch.Tensor, torch.Tensor]:
        kept = weights[:, None] > 0
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for layer, gradient in gradients.items():
            scaled = torch.where(kept, gradient * weights[:, None], 0.0)
            inputs = torch.where(kept, self._inputs[layer], 0.0)
            sums[layer.weight] = scaled.T @ inputs
            if layer.bias is not None:
                sums[layer.bias] = scaled.sum(0)
        return sums


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not isinstance(module, nn.Linear):
            raise UnsupportedModelError(
                f"layer {name or '(root)'} ({type(module).__name__}) has parameters of its own; "
                "this engine clips Linear layers only"
            )
        if own and not all(p.requires_grad for p in own):
            raise UnsupportedModelError(f"layer {name} is partly frozen: freeze all or nothing")
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UnsupportedModelError("the model has no Linear layer to train")
    return layers
