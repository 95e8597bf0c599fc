"""Records how trained layers are used in a forward pass: what they are given, and their outputs.

Most layers are observed by a hook. Recurrent layers and attention are run as the linear maps that
they consist of (`recurrent_layers`, `attention_layers`), each of which is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from training_client.errors import UnsupportedModelError
from training_client.private_step.gradients.convolution_gradients import (
    are_gradients_held,
    convolution_gradients,
    is_convolution,
)
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.isolation.operations import MixingError
from training_client.private_step.layers.attention_layers import run_attention
from training_client.private_step.layers.clippable_layers import (
    is_transposed_linear,
    trained_parameters,
)
from training_client.private_step.layers.group_normalization import (
    is_group_normalization,
    run_group_normalization,
)
from training_client.private_step.layers.layer_uses import (
    Differentiate,
    EnginePath,
    LayerUse,
    Parts,
    Tensors,
    bag_gradients,
    embedding_gradients,
    normalization_gradients,
    projection_gradients,
)
from training_client.private_step.layers.recurrent_layers import (
    run_recurrent_cell,
    run_recurrent_layer,
)
from training_client.private_step.layers.replayed_layers import LayerCall, Places, floating_outputs
from training_client.private_step.module_names import keeps_forward_of, unusual_layer

Gradients = dict[torch.Tensor, ExampleGradients]


class RowObserver(Protocol):
    """Interface of what observes the tensors that trained layers are given."""

    def require_rows(self, tensor: torch.Tensor) -> None:
        """Raise unless a tensor has one row for each example, or equal rows."""
        ...

    def require_shared(self, tensor: torch.Tensor) -> None:
        """Raise if a tensor depends on examples."""
        ...

    def own_part(
        self, layer: nn.Module, given: Sequence[torch.Tensor]
    ) -> AbstractContextManager[list[Any]]:
        """Return a context manager for a layer that the engine runs, which lists its results.

        Args:
            layer: the layer.
            given: the layer's parameters and buffers, and its arguments that are tensors.
        """
        ...

    def has_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor with as many rows as there are examples has one for each."""
        ...


@dataclass
class LayerRecorder:
    """Records each call of a trained layer in one forward pass; implements `UseRecorder`.

    Attributes:
        model: the model.
        examples: the number of examples.
        path: a path of the engine to force.
        sparse: examples of which most values are declared to be 0; layers that are given them, in
            any shape, skip zeros.
        keep_all: keep what every layer was given; see `run_model_pass`.
        uses: the recorded uses.
        parts: per-example gradients that were computed while the loss was differentiated.
        called: the layers that were called.
        is_paused: whether layers are called again for the backward pass (activation checkpointing):
            they must compute the same, but are not recorded.
        observer: observes what layers are given.
        hooks: how many hooks were registered on outputs.
        sources: operations that made the outputs of uses: gradients of all of them are computed.
    """

    model: nn.Module
    examples: int
    path: EnginePath | None = None
    sparse: torch.Tensor | None = None
    keep_all: bool = True
    places: Places = field(default_factory=dict)
    observer: RowObserver | None = None
    uses: list[LayerUse] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)
    called: set[nn.Module] = field(default_factory=set)
    is_paused: bool = False
    hooks: int = 0
    sources: set[Any] = field(default_factory=set)

    @contextmanager
    def recording(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Record the calls of these layers inside the `with` block."""
        hooks: list[RemovableHandle] = []
        replaced = []
        try:
            hooks += [
                layer.register_forward_pre_hook(self._refuse_groups)
                for layer in self.model.modules()
                if isinstance(layer, nn.AdaptiveLogSoftmaxWithLoss)
                and any(each.requires_grad for each in layer.parameters())
            ]
            for layer in layers:
                run = _own_forward(layer)
                if self.path == "replay" and run in (run_attention, run_group_normalization):
                    run = None
                if run is not None:
                    layer.forward = partial(self._run_own, run, layer)
                    replaced.append(layer)
                    continue
                hooks.append(layer.register_forward_hook(self._observe, with_kwargs=True))
                if isinstance(layer, nn.Embedding):
                    hooks.append(layer.register_forward_pre_hook(self._expand_shared))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in replaced:
                del layer.forward

    def _run_own(self, run: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a layer by the linear maps that it consists of."""
        if self.observer is None:
            return run(self, layer, *args, **kwargs)
        leaves = [*layer.parameters(), *layer.buffers(), *tree_leaves((args, kwargs))]
        given = [each for each in leaves if isinstance(each, torch.Tensor)]
        with self.observer.own_part(layer, given) as results:
            output = run(self, layer, *args, **kwargs)
            results += tree_leaves(output)
        return output

    def project(
        self,
        layer: nn.Module,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: slice | None = None,
    ) -> torch.Tensor:
        """Apply a linear map (or only these rows of it); record it for per-example gradients."""
        part = slice(None) if rows is None else rows
        used = weight if rows is None else weight[part]
        output = _own_base(
            linear(inputs, used, bias if bias is None or rows is None else bias[part])
        )
        differentiate = self._projection_differentiator(weight, bias, rows=rows)
        self.record_use(layer, (inputs,), output, differentiate)
        return output

    def record_use(
        self, layer: nn.Module, inputs: Tensors, output: torch.Tensor, differentiate: Differentiate
    ) -> None:
        """Record a layer's inputs, output, and the function for its per-example gradients."""
        self.called.add(layer)
        for each in (*inputs, output):
            self._require_rows(layer, each)
        if self.is_paused or not output.requires_grad:
            return
        kept = tuple(each.detach() for each in inputs)
        edge = get_gradient_edge(output)
        use = LayerUse(layer, (edge,), (output.shape,), kept, differentiate)
        is_early = not self.keep_all and self._is_differentiated_early(use, output)
        if is_early and any(map(self._is_made_of_uses, inputs)):
            self._differentiate_early(use, output)
            self.sources.add(edge.node)
        else:
            self.uses.append(use)

    def record_copies(
        self, layer: nn.Module, copies: Mapping[torch.Tensor, torch.Tensor], output: torch.Tensor
    ) -> None:
        """Record copies of a layer's parameters, one for each example, that gave this output."""
        self._require_rows(layer, output)
        trained = {own: each for own, each in copies.items() if each.requires_grad}
        if self.is_paused or not output.requires_grad or not trained:
            return
        edges = tuple(map(get_gradient_edge, trained.values()))
        shapes = tuple(each.shape for each in trained.values())
        self.uses.append(LayerUse(layer, edges, shapes, (), partial(_cut_copies, tuple(trained))))

    def _is_made_of_uses(self, tensor: torch.Tensor) -> bool:
        """Return whether the gradients of earlier uses pass through a tensor.

        Those of its own are not computed otherwise, although it may require them.
        """
        self.sources |= {edge.node for use in self.uses for edge in use.edges}
        left: list[Any] = [tensor.grad_fn]
        seen: set[Any] = {None}
        while left:
            node = left.pop()
            if node in self.sources:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                left += [each for each, _ in node.next_functions]
        return False

    def _is_differentiated_early(self, use: LayerUse, output: torch.Tensor) -> bool:
        """Return whether a use's per-example gradients take less memory than what it was given."""
        layer: Any = use.layer
        if is_convolution(layer):
            is_held = self.path is None and are_gradients_held(layer, use.inputs[0], output)
            return is_held or self.path == "held"
        return isinstance(layer, nn.LayerNorm | nn.RMSNorm) or is_group_normalization(layer)

    def _differentiate_early(self, use: LayerUse, output: torch.Tensor) -> None:
        """Compute a call's per-example gradients as soon as its output's gradient is known."""
        inputs, without_inputs = list(use.inputs), replace(use, inputs=(), edges=())
        parts = self.parts  # the hook must not refer to `self`, which refers to the graph

        def add_parts(gradient: torch.Tensor) -> None:
            """Add the call's per-example gradients, and free its inputs."""
            with torch.no_grad(), _disable_current_modes():  # no operations of the program
                parts.append(without_inputs.example_gradients(inputs, [gradient]))
            inputs.clear()

        output.register_hook(add_parts)  # type: ignore[no-untyped-call]
        self.hooks += 1

    def unsupported_error(self, layer: nn.Module, problem: str) -> UnsupportedModelError:
        """Return the error for a layer that cannot be clipped: its name, and why (`problem`)."""
        return unusual_layer(self.model, layer, problem)

    def _observe(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Forward hook: record one call of a layer, and return the output to use."""
        differentiate = None if self.path == "replay" else self._differentiator(layer)
        if differentiate is None:
            return self._record_replayed(layer, args, kwargs, output)
        given = [*args, *kwargs.values()]
        is_bag = isinstance(layer, nn.EmbeddingBag)
        if not isinstance(output, torch.Tensor) or (len(given) != 1 and not is_bag):
            raise self.unsupported_error(
                layer, "must be called with one tensor and return one: wrap it, or freeze it"
            )
        if is_bag:
            given = self._bag_inputs(layer, *args, **kwargs)
        elif isinstance(layer, nn.Linear | nn.Embedding):
            output = _own_base(output)
        self.record_use(layer, given, output, differentiate)
        return output

    def _differentiator(self, layer: nn.Module) -> Differentiate | None:
        """Return the layer's per-example gradient function; None if the layer must be rerun."""
        found: Any = layer  # of the type that is asked for
        if keeps_forward_of(layer, nn.Linear):
            return self._projection_differentiator(found.weight, found.bias)
        if is_transposed_linear(layer):
            return self._projection_differentiator(found.weight, found.bias, is_transposed=True)
        if keeps_forward_of(layer, nn.Embedding):
            return lambda inputs, gradients: embedding_gradients(found, inputs[0], gradients[0])
        if keeps_forward_of(layer, nn.EmbeddingBag):
            return lambda inputs, gradients: bag_gradients(
                found, inputs[0], inputs[1] if len(inputs) > 1 else None, gradients[0]
            )
        if keeps_forward_of(layer, nn.LayerNorm) or keeps_forward_of(layer, nn.RMSNorm):
            return lambda inputs, gradients: normalization_gradients(found, inputs[0], gradients[0])
        if is_convolution(layer):
            path = self.path  # not `self`: see `_projection_differentiator`
            return lambda inputs, gradients: convolution_gradients(
                found, inputs[0], gradients[0], path
            )
        return None

    def _projection_differentiator(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        rows: slice | None = None,
        is_transposed: bool = False,
    ) -> Differentiate:
        """Return the per-example gradient function of a linear map.

        It does not refer to the recorder, which holds it: such a cycle would keep a step's inputs
        in memory until Python's garbage collector runs.
        """
        return partial(
            _project_back, weight, bias, self.sparse,
            path=self.path, rows=rows, is_transposed=is_transposed,
        )  # fmt: skip

    def _record_replayed(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Record a call of a layer that is rerun to get its gradients; return its output.

        One output may be computed from another, as an LSTM's hidden state is from its cell state.
        So several outputs are returned as views, whose gradients do not include each other. A
        single output is not, because a view has no gradient once it was changed in place.
        """
        self.called.add(layer)
        if len(floating_outputs(output)) > 1:
            output = tree_map_only(torch.Tensor, lambda each: each.view_as(each), output)
        if self.is_paused:
            return output
        outputs = floating_outputs(output)
        wanted = tuple(at for at, each in enumerate(outputs) if each.requires_grad)
        call, inputs = LayerCall.from_arguments(
            self.model, layer, trained_parameters(layer), (args, kwargs), wanted,
            self.places.setdefault((layer, self._calls(layer)), set()),
            self._has_rows,
        )  # fmt: skip
        if not inputs:
            raise self.unsupported_error(
                layer, f"is given no tensor with one row for each of the {self.examples} examples: "
                "give it one row or sequence per example, along the first dimension, or freeze it"
            )  # fmt: skip
        if self.observer is not None:
            for each in inputs:
                self.observer.require_rows(each)
            for each in call.shared:
                self.observer.require_shared(each)
        if not wanted:
            return output
        differentiated = [outputs[at] for at in wanted]
        for each in differentiated:
            self._require_rows(layer, each)
        edges = tuple(get_gradient_edge(each) for each in differentiated)
        shapes = tuple(each.shape for each in differentiated)
        self.uses.append(
            LayerUse(
                layer, edges, shapes, inputs, call.example_gradients, is_bilinear=False,
                shared=call.shared,
            )
        )  # fmt: skip
        return output

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has one row for each example, as far as one can see."""
        is_long = tensor.dim() > 0 and len(tensor) == self.examples
        return is_long and (self.observer is None or self.observer.has_rows(tensor))

    def _calls(self, layer: nn.Module) -> int:
        """Return how often the layer was recorded in this pass."""
        return sum(each.layer is layer for each in self.uses)

    def _bag_inputs(
        self,
        layer: nn.Module,
        tokens: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the tensors among an `EmbeddingBag`'s arguments: tokens, and weights if given."""
        if offsets is not None or tokens.dim() != 2:
            raise self.unsupported_error(
                layer, "must be given one row of tokens per example: pad the bags, with padding_idx"
            )
        return [tokens] if per_sample_weights is None else [tokens, per_sample_weights]

    def _require_rows(self, layer: nn.Module, tensor: torch.Tensor) -> None:
        """Raise unless a tensor has one row for each example."""
        rows = len(tensor) if tensor.dim() else 1
        if rows != self.examples:
            raise self.unsupported_error(
                layer,
                f"is applied to {rows} rows, of {self.examples} examples: give it one row or "
                "sequence per example, along the first dimension; expand inputs that all examples "
                "share, such as position ids",
            )
        if self.observer is not None:
            self.observer.require_rows(tensor)

    def _require_shared(self, layer: nn.Module, tensor: torch.Tensor) -> None:
        """Raise if the only row that a layer is given holds examples along another dimension."""
        try:
            if self.observer is not None:
                self.observer.require_shared(tensor)
        except MixingError as error:
            raise self.unsupported_error(
                layer, f"is given one row that {error}: give it one row or sequence per example, "
                "along the first dimension"
            ) from error  # fmt: skip

    def _refuse_groups(self, layer: nn.Module, _: tuple[Any, ...]) -> None:
        """Forward pre-hook: refuse a layer that sorts examples into groups by their targets."""
        raise self.unsupported_error(
            layer, "gives its layers groups of examples by their targets: call its log_prob, and "
            "compute the loss from that"
        )  # fmt: skip

    def _expand_shared(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Forward pre-hook: expand a single input row, shared by all examples, to one row for each.

        Otherwise its output gradient would be summed over the examples.
        """
        if len(args) == 1 and args[0].dim() > 1 and len(args[0]) == 1 < self.examples:
            self._require_shared(layer, args[0])
            return (args[0].expand(self.examples, *args[0].shape[1:]),)
        return None


def _own_base(output: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear map or embedding such that it is a view of no other tensor.

    PyTorch computes sequences as one matrix, and returns a view of it. If a model changes a view in
    place, as in `rows += positions`, the recorded place in the graph gets no gradient any more.
    These layers do not keep their outputs for the backward pass, so both may share memory.
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


def _project_back(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sparse: torch.Tensor | None,
    inputs: Tensors,
    gradients: Tensors,
    *,
    path: EnginePath | None,
    rows: slice | None,
    is_transposed: bool,
) -> Gradients:
    """Return a linear map's per-example gradients from its inputs and output gradients."""
    is_sparse = sparse is not None and inputs[0].data_ptr() == sparse.data_ptr()
    return projection_gradients(
        weight, bias, inputs[0], gradients[0],
        path=path, sparse=is_sparse, rows=rows, is_transposed=is_transposed,
    )  # fmt: skip


def _cut_copies(parameters: Sequence[torch.Tensor], _: Tensors, gradients: Tensors) -> Gradients:
    """Return per-example gradients from those of copies of parameters, one after the other."""
    return {
        own: MaterializedGradients(each.view(-1, *own.shape))
        for own, each in zip(parameters, gradients, strict=True)
    }


def _own_forward(layer: nn.Module) -> Callable[..., Any] | None:
    """Return this package's forward function for a layer that it runs itself; else None."""
    if keeps_forward_of(layer, nn.MultiheadAttention):
        assert isinstance(layer, nn.MultiheadAttention)
        is_plain = layer.bias_k is None and not layer.add_zero_attn
        is_plain = is_plain and not is_parametrized(layer.out_proj)
        return run_attention if is_plain else None
    if any(keeps_forward_of(layer, kind) for kind in (nn.RNN, nn.LSTM, nn.GRU)):
        return run_recurrent_layer
    if any(keeps_forward_of(layer, kind) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)):
        return run_recurrent_cell
    if is_group_normalization(layer):
        return run_group_normalization
    return None
