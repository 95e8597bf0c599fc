"""One pass of examples through a model, and what each of its layers saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from training_client.clipping.gradients import ExampleGradients
from training_client.clipping.layers import gradients_of
from training_client.errors import UnsupportedModelError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # one value an example


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of a pass.

    Attributes:
        losses: one an example.
        inputs: of each layer, an example at each place of the first dimension.
        gradients: of the summed loss in each layer's output, likewise.
        whole: of the summed loss in each parameter, if that was asked for.
    """

    losses: torch.Tensor
    inputs: dict[nn.Module, torch.Tensor]
    gradients: dict[nn.Module, torch.Tensor]
    whole: Sequence[torch.Tensor | None] = ()

    def by_parameter(
        self, parameters: Sequence[nn.Parameter], sparse: torch.Tensor | None = None
    ) -> list[ExampleGradients]:
        """Every example's gradient of each parameter; what was seen is given up for it.

        Args:
            parameters: of the layers.
            sparse: examples of which most numbers are said to be 0; a layer that is given them, in
                any shape, leaves zeros out.

        Raises:
            UnsupportedModelError: a parameter has none.
        """
        found: dict[torch.Tensor, ExampleGradients] = {}
        for layer in list(self.inputs):
            inputs, gradient = self.inputs.pop(layer), self.gradients.pop(layer)
            kind = next(layer.parameters(recurse=False)).dtype
            inputs = inputs.to(kind) if inputs.is_floating_point() else inputs
            few = sparse is not None and inputs.data_ptr() == sparse.data_ptr()
            found |= gradients_of(layer, inputs, gradient.to(kind), sparse=few)
        for parameter in parameters:
            if parameter not in found:
                raise UnsupportedModelError(
                    f"a parameter of shape {tuple(parameter.shape)} takes no part in the loss, or "
                    "not by an ordinary call of its layer: freeze it"
                )
        return [found[parameter] for parameter in parameters]


@dataclass
class _Seen:
    """What a forward pass went through: layers' inputs, and where their outputs' gradients are."""

    model: nn.Module
    examples: int
    inputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    edges: dict[nn.Module, GradientEdge] = field(default_factory=dict)

    def remember(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A forward hook."""
        if layer in self.inputs:
            raise self._refused(
                layer, "is applied twice in one forward pass: give each use a layer of its own"
            )
        if len(inputs) != 1 or not isinstance(output, torch.Tensor):
            raise self._refused(layer, "is not called with one tensor, to give another")
        rows = {len(inputs[0]), len(output)}
        if rows != {self.examples}:
            raise self._refused(
                layer,
                f"is applied to {min(rows - {self.examples})} rows, of {self.examples} examples: "
                "give it one row or sequence of each example, in the first dimension; what all "
                "examples share, such as position ids, is expanded to as many",
            )
        self.inputs[layer] = inputs[0].detach()
        self.edges[layer] = get_gradient_edge(output)

    def _refused(self, layer: nn.Module, problem: str) -> UnsupportedModelError:
        name = next(name for name, each in self.model.named_modules() if each is layer)
        return UnsupportedModelError(f"layer {name or '(root)'} ({layer}) {problem}")


@torch.enable_grad()
def pass_through(
    model: nn.Module,
    layers: Sequence[nn.Module],
    examples: torch.Tensor,
    targets: torch.Tensor,
    loss: Loss,
    *,
    whole: Sequence[nn.Parameter] = (),
) -> Passed:
    """Examples forward, and the summed loss back to the layers' outputs.

    Args:
        model: called with `examples`.
        layers: of it, to remember.
        examples: at least one.
        targets: one each.
        loss: maps predictions and targets to one loss an example.
        whole: parameters whose gradient is wanted too.

    Raises:
        UnsupportedModelError: a layer is called in another way than once with one tensor, the loss
            is not one an example, or the pass changes what the model keeps.
    """
    seen = _Seen(model, len(examples))
    with _watched(seen, layers), _unchanged(model) as kept:
        losses = loss(model(examples), targets)
    if losses.shape != (len(examples),):
        raise UnsupportedModelError(
            f"the loss must give one value an example, not a tensor of shape "
            f"{tuple(losses.shape)}: use reduction='none'"
        )
    if not seen.edges:
        raise UnsupportedModelError(
            "no layer that is trained takes part in the loss by an ordinary call; of a model that "
            "torch.compile made, none is seen if it was called before: compile it anew"
        )
    wanted: list[Any] = [*seen.edges.values(), *whole]
    found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
    apart = _ApartFrom(kept)
    reached = {
        layer: apart(gradient)
        for layer, gradient in zip(seen.edges, found[: len(seen.edges)], strict=True)
        if gradient is not None
    }
    inputs = {layer: apart(seen.inputs[layer]) for layer in reached}
    return Passed(losses.detach(), inputs, reached, found[len(seen.edges) :])


class _ApartFrom:
    """Gives tensors that share no memory with what a model keeps, which an update changes."""

    def __init__(self, kept: Sequence[torch.Tensor]) -> None:
        self._owned = {each.untyped_storage().data_ptr() for each in kept}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        shared = tensor.untyped_storage().data_ptr() in self._owned
        return tensor.clone() if shared else tensor


@contextmanager
def _watched(seen: _Seen, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Remember what one forward pass goes through, and no other."""
    hooks = [layer.register_forward_hook(seen.remember) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Gives parameters and buffers; raise if they change: what examples leave has no noise."""
    before = _state(model)
    versions = [tensor._version for tensor in before]
    yield before
    after = _state(model)
    same = len(after) == len(before) and all(
        now is then and now._version == version
        for now, then, version in zip(after, before, versions, strict=True)
    )
    if not same:
        raise UnsupportedModelError(
            "the forward pass changes the model's parameters or buffers: what it leaves there of "
            "examples has no noise (running statistics, max_norm of an embedding)"
        )


def _state(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
