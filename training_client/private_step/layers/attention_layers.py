"""The forward pass of PyTorch's `MultiheadAttention` as linear maps and attention.

PyTorch's own uses the weights of all its linear maps in one function. Here each is recorded as the
linear map that it is. The numbers are the same up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.layers.layer_uses import Tensors, UseRecorder


def run_attention(
    recorder: UseRecorder,
    layer: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001 (only a hint about `attn_mask`)
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run an attention layer on one sequence per example; record its linear maps for clipping.

    Args:
        recorder: records the uses.
        layer: the layer, with batch_first=True.
        query: of shape (examples, positions, width).
        key: likewise.
        value: likewise.
        key_padding_mask: of shape (examples, positions); true or −∞ for keys to leave out.
        need_weights: whether to return the attention weights too.
        attn_mask: of shape (positions, positions), or one for each example and head.
        average_attn_weights: whether to average the weights over the heads.
        is_causal: a hint that `attn_mask` is causal; not needed.

    Raises:
        UnsupportedModelError: the inputs are not one sequence per example.
    """
    if query.dim() != 3:
        raise recorder.unsupported_error(
            layer, "must be given one sequence per example, in a batch"
        )
    queries, keys, values = (
        _split_heads(each, layer.num_heads)
        for each in _project_inputs(recorder, layer, query, key, value)
    )
    mask = _join_masks(layer, key_padding_mask, attn_mask, queries)
    share = layer.dropout if layer.training else 0.0
    weights = None
    if need_weights:
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = dropout(weights, share, layer.training)
        mixed = weights @ values
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = scaled_dot_product_attention(queries, keys, values, mask, share)
    mixed = mixed.transpose(1, 2).flatten(2)
    last = layer.out_proj
    return recorder.project(last, mixed, last.weight, last.bias), weights


def _project_inputs(
    recorder: UseRecorder,
    layer: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Apply the linear maps of query, key and value; map identical inputs only once."""
    weight, bias, width = layer.in_proj_weight, layer.in_proj_bias, layer.embed_dim
    if weight is None:  # keys or values of another width
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return tuple(
            _project_with_part_of_bias(
                recorder, layer, each, of, slice(at * width, (at + 1) * width)
            )
            for at, (each, of) in enumerate(zip((query, key, value), weights, strict=True))
        )
    if query is key and key is value:
        return recorder.project(layer, query, weight, bias).chunk(3, -1)
    queries = recorder.project(layer, query, weight, bias, slice(0, width))
    if key is value:
        both = recorder.project(layer, key, weight, bias, slice(width, 3 * width))
        return queries, *both.chunk(2, -1)
    keys = recorder.project(layer, key, weight, bias, slice(width, 2 * width))
    return queries, keys, recorder.project(layer, value, weight, bias, slice(2 * width, 3 * width))


def _project_with_part_of_bias(
    recorder: UseRecorder,
    layer: nn.MultiheadAttention,
    rows: torch.Tensor,
    weight: torch.Tensor,
    part: slice,
) -> torch.Tensor:
    """Apply a linear map whose bias is the slice `part` of the layer's `in_proj_bias`."""
    found, bias = recorder.project(layer, rows, weight, None), layer.in_proj_bias
    if bias is None:
        return found
    shifted = found + bias[part]

    def differentiate(_: Tensors, gradients: Tensors) -> dict[torch.Tensor, ExampleGradients]:
        """Return per-example gradients of the whole bias, 0 outside the slice `part`."""
        held = gradients[0].new_zeros(len(gradients[0]), len(bias))
        held[:, part] = gradients[0].sum(1)
        return {bias: MaterializedGradients(held)} if bias.requires_grad else {}

    recorder.record_use(layer, (), shifted, differentiate)
    return shifted


def _split_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape (examples, positions, width) to (examples, heads, positions, width per head)."""
    width = rows.shape[-1] // heads
    return rows.reshape(*rows.shape[:-1], heads, width).transpose(1, 2)


def _join_masks(
    layer: nn.MultiheadAttention,
    padding: torch.Tensor | None,
    attention: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """Merge padding and attention mask into a tensor to add to attention scores; None if no masks.

    A boolean mask is true where attention is not allowed.
    """
    found = None
    if padding is not None:
        found = _as_numbers(padding, like)[:, None, None, :]
    if attention is not None:
        numbers = _as_numbers(attention, like)
        if numbers.dim() == 3:
            numbers = numbers.view(-1, layer.num_heads, *numbers.shape[1:])
        found = numbers if found is None else found + numbers
    return found


def _as_numbers(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Convert a boolean mask to numbers to add to attention scores: −∞ where it is true."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
