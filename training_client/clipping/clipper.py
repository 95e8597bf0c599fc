"""Clipped sums of per-example gradients, from one backward pass to the layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from training_client.clipping.blocks import blocks_of
from training_client.clipping.gradients import ExampleGradients
from training_client.clipping.layers import gradients_of, trained_layers
from training_client.clipping.transform import Transform
from training_client.errors import UnsupportedModelError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # one value an example
_ROUNDING: Final = 1e-6  # of an example's weight, and of what is weighted


@dataclass
class _Seen:
    """What a forward pass went through: layers' inputs, and where their outputs' gradients are."""

    examples: int
    inputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    edges: dict[nn.Module, GradientEdge] = field(default_factory=dict)

    def remember(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """A forward hook."""
        if layer in self.inputs:
            raise UnsupportedModelError(f"{layer} is applied twice in one forward pass")
        if len(inputs[0]) != self.examples or len(output) != self.examples:
            raise UnsupportedModelError(f"{layer} is applied to more than one row an example")
        self.inputs[layer] = inputs[0].detach()
        self.edges[layer] = get_gradient_edge(output)


class Clipper:
    """Computes Σᵢ clip(D∘∇ᵢ + c) of a batch for one model.

    Attributes:
        parameters: what is trained, in the order of `model.parameters()`.
        blocks: all of them in parts.

    Args:
        model: its layers with parameters are Linear, or known to Opacus; each is applied once, to
            one row or sequence an example.

    Raises:
        UnsupportedModelError: a layer cannot be clipped; the message names it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = trained_layers(model)
        self._probed = False
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.blocks = blocks_of(self.parameters)

    def sum_clipped(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> tuple[list[torch.Tensor], float]:
        """The sum over the batch of each example's transformed gradient, clipped.

        Args:
            examples: one at each place of the first dimension.
            targets: likewise.
            loss: maps predictions and targets to one loss an example; it must not mix examples.
            transform: what is clipped, and to what bound.

        Returns:
            A tensor per trained parameter, and the mean loss of the batch (not private: for the
            progress bar of the data's owner only).

        Raises:
            UnsupportedModelError: the model or the loss mixes examples.
        """
        if transform.box and transform.bound < math.sqrt(sum(p.numel() for p in self.parameters)):
            raise ValueError("a box is bounded by the root of its coordinates, not by less")
        if len(examples) == 0:
            return [torch.zeros_like(p) for p in self.parameters], 0.0
        gradients, mean_loss = self._gradients(examples, targets, loss)
        with torch.autocast(examples.device.type, enabled=False):  # whatever the model ran in
            if transform.box:
                return self._clamped_sums(gradients, transform), mean_loss
            weights = self._weights(gradients, transform)
            kept = weights > 0
            if not bool(kept.all()):  # what is left out may not be finite: 0 times it neither
                gradients = [each.only(kept) for each in gradients]
            return self._weighted_sums(gradients, weights[kept], transform), mean_loss

    def _gradients(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss
    ) -> tuple[list[ExampleGradients], float]:
        """Every example's gradient of each parameter, and the mean loss."""
        seen = _Seen(len(examples))
        with self._watched(seen):
            losses = loss(self._model(examples), targets)
        if losses.shape != (len(examples),):
            raise UnsupportedModelError(
                f"the loss must give one value an example, not a tensor of shape "
                f"{tuple(losses.shape)}: use reduction='none'"
            )
        self._probe(losses, seen)
        gradients = torch.autograd.grad(losses.sum(), list(seen.edges.values()), allow_unused=True)
        by_layer = dict(zip(seen.edges, gradients, strict=True))
        found = dict[torch.Tensor, ExampleGradients]()
        for layer in self._layers:
            gradient = by_layer.get(layer)
            if gradient is None:
                raise UnsupportedModelError(f"{layer} takes no part in the loss: freeze it")
            kind = next(layer.parameters(recurse=False)).dtype
            inputs = seen.inputs.pop(layer)
            inputs = inputs.to(kind) if inputs.is_floating_point() else inputs
            found |= gradients_of(layer, inputs, gradient.to(kind))
        return [found[p] for p in self.parameters], float(losses.detach().mean())

    @contextmanager
    def _watched(self, seen: _Seen) -> Iterator[None]:
        """Remember what one forward pass goes through, and no other."""
        hooks = [layer.register_forward_hook(seen.remember) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _probe(self, losses: torch.Tensor, seen: _Seen) -> None:
        """Once: the loss of the first example must not move what belongs to the others."""
        if self._probed or len(losses) < 2:
            return
        edges = list(seen.edges.values())
        found = torch.autograd.grad(losses[0], edges, retain_graph=True, allow_unused=True)
        for layer, gradient in zip(seen.edges, found, strict=True):
            others = torch.zeros(1) if gradient is None else gradient[1:]
            if bool((others.isfinite() & (others != 0)).any()):
                raise UnsupportedModelError(
                    f"the loss of one example depends on what {layer} makes of another: model and "
                    "loss must keep examples apart, at the first dimension of every tensor"
                )
        self._probed = True

    def _weights(self, gradients: list[ExampleGradients], transform: Transform) -> torch.Tensor:
        """min(1, B/‖u‖) for each example; 0 for an example whose gradient is not finite."""
        found = [
            each.squares([block for block in self.blocks if block.at == at], transform)
            for at, each in enumerate(gradients)
        ]
        norms = torch.stack([each.found + each.lost for each in found]).sum(0).sqrt_()
        limit = transform.bound * (1 - _ROUNDING)
        weights = (limit / norms.clamp_min(1e-300)).clamp_max_(1.0)
        return weights.where(norms.isfinite(), 0.0).to(self.parameters[0].dtype)

    def _weighted_sums(
        self, gradients: list[ExampleGradients], weights: torch.Tensor, transform: Transform
    ) -> list[torch.Tensor]:
        """Σ wᵢ·(D∘∇ᵢ + c) = D∘Σ wᵢ∇ᵢ + (Σ wᵢ)·c."""
        sums = [torch.empty_like(p) for p in self.parameters]
        total = weights.sum()
        for block in self.blocks:
            found = block.of(sums)
            gradients[block.at].weighted_sum(block, weights, found)
            if transform.affine is not None:
                scale, shift = transform.affine(block)
                found *= scale
                if shift is not None:
                    found.addcmul_(shift, total)
        return sums

    def _clamped_sums(
        self, gradients: list[ExampleGradients], transform: Transform
    ) -> list[torch.Tensor]:
        """Σ clamp(D∘∇ᵢ, ±1)."""
        assert transform.affine is not None
        sums = [torch.empty_like(p) for p in self.parameters]
        for block in self.blocks:
            scale, shift = transform.affine(block)
            if shift is not None:
                raise ValueError("a box has scales and no shifts")
            block.of(sums).copy_(gradients[block.at].clamped_sum(block, scale))
        return sums
