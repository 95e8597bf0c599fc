"""Checks that a model and a loss keep examples apart, and that the clip sees the whole gradient.

The bound on a record's influence holds only if nothing of one example depends on another. The types
of layers do not show it: a model may mix examples in plain code, or in its loss. So a few examples
are run again with the others altered, without the others, and in reverse order, and the passes are
compared. The first check costs about as much as a step with three and a half times these few
examples, or with six and a half times as many if the model draws random numbers. And the whole
first batch has one more forward pass, with many examples replaced: the rest must have the same
losses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Final

import torch
from torch import nn
from torch.nn.functional import rms_norm
from torch.nn.modules.instancenorm import _InstanceNorm

from training_client.errors import UnsupportedModelError
from training_client.private_step.batches import Examples, select_examples, tensors_of
from training_client.private_step.blocks import Piece, cut_into_blocks
from training_client.private_step.evaluation import evaluation_mode
from training_client.private_step.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.layer_uses import Parts, merge_parts
from training_client.private_step.model_pass import (
    ModelPass,
    UsePass,
    changed_state_error,
    parameters_and_buffers,
)
from training_client.private_step.module_names import describe_layer, describe_tensor
from training_client.private_step.random_state import random_state, restored_random_state
from training_client.private_step.rounding_bounds import rounding_error

LARGE_BATCH: Final = 32
_CHECK_INTERVAL_FACTOR: Final = 16  # a run of 200 steps has two checks: at most 1 % of its time
_REPLACEMENT_FACTOR: Final = -3.0
_SUMMED_AT_ONCE: Final = 1 << 17  # values that are copied in double precision
_SMALL_BATCH: Final = 3  # a shuffle of so few examples often leaves them in place:
_RANDOM_REPETITIONS: Final = 3  # so they are replaced more often
_HALF_PRECISION_TOLERANCE: Final = 1e-3  # above it the tolerance is that of half precision
_NORMALISATIONS: Final = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm)
_CANCELLATION: Final = 1e-5  # of the largest gradient: how small a replayed layer's may cancel

RunModel = Callable[..., ModelPass]
RunLosses = Callable[[Examples, torch.Tensor], torch.Tensor]
Batch = tuple[Examples, torch.Tensor]


def is_checked(batch: int) -> bool:
    """Return whether the model is checked at this batch number: at 1, 16, 256, ….

    Args:
        batch: the number of the batch, from 1.
    """
    while batch % _CHECK_INTERVAL_FACTOR == 0:
        batch //= _CHECK_INTERVAL_FACTOR
    return batch == 1


def choose_rows(examples: Examples, targets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of a batch to check: spread over it, and with different labels if it has any.

    A batch is in the order of the dataset, which may be sorted by label. A loss that depends on the
    labels of a batch, such as one with weights of classes, is seen only where they differ. A model
    that sorts examples by their lengths is seen only where the lengths differ. So there is a row
    that differs from the first in as many of these numbers as any row does.

    Args:
        examples: of the batch, at least two.
        targets: of the batch.
        count: the number of rows, which may be more than there are.
    """
    size = len(targets)
    rows = torch.linspace(0, size - 1, min(count, size), device=targets.device).long()
    numbers = [each for each in (targets, *tensors_of(examples)) if each.dim() == 1]
    if numbers:
        differences = torch.stack([each != each[rows[0]] for each in numbers]).sum(0)
        if int(differences[rows].amax()) < int(differences.amax()):
            rows[-1 if len(rows) < 4 else -2] = differences.argmax()  # an even place: it is kept
    return rows


def check_model(
    model: nn.Module,
    run: RunModel,
    batch: Batch,
    parameters: Sequence[nn.Parameter],
    *,
    is_first: bool = True,
) -> None:
    """Raise if examples affect one another, or a per-example gradient misses a part.

    Every other example is first replaced, then left out, and all are run in reverse order: what
    remains must pass as before. A model that draws random numbers, such as dropout, would draw
    others for fewer examples or in another order, so there it is compared in evaluation mode. It
    may mix examples only with some random numbers, so examples are replaced several times.

    Args:
        model: the model; its random numbers come from PyTorch's default generators.
        run: runs examples and targets through it; also differentiates parameters if asked to.
        batch: a few examples and their targets.
        parameters: the trained parameters.
        is_first: whether the model was not checked before; later checks repeat less.

    Raises:
        UnsupportedModelError: examples depend on each other, and the message names the layer; or
            the per-example gradients do not add up.
    """
    device = parameters[0].device
    with restored_random_state(device):
        with _unchanged_values(model) if is_first else nullcontext():
            original, is_random = _run_beside_others(run, batch, device, parameters)
        if not is_random:
            _require_same_in_other_batches(run, batch, original, reversed_too=is_first)
            require_complete_gradients(original, parameters)
            return
        require_complete_gradients(original, parameters)
        del original  # frees its memory before the next pass
        is_small = len(batch[1]) <= _SMALL_BATCH
        for _ in range(_RANDOM_REPETITIONS if is_first and is_small else 1):
            _run_beside_others(run, batch, device)
        with evaluation_mode(model):
            _require_same_in_other_batches(run, batch, run(*batch), reversed_too=is_first)


def _run_beside_others(
    run: RunModel, batch: Batch, device: torch.device, parameters: Sequence[nn.Parameter] = ()
) -> tuple[ModelPass, bool]:
    """Run a batch; raise if examples pass differently beside others, with equal random numbers.

    Args:
        run: as in `check_model`.
        batch: likewise.
        device: of the model, and of its random numbers; targets may be elsewhere.
        parameters: those to differentiate.

    Returns:
        The pass, and whether it drew random numbers.
    """
    few, labels = batch
    kept = torch.arange(len(labels), device=labels.device) % 2 == 0
    with restored_random_state(device):
        before = random_state(device)
        original = run(few, labels, differentiate=parameters)
        is_random = not torch.equal(before, random_state(device))
    altered = run(_replace_others(few, kept), _replace_rows(labels, kept))
    _require_equal_passes(original, kept, altered, kept)
    return original, is_random


@contextmanager
def _unchanged_values(model: nn.Module) -> Iterator[None]:
    """Context manager for passes; raise if they change a buffer or parameter.

    The count of a tensor's changes does not show what is written through its `data`.
    """
    sums = _state_sums(model)
    yield
    tensors = parameters_and_buffers(model)
    for tensor, before, after in zip(tensors, sums, _state_sums(model), strict=True):
        if before != after:
            raise changed_state_error(model, tensor)


def _require_same_in_other_batches(
    run: RunModel, batch: Batch, original: ModelPass, *, reversed_too: bool
) -> None:
    """Raise if examples pass differently without every other one, or in reverse order.

    Where a model sorts or shuffles examples, replacing some may leave their places as they were.
    And where an example depends on those before it, the first of two depends on none.
    """
    few, labels = batch
    rows = torch.arange(len(labels), device=labels.device)
    kept, orders = rows[::2], [rows[::2]]
    if reversed_too:  # one pass does both if more than one example is left
        orders = [kept.flip(0)] if len(kept) > 1 else [kept, rows.flip(0)]
    for order in orders:
        with _explained_order():
            found = run(select_examples(few, order), labels[order])
        _require_equal_passes(original, order, found, rows[: len(order)])
        del found  # frees its memory before the next pass


def losses_beside_others(
    run: RunLosses, batch: Batch, device: torch.device
) -> Callable[[torch.Tensor], None]:
    """Replace most examples of a batch; return a check that the rest has the same losses.

    Half of a small batch, or three quarters of a large one, are replaced by a multiple of its last
    example, so they have the same label, and everything else in common. A loss or a model that
    depends on the batch as a whole then gives the rest other losses: weights of the batch's
    classes, the largest losses, the capacity of an expert.

    Args:
        run: computes the losses of examples and targets.
        batch: at least two examples, and their targets.
        device: of the model, and of its random numbers.

    Returns:
        A function that raises `UnsupportedModelError` unless the batch's losses, computed with the
        random numbers that come next, are those computed here.
    """
    examples, targets = batch
    interval = 4 if len(targets) >= LARGE_BATCH else 2
    kept = torch.arange(len(targets), device=targets.device).flip(0) % interval == 0
    with restored_random_state(device), _explained_order():
        altered = run(_replace_others(examples, kept, -1), _replace_rows(targets, kept, -1))

    def require_equal(losses: torch.Tensor) -> None:
        """Raise unless the examples that were kept have the same losses."""
        if not _is_close(losses[kept], altered[kept]):
            raise UnsupportedModelError(
                "the loss of one example depends on other examples of its batch: model and loss "
                "must keep examples apart, and draw random numbers from PyTorch only. Do not "
                "compute weights of classes, or which examples count, from the batch"
            )

    return require_equal


@contextmanager
def _explained_order() -> Iterator[None]:
    """Context manager for passes of examples in another order: explain why they fail."""
    try:
        yield
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"the model fails if the examples of a batch are in another order ({error}): batches "
            "are in no particular order. For packed sequences, use enforce_sorted=False"
        ) from error


def require_complete_gradients(model_pass: ModelPass, parameters: Sequence[nn.Parameter]) -> None:
    """Raise unless per-example gradients add up to the gradient of the summed loss.

    They do not where a parameter is used outside of its layer's ordinary call, or where a layer
    computes something else than its per-example gradients are for.

    They may differ by rounding, which is relative to the terms of the sums, not to the sums: where
    a model is sure of its answers, or before a normalisation layer, nearly everything cancels.

    Args:
        model_pass: a pass with the full gradients of the parameters; it is used up.
        parameters: the trained parameters.

    Raises:
        UnsupportedModelError: they differ.
    """
    tolerances, uses, full = (
        _sum_tolerances(model_pass), list(model_pass.uses), model_pass.full_gradients
    )  # fmt: skip
    gradients = model_pass.take_example_gradients(parameters)
    weights = parameters[0].new_ones(len(model_pass.losses))
    replayed_size = 0.0
    if not all(is_exact for _, is_exact in tolerances.values()):
        replayed_size = _CANCELLATION * max(_largest_magnitude(g) for g in full if g is not None)
    sizes: dict[torch.Tensor, list[ExampleGradients]] | None = None
    for piece in (piece for block in cut_into_blocks(parameters) for piece in block.pieces):
        parameter, expected = parameters[piece.index], full[piece.index]
        tolerance, is_exact = tolerances[parameter]
        found = parameter.new_empty(piece.shape)
        gradients[piece.index].weighted_sum(piece.rows, weights, found)
        size = 0.0 if is_exact else replayed_size
        is_sum = expected is not None and _is_sum(found, expected[piece.rows], tolerance, size)
        if not is_sum and expected is not None and is_exact:  # the terms may have cancelled
            sizes = sizes or _gradients_of_magnitudes(uses)
            size = _largest_sum(sizes[parameter], piece, weights)
            is_sum = _is_sum(found, expected[piece.rows], tolerance, size)
        if not is_sum:
            raise UnsupportedModelError(
                f"the per-example gradients of {describe_tensor(model_pass.model, parameter)} do "
                "not add up to its gradient: the parameter is used outside of its layer, or the "
                "layer computes more than its type says. Call the layer itself, or freeze the "
                "parameter"
            )


def _is_sum(found: torch.Tensor, expected: torch.Tensor, tolerance: float, size: float) -> bool:
    """Return whether two sums are equal up to a tolerance relative to `size`; NaN equals NaN."""
    if found.numel() == 0:
        return True
    limit = tolerance * (size + 2 * _largest_magnitude(expected))
    difference = found - expected
    largest = max((abs(float(each)) for each in difference.aminmax()), default=0.0)
    if math.isfinite(largest):
        return largest <= limit
    are_equal = (difference.abs() <= limit) | (found == expected)
    return bool((are_equal | (found.isnan() & expected.isnan())).all())


def _gradients_of_magnitudes(uses: Sequence[UsePass]) -> dict[torch.Tensor, list[ExampleGradients]]:
    """Return per-example gradients with the magnitudes of all their terms.

    They bound the sum of the magnitudes of the true gradients' terms, to which rounding errors
    are relative.
    """
    found: dict[torch.Tensor, list[ExampleGradients]] = defaultdict(list)
    for each in uses:
        if each.use.is_bilinear:
            for parameter, part in _magnitudes_of_use(each).items():
                found[parameter].append(part)
    return found


def _magnitudes_of_use(use: UsePass) -> Parts:
    """Return the per-example gradients of a layer's use with the magnitudes of all terms.

    The gradient of a normalisation layer's scale has its own terms: see `_normalised_magnitudes`.
    """
    magnitudes, layer = _absolute(use.gradients), use.use.layer
    found = replace(use, inputs=_absolute(use.inputs), gradients=magnitudes).example_gradients()
    if not isinstance(layer, _NORMALISATIONS) or layer.weight not in found:
        return found
    inputs, gradient = (each.to(layer.weight.dtype) for each in (use.inputs[0], magnitudes[0]))
    terms = _normalised_magnitudes(layer, inputs) * gradient
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        summed = tuple(range(1, terms.dim() - layer.weight.dim()))
    else:
        summed = tuple(range(2, terms.dim()))
    return {**found, layer.weight: MaterializedGradients(terms.sum(summed) if summed else terms)}


def _normalised_magnitudes(
    layer: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _InstanceNorm, inputs: torch.Tensor
) -> torch.Tensor:
    """Return the magnitudes of the terms of normalised inputs: (|x| + |mean|)/deviation.

    PyTorch multiplies x and the mean by gradients separately and sums before it subtracts. So where
    the mean is far larger than the deviation, rounding is relative to these terms, and not to the
    normalised inputs, which may be far smaller.
    """
    match layer:
        case nn.RMSNorm():
            return rms_norm(inputs, tuple(layer.normalized_shape), eps=layer.eps).abs()
        case nn.LayerNorm():
            rows = inputs.flatten(-len(layer.normalized_shape))
        case nn.GroupNorm():
            rows = inputs.reshape(len(inputs), layer.num_groups, -1)
        case _:
            rows = inputs.flatten(2)
    mean = rows.mean(-1, keepdim=True)
    deviation = (rows.var(-1, correction=0, keepdim=True) + layer.eps).sqrt()
    return ((rows.abs() + mean.abs()) / deviation).view(inputs.shape)


def _largest_sum(parts: Sequence[ExampleGradients], piece: Piece, weights: torch.Tensor) -> float:
    """Return a weighted gradient sum's largest absolute coordinate on a piece of a parameter."""
    total = weights.new_empty(piece.shape)
    merge_parts(parts, None).weighted_sum(piece.rows, weights, total)
    return _largest_magnitude(total)


def _replace_others(examples: Examples, kept: torch.Tensor, source: int | None = None) -> Examples:
    """Return the batch with all examples outside `kept` replaced; see `_replace_rows`."""
    if isinstance(examples, torch.Tensor):
        return _replace_rows(examples, kept, source)
    return {
        name: _replace_rows(each, kept, source) if isinstance(each, torch.Tensor) else each
        for name, each in examples.items()
    }


def _replace_rows(
    rows: torch.Tensor, kept: torch.Tensor, source: int | None = None
) -> torch.Tensor:
    """Return the tensor with rows outside `kept` replaced by a multiple of another row.

    Args:
        rows: one per example.
        kept: a mask of the rows to leave unchanged.
        source: the row that replaces them; by default each one's neighbour.
    """
    found, others = rows.clone(), ~kept
    by = rows[source] if source is not None else rows.roll(1, 0)[others]
    found[others] = by * _REPLACEMENT_FACTOR if by.is_floating_point() else by
    return found


def _require_equal_passes(
    first: ModelPass, first_rows: torch.Tensor, second: ModelPass, second_rows: torch.Tensor
) -> None:
    """Raise unless layers got equal inputs and gradients for the same examples in both passes.

    Packed sequences are padded to the longest of a pass. There the gradients of a linear map are 0,
    and so its inputs do not matter.
    """
    for one, other in _paired_uses(first, second):
        gradients = [
            (a[first_rows], b[second_rows])
            for a, b in zip(one.gradients, other.gradients, strict=True)
        ]
        inputs = [
            (a[first_rows], b[second_rows]) for a, b in zip(one.inputs, other.inputs, strict=True)
        ]
        if one.use.is_bilinear and any(a.shape != b.shape for a, b in gradients):
            inputs = [_common_part(a, b) for a, b in inputs]
        shared = zip(one.use.shared, other.use.shared, strict=True)
        are_equal = all(_is_close(a, b) for a, b in (*gradients, *inputs)) and all(
            a.shape == b.shape and _is_close(a, b) for a, b in shared
        )
        if not are_equal:
            raise _mixing_error(first.model, one.use.layer)


def _state_sums(model: nn.Module) -> list[str]:
    """Return two sums of every parameter and buffer as text, so that NaN equals NaN.

    They differ after almost any change of its values.
    """
    found = []
    for each in parameters_and_buffers(model):
        values = each.detach().abs() if each.is_complex() else each.detach()
        sums = [
            torch.stack([numbers.sum(), numbers.square().sum()])
            for numbers in (
                part.double() for part in torch.split(values.reshape(-1), _SUMMED_AT_ONCE)
            )
        ]
        found.append(str(torch.stack(sums).sum(0).tolist()) if sums else "")
    return found


def _paired_uses(first: ModelPass, second: ModelPass) -> Iterator[tuple[UsePass, UsePass]]:
    """Yield the layer calls of two forward passes in pairs; raise if the layers differ."""
    for at, one in enumerate(first.uses):
        if at >= len(second.uses) or second.uses[at].use.layer is not one.use.layer:
            raise _mixing_error(first.model, one.use.layer)
        yield one, second.uses[at]


def _mixing_error(model: nn.Module, layer: nn.Module) -> UnsupportedModelError:
    """Return the error for a layer whose values for one example depend on other examples."""
    return UnsupportedModelError(
        f"the inputs or gradients that {describe_layer(model, layer)} gets for one example depend "
        "on other examples: model and loss must keep examples apart, along the first dimension of "
        "every tensor, and draw random numbers from PyTorch only"
    )


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding; NaN equals NaN.

    A narrower tensor is compared as if it ended in zeros.
    """
    if one.shape != other.shape:
        if one.dim() != other.dim():
            return False
        widest = [max(pair) for pair in zip(one.shape, other.shape, strict=True)]
        one, other = _fill_with_zeros(one, widest), _fill_with_zeros(other, widest)
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = _relative_tolerance(one)
    atol = tolerance * _largest_magnitude(one)
    return torch.allclose(one, other, rtol=tolerance, atol=atol, equal_nan=True)


def _common_part(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of two tensors at the places that both have."""
    places = tuple(slice(min(pair)) for pair in zip(one.shape, other.shape, strict=False))
    return one[places], other[places]


def _fill_with_zeros(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of a larger shape, which begins with the given one and ends in zeros."""
    found = tensor.new_zeros(tuple(shape))
    found[tuple(map(slice, tensor.shape))] = tensor
    return found


def _relative_tolerance(tensor: torch.Tensor) -> float:
    """Return √(machine epsilon) of a tensor's dtype, as a relative tolerance."""
    return float(torch.finfo(tensor.dtype).eps) ** 0.5 if tensor.is_floating_point() else 0.0


def _sum_tolerances(model_pass: ModelPass) -> dict[torch.Tensor, tuple[float, bool]]:
    """Return each parameter's tolerance for gradient sums, and whether all its uses are bilinear.

    Half precision loses more in a term than in the sum, and so does an accelerator, where
    convolutions are in TF32 by default.
    """
    found: dict[torch.Tensor, tuple[float, bool]] = {}
    for each in model_pass.uses:
        tensors = [*each.inputs, *each.gradients]
        tolerance = max(map(_relative_tolerance, tensors))
        is_precise = all(_relative_tolerance(t) < _HALF_PRECISION_TOLERANCE for t in tensors)
        gradient, is_exact = each.gradients[0], each.use.is_bilinear
        if gradient.is_cpu and is_precise and is_exact:
            tolerance = min(tolerance, rounding_error(gradient.dtype, _term_count(gradient)))
        for parameter in each.use.layer.parameters():
            before = found.get(parameter, (0.0, True))
            found[parameter] = max(before[0], tolerance), before[1] and is_exact
    return found


def _term_count(gradient: torch.Tensor) -> int:
    """Return an upper bound on the number of terms that a parameter's gradient sums."""
    return gradient.numel() // max(1, min(gradient.shape[1:], default=1))


def _absolute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the absolute values of floating-point tensors; leave integers unchanged."""
    return [each.abs() if each.is_floating_point() else each for each in tensors]


def _largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor."""
    if tensor.numel() == 0:
        return 0.0
    smallest, largest = (float(each) for each in tensor.aminmax())
    if math.isfinite(smallest) and math.isfinite(largest):
        return max(-smallest, largest)
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs_().amax())
