"""Clips per-example gradients, from one backward pass to the layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import torch
from torch import nn

from training_client.clipping.allowances import WEIGHTED, least_factor, usual_bounds
from training_client.clipping.blocks import Block, Piece, blocks_of
from training_client.clipping.clipped_sum import Added, ClippedSum, Sum
from training_client.clipping.gradients import ExampleGradients
from training_client.clipping.layers import trained_layers
from training_client.clipping.passes import Loss, pass_through
from training_client.clipping.probe import require_apart, require_whole
from training_client.clipping.products import full_precision
from training_client.clipping.transform import Affine, Transform


class Clipper:
    """Finds Σᵢ clip(D∘(∇ᵢ + b)) of batches, for one model.

    Attributes:
        parameters: what is trained, in the order of `model.parameters()`.
        blocks: of all their numbers.
        size: how many numbers that is.

    Args:
        model: its layers with parameters are Linear, or known to Opacus; each is applied once, to
            one row or sequence an example.
        physical_batch_size: so many examples go through the model at a time; all by default.
        sparse_inputs: most numbers of examples are 0, and a Linear layer that is given them leaves
            those out, which takes less time if more than three quarters are. To be said, and not
            found from the data: sums are rounded in another order.

    Raises:
        UnsupportedModelError: a layer cannot be clipped; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        physical_batch_size: int | None = None,
        *,
        sparse_inputs: bool = False,
    ) -> None:
        if physical_batch_size is not None and physical_batch_size < 1:
            raise ValueError(f"expected physical_batch_size ≥ 1, got {physical_batch_size}")
        self._model, self._physical_batch_size = model, physical_batch_size
        self._sparse_inputs = sparse_inputs
        self._layers = trained_layers(model)
        self._batches = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.blocks = blocks_of(self.parameters)
        self.size = sum(block.size for block in self.blocks)

    def zeros(self) -> torch.Tensor:
        """A vector of as many numbers as are trained."""
        return self.parameters[0].new_zeros(self.size)

    @torch.no_grad()
    def clip(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> Sum:
        """Pass a batch through the model, and find by how much each example is scaled.

        Args:
            examples: one at each place of the first dimension.
            targets: likewise.
            loss: maps predictions and targets to one loss an example; it must not mix examples.
            transform: what is clipped, and to what bound.

        Returns:
            The sum. Of one physical batch it is not made yet: until it is taken the examples may
            not change. Of several it is made at once, and held.

        Raises:
            UnsupportedModelError: the model or the loss mixes examples.
            ValueError: the bound is so small or large that sums would lose digits, or all of them.
        """
        self._require_usual(transform.bound)
        if transform.box and transform.bound < math.sqrt(self.size):
            raise ValueError("a box is bounded by the root of its coordinates, not by less")

        def clipped(examples: torch.Tensor, targets: torch.Tensor) -> ClippedSum:
            self._probe(examples, targets, loss)
            gradients, mean_loss = self._passed(examples, targets, loss)
            if transform.box:
                return ClippedSum(gradients, None, mean_loss)
            with full_precision(examples.device):
                weights = self._weights(gradients, transform)
            kept = weights > 0
            if not bool(kept.all()):  # what is left out may not be finite: 0 times it neither
                gradients, weights = [each.only(kept) for each in gradients], weights[kept]
            if transform.damping:
                return ClippedSum(gradients, weights, mean_loss, transform.damping)
            return ClippedSum.of(gradients, weights, mean_loss, self.parameters)

        return self._over_physical_batches(examples, targets, clipped, transform.at)

    @torch.no_grad()
    def add_up(self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, size: float) -> Sum:
        """The gradient of the summed loss over a size: of public data, or without a guarantee."""

        def added(examples: torch.Tensor, targets: torch.Tensor) -> ClippedSum:
            gradients, mean_loss = self._passed(examples, targets, loss)
            weights = self.parameters[0].new_full((len(examples),), 1 / size)
            return ClippedSum.of(gradients, weights, mean_loss, self.parameters)

        return self._over_physical_batches(examples, targets, added, lambda _: Affine(None))

    def _over_physical_batches(
        self,
        examples: torch.Tensor,
        targets: torch.Tensor,
        summed: Callable[[torch.Tensor, torch.Tensor], ClippedSum],
        affine: Callable[[Block], Affine],
    ) -> Sum:
        """The sum over all examples, of which so many at a time are summed."""
        rows = self._physical_batch_size or len(examples)
        if len(examples) == 0:
            return ClippedSum([], None, 0.0)
        if len(examples) <= rows:
            return summed(examples, targets)
        sums, losses = self.zeros(), 0.0
        for at in range(0, len(examples), rows):
            part = slice(at, at + rows)
            found = summed(examples[part], targets[part])
            losses += found.mean_loss * len(examples[part])
            for block in self.blocks:
                total = block.of(sums)
                each = torch.empty_like(total)
                found.on(block, affine(block), each)
                total += each
        return Added(sums, losses / len(examples))

    def _require_usual(self, bound: float) -> None:
        """Return if numbers of the model's precision can tell sums of so many that are so long."""
        kind = self.parameters[0].dtype
        least, most = usual_bounds(kind, self.size)
        if not least <= bound <= most:
            raise ValueError(
                f"expected a bound from {least:.0e} to {most:.0e}, got {bound:g}: numbers of "
                f"{kind} could not tell the sums"
            )

    def _passed(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss
    ) -> tuple[list[ExampleGradients], float]:
        """Every example's gradients, by parameter, and the mean loss."""
        passed = pass_through(self._model, self._layers, examples, targets, loss)
        gradients = passed.by_parameter(self.parameters, examples if self._sparse_inputs else None)
        return gradients, float(passed.losses.mean())

    def _probe(self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss) -> None:
        """Now and then, for a model may begin to mix examples later, or show it by chance only."""
        if len(examples) < 2:
            return
        self._batches += 1
        if self._batches & (self._batches - 1):
            return  # at the first, second, fourth, eighth batch, and so on
        run = partial(pass_through, self._model, self._layers, loss=loss)
        require_apart(self._model, run, examples, targets)
        require_whole(partial(run, whole=self.parameters), self.parameters, examples, targets)

    def _weights(self, gradients: list[ExampleGradients], transform: Transform) -> torch.Tensor:
        """min(1, B/‖u‖) for each example.

        It is 0 for an example whose gradient is not finite, or so large that a weighted one would
        lose digits.
        """
        norms = torch.stack(self._squares(gradients, transform)).sum(0).sqrt_()
        limit, kind = transform.bound * (1 - WEIGHTED), self.parameters[0].dtype
        weights = (limit / norms.clamp_min(1e-300)).clamp_max_(1.0)
        counted = norms.isfinite() & (weights > least_factor(kind))
        return weights.where(counted, 0.0).to(kind)

    def _squares(
        self, gradients: list[ExampleGradients], transform: Transform
    ) -> list[torch.Tensor]:
        """‖u‖² of each example in each parameter, or more."""
        if transform.scale is None:
            return [each.squares(transform.bound) for each in gradients]
        by_parameter = groupby(self._pieces(transform), key=lambda part: part[0].at)
        if transform.damping:
            return [gradients[at].damped_squares(of, transform.damping) for at, of in by_parameter]
        return [gradients[at].affine_squares(parts, transform.bound) for at, parts in by_parameter]

    def _pieces(self, transform: Transform) -> Iterator[tuple[Piece, Affine]]:
        """Each with its map, which is made for one block at a time."""
        for block in self.blocks:
            affine = transform.at(block)
            for piece in block.pieces:
                yield piece, affine.on(piece)
