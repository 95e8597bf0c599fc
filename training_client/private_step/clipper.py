"""Clips per-example gradients, from one backward pass that ends at the layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import get_args

import torch
from torch import nn

from training_client.errors import DataError, UnsupportedModelError, UnusualUseError
from training_client.private_step.batches import (
    Examples,
    count_examples,
    select_examples,
    without_graph,
)
from training_client.private_step.blocks import Block, Piece, cut_into_blocks
from training_client.private_step.clipped_sum import AccumulatedSum, BlockwiseSum, ClippedSum
from training_client.private_step.gradients.example_gradients import ExampleGradients, as_scalar
from training_client.private_step.kernels.compiled import is_on_cpu
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.matmul import full_precision
from training_client.private_step.layers.clippable_layers import find_trained_layers
from training_client.private_step.layers.layer_uses import EnginePath
from training_client.private_step.layers.model_checks import CheckedModel
from training_client.private_step.layers.model_pass import Loss
from training_client.private_step.module_names import describe_tensor
from training_client.private_step.rounding_bounds import (
    SHARE_MAX,
    Scalar,
    require_precise_sum,
    safe_bound_range,
    single_precision_block,
    smallest_safe_factor,
    weight_rounding,
)
from training_client.private_step.trained_parameters import TrainedParameters
from training_client.private_step.transform import Transform


class Clipper:
    """Computes sums of clipped per-example gradients for one model.

    Attributes:
        trained: the model's trained parameters, which may be sharded among processes.
        parameters: the whole trained parameters, in the order of `model.parameters()`.
        blocks: the blocks that their coordinates are cut into.
        size: the number of their coordinates.

    Args:
        model: its layers with parameters are applied to one row or sequence per example, along the
            first dimension.
        physical_batch_size: examples per forward pass; the whole batch by default.
        sparse_inputs: declare that most input values are 0. Linear layers that read the inputs then
            skip zeros, which saves time if more than three quarters are. This is declared, not
            detected from the data, because it changes the order in which sums are rounded.
        trained: the model's trained parameters; found in the model by default.
        path: a path of the engine to force, for tests: "gram" or "product" for the norms of linear
            maps, "held" to form every example's gradient, "replay" to run each layer again for each
            example. By default each layer takes the cheapest.

    Raises:
        UnsupportedModelError: a layer cannot be clipped; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        physical_batch_size: int | None = None,
        *,
        sparse_inputs: bool = False,
        path: EnginePath | None = None,
        trained: TrainedParameters | None = None,
    ) -> None:
        if path is not None and path not in get_args(EnginePath):
            raise ValueError(
                f"unknown path {path!r}: use one of {', '.join(get_args(EnginePath))}, or None"
            )
        if physical_batch_size is not None and physical_batch_size < 1:
            raise ValueError(f"expected physical_batch_size ≥ 1, got {physical_batch_size}")
        self._model, self._physical_batch_size = model, physical_batch_size
        self._sparse_inputs = sparse_inputs
        layers, as_a_whole = _layers_of(model)
        self.trained = trained or TrainedParameters(model)
        self.parameters = self.trained.whole
        self._checked = CheckedModel(model, layers, self.parameters, path, as_a_whole)
        self.blocks = cut_into_blocks(self.parameters)
        self.size = sum(block.size for block in self.blocks)

    @property
    def unproved(self) -> tuple[str, ...]:
        """The operations that were only tested to keep examples apart, each with its line."""
        return tuple(self._checked.unproved)

    def zeros(self) -> torch.Tensor:
        """Return a flat vector of zeros, one for each trained coordinate."""
        return self.parameters[0].new_zeros(self.size)

    @torch.no_grad()
    def clip(
        self,
        examples: Examples,
        targets: torch.Tensor,
        loss: Loss,
        transform: Transform,
        share: float = SHARE_MAX,
    ) -> BlockwiseSum:
        """Return the sum of a batch's clipped per-example gradients.

        Args:
            examples: a tensor, or a dictionary of tensors that become the model's keyword
                arguments; one example per row of the first dimension.
            targets: one per example.
            loss: maps the model's output and targets to one loss per example; it must not mix
                examples.
            transform: what is clipped, and to what bound.
            share: a; one example moves the computed sum by at most (1 + a) times the bound.

        Returns:
            The clipped sum. For one physical batch it is computed only when it is read: until then
            the examples must not change. For several it is computed at once, and held.

        Raises:
            UnsupportedModelError: the model or the loss mixes examples.
            ValueError: the bound is so small or large that sums would underflow or overflow, or
                the batch so large that the rounding of its sum is not bounded.
        """
        self._require_trainable_parameters()
        self._require_safe_bound(transform.bound)
        if transform.box and transform.bound < math.sqrt(self.size):
            raise ValueError(
                f"expected a bound ≥ √(number of coordinates) = {math.sqrt(self.size):g} for a "
                f"box, got {transform.bound:g}"
            )
        count, is_shifted = count_examples(examples), transform.shift is not None
        require_precise_sum(count, share, self.parameters[0].dtype, is_shifted=is_shifted)
        in_single = 0 if is_shifted else single_precision_block(count, share)

        def clip_physical_batch(examples: Examples, targets: torch.Tensor) -> ClippedSum:
            """Return the clipped sum of one physical batch."""
            gradients, mean_loss = self._example_gradients(examples, targets, loss)
            if transform.box:
                return ClippedSum(gradients, None, mean_loss)
            with full_precision(self.parameters[0].device):
                weights = self._clip_weights(gradients, transform)
            unclipped = as_scalar((weights == 1).sum()) if transform.counts else 0
            kept = weights > 0  # an excluded gradient may not be finite, and 0·∞ is NaN
            if not is_on_cpu(kept):  # a condition would wait for the accelerator
                gradients = [gradients.pop(0).zero_others(kept) for _ in self.parameters]
            elif not bool(kept.all()):
                gradients, weights = [each.select(kept) for each in gradients], weights[kept]
            if transform.damping:
                return ClippedSum(gradients, weights, mean_loss, transform.damping, unclipped)
            return ClippedSum.with_small_sums(
                gradients, weights, mean_loss, self.parameters, unclipped, in_single
            )

        with self.trained.gathered():
            return self._sum_physical_batches(
                examples, targets, clip_physical_batch, transform.for_block
            )

    @torch.no_grad()
    def sum_unclipped(
        self, examples: Examples, targets: torch.Tensor, loss: Loss, size: float
    ) -> BlockwiseSum:
        """Return the sum of a batch's unclipped gradients, divided by `size`: not private.

        It is for public data, and for runs without a privacy guarantee.
        """

        def sum_physical_batch(examples: Examples, targets: torch.Tensor) -> ClippedSum:
            """Return the unclipped sum of one physical batch, divided by `size`."""
            gradients, mean_loss = self._example_gradients(
                examples, targets, loss, is_private=False
            )
            weights = self.parameters[0].new_full((len(targets),), 1 / size)
            return ClippedSum.with_small_sums(
                gradients, weights, mean_loss, self.parameters, summed_in_single=len(targets)
            )

        with self.trained.gathered():
            return self._sum_physical_batches(
                examples, targets, sum_physical_batch, lambda _: AffineMap(None)
            )

    @torch.no_grad()
    def mean_of_squares(
        self, examples: Examples, targets: torch.Tensor, loss: Loss, size: float
    ) -> tuple[torch.Tensor, float]:
        """Return the sum of squared per-example gradients divided by `size`, and the mean loss.

        It is for public data, and for runs without a privacy guarantee. The gradients are formed
        one example at a time.
        """
        count = count_examples(examples)
        squares = self.zeros()
        losses: Scalar = 0.0
        rows = self._physical_batch_size or max(count, 1)
        with self.trained.gathered():
            for start in range(0, count, rows):
                part = slice(start, min(start + rows, count))
                gradients, mean_loss = self._example_gradients(
                    select_examples(examples, part), targets[part], loss, is_private=False
                )
                losses += mean_loss * (part.stop - part.start)
                self._add_squares(gradients, part.stop - part.start, squares)
        return squares.div_(size), float(losses / max(count, 1))

    def _add_squares(
        self, gradients: Sequence[ExampleGradients], count: int, squares: torch.Tensor
    ) -> None:
        """Add each example's squared gradient to a flat vector of all coordinates."""
        weight = self.parameters[0].new_ones(1)
        numbers = torch.arange(count, device=weight.device)
        for number in range(count):
            alone = [each.select(numbers == number) for each in gradients]
            for piece, total in self._pieces_of(squares):
                found = torch.empty_like(total, dtype=torch.float64)
                alone[piece.index].weighted_sum(piece.rows, weight, 1, found)
                total.addcmul_(found, found)

    def _pieces_of(self, vector: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield each piece (rows of one parameter), with a view of its values in a flat vector."""
        for block in self.blocks:
            for piece in block.pieces:
                yield piece, piece.view_in(block.view_in(vector))

    def _sum_physical_batches(
        self,
        examples: Examples,
        targets: torch.Tensor,
        sum_physical_batch: Callable[[Examples, torch.Tensor], ClippedSum],
        map_for_block: Callable[[Block], AffineMap],
    ) -> BlockwiseSum:
        """Return a gradient sum over all examples, computed one physical batch at a time."""
        count = count_examples(examples)
        examples, targets = without_graph(examples), without_graph(targets)
        if len(targets) != count:
            raise DataError(f"there are {count} examples and {len(targets)} targets")
        rows = self._physical_batch_size or count
        if count == 0:
            return ClippedSum([], None, 0.0)
        if count <= rows:
            return sum_physical_batch(examples, targets)
        sums = self.zeros().double()
        losses: Scalar = 0.0
        unclipped: Scalar = 0
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            found = sum_physical_batch(select_examples(examples, part), targets[part])
            losses += found.mean_loss * (part.stop - part.start)
            unclipped += found.unclipped
            for block in self.blocks:
                total = block.view_in(sums)
                each = torch.empty_like(total)
                found.write_block(block, map_for_block(block), each)
                total += each
        return AccumulatedSum(sums, losses / count, unclipped)

    def _require_trainable_parameters(self) -> None:
        """Raise if a parameter was frozen, or converted to half precision, after `__init__`."""
        for each in self.parameters:
            if not each.requires_grad:
                raise UnsupportedModelError(
                    f"{describe_tensor(self._model, each)} was frozen after the optimizer was "
                    "made: freeze it before, or make a new optimizer"
                )
            if each.dtype not in (torch.float32, torch.float64):
                raise UnsupportedModelError(
                    f"{describe_tensor(self._model, each)} is in {each.dtype}, which would "
                    "round the noise away: keep the model in float32 and run it under "
                    "torch.autocast"
                )

    def _require_safe_bound(self, bound: float) -> None:
        """Raise if sums of gradients clipped to this bound could overflow or underflow."""
        dtype = self.parameters[0].dtype
        smallest, largest = safe_bound_range(dtype, self.size)
        if not smallest <= bound <= largest:
            raise ValueError(
                f"expected a clipping bound from {smallest:.0e} to {largest:.0e}, got {bound:g}: "
                f"beyond that, sums of gradients underflow or overflow in {dtype}"
            )

    def _example_gradients(
        self, examples: Examples, targets: torch.Tensor, loss: Loss, *, is_private: bool = True
    ) -> tuple[list[ExampleGradients], Scalar]:
        """Return one set of per-example gradients per parameter, and the mean loss."""
        sparse = examples if self._sparse_inputs and isinstance(examples, torch.Tensor) else None
        model_pass = self._checked.run(
            examples, targets, loss, sparse=sparse, is_private=is_private
        )
        gradients = model_pass.take_example_gradients(self.parameters)
        return gradients, as_scalar(model_pass.losses.mean())

    def _clip_weights(
        self, gradients: list[ExampleGradients], transform: Transform
    ) -> torch.Tensor:
        """Return each example's clipping weight min(1, bound / (gradient norm + stability)).

        It is 0 for an example whose gradient is not finite, or so large that the weighted gradient
        would underflow.
        """
        norms = torch.stack(self._squared_norms(gradients, transform)).sum(0).sqrt_()
        norms += transform.stability
        dtype = self.parameters[0].dtype
        limit = transform.bound * (1 - weight_rounding(dtype))
        weights = (limit / norms.clamp_min(1e-300)).clamp_max_(1.0)
        counted = norms.isfinite() & (weights > smallest_safe_factor(dtype))
        return weights.where(counted, 0.0).to(dtype)

    def _squared_norms(
        self, gradients: list[ExampleGradients], transform: Transform
    ) -> list[torch.Tensor]:
        """Return, per parameter, upper bounds on its part of each example's squared norm."""
        if transform.scale is None:
            return [each.squared_norms(transform.bound) for each in gradients]
        by_parameter = groupby(self._mapped_pieces(transform), key=lambda pair: pair[0].index)
        if transform.damping:
            return [
                gradients[index].damped_squared_norms(pieces, transform.damping)
                for index, pieces in by_parameter
            ]
        return [
            gradients[index].mapped_squared_norms(pieces, transform.bound)
            for index, pieces in by_parameter
        ]

    def _mapped_pieces(self, transform: Transform) -> Iterator[tuple[Piece, AffineMap]]:
        """Yield each piece (rows of one parameter), with the scale and shift of its coordinates."""
        for block in self.blocks:
            affine = transform.for_block(block)
            for piece in block.pieces:
                yield piece, affine.for_piece(piece)


def _layers_of(model: nn.Module) -> tuple[list[nn.Module], str | None]:
    """Return the trained layers; or none, and why the model must be run as a whole."""
    try:
        return find_trained_layers(model), None
    except UnusualUseError as error:
        return [], str(error)
