"""One pass of examples through a model: how each layer was used, and the gradients it got."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import nn

from training_client.errors import UnsupportedModelError, UnusualUseError
from training_client.private_step.batches import Examples, call_model, count_examples
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.layers.clippable_layers import own_parameters, trained_parameters
from training_client.private_step.layers.layer_recorder import LayerRecorder, RowObserver
from training_client.private_step.layers.layer_uses import (
    EnginePath,
    LayerUse,
    Parts,
    Tensors,
    merge_parts,
)
from training_client.private_step.layers.replayed_layers import Places
from training_client.private_step.module_names import describe_layer, describe_tensor

Loss = Callable[[Any, torch.Tensor], torch.Tensor]  # one value per example


class PassObserver(RowObserver, Protocol):
    """Interface of what observes a pass: its operations, and what trained layers are given.

    Attributes:
        reads: the numbers that Python read in the pass, of what no example decides.
    """

    reads: list[Any]

    def forward_part(self) -> AbstractContextManager[Any]:
        """Return a context manager for model and loss."""
        ...

    def backward_part(self, losses: torch.Tensor, hooks: int) -> AbstractContextManager[Any]:
        """Return a context manager for the gradients of losses, on which this module has hooks."""
        ...


@dataclass(frozen=True, slots=True)
class UsePass:
    """One call of a layer in a forward and backward pass, with the gradients of its outputs.

    Attributes:
        use: the use.
        inputs: what the layer was given, one example per row of the first dimension.
        gradients: of the summed loss in each output of the use, likewise.
    """

    use: LayerUse
    inputs: Tensors
    gradients: Tensors

    def example_gradients(self) -> dict[torch.Tensor, ExampleGradients]:
        """Return the per-example gradients of the layer's parameters from this call."""
        return dict(self.use.example_gradients(self.inputs, self.gradients))


@dataclass(slots=True)
class ModelPass:
    """The losses of a model's forward pass, and the calls of its trained layers.

    Attributes:
        model: the model.
        losses: one per example.
        uses: the uses that the loss depends on.
        parts: per-example gradients that were computed while the loss was differentiated.
        path: a path of the engine to force.
        full_gradients: the gradient of the summed loss in each parameter to differentiate.
        skipped: the parameters of layers that random numbers left out of this pass.
    """

    model: nn.Module
    losses: torch.Tensor
    uses: list[UsePass]
    parts: Sequence[Parts] = ()
    path: EnginePath | None = None
    full_gradients: Sequence[torch.Tensor | None] = ()
    skipped: frozenset[nn.Parameter] = frozenset()

    def take_example_gradients(self, parameters: Sequence[nn.Parameter]) -> list[ExampleGradients]:
        """Return each parameter's per-example gradients, and free their inputs; call it once.

        Args:
            parameters: the layers' parameters.

        Raises:
            UnsupportedModelError: a parameter has no gradient.
        """
        parts: dict[torch.Tensor, list[ExampleGradients]] = defaultdict(list)
        uses, self.uses = self.uses, []
        for early in self.parts:
            for parameter, part in early.items():
                parts[parameter].append(part)
        while uses:
            for parameter, part in uses.pop(0).example_gradients().items():
                parts[parameter].append(part)
        for parameter in parameters:
            if parameter in self.skipped:
                zeros = parameter.new_zeros(1).expand(len(self.losses), *parameter.shape)
                parts[parameter].append(MaterializedGradients(zeros))
            if parameter not in parts:
                raise UnusualUseError(
                    f"{describe_tensor(self.model, parameter)} takes no part in the loss, or not "
                    "by an ordinary call of its layer: call the layer itself, or freeze it"
                )
        return [merge_parts(parts.pop(parameter), self.path) for parameter in parameters]


@torch.enable_grad()
def run_model_pass(
    model: nn.Module,
    layers: Sequence[nn.Module],
    examples: Examples,
    targets: torch.Tensor,
    loss: Loss,
    *,
    differentiate: Sequence[nn.Parameter] = (),
    path: EnginePath | None = None,
    sparse: torch.Tensor | None = None,
    keep_all: bool = True,
    places: Places | None = None,
    observer: PassObserver | None = None,
) -> ModelPass:
    """Run a batch through a model forward and backward; return the recorded layer calls.

    Args:
        model: called with `examples`.
        layers: the layers to record.
        examples: at least one.
        targets: one per example.
        loss: maps the model's output and targets to one loss per example.
        differentiate: parameters whose full gradient is computed too.
        path: a path of the engine to force.
        sparse: examples of which most values are declared to be 0; a layer that is given them, in
            any shape, skips zeros.
        keep_all: keep what every layer was given. Otherwise the gradients of normalisation layers
            are computed while the loss is differentiated, and the rest of the memory is freed.
        places: which arguments of replayed layers have one row per example, known from earlier
            passes; it is updated.
        observer: observes the pass.

    Raises:
        UnsupportedModelError: a layer cannot be observed, the loss does not return one value per
            example, or the pass changes the model's state.
    """
    count = count_examples(examples)
    recorder = LayerRecorder(
        model, count, path, sparse, keep_all, {} if places is None else places, observer
    )
    with recorder.recording(layers):
        with nullcontext() if observer is None else observer.forward_part():
            losses, state = _run_forward(recorder, layers, examples, targets, loss)
        if observer is not None:
            observer.require_rows(losses)
        edges: list[Any] = [edge for use in recorder.uses for edge in use.edges]
        recorder.is_paused = True
        uncalled = _uncalled_parameters(recorder, layers) if observer and observer.reads else []
        wanted = [*edges, *differentiate, *uncalled]
        with nullcontext() if observer is None else observer.backward_part(losses, recorder.hooks):
            found = torch.autograd.grad(losses, wanted, torch.ones_like(losses), allow_unused=True)
    owned = {each.untyped_storage().data_ptr() for each in state}
    uses, start = [], 0
    for use in recorder.uses:
        gradients = found[start : start + len(use.edges)]
        start += len(use.edges)
        if any(each is not None for each in gradients):
            inputs = [_copy_if_shared(each, owned) for each in use.inputs]
            given = [
                losses.new_zeros(shape) if each is None else _copy_if_shared(each, owned)
                for each, shape in zip(gradients, use.shapes, strict=True)
            ]
            uses.append(UsePass(use, inputs, given))
    full = found[len(edges) :][: len(differentiate)]
    of_uncalled = zip(uncalled, found[len(wanted) - len(uncalled) :], strict=True)
    skipped = frozenset(each for each, gradient in of_uncalled if gradient is None)
    return ModelPass(model, losses.detach(), uses, recorder.parts, path, full, skipped)


def _uncalled_parameters(
    recorder: LayerRecorder, layers: Sequence[nn.Module]
) -> list[nn.Parameter]:
    """Return the trained parameters of layers that were not called, and of no others."""
    called = {each for layer in recorder.called for each in own_parameters(layer).values()}
    of_layers = (each for layer in layers for each in trained_parameters(layer).values())
    return [each for each in dict.fromkeys(of_layers) if each not in called]


@torch.enable_grad()
def compute_losses(
    model: nn.Module,
    layers: Sequence[nn.Module],
    examples: Examples,
    targets: torch.Tensor,
    loss: Loss,
    *,
    path: EnginePath | None = None,
    places: Places | None = None,
) -> torch.Tensor:
    """Return the losses of a batch, computed as in `run_model_pass`, without a backward pass.

    Gradients are enabled, because layers may compute differently without them.
    """
    count = count_examples(examples)
    recorder = LayerRecorder(model, count, path, places={} if places is None else places)
    with recorder.recording(layers):
        return _run_forward(recorder, layers, examples, targets, loss)[0].detach()


def _run_forward(
    recorder: LayerRecorder,
    layers: Sequence[nn.Module],
    examples: Examples,
    targets: torch.Tensor,
    loss: Loss,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a batch through the recorder's model; return its losses, and all tensors of the model.

    Raises:
        UnsupportedModelError: see `run_model_pass`.
    """
    with _require_unchanged_state(recorder.model) as state:
        losses = loss(call_model(recorder.model, examples), targets)
    if losses.shape != (recorder.examples,):
        raise UnsupportedModelError(
            f"the loss must return one value per example, not a tensor of shape "
            f"{tuple(losses.shape)}: use reduction='none'"
        )
    if not recorder.uses:
        raise UnusualUseError(
            "no trained layer takes part in the loss by an ordinary call, such as "
            f"{describe_layer(recorder.model, layers[0])}: call the layer itself. The layers of a "
            "model made by torch.compile cannot be observed if it was called before: compile it "
            "anew"
        )
    return losses, state


def _copy_if_shared(tensor: torch.Tensor, owned: set[int]) -> torch.Tensor:
    """Return a copy of a tensor if it shares memory with the model, else the tensor itself."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in owned else tensor


@contextmanager
def _require_unchanged_state(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters and buffers; raise afterwards if the `with` block changed them."""
    before = parameters_and_buffers(model)
    versions = [tensor._version for tensor in before]
    yield before
    after = parameters_and_buffers(model)
    for now, then, version in zip_longest(after, before, versions):
        if now is not then or now._version != version:
            raise changed_state_error(model, now if then is None or now is not None else then)


def changed_state_error(model: nn.Module, tensor: torch.Tensor) -> UnsupportedModelError:
    """Return the error for a forward pass that changes a parameter or buffer."""
    return UnsupportedModelError(
        f"the forward pass changes {describe_tensor(model, tensor)}, which would store information "
        "about examples without noise (running statistics, or max_norm of an embedding): turn that "
        "off"
    )


def parameters_and_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return all parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]
