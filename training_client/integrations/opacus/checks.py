"""Checks of Opacus' optimizers and loaders: their plan, and settings without a guarantee.

A guarantee assumes four things that different objects hold: the sampler draws each record with the
same probability, the optimizer clips and adds noise, each step sees one batch, and nobody can
compute the noise or the batches. The objects themselves are read, so that the plan that is charged
is what really runs.
"""

from __future__ import annotations

import math
from typing import Any, Final

from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

from training_client.errors import NoGuaranteeError
from training_client.integrations.opacus.balls_in_bins import BallsInBinsBatches
from training_client.integrations.opacus.exact_noise import require_exact_noise
from training_client.integrations.opacus.secret_generators import require_secret_generators
from training_client.integrations.opacus.split_batches import find_skip_queue
from training_client.plan import POISSON, Plan
from training_client.private_step.processes.process_group import world_size

_SAMPLERS: Final = (
    UniformWithReplacementSampler,
    DistributedUniformWithReplacementSampler,
    BallsInBinsBatches,
)
_TOLERANCE: Final = 1e-9  # relative rounding error of numbers that should be equal


def plan_of(optimizer: Any, loader: Any) -> Plan:
    """Return the DP-SGD plan (sampling, clip norm, noise) of an Opacus optimizer and its loader.

    Args:
        optimizer: the optimizer that Opacus' `make_private` returned.
        loader: the loader that it returned, or that `BatchMemoryManager` made of that.

    Raises:
        NoGuaranteeError: no plan describes them; the message says what to change.
    """
    sampler = find_sampler(loader)
    _require_empty_batches(loader)
    require_private_optimizer(optimizer)
    require_secret_generators(optimizer, sampler)
    return Plan(
        dataset_size=int(getattr(sampler, "total_size", sampler.num_samples)),
        sample_rate=float(sampler.sample_rate),
        clip_norm=float(optimizer.max_grad_norm),
        noise_multiplier=float(optimizer.noise_multiplier),
        sampling=getattr(sampler, "sampling", POISSON),
    )


def _require_empty_batches(loader: Any) -> None:
    """Raise if the loader fills an empty batch with a random record.

    With one record more the batch is that record's: both sums are clipped to C, so they may differ
    by 2C, and C is charged.
    """
    if getattr(getattr(loader, "collate_fn", None), "rand_on_empty", False):
        raise NoGuaranteeError(
            "the loader fills empty batches with a random record, which no guarantee covers: call "
            "make_private without rand_on_empty=True"
        )


def require_plan(optimizer: Any, loader: Any, plan: Plan) -> None:
    """Raise unless an optimizer and its loader carry out the plan that budget is spent on.

    Args:
        optimizer: the optimizer that Opacus' `make_private` returned.
        loader: the loader that it returned, or that `BatchMemoryManager` made of that.
        plan: the plan that is charged.

    Raises:
        NoGuaranteeError: they run another plan, or one that no guarantee covers.
    """
    require_constant_plan(plan)
    found = plan_of(optimizer, loader)
    if found.sampling != plan.sampling:
        raise NoGuaranteeError(
            f"the loader draws batches by {found.sampling}, and {plan.sampling} is charged: make "
            "the plan with plan_of(optimizer, loader)"
        )
    for name in ("dataset_size", "sample_rate", "clip_norm", "noise_multiplier"):
        runs, charged = getattr(found, name), getattr(plan, name)
        if not math.isclose(runs, charged, rel_tol=_TOLERANCE):
            raise NoGuaranteeError(
                f"{name} is {runs:g} in the optimizer or loader, and {charged:g} in the plan that "
                "is charged: make the plan with plan_of(optimizer, loader)"
            )
    _require_batch_size(optimizer, plan)


def require_constant_plan(plan: Plan) -> None:
    """Raise unless all steps of a plan have the same noise and clip norm, as Opacus' have.

    Raises:
        NoGuaranteeError: noise or clip norm are scheduled or adapted.
    """
    if plan.varies:
        raise NoGuaranteeError(
            "the plan's noise or clip norm changes from step to step, and Opacus' do not: train "
            "with the optimizers of this package, or make a plan without schedules"
        )


def find_sampler(loader: Any) -> Any:
    """Return a loader's batch sampler; raise unless it samples by Poisson or balls-in-bins.

    Raises:
        NoGuaranteeError: it is another sampler, or each of several processes would draw from all
            records.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if not isinstance(sampler, _SAMPLERS):
        source = loader if sampler is None else sampler
        raise NoGuaranteeError(
            f"batches come from {type(source).__name__}, which samples neither by Poisson nor by "
            "balls in bins: use the loader that make_private returns with poisson_sampling=True. "
            "To use every record once an epoch, as shuffling does, use balls-in-bins sampling: "
            "loader = balls_in_bins_loader(loader), of "
            "training_client.integrations.opacus.balls_in_bins, then "
            "make_private(data_loader=loader, poisson_sampling=False, ...)"
        )
    shared = isinstance(sampler, DistributedUniformWithReplacementSampler)
    if world_size() > 1 and not shared:
        raise NoGuaranteeError(
            f"each of {world_size()} processes would draw from all records: wrap the model in "
            "DifferentiallyPrivateDistributedDataParallel before make_private, with Poisson "
            "sampling"
        )
    return sampler


def require_private_optimizer(optimizer: Any) -> None:
    """Raise unless an optimizer adds noise and itself clips gradients to a fixed norm.

    Raises:
        NoGuaranteeError: it is not an Opacus optimizer; σ or C is zero, infinite or NaN; C adapts
            to the gradients; clipping happens in the loss; or noise cannot be exact.
    """
    if not isinstance(optimizer, DPOptimizer):
        raise NoGuaranteeError(
            f"{type(optimizer).__name__} adds no noise: use the optimizer that make_private returns"
        )
    if isinstance(optimizer, AdaClipDPOptimizer):
        # the next C depends on the exact batch size, which no noise hides
        raise NoGuaranteeError(
            'clipping="adaptive" computes C from private batches, and no guarantee covers that: '
            'use clipping="flat"'
        )
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        # it sums gradients as they are: whether the loss clipped them, and at which C, is unknown
        raise NoGuaranteeError(
            'ghost clipping (grad_sample_mode="ghost") clips in the loss that make_private '
            "returns, and neither the use of this loss nor its clip norm can be checked: "
            'use grad_sample_mode="hooks"'
        )
    require_exact_noise(optimizer)
    for name in ("noise_multiplier", "max_grad_norm"):
        value = float(getattr(optimizer, name))
        if not 0 < value < math.inf:
            raise NoGuaranteeError(
                f"{name} = {value:g} gives no guarantee: it must be positive and finite"
            )


def require_one_batch(optimizer: DPOptimizer) -> None:
    """Raise if a step adds up several batches, where one record may exceed the clip norm.

    Raises:
        NoGuaranteeError: gradients of several batches were accumulated.
    """
    if optimizer.accumulated_iterations != 1:
        raise NoGuaranteeError(
            f"the step adds up {optimizer.accumulated_iterations} batches, and a record may be in "
            "each: use one batch per step, split by Opacus' BatchMemoryManager if it is too large"
        )


def require_no_skipped_steps(optimizer: DPOptimizer) -> None:
    """Raise if `signal_skip_step` makes a step sum several batches, rather than parts of one.

    Opacus does not count skipped steps; it knows only whether the last one was skipped.

    Raises:
        NoGuaranteeError: the step is of several batches.
    """
    queue = find_skip_queue(optimizer)
    completes_batch = queue is not None and queue.last is False
    if optimizer._is_last_step_skipped and not completes_batch:
        raise NoGuaranteeError(
            "the step adds up batches whose own steps were skipped (signal_skip_step), and a "
            "record may be in each: use one batch per step, split by Opacus' BatchMemoryManager"
        )


def require_no_accumulation(batches: int) -> None:
    """Raise if a framework's option accumulates gradients over several batches.

    Args:
        batches: the number of batches for one step.

    Raises:
        NoGuaranteeError: it is not 1.
    """
    if batches != 1:
        raise NoGuaranteeError(
            f"each step would add up the gradients of {batches} batches, and a record may be in "
            "each: use one larger batch instead, split by Opacus' BatchMemoryManager"
        )


def _require_batch_size(optimizer: DPOptimizer, plan: Plan) -> None:
    """Raise unless the optimizer divides gradient sums by the plan's expected batch size."""
    if optimizer.loss_reduction != "mean":
        return
    divisor = float(optimizer.expected_batch_size) * world_size()
    if not abs(divisor - plan.expected_batch_size) < 1:
        raise NoGuaranteeError(
            f"sums are divided by {divisor:g}, the plan expects batches of "
            f"{plan.expected_batch_size:g}"
        )
