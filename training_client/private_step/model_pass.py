"""One pass of examples through a model: what each layer was given, and the gradients it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from training_client.errors import UnsupportedModelError
from training_client.private_step.clippable_layers import layer_example_gradients
from training_client.private_step.example_gradients import ExampleGradients

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # one value per example


@dataclass(frozen=True, slots=True)
class ModelPass:
    """The losses of a model's forward pass, and each layer's inputs and output gradients.

    Attributes:
        losses: one per example.
        inputs: each layer's inputs, one example per row of the first dimension.
        gradients: the gradient of the summed loss in each layer's output, likewise.
        full_gradients: the gradient of the summed loss in each parameter to differentiate.
    """

    losses: torch.Tensor
    inputs: dict[nn.Module, torch.Tensor]
    gradients: dict[nn.Module, torch.Tensor]
    full_gradients: Sequence[torch.Tensor | None] = ()

    def take_example_gradients(
        self, parameters: Sequence[nn.Parameter], sparse_inputs: torch.Tensor | None = None
    ) -> list[ExampleGradients]:
        """Return each parameter's per-example gradients, and free the pass's memory; call it once.

        Args:
            parameters: the layers' parameters.
            sparse_inputs: examples of which most values are declared to be 0; a layer that is given
                them, in any shape, skips zeros.

        Raises:
            UnsupportedModelError: a parameter has no gradient.
        """
        found: dict[torch.Tensor, ExampleGradients] = {}
        for layer in list(self.inputs):
            inputs, gradient = self.inputs.pop(layer), self.gradients.pop(layer)
            dtype = next(layer.parameters(recurse=False)).dtype
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
            is_sparse = sparse_inputs is not None and inputs.data_ptr() == sparse_inputs.data_ptr()
            found |= layer_example_gradients(layer, inputs, gradient.to(dtype), sparse=is_sparse)
        for parameter in parameters:
            if parameter not in found:
                raise UnsupportedModelError(
                    f"a parameter of shape {tuple(parameter.shape)} takes no part in the loss, or "
                    "not by an ordinary call of its layer: call the layer itself, or freeze it"
                )
        return [found[parameter] for parameter in parameters]


@dataclass
class _LayerRecorder:
    """Records the inputs of layers and the graph edges of their outputs in a forward pass."""

    model: nn.Module
    examples: int
    inputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    edges: dict[nn.Module, GradientEdge] = field(default_factory=dict)

    def record(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Record one call of a layer; a forward hook."""
        if layer in self.inputs:
            raise self._unsupported(
                layer, "is applied twice in one forward pass: give each use a layer of its own"
            )
        if len(inputs) != 1 or not isinstance(output, torch.Tensor):
            raise self._unsupported(
                layer, "must be called with one tensor and return one: wrap it, or freeze it"
            )
        rows = {len(inputs[0]), len(output)}
        if rows != {self.examples}:
            raise self._unsupported(
                layer,
                f"is applied to {min(rows - {self.examples})} rows, of {self.examples} examples: "
                "give it one row or sequence per example, along the first dimension; expand inputs "
                "that all examples share, such as position ids",
            )
        self.inputs[layer] = inputs[0].detach()
        self.edges[layer] = get_gradient_edge(output)

    def _unsupported(self, layer: nn.Module, problem: str) -> UnsupportedModelError:
        """Return the error for a layer that cannot be clipped, with the problem."""
        name = next(name for name, each in self.model.named_modules() if each is layer)
        return UnsupportedModelError(f"layer {name or '(root)'} ({layer}) {problem}")


@torch.enable_grad()
def run_model_pass(
    model: nn.Module,
    layers: Sequence[nn.Module],
    examples: torch.Tensor,
    targets: torch.Tensor,
    loss: Loss,
    *,
    differentiate: Sequence[nn.Parameter] = (),
) -> ModelPass:
    """Run examples through a model, and return each layer's inputs and output gradients.

    Args:
        model: called with `examples`.
        layers: the layers to record.
        examples: at least one.
        targets: one per example.
        loss: maps predictions and targets to one loss per example.
        differentiate: parameters whose full gradient is computed too.

    Raises:
        UnsupportedModelError: a layer is called otherwise than once with one tensor, the loss does
            not return one value per example, or the pass changes the model's state.
    """
    recorder = _LayerRecorder(model, len(examples))
    with _recording(recorder, layers), _require_unchanged_state(model) as state:
        losses = loss(model(examples), targets)
    if losses.shape != (len(examples),):
        raise UnsupportedModelError(
            f"the loss must return one value per example, not a tensor of shape "
            f"{tuple(losses.shape)}: use reduction='none'"
        )
    if not recorder.edges:
        raise UnsupportedModelError(
            "no trained layer takes part in the loss by an ordinary call; the layers of a model "
            "made by torch.compile cannot be observed if it was called before: compile it anew"
        )
    wanted: list[Any] = [*recorder.edges.values(), *differentiate]
    found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
    owned = {each.untyped_storage().data_ptr() for each in state}
    gradients = {
        layer: _copy_if_shared(gradient, owned)
        for layer, gradient in zip(recorder.edges, found[: len(recorder.edges)], strict=True)
        if gradient is not None
    }
    inputs = {layer: _copy_if_shared(recorder.inputs[layer], owned) for layer in gradients}
    return ModelPass(losses.detach(), inputs, gradients, found[len(recorder.edges) :])


def _copy_if_shared(tensor: torch.Tensor, owned: set[int]) -> torch.Tensor:
    """Return a copy of a tensor that shares the model's memory, which an update would change."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in owned else tensor


@contextmanager
def _recording(recorder: _LayerRecorder, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Hook the recorder to the layers for one forward pass."""
    hooks = [layer.register_forward_hook(recorder.record) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _require_unchanged_state(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield parameters and buffers; raise if the pass changes them, as that has no noise."""
    before = _parameters_and_buffers(model)
    versions = [tensor._version for tensor in before]
    yield before
    after = _parameters_and_buffers(model)
    is_unchanged = len(after) == len(before) and all(
        now is then and now._version == version
        for now, then, version in zip(after, before, versions, strict=True)
    )
    if not is_unchanged:
        raise UnsupportedModelError(
            "the forward pass changes the model's parameters or buffers, which would store "
            "information about examples without noise (running statistics, or max_norm of an "
            "embedding): turn that off"
        )


def _parameters_and_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return all parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]
