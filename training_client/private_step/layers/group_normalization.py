"""GroupNorm and InstanceNorm, run such that PyTorch's backward pass gives per-example gradients.

The channels of all examples are normalised as the channels of one, with a copy of scale and shift
for each example. The numbers are those of the ordinary call; the gradient of the copies has a row
for each example, and costs what the gradient of scale and shift costs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import instance_norm
from torch.nn.modules.instancenorm import _InstanceNorm

from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.layers.layer_uses import Tensors, UseRecorder
from training_client.private_step.module_names import keeps_forward_of

_KINDS: Final = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_group_normalization(layer: nn.Module) -> bool:
    """Return whether a layer is a GroupNorm or InstanceNorm that uses each example's statistics."""
    has_statistics = getattr(layer, "track_running_stats", False)
    return not has_statistics and any(keeps_forward_of(layer, kind) for kind in _KINDS)


def run_group_normalization(
    recorder: UseRecorder, layer: nn.GroupNorm | _InstanceNorm, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Run a layer on one tensor of shape (examples, channels, …), and record its use.

    The output is a view of no other tensor, as its place in the graph is lost if a view is changed.
    """
    (inputs,) = (*args, *kwargs.values())
    if recorder.keep_all or not inputs.is_contiguous():  # another memory format is kept
        found = type(layer).forward(layer, inputs)  # type: ignore[arg-type]
        output: torch.Tensor = torch.ops.aten._unsafe_view(found, inputs.shape)

        def differentiate(
            given: Tensors, gradients: Tensors
        ) -> dict[torch.Tensor, ExampleGradients]:
            """Return the per-example gradients of scale and shift."""
            return group_normalization_gradients(layer, given[0], gradients[0])

        recorder.record_use(layer, (inputs,), output, differentiate)
        return output
    count = len(inputs)
    weight, bias = (
        None if own is None else own.detach().repeat(count).requires_grad_(own.requires_grad)
        for own in (layer.weight, layer.bias)
    )
    rows = inputs.reshape(1, -1, *inputs.shape[2:])
    if isinstance(layer, nn.GroupNorm):
        found = torch.group_norm(rows, count * layer.num_groups, weight, bias, layer.eps)
    else:
        found = instance_norm(rows, weight=weight, bias=bias, eps=layer.eps)
    output = torch.ops.aten._unsafe_view(found, inputs.shape)
    pairs = ((layer.weight, weight), (layer.bias, bias))
    recorder.record_copies(layer, {own: each for own, each in pairs if each is not None}, output)
    return output


def group_normalization_gradients(
    layer: nn.GroupNorm | _InstanceNorm, inputs: torch.Tensor, gradient: torch.Tensor
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of scale and shift.

    Args:
        layer: one that `is_group_normalization` accepts.
        inputs: of shape (examples, channels, …).
        gradient: of the outputs, likewise.
    """
    if isinstance(layer, nn.GroupNorm):
        unit = torch.group_norm(inputs, layer.num_groups, eps=layer.eps)
    else:
        unit = instance_norm(inputs, eps=layer.eps)
    pairs = ((layer.weight, unit * gradient), (layer.bias, gradient))
    return {
        own: MaterializedGradients(each.reshape(*each.shape[:2], -1).sum(2))
        for own, each in pairs
        if own is not None and own.requires_grad
    }
