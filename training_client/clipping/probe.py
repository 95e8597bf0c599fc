"""Whether a model and a loss keep examples apart, and whether the clip sees all of a gradient.

The bound on what a record moves holds only if nothing of one example depends on another. Names of
layers do not show it: a model may mix examples in plain code, or in its loss. So a few examples are
run beside altered ones, and alone, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from training_client.clipping.allowances import rounding
from training_client.clipping.blocks import blocks_of
from training_client.clipping.passes import Passed
from training_client.errors import UnsupportedModelError
from training_client.evaluation import evaluating

_EXAMPLES: Final = 32
_ALTERED: Final = -3.0
_ROWS: Final = 128  # of a tensor at a time
_COARSE: Final = 1e-3  # between single and half precision

Pass = Callable[[torch.Tensor, torch.Tensor], Passed]


def require_apart(
    model: nn.Module, run: Pass, examples: torch.Tensor, targets: torch.Tensor
) -> None:
    """Return if examples do not depend on each other.

    Every other example is replaced, and then left out: the rest must pass as before. Where examples
    are left out random parts are switched off, for they would be drawn differently.

    Args:
        model: its random numbers come from PyTorch's default generators.
        run: passes examples and targets through it.
        examples: of which a few are taken.
        targets: of these.

    Raises:
        UnsupportedModelError: they do; the message names the layer where it shows.
    """
    few, labels = examples[:_EXAMPLES], targets[:_EXAMPLES]
    kept = torch.arange(len(few), device=few.device) % 2 == 0
    with _as_before(few.device):
        here = run(few, labels)
    with _as_before(few.device):
        there = run(_altered(few, kept), _altered(labels, kept))
    _require_alike(here, kept, there, kept)
    with _as_before(few.device), evaluating(model):
        here, there = run(few, labels), run(few[kept], labels[kept])
    _require_alike(here, kept, there, kept[kept])


def require_whole(
    run: Pass,
    parameters: Sequence[nn.Parameter],
    examples: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Return if examples' gradients add up to the gradient of the summed loss, up to rounding.

    What is rounded is what is added up, within examples and over them: of a model that is sure of
    its answers, or of a layer before a normalisation, nearly nothing of it may be left.

    They do not where a parameter is used outside of its layer's ordinary call, or where a layer is
    not what its per-example gradients are made for.

    Args:
        run: passes examples and targets through the model, for the whole gradient too.
        parameters: that are trained.
        examples: of which a few are taken.
        targets: of these.

    Raises:
        UnsupportedModelError: they differ.
    """
    with _as_before(examples.device):
        passed = run(examples[:_EXAMPLES], targets[:_EXAMPLES])
    tolerances = _tolerances(passed)
    added = replace(passed, inputs=_sizes(passed.inputs), gradients=_sizes(passed.gradients))
    each, sizes = passed.by_parameter(parameters), added.by_parameter(parameters)
    weights = torch.ones(len(passed.losses), dtype=parameters[0].dtype, device=examples.device)
    whole = [torch.zeros(0) if g is None else g for g in passed.whole]
    pieces = (piece for block in blocks_of(parameters) for piece in block.pieces)
    for piece in pieces:  # none but the gradient itself is there as a whole
        gradient, found = whole[piece.at][piece.rows], parameters[0].new_empty(piece.shape)
        sizes[piece.at].weighted_sum(piece.rows, weights, found)
        tolerance = tolerances[parameters[piece.at]]
        atol = tolerance * (_size(found) + _size(gradient))  # what cancels is rounded by its size
        each[piece.at].weighted_sum(piece.rows, weights, found)
        if len(gradient) == 0 or not torch.allclose(
            gradient, found, rtol=tolerance, atol=atol, equal_nan=True
        ):
            raise UnsupportedModelError(
                f"the examples' gradients of a parameter of shape "
                f"{tuple(parameters[piece.at].shape)} do not add up to its gradient: it is used "
                "outside of its layer, or its layer does more than can be clipped here"
            )


@contextmanager
def _as_before(device: torch.device) -> Iterator[None]:
    """What is drawn within is drawn again afterwards."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield


def _altered(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The same, with values of others where a row is not kept."""
    others = rows.roll(1, 0)
    others = others * _ALTERED if others.is_floating_point() else others
    return torch.where(kept.view(-1, *(1,) * (rows.dim() - 1)), rows, others)


def _require_alike(
    here: Passed, rows_here: torch.Tensor, there: Passed, rows_there: torch.Tensor
) -> None:
    for layer, inputs in here.inputs.items():
        pairs = (inputs, there.inputs[layer]), (here.gradients[layer], there.gradients[layer])
        if not all(_alike(one[rows_here], other[rows_there]) for one, other in pairs):
            raise UnsupportedModelError(
                f"what {layer} sees of one example depends on others: model and loss must keep "
                "examples apart, at the first dimension of every tensor, and draw random numbers "
                "from PyTorch alone"
            )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal up to rounding, or both no numbers."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    rounding = _rounding(one)
    return torch.allclose(one, other, rtol=rounding, atol=rounding * _size(one), equal_nan=True)


def _rounding(tensor: torch.Tensor) -> float:
    """By how much of their size numbers may differ that were computed in its precision."""
    return float(torch.finfo(tensor.dtype).eps) ** 0.5 if tensor.is_floating_point() else 0.0


def _tolerances(passed: Passed) -> dict[nn.Parameter, float]:
    """By how much each parameter's sums may differ, over what the sizes of their terms add up to.

    Half precision takes more from a term than from the sum, and so does an accelerator, where
    convolutions are in TF32 by default.
    """
    found: dict[nn.Parameter, float] = {}
    for layer, gradient in passed.gradients.items():
        pair = passed.inputs[layer], gradient
        usual = max(map(_rounding, pair))
        if gradient.is_cpu and all(_rounding(each) < _COARSE for each in pair):
            usual = min(usual, rounding(gradient.dtype, _terms(gradient)))
        found |= dict.fromkeys(layer.parameters(recurse=False), usual)
    return found


def _terms(gradient: torch.Tensor) -> int:
    """How many are added up for a parameter, at most: one an example, or one a position of it."""
    return gradient.numel() // max(1, min(gradient.shape[1:], default=1))


def _sizes(tensors: dict[nn.Module, torch.Tensor]) -> dict[nn.Module, torch.Tensor]:
    """Without signs, so that nothing cancels; indices stay what they are."""
    return {
        layer: each.abs() if each.is_floating_point() else each for layer, each in tensors.items()
    }


def _size(tensor: torch.Tensor) -> float:
    """Of the largest number in it."""
    if tensor.numel() == 0:
        return 0.0
    parts = torch.split(tensor, _ROWS)
    return max(float(part.nan_to_num(0.0, 0.0, 0.0).abs_().amax()) for part in parts)
