"""Checks that a model and a loss keep examples apart, and that the clip sees the whole gradient.

The bound on a record's influence holds only if nothing of one example depends on another. The types
of layers do not show it: a model may mix examples in plain code, or in its loss. So a few examples
are run again with the others altered, and again without the others, and the passes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from training_client.errors import UnsupportedModelError
from training_client.private_step.blocks import cut_into_blocks
from training_client.private_step.evaluation import evaluation_mode
from training_client.private_step.model_pass import ModelPass
from training_client.private_step.rounding_bounds import rounding_error

_EXAMPLES: Final = 32  # examples that are compared
_REPLACEMENT_FACTOR: Final = -3.0
_ROWS: Final = 128  # rows of a tensor that are copied at a time
_HALF_PRECISION_TOLERANCE: Final = 1e-3  # above it the tolerance is that of half precision

RunModel = Callable[[torch.Tensor, torch.Tensor], ModelPass]


def require_independent_examples(
    model: nn.Module, run: RunModel, examples: torch.Tensor, targets: torch.Tensor
) -> None:
    """Raise if a layer's values for one example depend on other examples of the batch.

    Every other example is first replaced, then left out: the rest must pass as before. Where
    examples are left out the model is in evaluation mode, because dropout and the like would draw
    other random numbers for fewer examples.

    Args:
        model: the model; its random numbers come from PyTorch's default generators.
        run: runs examples and targets through it.
        examples: a batch, of which a few examples are used.
        targets: their targets.

    Raises:
        UnsupportedModelError: examples depend on each other; the message names the layer.
    """
    few, labels = examples[:_EXAMPLES], targets[:_EXAMPLES]
    kept = torch.arange(len(few), device=few.device) % 2 == 0
    with _restored_random_state(few.device):
        original = run(few, labels)
    with _restored_random_state(few.device):
        altered = run(_replace_rows(few, kept), _replace_rows(labels, kept))
    _require_equal_passes(original, kept, altered, kept)
    with _restored_random_state(few.device), evaluation_mode(model):
        original, alone = run(few, labels), run(few[kept], labels[kept])
    _require_equal_passes(original, kept, alone, kept[kept])


def require_complete_gradients(
    run: RunModel,
    parameters: Sequence[nn.Parameter],
    examples: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Raise unless per-example gradients add up to the gradient of the summed loss.

    They do not where a parameter is used outside of its layer's ordinary call, or where a layer
    computes something else than its per-example gradients are for.

    They may differ by rounding, which is relative to the terms of the sums, not to the sums: where
    a model is sure of its answers, or before a normalisation layer, nearly everything cancels.

    Args:
        run: runs examples and targets through the model, and returns the full gradients too.
        parameters: the trained parameters.
        examples: a batch, of which a few examples are used.
        targets: their targets.

    Raises:
        UnsupportedModelError: they differ.
    """
    with _restored_random_state(examples.device):
        model_pass = run(examples[:_EXAMPLES], targets[:_EXAMPLES])
    tolerances = _sum_tolerances(model_pass)
    absolute_pass = replace(
        model_pass,
        inputs=_absolute_values(model_pass.inputs),
        gradients=_absolute_values(model_pass.gradients),
    )
    gradients = model_pass.take_example_gradients(parameters)
    absolute_gradients = absolute_pass.take_example_gradients(parameters)
    weights = torch.ones(len(model_pass.losses), dtype=parameters[0].dtype, device=examples.device)
    full = [torch.zeros(0) if g is None else g for g in model_pass.full_gradients]
    pieces = (piece for block in cut_into_blocks(parameters) for piece in block.pieces)
    for piece in pieces:  # sums are made piece by piece, to save memory
        parameter = parameters[piece.index]
        expected, found = full[piece.index][piece.rows], parameters[0].new_empty(piece.shape)
        absolute_gradients[piece.index].weighted_sum(piece.rows, weights, found)
        tolerance = tolerances[parameter]
        atol = tolerance * (_largest_magnitude(found) + _largest_magnitude(expected))
        gradients[piece.index].weighted_sum(piece.rows, weights, found)
        if len(expected) == 0 or not torch.allclose(
            expected, found, rtol=tolerance, atol=atol, equal_nan=True
        ):
            raise UnsupportedModelError(
                f"the per-example gradients of a parameter of shape {tuple(parameter.shape)} do "
                "not add up to its gradient: the parameter is used outside of its layer, or the "
                "layer computes more than its type says. Call the layer itself, once, or freeze "
                "the parameter"
            )


@contextmanager
def _restored_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state afterwards, so that the next run draws the same numbers."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield


def _replace_rows(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return rows in which those not in `kept` are replaced by scaled neighbouring rows."""
    others = rows.roll(1, 0)
    others = others * _REPLACEMENT_FACTOR if others.is_floating_point() else others
    return torch.where(kept.view(-1, *(1,) * (rows.dim() - 1)), rows, others)


def _require_equal_passes(
    first: ModelPass, first_rows: torch.Tensor, second: ModelPass, second_rows: torch.Tensor
) -> None:
    """Raise unless each layer saw the same inputs and gradients in both passes."""
    for layer, inputs in first.inputs.items():
        pairs = (
            (inputs, second.inputs[layer]),
            (first.gradients[layer], second.gradients[layer]),
        )
        if not all(_is_close(one[first_rows], other[second_rows]) for one, other in pairs):
            raise UnsupportedModelError(
                f"the inputs or gradients that {layer} gets for one example depend on other "
                "examples: model and loss must keep examples apart, along the first dimension of "
                "every tensor, and draw random numbers from PyTorch only"
            )


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal up to rounding; NaN equals NaN."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = _relative_tolerance(one)
    atol = tolerance * _largest_magnitude(one)
    return torch.allclose(one, other, rtol=tolerance, atol=atol, equal_nan=True)


def _relative_tolerance(tensor: torch.Tensor) -> float:
    """Return the relative tolerance for values computed in a tensor's precision: √epsilon."""
    return float(torch.finfo(tensor.dtype).eps) ** 0.5 if tensor.is_floating_point() else 0.0


def _sum_tolerances(model_pass: ModelPass) -> dict[nn.Parameter, float]:
    """Return the tolerance for each parameter's gradient sums, relative to the sum of |terms|.

    Half precision loses more in a term than in the sum, and so does an accelerator, where
    convolutions are in TF32 by default.
    """
    found: dict[nn.Parameter, float] = {}
    for layer, gradient in model_pass.gradients.items():
        pair = model_pass.inputs[layer], gradient
        tolerance = max(map(_relative_tolerance, pair))
        is_precise = all(_relative_tolerance(each) < _HALF_PRECISION_TOLERANCE for each in pair)
        if gradient.is_cpu and is_precise:
            tolerance = min(tolerance, rounding_error(gradient.dtype, _term_count(gradient)))
        found |= dict.fromkeys(layer.parameters(recurse=False), tolerance)
    return found


def _term_count(gradient: torch.Tensor) -> int:
    """Return an upper bound on the number of terms in the sums of a parameter's gradient."""
    return gradient.numel() // max(1, min(gradient.shape[1:], default=1))


def _absolute_values(tensors: dict[nn.Module, torch.Tensor]) -> dict[nn.Module, torch.Tensor]:
    """Return absolute values of floats, so that nothing cancels; integers stay as they are."""
    return {
        layer: each.abs() if each.is_floating_point() else each for layer, each in tensors.items()
    }


def _largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor."""
    if tensor.numel() == 0:
        return 0.0
    parts = torch.split(tensor, _ROWS)
    return max(float(part.nan_to_num(0.0, 0.0, 0.0).abs_().amax()) for part in parts)
