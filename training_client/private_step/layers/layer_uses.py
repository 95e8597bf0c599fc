"""Uses of trained layers in a forward pass, and the per-example gradients of each use.

A layer may be used several times, and several layers may share a parameter. So each use has its own
part of an example's gradient, and `merge_parts` adds the parts of one parameter before the clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.functional import layer_norm, rms_norm

from training_client.errors import UnsupportedModelError
from training_client.private_step.gradients.chunked_gradients import ChunkedGradients
from training_client.private_step.gradients.convolution_gradients import ConvolutionProducts
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
    OuterProducts,
)
from training_client.private_step.gradients.sequence_products import SequenceProducts
from training_client.private_step.gradients.summed_gradients import Part, SummedGradients
from training_client.private_step.gradients.token_gradients import TokenGradients

Tensors = Sequence[torch.Tensor]
Parts = Mapping[torch.Tensor, ExampleGradients]
Differentiate = Callable[[Tensors, Tensors], Parts]
EnginePath = Literal["gram", "product", "held", "replay"]


@dataclass(frozen=True, slots=True)
class LayerUse:
    """One call of a layer in a forward pass, with the function for its per-example gradients.

    Attributes:
        layer: the layer.
        edges: the outputs of which the loss gradients are needed.
        shapes: their shapes.
        inputs: what the layer was given, one example per row of the first dimension.
        differentiate: maps the inputs, and the loss gradients of the outputs, to the per-example
            gradients of the layer's parameters.
        shared: tensors that the layer was given for all examples together.
        is_bilinear: whether absolute values of inputs and gradients give the sum of the magnitudes
            of the terms that a gradient is the sum of.
    """

    layer: nn.Module
    edges: tuple[GradientEdge, ...]
    shapes: tuple[torch.Size, ...]
    inputs: tuple[torch.Tensor, ...]
    differentiate: Differentiate
    is_bilinear: bool = True
    shared: tuple[torch.Tensor, ...] = ()

    def example_gradients(self, inputs: Tensors, gradients: Tensors) -> Parts:
        """Return the layer's per-example gradients, in the precision of its parameters.

        Args:
            inputs: the layer's inputs.
            gradients: of its outputs.
        """
        dtype = next(p.dtype for p in self.layer.parameters() if p.requires_grad)
        given, found = (
            [each.to(dtype) if each.is_floating_point() else each for each in tensors]
            for tensors in (inputs, gradients)
        )
        return self.differentiate(given, found)


class UseRecorder(Protocol):
    """Interface by which a layer's forward pass records the linear maps that it applies.

    Attributes:
        path: a path of the engine to force.
        keep_all: keep what every layer was given.
    """

    path: EnginePath | None
    keep_all: bool

    def project(
        self,
        layer: nn.Module,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: slice | None = None,
    ) -> torch.Tensor:
        """Apply a linear map (or only these rows of it); record it for per-example gradients."""
        ...

    def record_use(
        self, layer: nn.Module, inputs: Tensors, output: torch.Tensor, differentiate: Differentiate
    ) -> None:
        """Record a layer's inputs, output, and the function for its per-example gradients."""
        ...

    def record_copies(
        self, layer: nn.Module, copies: Mapping[torch.Tensor, torch.Tensor], output: torch.Tensor
    ) -> None:
        """Record copies of a layer's parameters, one for each example, that gave this output."""
        ...

    def unsupported_error(self, layer: nn.Module, problem: str) -> UnsupportedModelError:
        """Return the error for a layer that cannot be clipped: its name, and why (`problem`)."""
        ...


def projection_gradients(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    *,
    path: EnginePath | None = None,
    sparse: bool = False,
    rows: slice | None = None,
    is_transposed: bool = False,
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of a linear map's weight and bias.

    Args:
        weight: of shape (outputs, inputs).
        bias: one value per output; None without.
        inputs: of shape (examples, ..., inputs).
        gradient: of the outputs, of shape (examples, ..., outputs).
        path: a path of the engine to force.
        sparse: whether most input values are declared to be 0.
        rows: the rows of weight and bias that were used; all by default.
        is_transposed: whether the weight is of shape (inputs, outputs).
    """
    # contiguous, as they are after an example is excluded: another memory layout would be summed
    # and rounded in another order
    inputs, gradient = inputs.contiguous(), gradient.contiguous()
    if rows is not None:
        whole = gradient.new_zeros(*gradient.shape[:-1], len(weight))
        whole[..., rows] = gradient
        gradient = whole
    found: dict[torch.Tensor, ExampleGradients] = {}
    if weight.requires_grad:
        left, right = (inputs, gradient) if is_transposed else (gradient, inputs)
        if inputs.dim() == 2 and path is None:
            found[weight] = OuterProducts(left, right, sparse and not is_transposed)
        else:
            method = path if path in ("gram", "product") else None
            found[weight] = SequenceProducts(_as_sequence(left), _as_sequence(right), method)
    if bias is not None and bias.requires_grad:
        held = gradient if gradient.dim() == 2 else gradient.flatten(1, -2).sum(1)
        found[bias] = MaterializedGradients(held)
    return found


def _as_sequence(factor: torch.Tensor) -> torch.Tensor:
    """Reshape (examples, ..., width) to (examples, positions, width)."""
    return factor.flatten(1, -2) if factor.dim() > 2 else factor[:, None]


def embedding_gradients(
    layer: nn.Embedding, tokens: torch.Tensor, gradient: torch.Tensor
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of an embedding table."""
    found = TokenGradients.from_output_gradients(
        tokens.reshape(len(tokens), -1),
        gradient.reshape(len(tokens), -1, gradient.shape[-1]),
        layer.num_embeddings,
        layer.padding_idx,
    )
    return {layer.weight: found}


def bag_gradients(
    layer: nn.EmbeddingBag,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    gradient: torch.Tensor,
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of an embedding table in an `EmbeddingBag`.

    Args:
        layer: the layer, of mode sum or mean.
        tokens: of shape (examples, positions).
        weights: of the tokens in a sum; None for 1.
        gradient: of the bags, of shape (examples, width).
    """
    of_token = gradient[:, None, :].expand(*tokens.shape, -1)
    if weights is not None:
        of_token = of_token * weights[:, :, None]
    if layer.mode == "mean":
        counted = tokens != (-1 if layer.padding_idx is None else layer.padding_idx)
        of_token = of_token / counted.sum(1).clamp_min(1)[:, None, None]
    found = TokenGradients.from_output_gradients(
        tokens, of_token, layer.num_embeddings, layer.padding_idx
    )
    return {layer.weight: found}


def normalization_gradients(
    layer: nn.LayerNorm | nn.RMSNorm, inputs: torch.Tensor, gradient: torch.Tensor
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of a normalization layer's scale and shift."""
    shape, eps = tuple(layer.normalized_shape), layer.eps
    found: dict[torch.Tensor, ExampleGradients] = {}
    positions = tuple(range(1, inputs.dim() - len(shape)))
    if layer.weight is not None and layer.weight.requires_grad:
        if isinstance(layer, nn.LayerNorm):
            unit = layer_norm(inputs, shape, eps=layer.eps)
        else:
            unit = rms_norm(inputs, shape, eps=eps)
        scaled = unit.mul_(gradient)
        found[layer.weight] = MaterializedGradients(scaled.sum(positions) if positions else scaled)
    bias = getattr(layer, "bias", None)
    if bias is not None and bias.requires_grad:
        shift = gradient.sum(positions) if positions else gradient.contiguous()
        found[bias] = MaterializedGradients(shift)
    return found


def merge_parts(parts: Sequence[ExampleGradients], path: EnginePath | None) -> ExampleGradients:
    """Sum one parameter's per-example gradients over the calls that use it.

    Args:
        parts: at least one.
        path: a path of the engine to force.
    """
    found = parts[0] if len(parts) == 1 else _merge(parts)
    if path != "held" or isinstance(found, MaterializedGradients):
        return found
    if isinstance(found, OuterProducts):
        found = SequenceProducts.from_outer_products(found)
    assert isinstance(found, ChunkedGradients | TokenGradients)
    everything = slice(0, found.example_count), slice(0, found.shape[0])
    return MaterializedGradients(found.dense(*everything))


def _merge(parts: Sequence[ExampleGradients]) -> ExampleGradients:
    """Sum two or more sets of per-example gradients of one parameter."""
    held = [each for each in parts if isinstance(each, MaterializedGradients)]
    tokens = [each for each in parts if isinstance(each, TokenGradients)]
    products = [
        SequenceProducts.from_outer_products(each) if isinstance(each, OuterProducts) else each
        for each in parts
        if isinstance(each, OuterProducts | SequenceProducts)
    ]
    merged: list[Part] = [each for each in parts if isinstance(each, ConvolutionProducts)]
    if held:
        merged.append(MaterializedGradients(_add(held)))
    if tokens:
        merged.append(TokenGradients.merge(tokens))
    if products:
        merged.append(SequenceProducts.merge(products))
    return merged[0] if len(merged) == 1 else SummedGradients(tuple(merged))


def _add(parts: Sequence[MaterializedGradients]) -> torch.Tensor:
    """Sum per-example gradients that are stored in full."""
    total = parts[0].gradients.clone()
    for each in parts[1:]:
        total += each.gradients
    return total
