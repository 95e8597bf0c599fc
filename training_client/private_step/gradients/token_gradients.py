"""Per-example gradients of an embedding table: only the rows of the tokens that occur.

The output gradients of equal tokens of one example are added first. The result is one row for each
pair of an example and a token, in the table's precision, and these rows are what is clipped: their
norms, in double precision, and their weighted sum are of the same numbers. The rows are sorted by
token, then by example, so that each block of the table is a range of them.

On an accelerator nothing waits for the number of these pairs: there is a row for every token of
every example. Rows of repeated tokens and of padding are 0, so they change no norm and no sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from training_client.private_step.gradients.chunked_gradients import ChunkedGradients
from training_client.private_step.gradients.example_gradients import (
    MappedPieces,
    as_scalar,
    squared_norm,
    zero_rows,
)
from training_client.private_step.kernels.compiled import is_on_cpu
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.per_coordinate_sums import clamp_in_place
from training_client.private_step.kernels.row_sums import mapped_squared_norms, squared_norms
from training_client.private_step.kernels.weighted_rows import add_rows_at
from training_client.private_step.rounding_bounds import (
    Scalar,
    negligible_share,
    overflow_guard,
    rounding_error,
    weighted_underflow,
)

_ROWS: Final = 4096  # rows that are mapped at a time


@dataclass(frozen=True)
class TokenGradients(ChunkedGradients):
    """Per-example gradients of an embedding table: one row per token that occurs in an example.

    Attributes:
        rows: one row for each pair, of the width of the table; more rows, of 0, on an accelerator.
        tokens: the token of each pair, ascending.
        examples: the example of each pair, ascending among the pairs of a token.
        count: the number of examples.
        vocabulary: the number of rows of the table.
        positions: the number of tokens of an example, equal ones included, over all uses.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    examples: torch.Tensor
    count: int
    vocabulary: int
    positions: int

    @classmethod
    def from_output_gradients(
        cls,
        tokens: torch.Tensor,
        gradients: torch.Tensor,
        vocabulary: int,
        padding: int | None = None,
    ) -> TokenGradients:
        """Add up the output gradients of equal tokens within each example.

        Args:
            tokens: of shape (examples, positions).
            gradients: of shape (examples, positions, width).
            vocabulary: the number of rows of the table.
            padding: a token whose row gets no gradient.
        """
        count = len(tokens)
        keys = tokens.long() * count + torch.arange(count, device=tokens.device)[:, None]
        return cls._from_keys(
            keys.flatten(), gradients.flatten(0, 1), count, vocabulary, tokens.shape[1], padding
        )

    @classmethod
    def _from_keys(
        cls,
        keys: torch.Tensor,
        gradients: torch.Tensor,
        count: int,
        vocabulary: int,
        positions: int,
        padding: int | None = None,
    ) -> TokenGradients:
        """Sum the gradients that share a key; a pair's key is token·count + example."""
        kept = None if padding is None else keys.div(count, rounding_mode="floor") != padding
        add_up = _sum_equal_keys if is_on_cpu(keys) else _sum_equal_keys_without_waiting
        pairs, rows = add_up(keys, gradients, kept)
        tokens = pairs.div(count, rounding_mode="floor")
        return cls(rows, tokens, pairs - tokens * count, count, vocabulary, positions)

    @classmethod
    def merge(cls, parts: list[TokenGradients]) -> TokenGradients:
        """Return the sum of the gradients from several uses of one table."""
        count = parts[0].count
        keys = torch.cat([each.tokens * count + each.examples for each in parts])
        rows = torch.cat([each.rows for each in parts])
        positions = sum(each.positions for each in parts)
        return cls._from_keys(keys, rows, count, parts[0].vocabulary, positions)

    @property
    def element_count(self) -> int:
        """The number of elements of all rows, if no two tokens of an example are equal.

        It must not depend on the tokens: it decides in which order sums are rounded.
        """
        return self.count * self.positions * self.rows.shape[1]

    @property
    def terms(self) -> int:
        """Return 1: each stored row is already the sum over the token's occurrences."""
        return 1

    @property
    def example_count(self) -> int:
        """The number of examples."""
        return self.count

    @property
    def shape(self) -> torch.Size:
        """The shape of the table."""
        return torch.Size((self.vocabulary, self.rows.shape[1]))

    @property
    def sample(self) -> torch.Tensor:
        """One of the stored tensors, whose dtype and device are those of the gradients."""
        return self.rows

    def dense(self, examples: slice, rows: slice) -> torch.Tensor:
        """Compute some examples' gradients on `rows` of the table; rows of absent tokens are 0."""
        found = self.rows.new_zeros(
            examples.stop - examples.start, rows.stop - rows.start, self.rows.shape[1]
        )
        part = self._pairs(rows)
        example = self.examples[part]
        if not is_on_cpu(found):
            kept = (example >= examples.start) & (example < examples.stop)
            places = (
                (example - examples.start).clamp_(0, len(found) - 1),
                self.tokens[part] - rows.start,
            )
            return found.index_put_(places, zero_rows(self.rows[part], kept), accumulate=True)
        kept = (example >= examples.start) & (example < examples.stop)
        places = example[kept] - examples.start, self.tokens[part][kept] - rows.start
        found[places] = self.rows[part][kept]
        return found

    def magnitudes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each example's squared norm twice: for the rounding and the underflow bound."""
        found = self._add_up(squared_norms(self.rows), self.examples)
        return found, found

    def mapped_magnitudes(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Return each example's squared norm of its gradient on some embeddings, times `scale`."""
        return self._mapped_squares(rows, AffineMap(scale))

    def squared_norms(self, _: float) -> torch.Tensor:
        """Return each example's squared gradient norm, in double precision."""
        return self.magnitudes()[0]

    def mapped_squared_norms(self, pieces: MappedPieces, bound: float) -> torch.Tensor:
        """Bound each example's squared norm after shift and scale; ∞ on excessive underflow.

        Tokens that do not occur add ‖D∘b‖² on their row.
        """
        dtype = self.rows.dtype
        found = self.magnitudes()[0].mul_(overflow_guard(bound, dtype))
        scale_norm: Scalar = 0.0
        shift_norm: Scalar = 0.0
        for piece, affine in pieces:
            assert affine.scale is not None
            found += self._mapped_squares(piece.rows, affine)
            row = affine.as_row()
            assert row.scale is not None
            scale_norm += squared_norm(row.scale)
            if row.shift is not None:
                shift_norm += as_scalar(mapped_squared_norms(row.shift, row.scale))
        # rounding, also in double precision, is relative to the terms before they cancel
        found.clamp_min_(0.0).mul_(1 + 2 * rounding_error(dtype))
        size = self.shape.numel()
        rounding = 4 * rounding_error(dtype) + rounding_error(torch.float64, size)
        found.add_(rounding * shift_norm)
        lost = weighted_underflow(size, scale_norm, dtype)
        excluded = torch.as_tensor(lost > negligible_share(dtype) * bound, device=found.device)
        return found.masked_fill_(excluded, torch.inf)

    def _mapped_squares(self, rows: slice, affine: AffineMap) -> torch.Tensor:
        """Return each example's squared norm of its mapped gradient on the embeddings in `rows`."""
        assert affine.scale is not None
        if not is_on_cpu(self.rows):
            return self._mapped_upper_bounds(rows, affine.scale, affine.shift)
        found, pairs = self._zeros(), self._pairs(rows)
        if affine.shift is not None:
            found += mapped_squared_norms(*_reshape_to_rows(affine.shift, affine.scale))
        for start in range(pairs.start, pairs.stop, _ROWS):
            part = slice(start, min(start + _ROWS, pairs.stop))
            token = self.tokens[part] - rows.start
            scale, gradient = affine.scale[token].double(), self.rows[part].double()
            if affine.shift is None:
                squares = (gradient * scale).square_().sum(1)
            else:
                shift = affine.shift[token].double()
                squares = ((gradient + shift) * scale).square_().sum(1)
                squares -= (shift * scale).square_().sum(1)
            found.index_add_(0, self.examples[part], squares)
        return found

    def _mapped_upper_bounds(
        self, rows: slice, scale: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `_mapped_squares`, rounded up.

        The squared norm of D∘b on each embedding is computed once, rounded up. It is added for all
        of them, and the same number is subtracted again for a token that occurs. A row of zeros may
        stand for a token that occurs in another row too, and changes nothing.
        """
        found, pairs = self._zeros(), self._pairs(rows)
        of_shift = None if shift is None else mapped_squared_norms(shift, scale)
        if of_shift is not None:
            found += of_shift.sum()
        for start in range(pairs.start, pairs.stop, _ROWS):
            part = slice(start, min(start + _ROWS, pairs.stop))
            each, token = self.rows[part], self.tokens[part] - rows.start
            shifts = None if shift is None else shift[token]
            squares = mapped_squared_norms(each, scale[token], shifts)
            if of_shift is not None:
                squares -= of_shift[token]
            squares.masked_fill_(~each.any(1), 0.0)
            found.index_add_(0, self.examples[part], squares)
        return found

    def weighted_sum(self, rows: slice, weights: torch.Tensor, _: int, out: torch.Tensor) -> None:
        """Write the weighted sum of the gradients, on some rows of the table, into `out`."""
        part = self._pairs(rows)
        places = self.tokens[part] - rows.start
        add_rows_at(places, self.rows[part], weights, self.examples[part], out.zero_())

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Return the sum of scaled gradients, each coordinate clamped to ±1, on `rows`."""
        part = self._pairs(rows)
        token = self.tokens[part] - rows.start
        clamped = clamp_in_place(self.rows[part] * scale[token]).double()
        return torch.zeros_like(scale, dtype=torch.float64).index_add_(0, token, clamped)

    def select(self, kept: torch.Tensor) -> TokenGradients:
        """Return the per-example gradients of those examples where `kept` is true."""
        number, pairs = kept.cumsum(0) - 1, kept[self.examples]
        examples = number[self.examples[pairs]]
        count = int(kept.sum())
        return TokenGradients(
            self.rows[pairs], self.tokens[pairs], examples, count, self.vocabulary, self.positions
        )

    def zero_others(self, kept: torch.Tensor) -> TokenGradients:
        """Return the gradients with 0 for examples where `kept` is false."""
        return replace(self, rows=zero_rows(self.rows, kept[self.examples]))

    def _pairs(self, rows: slice) -> slice:
        """Return the slice of the stored (token, example) pairs whose token is in `rows`."""
        if rows == slice(0, self.vocabulary):  # as always on an accelerator: it need not be read
            return slice(0, len(self.tokens))
        ends = torch.tensor([rows.start, rows.stop], device=self.tokens.device)
        start, stop = torch.searchsorted(self.tokens, ends).tolist()
        return slice(start, stop)

    def _add_up(self, values: torch.Tensor, examples: torch.Tensor) -> torch.Tensor:
        """Sum values, one per stored (token, example) pair, over each example."""
        return self._zeros().index_add_(0, examples, values)


def _reshape_to_rows(shift: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape a shift and a scale to matrices of one row each."""
    return shift.reshape(1, -1), scale.reshape(1, -1)


def _sum_equal_keys(
    keys: torch.Tensor, gradients: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the different keys, ascending, and for each the sum of its gradients.

    Args:
        keys: one for each gradient.
        gradients: one per row.
        kept: a mask of the gradients to add up; all by default.
    """
    if kept is not None:
        keys, gradients = keys[kept], gradients[kept]
    keys, order = torch.sort(keys, stable=True)
    different, places = torch.unique_consecutive(keys, return_inverse=True)
    rows = gradients[order]
    if len(different) < len(keys):
        rows = rows.new_zeros(len(different), rows.shape[1]).index_add_(0, places, rows)
    return different, rows


def _sum_equal_keys_without_waiting(
    keys: torch.Tensor, gradients: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_sum_equal_keys` does, and after it the last key with sums of 0.

    There are as many keys and sums as gradients, so that nothing waits for the number of different
    keys. Gradients outside of `kept` are set to 0.
    """
    if kept is not None:
        gradients = zero_rows(gradients, kept)
    keys, order = torch.sort(keys, stable=True)
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    places = is_first.cumsum(0) - 1
    rows = torch.zeros_like(gradients).index_add_(0, places, gradients[order])
    different = torch.full_like(keys, -1).scatter_(0, places, keys).cummax(0).values
    return different, rows
