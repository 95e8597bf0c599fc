"""The layers that can be clipped, and the per-example gradients of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from training_client.errors import UnsupportedModelError
from training_client.private_step.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
    OuterProducts,
)
from training_client.private_step.kernels.matmul import full_precision

_PARALLEL_WRAPPERS: Final = {  # names: importing the classes is slow, or fails where missing
    "DataParallel",
    "DistributedDataParallel",
    "DifferentiallyPrivateDistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}

_RECURRENT_ADVICE: Final = (
    "use a layer that takes a whole sequence at once, train Opacus' DP{name} with Opacus "
    "(docs/how-to/frameworks.md)"
)
_ALTERNATIVES: Final[dict[type[nn.Module], str]] = {
    nn.EmbeddingBag: "use Embedding and a sum or mean over the tokens",
    nn.MultiheadAttention: (
        "use Linear layers for queries, keys and values with "
        "torch.nn.functional.scaled_dot_product_attention, train Opacus' DPMultiheadAttention with "
        "Opacus (docs/how-to/frameworks.md)"
    ),
    **{kind: _RECURRENT_ADVICE.format(name=kind.__name__) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
}

GradSampler = Callable[
    [nn.Module, list[torch.Tensor], torch.Tensor], dict[torch.Tensor, torch.Tensor]
]


def find_trained_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that have parameters to train.

    Raises:
        UnsupportedModelError: a layer cannot be clipped, mixes examples, keeps statistics of them,
            or overwrites outputs that are still needed. The message names the layer.
    """
    layers = []
    for name, module in model.named_modules():
        problem = _find_problem(module)
        if problem is not None:
            raise UnsupportedModelError(
                f"layer {name or '(root)'} ({type(module).__name__}) {problem}"
            )
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            layers.append(module)
    if not layers:
        raise UnsupportedModelError(
            "the model has no layer to train: none of its parameters has requires_grad=True"
        )
    held = [p for layer in layers for p in layer.parameters(recurse=False)]
    if len({id(p) for p in held}) < len(held):
        raise UnsupportedModelError(
            "two layers share a parameter (tied weights), which cannot be clipped: give each layer "
            "a parameter of its own"
        )
    dtypes = {str(p.dtype) for p in held}
    if len(dtypes) > 1:
        raise UnsupportedModelError(
            f"the layers' parameters have several precisions ({', '.join(sorted(dtypes))}): use "
            "float32 or float64 for all of them"
        )
    return layers


def _find_problem(module: nn.Module) -> str | None:
    """Return why a module cannot be part of a private model; None if it can."""
    if _PARALLEL_WRAPPERS & {kind.__name__ for kind in type(module).__mro__}:
        return (
            "distributes examples or parameters over devices or processes, each of which would be "
            "a run of its own: pass the model that it wraps, in one process"
        )
    if isinstance(module, _BatchNorm):
        return (
            "normalises over the batch, so that one example changes the gradients of others: use "
            "LayerNorm or GroupNorm"
        )
    if isinstance(module, _NormBase) and module.track_running_stats:
        return "keeps running statistics of examples, without noise: use track_running_stats=False"
    if getattr(module, "inplace", False):
        return "overwrites an output that the gradients are computed from: use inplace=False"
    own = list(module.parameters(recurse=False))
    trained = [p for p in own if p.requires_grad]
    if not trained:
        return None
    if len(trained) < len(own):
        return "has frozen and trained parameters: freeze all of them, or none"
    if any(p.dtype not in (torch.float32, torch.float64) for p in own):
        return (
            f"has {own[0].dtype} parameters, which would round the noise away: keep them in "
            "float32 and run the model under torch.autocast"
        )
    return _find_clipping_problem(module)


def _find_clipping_problem(module: nn.Module) -> str | None:
    """Return why the gradients of a module's own parameters cannot be clipped; None if they can."""
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return (
            "divides gradients by how often a token occurs in the batch, so that one example "
            "changes the gradients of others: use scale_grad_by_freq=False"
        )
    if isinstance(module, nn.Embedding) and module.sparse:
        return "has sparse gradients, which cannot be clipped: use sparse=False"
    if type(module) in _ALTERNATIVES:
        return f"cannot be clipped: {_ALTERNATIVES[type(module)]}, or freeze it"
    if type(module) is not nn.Linear and type(module) not in _opacus_grad_samplers():
        return f"has parameters that cannot be clipped: {_suggest_layers()}, or freeze it"
    return None


def _suggest_layers() -> str:
    """Return advice on layers to use in place of one that cannot be clipped."""
    if _opacus_grad_samplers():
        return "use Linear layers, or layers that Opacus has a grad sampler for"
    return (
        "use Linear layers, or install Opacus, which has grad samplers for other layers (pip "
        "install 'privacy-accountant[opacus]')"
    )


def _opacus_grad_samplers() -> dict[type[nn.Module], GradSampler]:
    """Return Opacus' per-example gradient function for each layer type; empty without Opacus."""
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError:
        return {}
    found: dict[type[nn.Module], GradSampler] = GradSampleModule.GRAD_SAMPLERS
    return found


def layer_example_gradients(
    layer: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor, *, sparse: bool = False
) -> dict[torch.Tensor, ExampleGradients]:
    """Return the per-example gradients of each parameter of a layer.

    Args:
        layer: one of `find_trained_layers`.
        inputs: the layer's inputs, one example per row of the first dimension.
        gradient: the loss gradient of the layer's output, one example per row.
        sparse: whether most input values are declared to be 0.

    Raises:
        UnsupportedModelError: Opacus is needed and missing.
    """
    # contiguous, as they are after an example is excluded: another memory layout would be summed
    # and rounded in another order; and Opacus misreads convolutions in channels_last
    inputs, gradient = inputs.contiguous(), gradient.contiguous()
    if type(layer) is nn.Linear and inputs.dim() == 2:
        weight: dict[torch.Tensor, ExampleGradients] = {
            layer.weight: OuterProducts(gradient, inputs, sparse)
        }
        return (
            weight if layer.bias is None else weight | {layer.bias: MaterializedGradients(gradient)}
        )
    sampler = _opacus_grad_samplers().get(type(layer))
    if sampler is None:
        raise UnsupportedModelError(
            f"{layer} is applied to sequences, which needs Opacus: pip install "
            "'privacy-accountant[opacus]'"
        )
    with full_precision(gradient.device):
        held = sampler(layer, [inputs], gradient)
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        held[layer.weight][:, layer.padding_idx] = 0.0  # PyTorch does this, Opacus does not
    return {parameter: MaterializedGradients(each) for parameter, each in held.items()}
