"""Per-example gradients of any layer: it is run again for each example, and differentiated alone.

Only the layer is run again, with the inputs that it was given, not the model. PyTorch's `vmap` runs
several examples at once; where it cannot, one example is run after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.kernels.matmul import full_precision
from training_client.private_step.layers.double_sums import DoubleSums
from training_client.private_step.model_state import random_state
from training_client.private_step.module_names import unusual_layer

_CHUNK_SIZE: Final = 1 << 20  # coordinates of inputs and gradients of the examples run at once

Values = tuple[torch.Tensor, ...]
# which arguments of a layer's n-th call in a pass have one row per example
Places = dict[tuple[nn.Module, int], set[int]]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one call of a layer, kept so that the call can be repeated.

    Attributes:
        model: the model that the layer is of.
        layer: the layer.
        parameters: its own trained parameters, by their names in the layer.
        leaves: all arguments, flat; a tensor with one example per row is None.
        structure: how the arguments are nested.
        places: the places of the tensors with one example per row among the leaves.
        wanted: which of the layer's floating-point outputs have gradients.
    """

    model: nn.Module
    layer: nn.Module
    parameters: Mapping[str, torch.Tensor]
    leaves: tuple[Any, ...]
    structure: TreeSpec
    places: tuple[int, ...]
    wanted: tuple[int, ...]

    @classmethod
    def from_arguments(
        cls,
        model: nn.Module,
        layer: nn.Module,
        parameters: Mapping[str, torch.Tensor],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        wanted: tuple[int, ...],
        known: set[int],
        has_rows: Callable[[torch.Tensor], bool],
    ) -> tuple[LayerCall, Values]:
        """Split a call into a `LayerCall` without per-example tensors, and these tensors.

        Args:
            model: the model that the layer is of.
            layer: the layer.
            parameters: its own trained parameters.
            arguments: of the call.
            wanted: which outputs have gradients.
            known: the places that had one row per example in earlier passes, or nothing before the
                first; it is updated. A tensor for all examples may have as many rows by chance.
            has_rows: whether a tensor has one row per example, as far as this pass shows.
        """
        leaves, structure = tree_flatten(arguments)
        found = {
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and has_rows(leaf)
        }
        if known:
            known &= found
        else:
            known |= found
        places = tuple(sorted(known))
        inputs = tuple(leaves[place].detach() for place in places)
        rest = tuple(
            None if place in places else leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            for place, leaf in enumerate(leaves)
        )
        return cls(model, layer, parameters, rest, structure, places, wanted), inputs

    @property
    def shared(self) -> Values:
        """The tensors that the layer was given for all examples together."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def run(self, parameters: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> Values:
        """Repeat the call with other parameters and inputs; return outputs that need gradients."""
        leaves = list(self.leaves)
        for place, each in zip(self.places, inputs, strict=True):
            leaves[place] = each
        args, kwargs = tree_unflatten(leaves, self.structure)
        output = functional_call(self.layer, dict(parameters), args, kwargs, tie_weights=False)
        outputs = floating_outputs(output)
        return tuple(outputs[at] for at in self.wanted)

    def example_gradients(
        self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> dict[torch.Tensor, ExampleGradients]:
        """Return the per-example gradients of the trained parameters that the layer itself holds.

        Args:
            inputs: the tensors with one example per row.
            gradients: of the layer's outputs that have gradients, one example per row.

        Raises:
            UnsupportedModelError: the layer draws random numbers, or fails on one example.
        """
        found = {name: [] for name in self.parameters}  # type: dict[str, list[torch.Tensor]]
        size = sum(each[0].numel() for each in (*inputs, *gradients))
        size += sum(each.numel() for each in self.parameters.values())
        step = max(1, _CHUNK_SIZE // max(1, size))
        with full_precision(gradients[0].device):
            for start in range(0, len(gradients[0]), step):
                part = slice(start, start + step)
                few = self._differentiate([e[part] for e in inputs], [e[part] for e in gradients])
                for name, each in few.items():
                    found[name].append(each)
        return {
            parameter: MaterializedGradients(torch.cat(found[name]).contiguous())
            for name, parameter in self.parameters.items()
        }

    def _differentiate(
        self, inputs: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the parameter gradients of a few examples, one per row, by `vmap` if possible."""
        values = {name: each.detach() for name, each in self.parameters.items()}

        def differentiate_one(
            rows: list[torch.Tensor], gradient: list[torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            """Return the parameter gradients of one example."""
            one = [each[None] for each in rows]
            pull_back = vjp(lambda changed: self.run(changed, one), values)[1]
            found: dict[str, torch.Tensor] = pull_back(tuple(each[None] for each in gradient))[0]
            return found

        try:
            with warnings.catch_warnings(), DoubleSums():
                warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap
                result: dict[str, torch.Tensor] = vmap(differentiate_one, randomness="error")(
                    inputs, gradients
                )
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return self._differentiate_one_by_one(inputs, gradients)
        return result

    def _differentiate_one_by_one(
        self, inputs: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the parameter gradients of a few examples, one per row, by a loop."""
        names, rows = list(self.parameters), []
        device = gradients[0].device
        before = random_state(device)
        for at in range(len(gradients[0])):
            values = {n: e.detach().requires_grad_() for n, e in self.parameters.items()}
            with torch.enable_grad():
                outputs = self._run_alone(values, [each[at : at + 1] for each in inputs])
                pairs = [
                    (output, gradient[at : at + 1])
                    for output, gradient in zip(outputs, gradients, strict=True)
                    if output.requires_grad
                ]
                found = torch.autograd.grad(
                    [output for output, _ in pairs],
                    [values[name] for name in names],
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            rows.append(found)
        if not torch.equal(before, random_state(device)):
            raise unusual_layer(
                self.model, self.layer,
                "draws random numbers, and parameters of its own cannot be differentiated again "
                "with the same numbers: set its dropout to 0, or put these parameters into a layer "
                "of their own, or freeze them"
            )  # fmt: skip
        return {
            name: torch.stack(column)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }

    def _run_alone(
        self, parameters: Mapping[str, torch.Tensor], inputs: list[torch.Tensor]
    ) -> Values:
        """Repeat the call for one example; raise `UnsupportedModelError` if the layer fails."""
        try:
            return self.run(parameters, inputs)
        except (RuntimeError, TypeError, ValueError, LookupError, NotImplementedError) as error:
            raise unusual_layer(
                self.model, self.layer,
                f"fails on one example alone ({error}): let its forward accept any number of "
                "examples, or freeze it"
            ) from error  # fmt: skip


def floating_outputs(output: Any) -> Values:
    """Return the floating-point tensors in a layer's (possibly nested) output, in order."""
    leaves, _ = tree_flatten(output)
    return tuple(
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    )
