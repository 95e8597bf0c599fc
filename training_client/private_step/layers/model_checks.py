"""Checks that a model and a loss keep examples apart, and that the clip sees the whole gradient.

The bound on a record's influence holds only if nothing of one example depends on another. The types
of layers do not show it: a model may mix examples in plain code, or in its loss. So a pass of a few
examples is followed through every operation (`isolation`) before the first step, and again whenever
a step's pass has other operations than were proved. Where an operation has no rule, a few examples
are run again beside others of the batch, without these, and in reverse order, and the passes are
compared: this is a test, and no proof.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import rms_norm
from torch.nn.modules.instancenorm import _InstanceNorm

from training_client.errors import UnsupportedModelError, UnusualUseError
from training_client.private_step.batches import (
    Examples,
    select_examples,
    tensors_of,
)
from training_client.private_step.blocks import Piece, cut_into_blocks, rows_of
from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MaterializedGradients,
)
from training_client.private_step.isolation.operands import first_alike
from training_client.private_step.isolation.operations import (
    DrawnError,
    MixingError,
    StateChangeError,
    UnknownError,
)
from training_client.private_step.isolation.places import Place
from training_client.private_step.isolation.proof import (
    ROWS,
    Comparison,
    Proof,
    has_compiled_parts,
    prove,
)
from training_client.private_step.isolation.trace import Trace, followed
from training_client.private_step.layers.clippable_layers import find_trained_layers
from training_client.private_step.layers.layer_uses import EnginePath, Parts, merge_parts
from training_client.private_step.layers.model_pass import (
    Loss,
    ModelPass,
    UsePass,
    changed_state_error,
    compute_losses,
    parameters_and_buffers,
    run_model_pass,
)
from training_client.private_step.layers.replayed_layers import Places
from training_client.private_step.layers.whole_model import WholeModel, python_of_program
from training_client.private_step.model_state import (
    RandomStates,
    evaluation_mode,
    numbers_of,
    random_state,
    restore_numbers,
    restored_random_state,
)
from training_client.private_step.module_names import describe_layer, describe_tensor
from training_client.private_step.rounding_bounds import rounding_error

LARGE_BATCH: Final = 32
_SUMMED_EXAMPLES: Final = 4  # whose gradients must add up
_TESTED_EXAMPLES: Final = 4
_SMALL_BATCH: Final = 3  # a shuffle of so few examples often leaves them in place:
_RANDOM_REPETITIONS: Final = 3  # so they are replaced more often
_HALF_PRECISION_TOLERANCE: Final = 1e-3  # above it the tolerance is that of half precision
_NORMALISATIONS: Final = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm)
_CANCELLATION: Final = 1e-5  # of the largest gradient: how small a replayed layer's may cancel

RunModel = Callable[..., ModelPass]
RunLosses = Callable[[Examples, torch.Tensor], torch.Tensor]
Batch = tuple[Examples, torch.Tensor]


class CheckedModel:
    """Runs batches through a model; proves whatever was not proved yet of the passes.

    Attributes:
        unproved: the operations that no rule covers, each with its line: there the model was
            tested, and nothing is proved.
        as_a_whole: why the model is run as a whole on each example, if it is.
        whole: runs it so.

    Args:
        model: the model; it draws random numbers from PyTorch's default generators.
        layers: its trained layers.
        parameters: the trained parameters.
        path: a path of the engine to force.
        as_a_whole: see above.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        path: EnginePath | None,
        as_a_whole: str | None = None,
    ) -> None:
        self._model, self._layers, self._parameters = model, layers, parameters
        self._path, self.as_a_whole = path, as_a_whole
        self._places: Places = {}
        self._proofs: list[Proof] = []
        self._known: dict[object, _Known] = {}
        self._modes: list[tuple[nn.Module, bool]] = []
        self._stale: dict[int, StorageWeakRef] = {}
        self._last: tuple[Comparison, Proof] | None = None
        self.whole, self._is_told = WholeModel(model, parameters), False
        self.unproved: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: the model, and no proof of another one's passes."""
        empty: dict[str, Any] = {"_proofs": [], "_known": {}, "_modes": [], "_stale": {}}
        return vars(self) | empty | {"_last": None}

    def run(
        self,
        examples: Examples,
        targets: torch.Tensor,
        loss: Loss,
        *,
        sparse: torch.Tensor | None = None,
        is_private: bool = True,
    ) -> ModelPass:
        """Run a batch forward and backward.

        Args:
            examples: at least one.
            targets: one per example.
            loss: one value per example.
            sparse: see `run_model_pass`.
            is_private: whether the gradients are clipped; only then examples must be apart.

        Raises:
            UnsupportedModelError: examples depend on each other, and the message names the
                operation and its line; or the per-example gradients do not add up.
        """
        batch = _Batch(examples, targets, loss, {"sparse": sparse, "keep_all": False})
        try:
            return self._run_in_a_way(batch, is_private=is_private)
        except StateChangeError as error:
            raise changed_state_error(self._model, error.tensor) from None
        except MixingError as error:
            raise UnsupportedModelError(
                f"examples depend on other examples of their batch: {error}. Model and loss must "
                "keep examples apart, along the first dimension of every tensor, and draw random "
                "numbers from PyTorch only"
            ) from None

    def _run_in_a_way(self, batch: _Batch, *, is_private: bool) -> ModelPass:
        """Run a batch by the layers of the model; if these do not show enough, as a whole."""
        if self.as_a_whole is None:
            try:
                return self._run_proved(batch) if is_private else self._pass(batch)
            except (UnusualUseError, DrawnError) as error:
                if self._known or self._path is not None:  # it was another model in earlier steps
                    raise
                why = "random numbers are not followed: " if isinstance(error, DrawnError) else ""
                self.as_a_whole = f"{why}{error}"
        return self._run_as_a_whole(batch)

    def _run_as_a_whole(self, batch: _Batch) -> ModelPass:
        """Run the model on each example alone, where its layers do not show its gradients."""
        assert self.as_a_whole is not None
        if self._path is not None:
            raise UnsupportedModelError(self.as_a_whole)
        try:
            found = self.whole.run(batch.examples, batch.targets, batch.loss, self._stale)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.as_a_whole}; {error}") from error
        if not self._is_told:
            warnings.warn(
                f"{self.as_a_whole}. So the model is run on each example alone, which takes more "
                "time and memory",
                stacklevel=2,
            )
            self._is_told = True
        return found

    def _pass(self, batch: _Batch, **options: Any) -> ModelPass:
        """Make one pass."""
        return run_model_pass(
            self._model, self._layers, batch.examples, batch.targets, batch.loss,
            path=self._path, places=self._places, **{**batch.options, **options},
        )  # fmt: skip

    def _run_proved(self, batch: _Batch) -> ModelPass:
        """Make a pass whose operations were proved, or prove them first."""
        self._find_kept_values()
        modes = [(each, each.training) for each in self._model.modules()]
        if modes != self._modes:
            find_trained_layers(self._model)  # raises if a layer cannot be clipped
            self._modes = modes
        device = self._parameters[0].device
        fresh: Proof | None = None if self._known else self._prove(batch)
        while True:
            states = RandomStates(device, all_generators=True)
            torch.clear_autocast_cache()  # so that every pass casts the weights itself
            given = [batch.targets, *tensors_of(batch.examples)]
            comparison = Comparison(
                given, self._proofs, self._stale, parameters_and_buffers(self._model),
                is_compiled=has_compiled_parts(self._model),
            )  # fmt: skip
            # the proof keeps what layers were given, and the engine's own operations depend on that
            keep_all = any(each.has_backward_part for each in self._proofs)
            found = self._pass(batch, observer=comparison, keep_all=keep_all)
            if comparison.error is not None:
                raise comparison.error
            key = comparison.key
            known = self._known.get(key)
            if fresh is not None and self._is_covered(fresh, batch, comparison):
                python = fresh.is_tested and python_of_program(self._model, comparison.python)
                if python:
                    raise UnusualUseError(_tested_python(python, self.unproved))
                changes = 0 if known is None else known.changes
                known = self._known[key] = _Known(fresh, comparison.factors, changes)
                self._last = comparison, fresh
                return found
            if fresh is None and known is not None and known.expects(comparison):
                self._add_up(known.proof, batch)
                self._last = comparison, known.proof
                return found
            if fresh is not None and fresh.is_of(comparison.reads):
                raise MixingError(
                    f"a batch of {len(batch.targets)} passes other operations than a few of its "
                    f"examples: {fresh.first_difference(comparison)}"
                )
            del found
            states.restore()
            fresh = self._prove(batch, comparison.reads)
            kept = comparison.survivors(fresh)
            if not set(kept) <= set(self._stale) | {
                each.untyped_storage()._cdata for each in given
            }:
                self._stale.update(kept)  # the proof may have used what the pass kept
                fresh = self._prove(batch, comparison.reads)

    def _find_kept_values(self) -> None:
        """Find what the program kept of the examples of the last pass."""
        if self._last is not None:
            comparison, proof = self._last
            self._stale.update(comparison.survivors(proof))
            self._last = None
        self._stale = {key: ref for key, ref in self._stale.items() if not ref.expired()}  # type: ignore[no-untyped-call]

    def _prove(self, batch: _Batch, drawn: Sequence[Any] = ()) -> Proof:
        """Prove of a few examples of a batch that they are apart; test it where no rule exists."""
        size = len(batch.targets)
        rows = torch.arange(ROWS) * max(1, size // ROWS) % size
        whole = [each.untyped_storage() for each in (*tensors_of(batch.examples), batch.targets)]
        stale = {**self._stale, **{each._cdata: StorageWeakRef(each) for each in whole}}  # type: ignore[no-untyped-call]

        def run(part: torch.Tensor, trace: Trace) -> None:
            """Run these rows under a trace."""
            few = batch.select(part)
            for each in (few.targets, *tensors_of(few.examples)):
                trace.tag(each, Place(0))
                trace.operands.name_given(each)
            with followed(trace):
                found = self._pass(few, observer=trace, sparse=None, keep_all=True)
                for gradient in (each for use in found.uses for each in use.gradients):
                    trace.require_rows(gradient)

        try:
            proof = prove(run, rows, self._model, stale, self._stale, drawn)
        except UnknownError as error:
            self._note_unproved(str(error))
            error.__traceback__ = error.__context__ = None  # their frames would keep the batch
            self._test(batch)
            proof = Proof(is_tested=True)
        self._add_up(proof, batch)
        self._proofs.append(proof)
        return proof

    def _add_up(self, proof: Proof, batch: _Batch) -> None:
        """Raise unless gradients of a few examples add up to the whole; one example has no sum.

        It is repeated until every parameter had a gradient other than 0: zeros show nothing.
        """
        size = len(batch.targets)
        if size < 2 or len(proof.added_up) == len(self._parameters):
            return
        rows = torch.arange(ROWS) * max(1, size // ROWS) % size
        few = batch.select(rows[: min(size, _SUMMED_EXAMPLES)])
        options = {"differentiate": self._parameters, "sparse": None, "keep_all": True}
        states = RandomStates(self._parameters[0].device, all_generators=True)
        observer = Comparison(tensors_of(few.examples), [], {})  # sees random branches
        numbers = numbers_of(self._model)
        found = self._pass(few, observer=observer, **options)
        pairs = enumerate(zip(self._parameters, found.full_gradients, strict=True))
        proof.added_up |= {
            at
            for at, (parameter, each) in pairs
            if parameter in found.skipped or (each is not None and bool(each.any()))
        }
        require_complete_gradients(found, self._parameters)
        states.restore()
        restore_numbers(self._model, numbers)

    def _is_covered(self, proof: Proof, batch: _Batch, comparison: Comparison) -> bool:
        """Return whether a proof of a few examples is one of a pass.

        One example alone may pass other operations, such as those that drop a dimension of size 1.
        Then it is tested that it passes as beside a copy of itself.
        """
        if comparison.is_compiled or proof.covers(comparison):
            return True
        if comparison.count > 1:
            return False
        device, only = self._parameters[0].device, torch.tensor([0])
        states, before = RandomStates(device, all_generators=True), random_state(device)
        with evaluation_mode(self._model):
            alone = self._pass(batch)
            is_random = not torch.equal(before, random_state(device))
            states.restore()
            if not is_random:  # two would draw other numbers than one
                _require_equal_passes(self._pass(batch.select(only.repeat(2))), only, alone, only)
                states.restore()
        self._note_unproved("one example alone passes other operations")
        return True

    def _note_unproved(self, problem: str) -> None:
        if problem not in self.unproved:
            self.unproved.append(problem)

    def _test(self, batch: _Batch) -> None:
        """Test that examples are apart by passes beside other examples of the batch."""
        size, device = len(batch.targets), self._parameters[0].device
        if size < 2:
            return
        rows = choose_rows(batch.examples, batch.targets, _TESTED_EXAMPLES)
        few = batch.select(rows)
        run = partial(
            run_model_pass, self._model, self._layers, loss=batch.loss, path=self._path,
            places=self._places,
        )  # fmt: skip
        test_independence(self._model, run, (few.examples, few.targets), device)
        losses = partial(
            compute_losses, self._model, self._layers, loss=batch.loss, path=self._path,
            places=self._places,
        )  # fmt: skip
        with restored_random_state(device):
            check = losses_beside_others(losses, (batch.examples, batch.targets), device)
            check(losses(batch.examples, batch.targets))


def _tested_python(python: Sequence[str], unproved: Sequence[str]) -> str:
    """Return what is wrong with Python code in a backward pass that is only tested."""
    return (
        f"the backward pass runs Python code ({', '.join(python)}), and nothing proves that it "
        f"keeps examples apart ({'; '.join(unproved)}): compute gradients by PyTorch's own "
        "operations"
    )


@dataclass
class _Known:
    """A proof of passes with one key.

    Attributes:
        proof: the proof.
        factors: what the last pass was given that may change in every step.
        changes: how often these changed.
    """

    proof: Proof
    factors: Sequence[Any]
    changes: int

    def expects(self, comparison: Comparison) -> bool:
        """Return whether a pass needs no new proof.

        It does if factors change, as if they were computed from the batch: at the first change, the
        second, the fourth, and so on, because they may also change as planned.
        """
        if comparison.has_factors(self.factors):
            return True
        self.factors, self.changes = comparison.factors, self.changes + 1
        return self.changes.bit_count() > 1


@dataclass(frozen=True)
class _Batch:
    """A batch, its loss, and options of its pass."""

    examples: Examples
    targets: torch.Tensor
    loss: Loss
    options: dict[str, Any]

    def select(self, rows: torch.Tensor) -> _Batch:
        """Return copies of some of the examples; what is given twice has one copy."""
        given = [*tensors_of(self.examples), self.targets]
        found = select_examples(self.examples, rows)
        copies = [*tensors_of(found), self.targets[rows]]
        copies = [copies[at] for at in first_alike(given)]
        left, examples = iter(copies), copies[0]  # type: Iterator[torch.Tensor], Examples
        if not isinstance(found, torch.Tensor):
            examples = {
                name: next(left) if isinstance(each, torch.Tensor) else each
                for name, each in found.items()
            }
        return replace(self, examples=examples, targets=copies[-1])


def choose_rows(examples: Examples, targets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of a batch to test: spread over it, and with different labels if it has any.

    A batch is in the order of the dataset, which may be sorted by label. A loss that depends on the
    labels of a batch, such as one with weights of classes, is seen only where they differ. A model
    that sorts examples by their lengths is seen only where the lengths differ. So there is a row
    that differs from the first in as many of these numbers as any row does.

    Args:
        examples: of the batch, at least two.
        targets: of the batch.
        count: the number of rows, which may be more than there are.
    """
    size = len(targets)
    rows = torch.linspace(0, size - 1, min(count, size), device=targets.device).long()
    numbers = [each for each in (targets, *tensors_of(examples)) if each.dim() == 1]
    if numbers:
        differences = torch.stack([each != each[rows[0]] for each in numbers]).sum(0)
        if int(differences[rows].amax()) < int(differences.amax()):
            rows[-1 if len(rows) < 4 else -2] = differences.argmax()  # an even place: it is kept
    return rows


def test_independence(model: nn.Module, run: RunModel, batch: Batch, device: torch.device) -> None:
    """Raise if examples affect one another.

    Every other example is first replaced, then left out, and all are run in reverse order: what
    remains must pass as before. A model that draws random numbers, such as dropout, would draw
    others for fewer examples or in another order, so there it is compared in evaluation mode. It
    may mix examples only with some random numbers, so examples are replaced several times.

    Args:
        model: the model.
        run: runs examples and targets through it.
        batch: a few examples and their targets.
        device: of the model.

    Raises:
        UnsupportedModelError: examples depend on each other, and the message names the layer.
    """
    with restored_random_state(device):
        original, is_random = _run_beside_others(run, batch, device)
        if not is_random:
            _require_same_in_other_batches(run, batch, original)
            return
        for _ in range(_RANDOM_REPETITIONS if len(batch[1]) <= _SMALL_BATCH else 1):
            _run_beside_others(run, batch, device)
        with evaluation_mode(model):
            _require_same_in_other_batches(run, batch, run(*batch))


def _run_beside_others(run: RunModel, batch: Batch, device: torch.device) -> tuple[ModelPass, bool]:
    """Run a batch; raise if examples pass differently beside others, with equal random numbers.

    Args:
        run: as in `test_independence`.
        batch: likewise.
        device: of the model, and of its random numbers; targets may be elsewhere.

    Returns:
        The pass, and whether it drew random numbers.
    """
    few, labels = batch
    kept = torch.arange(len(labels), device=labels.device) % 2 == 0
    with restored_random_state(device):
        before = random_state(device)
        original = run(few, labels)
        is_random = not torch.equal(before, random_state(device))
    altered = run(_replace_others(few, kept), _replace_rows(labels, kept))
    _require_equal_passes(original, kept, altered, kept)
    return original, is_random


def _require_same_in_other_batches(run: RunModel, batch: Batch, original: ModelPass) -> None:
    """Raise if examples pass differently without every other one, or in reverse order.

    Where a model sorts or shuffles examples, replacing some may leave their places as they were.
    And where an example depends on those before it, the first of two depends on none. Of three, the
    first and the last may depend on each other in both orders, so that one is run alone.
    """
    few, labels = batch
    rows = torch.arange(len(labels), device=labels.device)
    kept = rows[::2]
    # one pass does both if more than one example is left
    orders = [kept.flip(0)] if len(kept) > 1 else [kept, rows.flip(0)]
    if len(rows) == _SMALL_BATCH:
        orders.append(kept[:1])
    for order in orders:
        with _explained_order():
            found = run(select_examples(few, order), labels[order])
        _require_equal_passes(original, order, found, rows[: len(order)])
        del found  # frees its memory before the next pass


def losses_beside_others(
    run: RunLosses, batch: Batch, device: torch.device
) -> Callable[[torch.Tensor], None]:
    """Replace most examples of a batch; return a check that the rest has the same losses.

    Half of a small batch, or three quarters of a large one, are replaced by copies of its last
    example, so they have the same label, and everything else in common. A loss or a model that
    depends on the batch as a whole then gives the rest other losses: weights of the batch's
    classes, the largest losses, the capacity of an expert.

    Args:
        run: computes the losses of examples and targets.
        batch: at least two examples, and their targets.
        device: of the model, and of its random numbers.

    Returns:
        A function that raises `UnsupportedModelError` unless the batch's losses, computed with the
        random numbers that come next, are those computed here.
    """
    examples, targets = batch
    interval = 4 if len(targets) >= LARGE_BATCH else 2
    kept = torch.arange(len(targets), device=targets.device).flip(0) % interval == 0
    with restored_random_state(device), _explained_order():
        altered = run(_replace_others(examples, kept, -1), _replace_rows(targets, kept, -1))

    def require_equal(losses: torch.Tensor) -> None:
        """Raise unless the examples that were kept have the same losses."""
        if not _is_close(losses[kept], altered[kept]):
            raise UnsupportedModelError(
                "the loss of one example depends on other examples of its batch: model and loss "
                "must keep examples apart, and draw random numbers from PyTorch only. Do not "
                "compute weights of classes, or which examples count, from the batch"
            )

    return require_equal


@contextmanager
def _explained_order() -> Iterator[None]:
    """Context manager for passes of examples in another order: explain why they fail."""
    try:
        yield
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"the model fails if the examples of a batch are in another order ({error}): batches "
            "are in no particular order. For packed sequences, use enforce_sorted=False"
        ) from error


def require_complete_gradients(model_pass: ModelPass, parameters: Sequence[nn.Parameter]) -> None:
    """Raise unless per-example gradients add up to the gradient of the summed loss.

    They do not where a parameter is used outside of its layer's ordinary call, or where a layer
    computes something else than its per-example gradients are for.

    They may differ by rounding, which is relative to the terms of the sums, not to the sums: where
    a model is sure of its answers, or before a normalisation layer, nearly everything cancels.

    Args:
        model_pass: a pass with the full gradients of the parameters; it is used up.
        parameters: the trained parameters.

    Raises:
        UnsupportedModelError: they differ.
    """
    tolerances, uses, full = (
        _sum_tolerances(model_pass), list(model_pass.uses), model_pass.full_gradients
    )  # fmt: skip
    gradients = model_pass.take_example_gradients(parameters)
    weights = parameters[0].new_ones(len(model_pass.losses))
    replayed_size = 0.0
    if not all(is_exact for _, is_exact in tolerances.values()):
        replayed_size = _CANCELLATION * max(_largest_magnitude(g) for g in full if g is not None)
    sizes: dict[torch.Tensor, list[ExampleGradients]] | None = None
    for piece in (piece for block in cut_into_blocks(parameters) for piece in block.pieces):
        parameter, expected = parameters[piece.index], full[piece.index]
        if parameter in model_pass.skipped:
            continue
        tolerance, is_exact = tolerances[parameter]
        found = _sum_on(gradients[piece.index], piece, weights)
        size = 0.0 if is_exact else replayed_size
        rows = None if expected is None else rows_of(expected)[piece.rows]
        is_sum = rows is not None and _is_sum(found, rows, tolerance, size)
        if not is_sum and rows is not None and is_exact:  # the terms may have cancelled
            sizes = sizes or _gradients_of_magnitudes(uses)
            size = _largest_sum(sizes[parameter], piece, weights)
            is_sum = _is_sum(found, rows, tolerance, size)
        if not is_sum:
            raise UnusualUseError(
                f"the per-example gradients of {describe_tensor(model_pass.model, parameter)} do "
                "not add up to its gradient: the parameter is used outside of its layer, or the "
                "layer computes more than its type says. Call the layer itself, or freeze the "
                "parameter"
            )


def _is_sum(found: torch.Tensor, expected: torch.Tensor, tolerance: float, size: float) -> bool:
    """Return whether two sums are equal up to a tolerance relative to `size`; NaN equals NaN."""
    if found.numel() == 0:
        return True
    limit = tolerance * (size + 2 * _largest_magnitude(expected))
    difference = found - expected
    largest = max((abs(float(each)) for each in difference.aminmax()), default=0.0)
    if math.isfinite(largest):
        return largest <= limit
    are_equal = (difference.abs() <= limit) | (found == expected)
    return bool((are_equal | (found.isnan() & expected.isnan())).all())


def _gradients_of_magnitudes(uses: Sequence[UsePass]) -> dict[torch.Tensor, list[ExampleGradients]]:
    """Return per-example gradients with the magnitudes of all their terms.

    They bound the sum of the magnitudes of the true gradients' terms, to which rounding errors
    are relative.
    """
    found: dict[torch.Tensor, list[ExampleGradients]] = defaultdict(list)
    for each in uses:
        if each.use.is_bilinear:
            for parameter, part in _magnitudes_of_use(each).items():
                found[parameter].append(part)
    return found


def _magnitudes_of_use(use: UsePass) -> Parts:
    """Return the per-example gradients of a layer's use with the magnitudes of all terms.

    The gradient of a normalisation layer's scale has its own terms: see `_normalised_magnitudes`.
    """
    magnitudes, layer = _absolute(use.gradients), use.use.layer
    found = replace(use, inputs=_absolute(use.inputs), gradients=magnitudes).example_gradients()
    if not isinstance(layer, _NORMALISATIONS) or layer.weight not in found:
        return found
    inputs, gradient = (each.to(layer.weight.dtype) for each in (use.inputs[0], magnitudes[0]))
    terms = _normalised_magnitudes(layer, inputs) * gradient
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        summed = tuple(range(1, terms.dim() - layer.weight.dim()))
    else:
        summed = tuple(range(2, terms.dim()))
    return {**found, layer.weight: MaterializedGradients(terms.sum(summed) if summed else terms)}


def _normalised_magnitudes(
    layer: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _InstanceNorm, inputs: torch.Tensor
) -> torch.Tensor:
    """Return the magnitudes of the terms of normalised inputs: (|x| + |mean|)/deviation.

    PyTorch multiplies x and the mean by gradients separately and sums before it subtracts. So where
    the mean is far larger than the deviation, rounding is relative to these terms, and not to the
    normalised inputs, which may be far smaller.
    """
    match layer:
        case nn.RMSNorm():
            return rms_norm(inputs, tuple(layer.normalized_shape), eps=layer.eps).abs()
        case nn.LayerNorm():
            rows = inputs.flatten(-len(layer.normalized_shape))
        case nn.GroupNorm():
            rows = inputs.reshape(len(inputs), layer.num_groups, -1)
        case _:
            rows = inputs.flatten(2)
    mean = rows.mean(-1, keepdim=True)
    deviation = (rows.var(-1, correction=0, keepdim=True) + layer.eps).sqrt()
    return ((rows.abs() + mean.abs()) / deviation).view(inputs.shape)


def _largest_sum(parts: Sequence[ExampleGradients], piece: Piece, weights: torch.Tensor) -> float:
    """Return a weighted gradient sum's largest absolute coordinate on a piece of a parameter."""
    return _largest_magnitude(_sum_on(merge_parts(parts, None), piece, weights))


def _sum_on(gradients: ExampleGradients, piece: Piece, weights: torch.Tensor) -> torch.Tensor:
    """Return a weighted gradient sum on a piece of a parameter, in the precision of the weights."""
    total = weights.new_empty(piece.shape, dtype=torch.float64)
    gradients.weighted_sum(piece.rows, weights, len(weights), total)
    return total.to(weights.dtype)


def _replace_others(examples: Examples, kept: torch.Tensor, source: int | None = None) -> Examples:
    """Return the batch with all examples outside `kept` replaced; see `_replace_rows`."""
    if isinstance(examples, torch.Tensor):
        return _replace_rows(examples, kept, source)
    return {
        name: _replace_rows(each, kept, source) if isinstance(each, torch.Tensor) else each
        for name, each in examples.items()
    }


def _replace_rows(
    rows: torch.Tensor, kept: torch.Tensor, source: int | None = None
) -> torch.Tensor:
    """Return the tensor with rows outside `kept` replaced by another row.

    Args:
        rows: one per example.
        kept: a mask of the rows to leave unchanged.
        source: the row that replaces them; by default each one's neighbour.
    """
    found, others = rows.clone(), ~kept
    found[others] = rows[source] if source is not None else rows.roll(1, 0)[others]
    return found


def _require_equal_passes(
    first: ModelPass, first_rows: torch.Tensor, second: ModelPass, second_rows: torch.Tensor
) -> None:
    """Raise unless layers got equal inputs and gradients for the same examples in both passes.

    Packed sequences are padded to the longest of a pass. There the gradients of a linear map are 0,
    and so its inputs do not matter.
    """
    for one, other in _paired_uses(first, second):
        gradients = [
            (a[first_rows], b[second_rows])
            for a, b in zip(one.gradients, other.gradients, strict=True)
        ]
        inputs = [
            (a[first_rows], b[second_rows]) for a, b in zip(one.inputs, other.inputs, strict=True)
        ]
        if one.use.is_bilinear and any(a.shape != b.shape for a, b in gradients):
            inputs = [_common_part(a, b) for a, b in inputs]
        shared = zip(one.use.shared, other.use.shared, strict=True)
        are_equal = all(_is_close(a, b) for a, b in (*gradients, *inputs)) and all(
            a.shape == b.shape and _is_close(a, b) for a, b in shared
        )
        if not are_equal:
            raise _mixing_error(first.model, one.use.layer)


def _paired_uses(first: ModelPass, second: ModelPass) -> Iterator[tuple[UsePass, UsePass]]:
    """Yield the layer calls of two forward passes in pairs; raise if the layers differ."""
    for at, one in enumerate(first.uses):
        if at >= len(second.uses) or second.uses[at].use.layer is not one.use.layer:
            raise _mixing_error(first.model, one.use.layer)
        yield one, second.uses[at]


def _mixing_error(model: nn.Module, layer: nn.Module) -> UnsupportedModelError:
    """Return the error for a layer whose values for one example depend on other examples."""
    return UnsupportedModelError(
        f"the inputs or gradients that {describe_layer(model, layer)} gets for one example depend "
        "on other examples: model and loss must keep examples apart, along the first dimension of "
        "every tensor, and draw random numbers from PyTorch only"
    )


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding; NaN equals NaN.

    A narrower tensor is compared as if it ended in zeros.
    """
    if one.shape != other.shape:
        if one.dim() != other.dim():
            return False
        widest = [max(pair) for pair in zip(one.shape, other.shape, strict=True)]
        one, other = _fill_with_zeros(one, widest), _fill_with_zeros(other, widest)
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = _relative_tolerance(one)
    atol = tolerance * _largest_magnitude(one)
    return torch.allclose(one, other, rtol=tolerance, atol=atol, equal_nan=True)


def _common_part(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of two tensors at the places that both have."""
    places = tuple(slice(min(pair)) for pair in zip(one.shape, other.shape, strict=False))
    return one[places], other[places]


def _fill_with_zeros(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of a larger shape, which begins with the given one and ends in zeros."""
    found = tensor.new_zeros(tuple(shape))
    found[tuple(map(slice, tensor.shape))] = tensor
    return found


def _relative_tolerance(tensor: torch.Tensor) -> float:
    """Return √(machine epsilon) of a tensor's dtype, as a relative tolerance."""
    return float(torch.finfo(tensor.dtype).eps) ** 0.5 if tensor.is_floating_point() else 0.0


def _sum_tolerances(model_pass: ModelPass) -> dict[torch.Tensor, tuple[float, bool]]:
    """Return each parameter's tolerance for gradient sums, and whether all its uses are bilinear.

    Half precision loses more in a term than in the sum, and so does an accelerator, where
    convolutions are in TF32 by default.
    """
    found: dict[torch.Tensor, tuple[float, bool]] = {}
    for each in model_pass.uses:
        tensors = [*each.inputs, *each.gradients]
        tolerance = max(map(_relative_tolerance, tensors))
        is_precise = all(_relative_tolerance(t) < _HALF_PRECISION_TOLERANCE for t in tensors)
        gradient, is_exact = each.gradients[0], each.use.is_bilinear
        if gradient.is_cpu and is_precise and is_exact:
            tolerance = min(tolerance, rounding_error(gradient.dtype, _term_count(gradient)))
        for parameter in each.use.layer.parameters():
            before = found.get(parameter, (0.0, True))
            found[parameter] = max(before[0], tolerance), before[1] and is_exact
    return found


def _term_count(gradient: torch.Tensor) -> int:
    """Return an upper bound on the number of terms that a parameter's gradient sums."""
    return gradient.numel() // max(1, min(gradient.shape[1:], default=1))


def _absolute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the absolute values of floating-point tensors; leave integers unchanged."""
    return [each.abs() if each.is_floating_point() else each for each in tensors]


def _largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor."""
    if tensor.numel() == 0:
        return 0.0
    smallest, largest = (float(each) for each in tensor.aminmax())
    if math.isfinite(smallest) and math.isfinite(largest):
        return max(-smallest, largest)
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs_().amax())
