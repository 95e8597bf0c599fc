"""Batches of examples: one tensor, or a dictionary of tensors that a model is called with.

A dictionary becomes the model's keyword arguments. Each of its tensors has one example per row of
the first dimension; its other values are passed on as they are. Targets are a tensor or such a
dictionary, which the loss is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from training_client.errors import DataError, UnsupportedModelError

Examples = torch.Tensor | Mapping[str, Any]
Targets = torch.Tensor | Mapping[str, Any]
TargetLoss = Callable[[Any, Any], torch.Tensor]  # of a model's output and targets, per example
Rows = slice | torch.Tensor  # a range, or a mask, or indices


def tensors_of(examples: Examples) -> list[torch.Tensor]:
    """Return the tensors of a batch.

    Raises:
        DataError: the batch is neither a tensor nor a dictionary, or holds packed sequences.
    """
    if isinstance(examples, torch.Tensor):
        return [examples]
    if not isinstance(examples, Mapping):
        raise _unexpected_batch(examples)
    for each in examples.values():
        if isinstance(each, PackedSequence):  # its rows cannot be told apart
            raise _unexpected_batch(each)
    return [each for each in examples.values() if isinstance(each, torch.Tensor)]


def without_graph(given: Any) -> Any:
    """Return examples or targets as data, of which no gradients are asked.

    Raises:
        UnsupportedModelError: they are computed from parameters, or are parameters.
    """
    if isinstance(given, Mapping):
        return {name: without_graph(each) for name, each in given.items()}
    if not isinstance(given, torch.Tensor) or not given.requires_grad:
        return given
    if given.grad_fn is not None or isinstance(given, nn.Parameter):
        raise UnsupportedModelError(
            "examples or targets are computed from parameters, whose gradients would be lost: "
            "compute them in the model or the loss, or detach them"
        )
    return given.detach()


def _unexpected_batch(given: object) -> DataError:
    """Return the error for examples that are no tensor and no dictionary of tensors."""
    return DataError(
        f"expected examples as a tensor or a dictionary of tensors, got {type(given).__name__}. "
        "Pass sequences as one tensor, padded to the same length in every batch, with their "
        "lengths as another, and pack them in the model's forward method"
    )


def count_examples(examples: Examples) -> int:
    """Return the number of examples in a batch.

    Raises:
        DataError: the batch has no tensor with examples, or its tensors have different numbers;
            or see `tensors_of`.
    """
    sizes = {len(each) if each.dim() else -1 for each in tensors_of(examples)}
    if len(sizes) != 1 or -1 in sizes:
        raise DataError(
            "expected examples as a tensor, or a dictionary of tensors with one example per row of "
            f"the first dimension; got tensors of {sorted(sizes)} rows"
        )
    return sizes.pop()


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shape of one example in each tensor of a batch of any structure."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [tuple(each.shape[1:]) for each in leaves if isinstance(each, torch.Tensor)]


def require_shapes(batch: Any, shapes: list[tuple[int, ...]], others: str) -> None:
    """Raise unless the examples of a batch have the given shapes.

    If a batch were padded to its longest record, one record would change how all others are
    computed and rounded, which no bound on its own gradient covers.

    Args:
        batch: of any structure.
        shapes: what `shapes_of` returned for another batch.
        others: the name of that batch.

    Raises:
        DataError: they have others.
    """
    if (found := shapes_of(batch)) != shapes:
        raise DataError(
            f"examples have the shape {_join(found)} in a batch, and {_join(shapes)} in {others}. "
            "A record would change how the others are padded: pad or cut every record to the same "
            'width, whatever is beside it (padding="max_length" of a Hugging Face tokenizer)'
        )


def _join(shapes: list[tuple[int, ...]]) -> str:
    """Return shapes as text, such as 128 and 3×32×32."""
    return " and ".join("×".join(map(str, each)) or "one number" for each in shapes) or "none"


def select_examples(examples: Examples, rows: Rows) -> Examples:
    """Return a batch with only the examples (rows) that are selected."""
    if isinstance(examples, torch.Tensor):
        return examples[rows]
    return {
        name: each[rows] if isinstance(each, torch.Tensor) else each
        for name, each in examples.items()
    }


def by_row(targets: Targets, loss: TargetLoss) -> tuple[torch.Tensor, TargetLoss]:
    """Return targets as one tensor, with the loss that takes it.

    The engine selects and exchanges targets by their rows. So a dictionary becomes the numbers of
    its rows, and the loss looks them up. A tensor is returned as it is.

    Raises:
        DataError: the targets are neither a tensor nor a dictionary of tensors with one row per
            example.
    """
    if isinstance(targets, torch.Tensor):
        return targets, loss
    if not isinstance(targets, Mapping):
        raise DataError(
            f"expected targets as a tensor or a dictionary of tensors, got {type(targets).__name__}"
        )
    rows = torch.arange(count_examples(targets), device=device_of(targets))
    return rows, lambda outputs, chosen: loss(outputs, select_examples(targets, chosen))


def device_of(examples: Examples) -> torch.device:
    """Return the device that a batch's tensors are on.

    Raises:
        DataError: its tensors are on several devices, or there are none; or see `tensors_of`.
    """
    devices = {each.device for each in tensors_of(examples)}
    if len(devices) != 1:
        raise DataError(f"expected examples on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def call_model(model: nn.Module, examples: Examples) -> Any:
    """Call a model on a batch: on the tensor, or with the dictionary as keyword arguments."""
    return model(examples) if isinstance(examples, torch.Tensor) else model(**examples)
