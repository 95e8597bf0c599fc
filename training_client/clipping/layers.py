"""Which layers can be clipped, and what form their examples' gradients take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from training_client.clipping.gradients import ExampleGradients, HeldGradients, OuterProducts
from training_client.clipping.products import full_precision
from training_client.errors import UnsupportedModelError

_SPREAD: Final = {  # by name: some of them take long to import, or are not everywhere
    "DataParallel",
    "DistributedDataParallel",
    "DifferentiallyPrivateDistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}

_RECURRENT: Final = (
    "take a layer that sees a sequence at once, train Opacus' DP{name} with Opacus "
    "(docs/how-to/frameworks.md)"
)
_INSTEAD: Final[dict[type[nn.Module], str]] = {
    nn.EmbeddingBag: "take Embedding and a sum or mean over the tokens",
    nn.MultiheadAttention: (
        "take Linear layers for queries, keys and values with "
        "torch.nn.functional.scaled_dot_product_attention, train Opacus' DPMultiheadAttention with "
        "Opacus (docs/how-to/frameworks.md)"
    ),
    **{kind: _RECURRENT.format(name=kind.__name__) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
}

Sampler = Callable[[nn.Module, list[torch.Tensor], torch.Tensor], dict[torch.Tensor, torch.Tensor]]


def trained_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that have parameters to train.

    Raises:
        UnsupportedModelError: one of them cannot be clipped; something mixes examples, keeps
            statistics of them, or changes what must be remembered. The message names it.
    """
    layers = []
    for name, module in model.named_modules():
        problem = _problem(module)
        if problem is not None:
            raise UnsupportedModelError(
                f"layer {name or '(root)'} ({type(module).__name__}) {problem}"
            )
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            layers.append(module)
    if not layers:
        raise UnsupportedModelError("the model has no layer to train")
    held = [p for layer in layers for p in layer.parameters(recurse=False)]
    if len({id(p) for p in held}) < len(held):
        raise UnsupportedModelError("two layers share a parameter")
    if len({p.dtype for p in held}) > 1:
        raise UnsupportedModelError("parameters must be of one precision, float32 or float64")
    return layers


def _problem(module: nn.Module) -> str | None:
    """Return why a module cannot be part of a private model; None if it can."""
    if _SPREAD & {kind.__name__ for kind in type(module).__mro__}:
        return (
            "shares examples or parameters out over devices or processes, each of which would be a "
            "run of its own: give the model that it wraps, in one process"
        )
    if isinstance(module, _BatchNorm):
        return (
            "normalises over the batch, so that one example moves the gradients of others: use "
            "LayerNorm or GroupNorm"
        )
    if isinstance(module, _NormBase) and module.track_running_stats:
        return "keeps statistics of examples, without noise: use track_running_stats=False"
    if getattr(module, "inplace", False):
        return "overwrites an output that is needed: use inplace=False"
    own = list(module.parameters(recurse=False))
    trained = [p for p in own if p.requires_grad]
    if not trained:
        return None
    if len(trained) < len(own):
        return "is frozen in part: freeze all of it, or nothing"
    if any(p.dtype not in (torch.float32, torch.float64) for p in own):
        return (
            f"has parameters of {own[0].dtype}, in which noise is lost by rounding: keep them in "
            "float32 and run the model under torch.autocast"
        )
    return _unclippable(module)


def _unclippable(module: nn.Module) -> str | None:
    """Return why the gradients of a module's own parameters cannot be clipped; None if they can."""
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return (
            "divides gradients by how often a batch has a token, so that one example moves the "
            "gradients of others: use scale_grad_by_freq=False"
        )
    if isinstance(module, nn.Embedding) and module.sparse:
        return "has sparse gradients, which are not clipped here: use sparse=False"
    if type(module) in _INSTEAD:
        return f"cannot be clipped here: {_INSTEAD[type(module)]}, or freeze it"
    if type(module) is not nn.Linear and type(module) not in _samplers():
        return f"has parameters that cannot be clipped here: {_way_out()}, or freeze it"
    return None


def _way_out() -> str:
    """Return which layers to take in the place of one that cannot be clipped."""
    if _samplers():
        return "take layers that are Linear, or that Opacus has a grad sampler for"
    return (
        "take Linear layers, or install Opacus, which has grad samplers for others (pip install "
        "'privacy-accountant[opacus]')"
    )


def _samplers() -> dict[type[nn.Module], Sampler]:
    """Opacus' functions for the per-example gradients of a layer; none where it is missing."""
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError:
        return {}
    found: dict[type[nn.Module], Sampler] = GradSampleModule.GRAD_SAMPLERS
    return found


def gradients_of(
    layer: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor, *, sparse: bool = False
) -> dict[torch.Tensor, ExampleGradients]:
    """Every example's gradient in the parameters of a layer.

    Args:
        layer: one of `trained_layers`.
        inputs: of the layer, an example at each place of the first dimension.
        gradient: of its output, likewise.
        sparse: whether most of the inputs' numbers are said to be 0.

    Raises:
        UnsupportedModelError: Opacus is needed and missing.
    """
    # in a row: so lies what is left when an example is left out, and sums of what lies in another
    # way are rounded in another way; and Opacus misreads convolutions in channels_last
    inputs, gradient = inputs.contiguous(), gradient.contiguous()
    if type(layer) is nn.Linear and inputs.dim() == 2:
        weight: dict[torch.Tensor, ExampleGradients] = {
            layer.weight: OuterProducts(gradient, inputs, sparse)
        }
        return weight if layer.bias is None else weight | {layer.bias: HeldGradients(gradient)}
    sampler = _samplers().get(type(layer))
    if sampler is None:
        raise UnsupportedModelError(
            f"{layer} is applied to sequences, which takes Opacus: pip install "
            "'privacy-accountant[opacus]'"
        )
    with full_precision(gradient.device):
        held = sampler(layer, [inputs], gradient)
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        held[layer.weight][:, layer.padding_idx] = 0.0  # as PyTorch has it, and Opacus has not
    return {parameter: HeldGradients(each) for parameter, each in held.items()}
