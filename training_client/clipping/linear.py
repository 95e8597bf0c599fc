"""Clipped sums for models whose parameters all belong to Linear layers.

The gradient of one example in a Linear layer is the outer product of its output gradient g and its
input a, so the squared norm of D∘(g aᵀ) + c is

    Σⱼ [(g²)D²]ⱼ·a²ⱼ + 2·gᵀ(D∘c)a + ‖c‖²,

which is ‖g‖²·‖a‖² without D and c, and a weighted sum over examples is one matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038), and one
backward pass to the layers' outputs is enough. Only a box is elementwise: it is clamped in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from training_client.clipping.transform import Transform
from training_client.errors import UnsupportedModelError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # one value an example
_ROUNDING: Final = 1e-6  # what a norm summed in single precision may lack, and its weight
_TERMS: Final = 64  # roundings of a sum that is not a matrix product, and of its terms
_CHUNK: Final = 1 << 22  # elements of per-example gradients that are held to clamp them


class LinearClipper:
    """Computes Σᵢ clip(D∘∇ᵢ + c) of a batch for one model.

    Args:
        model: parameters only in `nn.Linear` layers, each applied once to a matrix of examples.

    Raises:
        UnsupportedModelError: another layer has parameters; the message names it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = _linear_layers(model)
        self._inputs: dict[nn.Linear, torch.Tensor] = {}
        self._outputs: dict[nn.Linear, torch.Tensor] = {}
        self._rows = 0

    def sum_clipped(
        self,
        examples: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
        transform: Transform,
    ) -> tuple[list[torch.Tensor], float]:
        """The sum over the batch of each example's transformed gradient, clipped.

        Args:
            examples: one row an example.
            targets: one entry an example.
            loss: maps predictions and targets to one loss an example; it must not mix examples.
            transform: what is clipped, and to what bound.

        Returns:
            A tensor per trainable parameter in the order of `model.parameters()`, and the mean
            loss of the batch (not private: for the progress bar of the data's owner only).
        """
        if len(examples) == 0:
            return [torch.zeros_like(p) for p in self._parameters()], 0.0
        self._rows = len(examples)
        with self._remembering():
            losses = loss(self._model(examples), targets)
        if losses.shape != (len(examples),):
            raise UnsupportedModelError(
                f"the loss must give one value an example, not a tensor of shape "
                f"{tuple(losses.shape)}: use reduction='none'"
            )
        outputs = [self._outputs[layer] for layer in self._layers]
        found = torch.autograd.grad(losses.sum(), outputs)
        gradients = {
            layer: gradient.to(layer.weight.dtype)
            for layer, gradient in zip(self._layers, found, strict=True)
        }
        with torch.autocast(examples.device.type, enabled=False):  # whatever the model ran in
            if transform.box:
                sums = self._clamped_sums(gradients, transform)
            else:
                weights = self._weights(gradients, transform)
                sums = self._weighted_sums(gradients, weights, transform)
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
        if inputs[0].dim() != 2 or len(inputs[0]) != self._rows:
            raise UnsupportedModelError(f"{layer} is applied to more than one row an example")
        self._inputs[layer] = inputs[0].detach().to(layer.weight.dtype)
        self._outputs[layer] = output

    def _weights(
        self, gradients: dict[nn.Linear, torch.Tensor], transform: Transform
    ) -> torch.Tensor:
        """min(1, B/‖u‖) for each example; 0 for an example whose gradient is not finite."""
        scales, shifts = self._by_parameter(transform.scales), self._by_parameter(transform.shifts)
        first = next(iter(gradients.values()))
        squared = first.new_zeros(len(first), dtype=torch.float64)
        crossed, constant, terms = torch.zeros_like(squared), 0.0, 0
        for layer, gradient in gradients.items():
            unit, sizes = _normalised(gradient)
            for parameter, inputs in self._factors(layer):
                scale, shift = scales.get(parameter), shifts.get(parameter)
                factor, lengths = (None, sizes) if inputs is None else _normalised(inputs)
                lengths = sizes if inputs is None else sizes * lengths
                squared += lengths**2 * _form(unit * unit, _square(scale), _square(factor))
                if shift is not None:
                    product = shift if scale is None else scale * shift
                    crossed += 2 * lengths * _form(unit, product, factor)
                    constant += float(shift.double().square().sum())
            if transform.scales is not None or transform.shifts is not None:
                terms = max(terms, layer.out_features)
        # a sum of n terms lacks n roundings of itself at most (in the order of a matrix product)
        rounding = (terms + _TERMS) * float(torch.finfo(first.dtype).eps)
        if transform.shifts is not None:  # whatever cancels, by the size of its parts
            lost = rounding * (squared + crossed.abs() + constant)
            squared = (squared + crossed + constant).clamp_min(0.0) + lost
        margin = _ROUNDING + (rounding if terms else 0.0)
        limit = transform.bound * (1 - margin)
        weights = (limit / squared.sqrt().clamp_min(1e-300)).clamp_max(1.0)
        finite = torch.where(torch.isfinite(squared), weights, torch.zeros_like(weights))
        return finite.to(first.dtype)

    def _weighted_sums(
        self,
        gradients: dict[nn.Linear, torch.Tensor],
        weights: torch.Tensor,
        transform: Transform,
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Σ wᵢ·(D∘∇ᵢ + c) = D∘Σ wᵢ∇ᵢ + (Σ wᵢ)·c."""
        scales, shifts = self._by_parameter(transform.scales), self._by_parameter(transform.shifts)
        kept, total = weights > 0, weights.sum()
        whole = bool(kept.all())  # else what is left out may not be finite: 0 times it neither
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for layer, gradient in gradients.items():
            scaled = (gradient if whole else gradient[kept]) * weights[kept][:, None]
            for parameter, inputs in self._factors(layer):
                if inputs is None:
                    found = scaled.sum(0)
                else:
                    found = scaled.T @ (inputs if whole else inputs[kept])
                if parameter in scales:
                    found *= scales[parameter]
                if parameter in shifts:
                    found.add_(total * shifts[parameter])
                sums[parameter] = found
        return sums

    def _clamped_sums(
        self, gradients: dict[nn.Linear, torch.Tensor], transform: Transform
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Σ clamp(D∘∇ᵢ, ±1), a few examples at a time; 0 for what is not finite."""
        scales = self._by_parameter(transform.scales)
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for layer, gradient in gradients.items():
            for parameter, inputs in self._factors(layer):
                scale, total = scales[parameter], torch.zeros_like(parameter)
                rows = max(1, _CHUNK // parameter.numel())
                for at in range(0, len(gradient), rows):
                    each = gradient[at : at + rows]
                    if inputs is not None:
                        each = each[:, :, None] * inputs[at : at + rows, None, :]
                    total += (each * scale).nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0).sum(0)
                sums[parameter] = total
        return sums

    def _factors(self, layer: nn.Linear) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """A layer's parameters, each with what its gradient is the outer product with."""
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (layer.weight, self._inputs[layer])
        ]
        return found if layer.bias is None else [*found, (layer.bias, None)]

    def _by_parameter(
        self, tensors: Sequence[torch.Tensor] | None
    ) -> dict[torch.Tensor, torch.Tensor]:
        return {} if tensors is None else dict(zip(self._parameters(), tensors, strict=True))


def _normalised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose largest entry is 1, so that no square underflows, and what that was before."""
    sizes = rows.abs().amax(1)
    sizes = torch.where(sizes > 0, sizes, torch.ones_like(sizes))
    return rows / sizes[:, None], sizes.double()


def _form(
    gradient: torch.Tensor, matrix: torch.Tensor | None, inputs: torch.Tensor | None
) -> torch.Tensor:
    """Σ gᵒ·M_oj·aⱼ of each example; a bias has the input 1, and no matrix is all ones."""
    if inputs is None:
        return gradient.sum(1) if matrix is None else gradient @ matrix
    if matrix is None:
        return gradient.sum(1) * inputs.sum(1)
    return (gradient @ matrix).mul_(inputs).sum(1)


def _square(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor * tensor


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers of a model that this engine can clip.

    Raises:
        UnsupportedModelError: something in it has parameters of another kind, mixes examples, or
            changes what must be remembered.
    """
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        place = f"layer {name or '(root)'} ({type(module).__name__})"
        if isinstance(module, _NormBase):
            raise UnsupportedModelError(
                f"{place} normalises over the batch, so that one example moves the gradients of "
                "others: use LayerNorm or GroupNorm"
            )
        if own and not isinstance(module, nn.Linear):
            raise UnsupportedModelError(
                f"{place} has parameters of its own; this engine clips Linear layers only"
            )
        if own and not all(p.requires_grad for p in own):
            raise UnsupportedModelError(f"{place} is frozen, in part or whole: leave it out")
        if own and any(p.dtype not in (torch.float32, torch.float64) for p in own):
            raise UnsupportedModelError(
                f"{place} has parameters of {own[0].dtype}, in which noise is lost by rounding: "
                "keep them in float32 and run the model under torch.autocast"
            )
        if getattr(module, "inplace", False):
            raise UnsupportedModelError(
                f"{place} overwrites an output that is needed: use inplace=False"
            )
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UnsupportedModelError("the model has no Linear layer to train")
    held = [p for layer in layers for p in layer.parameters()]
    if len({id(p) for p in held}) < len(held):
        raise UnsupportedModelError("two layers share a parameter")
    return layers
