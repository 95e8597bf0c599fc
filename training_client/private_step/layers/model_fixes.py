"""A copy of a model that private steps can train, and what was changed for it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

Model = TypeVar("Model", bound=nn.Module)
_GROUPS_MAX: Final = 32  # Wu & He 2018, arXiv 1803.08494, §4.1
_ATTENTION: Final = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
)
_SEQUENCES: Final = frozenset({"query", "key", "value", "src", "tgt", "memory"})  # their arguments


def fix(model: Model) -> tuple[Model, list[str]]:
    """Return a copy of a model without layers that private steps refuse, and what was changed.

    - BatchNorm becomes GroupNorm, with the same scale and shift: at most 32 groups, of two channels
      or more; of `BatchNorm1d` one group, as its channels may have no positions. Running statistics
      are dropped, so that a trained model must be trained again.
    - InstanceNorm no longer tracks running statistics.
    - `MultiheadAttention` with `batch_first=False` gets `batch_first=True`. Hooks transpose what it
      gets and returns, or what the outermost PyTorch transformer around it does, so that it is
      called as before.

    Batch norms are replaced also in evaluation mode, in which they could be trained: they are
    refused once the model is in training mode. What else is refused, such as a batch norm in plain
    code, is found when an optimizer is made or in its first step.

    Args:
        model: it is not changed. It must have no layer that is still lazy.

    Returns:
        The copy, and a line for each change, which names the module.
    """
    found = copy.deepcopy(model)
    names = {module: name or "the model" for name, module in found.named_modules()}
    changes: list[str] = []
    replaced: dict[nn.Module, nn.Module] = {}
    for module, name in names.items():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and not isinstance(module, LazyModuleMixin):
            new = replaced[module] = _as_group_norm(module)
            changes.append(
                f"{name}: {kind} → GroupNorm({new.num_groups}, {new.num_channels}); its running "
                "statistics are dropped"
            )
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            _drop_statistics(module)
            changes.append(f"{name}: {kind} tracks no running statistics")
    for parent in names:
        for name, child in parent._modules.items():
            if child in replaced:
                setattr(parent, name, replaced[child])
    changes += _put_examples_first(found)
    return replaced.get(found, found), changes  # type: ignore[return-value]


def _as_group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    """Return a group norm with a batch norm's channels, scale and shift."""
    channels = norm.num_features
    most = 1 if isinstance(norm, nn.BatchNorm1d) else min(_GROUPS_MAX, channels // 2)
    groups = max(each for each in range(1, max(most, 1) + 1) if channels % each == 0)
    found = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    for name, parameter in norm.named_parameters(recurse=False):
        setattr(found, name, parameter)
    return found.train(norm.training)


def _drop_statistics(norm: _InstanceNorm) -> None:
    """Let a norm use the statistics of each example, and forget those that it tracks."""
    norm.track_running_stats = False
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def _put_examples_first(model: nn.Module) -> list[str]:
    """Have PyTorch's attention with examples in the second dimension get them in the first."""
    changes: list[str] = []
    for name, module in model.named_modules():
        if type(module) not in _ATTENTION:
            continue
        parts = list(module.modules())
        heads = [each for each in parts if isinstance(each, nn.MultiheadAttention)]
        is_own = all(type(each).__module__.startswith("torch.nn.") for each in parts)
        if not is_own or any(each.batch_first for each in heads):  # also if done around it
            continue
        for each in parts:
            if isinstance(each, (nn.MultiheadAttention, nn.Transformer)):
                each.batch_first = True
        module.register_forward_pre_hook(_transpose_arguments, with_kwargs=True)
        module.register_forward_hook(_transpose_output)
        changes.append(
            f"{name or 'the model'}: {type(module).__name__} with batch_first=True inside, called "
            "as before"
        )
    return changes


def _transpose_arguments(
    module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: exchange positions and examples of the sequences that a module gets."""
    given = inspect.signature(type(module).forward).bind(module, *args, **named)
    turned: dict[int, torch.Tensor] = {}  # one for what is the same sequence
    for name in _SEQUENCES & given.arguments.keys():
        each = given.arguments[name]
        given.arguments[name] = turned.setdefault(id(each), _transpose(each))
    return given.args[1:], given.kwargs


def _transpose_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG001
    """Forward hook: exchange examples and positions of the sequence that a module returns."""
    return (_transpose(output[0]), *output[1:]) if isinstance(output, tuple) else _transpose(output)


def _transpose(rows: torch.Tensor) -> torch.Tensor:
    """Exchange the first two dimensions; a sequence alone, without examples, has only two."""
    return rows.transpose(0, 1) if rows.dim() == 3 else rows
