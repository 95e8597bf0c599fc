"""Names of a model's layers and parameters in messages: the path in the model, and the class."""

from __future__ import annotations

import torch
from torch import nn

from training_client.errors import UnsupportedModelError, UnusualUseError


def layer_type(module: nn.Module) -> type[nn.Module]:
    """Return a module's type as it was before `fully_shard`, which replaces it by a subclass."""
    kind = type(module)
    is_replaced = any(base.__name__ == "FSDPModule" for base in kind.__bases__)
    return kind.__bases__[-1] if is_replaced else kind


def keeps_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is of this layer type (or a subclass) with its original `forward`."""
    own = type(module)
    if not isinstance(module, kind) or own.forward is not kind.forward:
        return False
    return "forward" not in vars(module) and not hasattr(module, "parametrizations")


def describe_layer(model: nn.Module, layer: nn.Module) -> str:
    """Return a layer's path and class on one line, such as "layer encoder.0 (Linear)"."""
    path = next((path for path, each in model.named_modules() if each is layer), "")
    return f"{f'layer {path}' if path else 'the model'} ({layer_type(layer).__name__})"


def describe_tensor(model: nn.Module, tensor: torch.Tensor) -> str:
    """Return a parameter's or buffer's name and shape on one line, and the layer that holds it.

    Outside of the model there is no name: then only the shape is returned.
    """
    shape = f"of shape {tuple(tensor.shape)}"
    for layer in model.modules():
        held = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        for name, each in held:
            if each is tensor:
                kind = "parameter" if isinstance(each, nn.Parameter) else "buffer"
                return f"{kind} {name} {shape} of {describe_layer(model, layer)}"
    return f"a tensor {shape}"


def unsupported_layer(model: nn.Module, layer: nn.Module, problem: str) -> UnsupportedModelError:
    """Return the error for a layer that cannot be clipped: its path and class, and the problem."""
    return UnsupportedModelError(f"{describe_layer(model, layer)} {problem}")


def unusual_layer(model: nn.Module, layer: nn.Module, problem: str) -> UnusualUseError:
    """Return the error for a layer that alone cannot be clipped; see `unsupported_layer`."""
    return UnusualUseError(f"{describe_layer(model, layer)} {problem}")
