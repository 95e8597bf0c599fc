"""The layers of a model that are trained, and those that cannot be clipped."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from training_client.errors import UnsupportedModelError, UnusualUseError
from training_client.private_step.module_names import (
    describe_layer,
    layer_type,
    unsupported_layer,
    unusual_layer,
)

_PARALLEL_WRAPPERS: Final = {  # names: importing the classes is slow, or fails where missing
    "DataParallel",
    "DistributedDataParallel",
    "DifferentiallyPrivateDistributedDataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
}

# a class, and its layer whose parameters it reads without a call
_UNCALLED_CHILDREN: Final[list[tuple[type[nn.Module], str]]] = [(nn.MultiheadAttention, "out_proj")]
if hasattr(nn, "LinearCrossEntropyLoss"):  # older versions of PyTorch lack it
    _UNCALLED_CHILDREN.append((nn.LinearCrossEntropyLoss, "linear"))

_INSTEAD_OF_SPECTRAL_NORM: Final = (
    "use torch.nn.utils.parametrizations.weight_norm or orthogonal instead of spectral_norm"
)


def find_trained_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that have parameters to train; raise if one is unsupported.

    Raises:
        UnsupportedModelError: a layer mixes examples, keeps statistics of them, or has parameters
            that cannot get noise. The message names the layer.
        UnusualUseError: a layer alone does not show the gradients of its parameters.
    """
    layers: list[nn.Module] = []
    without_calls: set[nn.Module] = set()
    unusual: UnusualUseError | None = None
    for module in model.modules():
        if (problem := _find_problem(module)) is not None:
            raise unsupported_layer(model, module, problem)
        own = trained_parameters(module)
        if own and (problem := _find_clipping_problem(module)) is not None:
            unusual = unusual or unusual_layer(model, module, problem)
        for _, child in _children_without_calls(module):
            without_calls.update(child.modules())
        if module not in without_calls and own:
            layers.append(module)
    if not layers:
        raise UnsupportedModelError(
            "the model has no layer to train: none of its parameters has requires_grad=True"
        )
    dtypes = {p.dtype: layer for layer in layers for p in trained_parameters(layer).values()}
    if len(dtypes) > 1:
        found = ", ".join(f"{dtype} in {describe_layer(model, dtypes[dtype])}" for dtype in dtypes)
        raise UnsupportedModelError(
            f"the layers' parameters have several precisions ({found}): use float32 or float64 "
            "for all of them"
        )
    if unusual is not None:
        raise unusual
    return layers


def _find_problem(module: nn.Module) -> str | None:
    """Return why a module cannot be part of a private model; None if it can."""
    if _PARALLEL_WRAPPERS & {kind.__name__ for kind in type(module).__mro__}:
        return (
            "distributes examples or parameters over devices or processes, each of which would be "
            "a run of its own: pass the model that it wraps, in one process"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "was compiled by torch.jit, so that its layers cannot be observed: train the original"
        )
    if isinstance(module, _BatchNorm) and module.training:
        return (
            "normalises over the batch, so that one example changes the gradients of others: use "
            "LayerNorm or GroupNorm, or freeze its statistics by eval()"
        )
    if isinstance(module, _NormBase) and module.track_running_stats and module.training:
        return "keeps running statistics of examples, without noise: use track_running_stats=False"
    if isinstance(module, nn.RReLU) and module.training and module.lower < module.upper:
        return (
            "draws a random number for each negative value of the batch, so that one example "
            "changes the numbers of others: use LeakyReLU or PReLU"
        )
    if isinstance(module, _SpectralNorm) and module.training:
        return f"updates a buffer in each forward pass: {_INSTEAD_OF_SPECTRAL_NORM}"
    if any(is_lazy(each) for each in module.parameters(recurse=False)):
        return (
            "is not initialized: call the model on a few examples, or use a layer of a fixed "
            "size, such as Linear instead of LazyLinear"
        )
    if type(module) in (nn.RNNBase, nn.modules.rnn.RNNCellBase):
        layers = (
            "RNNCell, GRUCell or LSTMCell"
            if "Cell" in type(module).__name__
            else "RNN, GRU or LSTM"
        )
        return f"has no forward pass: use {layers}"
    own = trained_parameters(module)
    if not own:
        return None
    return (
        _find_parameter_problem(own) or _find_weight_problem(module) or _find_sparse_problem(module)
    )


def _find_parameter_problem(parameters: dict[str, nn.Parameter]) -> str | None:
    """Return why trained parameters cannot be clipped or get noise; None if they can."""
    for name, each in parameters.items():
        if each.is_complex():
            return (
                f"has a complex parameter {name} ({each.dtype}), and the noise is of real numbers: "
                "hold real and imaginary part as two parameters, and call torch.complex in forward"
            )
        if each.dtype not in (torch.float32, torch.float64):
            return (
                f"has {each.dtype} parameters, which would round the noise away: keep them in "
                "float32 and run the model under torch.autocast"
            )
        if each._backward_hooks:
            return (
                f"has a parameter {name} with a hook, which would be given the gradient of no "
                "example: remove the hook, and change the loss or the forward pass instead"
            )
        if each.is_meta:
            return f"has a parameter {name} without values: use to_empty, and initialize it"
        if each.layout != torch.strided:
            return f"has a parameter {name} of layout {each.layout}: use a dense one"
    return None


def _find_weight_problem(module: nn.Module) -> str | None:
    """Return what computes a module's weights, and hides the trained ones; None if nothing."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            return (
                "computes its weight in a hook, which hides the trained parameters: use "
                "torch.nn.utils.parametrizations.weight_norm"
            )
        if isinstance(hook, SpectralNorm):
            return f"computes its weight in a hook: {_INSTEAD_OF_SPECTRAL_NORM}"
        if isinstance(hook, BasePruningMethod):
            return (
                "computes its weight in a hook, which hides the trained parameters: call "
                "torch.nn.utils.prune.remove(layer, name), or prune after training"
            )
    if isinstance(module, nn.RNNBase) and is_parametrized(module):
        return (
            "computes its weights by parametrizations, which recurrent layers of sequences do not "
            "support: call torch.nn.utils.parametrize.remove_parametrizations, or use RNNCell, "
            "GRUCell or LSTMCell"
        )
    return None


def _find_sparse_problem(module: nn.Module) -> str | None:
    """Return why the gradients of a table are not those of its examples; None if they are."""
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return (
            "divides gradients by how often a token occurs in the batch, so that one example "
            "changes the gradients of others: use scale_grad_by_freq=False"
        )
    if isinstance(module, nn.Embedding) and module.sparse:
        return "has sparse gradients, which cannot be clipped: use sparse=False"
    if isinstance(module, nn.EmbeddingBag) and (module.scale_grad_by_freq or module.sparse):
        return (
            "has sparse gradients, or divides them by how often a token occurs in the batch: use "
            "sparse=False and scale_grad_by_freq=False"
        )
    return None


def _find_clipping_problem(module: nn.Module) -> str | None:
    """Return why a module's own gradients cannot be clipped per example; None if they can."""
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "takes a maximum over tokens, which cannot be clipped: use mode='sum' or 'mean'"
    if isinstance(module, nn.MultiheadAttention):
        return _find_attention_problem(module)
    return None


def _find_attention_problem(module: nn.MultiheadAttention) -> str | None:
    """Return why the gradients of an attention layer cannot be clipped; None if they can."""
    if not module.batch_first:
        return "has examples along the second dimension: use batch_first=True"
    return None


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module holds itself, not through its layers, by name.

    They include those in its lists and dictionaries of parameters, those that its own weights are
    computed from (`torch.nn.utils.parametrize`), and those of layers that it uses without calling
    them, such as the last linear map of attention.
    """
    found = dict(module.named_parameters(recurse=False))
    for name, child in _children_without_calls(module):
        found |= {f"{name}.{key}": each for key, each in child.named_parameters()}
    return found


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that a module holds itself, not through its layers, by name."""
    return {name: each for name, each in own_parameters(module).items() if each.requires_grad}


def _children_without_calls(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children, with names, that only hold parameters and are never called."""
    return [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.ParameterList | nn.ParameterDict)
        or (name == "parametrizations" and is_parametrized(module))
        or any(isinstance(module, kind) and name == own for kind, own in _UNCALLED_CHILDREN)
    ]


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether a module is `Conv1D` of Transformers: a linear layer, weight transposed."""
    kind = layer_type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
