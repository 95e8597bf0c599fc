"""What a run by Opacus really is, and refusals of what no claim covers.

A claim is about three things that different objects hold: the sampler draws every record with one
probability, the optimizer clips and adds noise, and each step sees one batch. Here the objects
themselves are read, so that a plan, or a charge, is of what runs.
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
from training_client.integrations.splitting import flags_of
from training_client.plan import Plan
from training_client.processes import world_size

_POISSON: Final = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
_TOLERANCE: Final = 1e-9  # what floating point may do to a number on its way
_UNIFORM: Final = 2**24  # numbers that Opacus' samplers draw from, in single precision
_HELD: Final = "held_to"  # of a sampler: the rate it was asked for, and the one it was given


def plan_of(optimizer: Any, loader: Any) -> Plan:
    """What a step with this optimizer and this loader does and costs.

    The loader's sampler is held to the rate that is charged: see `held_to_rate`.

    Args:
        optimizer: what Opacus' `make_private` gave.
        loader: what it gave, or what `BatchMemoryManager` made of it.

    Raises:
        NoGuaranteeError: no plan describes them; the message says what would do.
    """
    sampler = poisson_sampler(loader)
    require_private(optimizer)
    return Plan(
        dataset_size=int(getattr(sampler, "total_size", sampler.num_samples)),
        sample_rate=held_to_rate(sampler),
        clip_norm=float(optimizer.max_grad_norm),
        noise_multiplier=float(optimizer.noise_multiplier),
    )


def require_plan(optimizer: Any, loader: Any, plan: Plan) -> None:
    """Refuse to have one plan charged while another runs.

    Args:
        optimizer: see `plan_of`.
        loader: see `plan_of`.
        plan: what is charged.

    Raises:
        NoGuaranteeError: they differ, or there is no plan of what runs.
    """
    found = plan_of(optimizer, loader)
    for name in Plan.__dataclass_fields__:
        runs, charged = getattr(found, name), getattr(plan, name)
        if not math.isclose(runs, charged, rel_tol=_TOLERANCE):
            raise NoGuaranteeError(
                f"{name} is {runs:g} in the optimizer or loader, and {charged:g} in the plan that "
                "is charged: make the plan with plan_of(optimizer, loader)"
            )
    _require_batch_size(optimizer, plan)


def poisson_sampler(loader: Any) -> Any:
    """The sampler of a loader, if it is one of Opacus' Poisson samplers.

    Raises:
        NoGuaranteeError: it is not, or each of several processes would draw from all records.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if not isinstance(sampler, _POISSON):
        source = loader if sampler is None else sampler
        raise NoGuaranteeError(
            f"batches come from {type(source).__name__}, which does not sample by Poisson: take "
            "the loader that make_private returns with poisson_sampling=True, or "
            "DPDataLoader.from_data_loader(loader)"
        )
    shared = isinstance(sampler, DistributedUniformWithReplacementSampler)
    if world_size() > 1 and not shared:
        raise NoGuaranteeError(
            f"each of {world_size()} processes would draw from all records: wrap the model in "
            "DifferentiallyPrivateDistributedDataParallel before make_private"
        )
    return sampler


def held_to_rate(sampler: Any) -> float:
    """The rate that a sampler of Opacus was asked for, at most with which it draws from now on.

    It takes a record if one of 2²⁴ numbers is below q, and so many of them are one more than q has
    room for: at q = 1e-4 it would draw by 0.017 % more than is charged. Multiples of 2⁻²⁴ it
    draws with exactly, so it is given the next lower one.

    Args:
        sampler: what `poisson_sampler` gave.

    Raises:
        NoGuaranteeError: there is none above 0.
    """
    asked, given = getattr(sampler, _HELD, (math.nan, math.nan))
    if float(sampler.sample_rate) == given:
        return float(asked)
    asked = float(sampler.sample_rate)  # never held, or told another rate since
    given = math.floor(asked * _UNIFORM) / _UNIFORM
    if not given > 0:
        raise NoGuaranteeError(
            f"q = {asked:g} is less than Opacus' samplers can draw with: make batches larger"
        )
    sampler.sample_rate = given
    setattr(sampler, _HELD, (asked, given))
    return asked


def require_private(optimizer: Any) -> None:
    """Refuse an optimizer that adds no noise, or noise for which there is no sensitivity.

    Raises:
        NoGuaranteeError: it is no Opacus optimizer, σ or C is zero, infinite or not a number, C
            follows the gradients, or it clips elsewhere.
    """
    if not isinstance(optimizer, DPOptimizer):
        raise NoGuaranteeError(
            f"{type(optimizer).__name__} adds no noise: take the optimizer that make_private "
            "returns"
        )
    if isinstance(optimizer, AdaClipDPOptimizer):
        # its next C is divided by the size of the batch, which no noise hides
        raise NoGuaranteeError(
            'clipping="adaptive" takes the next C from private batches, and no claim covers that: '
            'take clipping="flat"'
        )
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        # it sums what `backward` left: whether a clipped loss was used, and at what C, is not seen
        raise NoGuaranteeError(
            'ghost clipping (grad_sample_mode="ghost") clips in the loss that make_private returns '
            "and not in the optimizer, which cannot tell whether that was used, nor at what norm: "
            'take grad_sample_mode="hooks"'
        )
    for name in ("noise_multiplier", "max_grad_norm"):
        value = float(getattr(optimizer, name))
        if not 0 < value < math.inf:
            raise NoGuaranteeError(
                f"{name} = {value:g} gives no guarantee: it must be positive and finite"
            )


def require_one_batch(optimizer: DPOptimizer) -> None:
    """Refuse a step over several batches: a record may be in each of them, C is for one.

    Raises:
        NoGuaranteeError: gradients of several batches were added up.
    """
    if optimizer.accumulated_iterations != 1:
        raise NoGuaranteeError(
            f"the step adds up {optimizer.accumulated_iterations} batches, and a record may be in "
            "each: make it of one batch, split by Opacus' BatchMemoryManager if it is too large"
        )


def require_no_skipped_steps(optimizer: DPOptimizer) -> None:
    """Refuse a step after skipped ones, which it adds up, unless a splitting loader ends them.

    Opacus forgets how many there were; that the last was one is known until a step is made.

    Raises:
        NoGuaranteeError: the step is of several batches.
    """
    flags = flags_of(optimizer)
    ends = flags is not None and flags.last is False  # this part was said to be the last of one
    if optimizer._is_last_step_skipped and not ends:
        raise NoGuaranteeError(
            "the step adds up batches whose own steps were skipped (signal_skip_step), and a "
            "record may be in each: have one batch split by the loader of Opacus' "
            "BatchMemoryManager"
        )


def require_no_accumulation(batches: int) -> None:
    """The same, of what a framework was asked to do.

    Args:
        batches: to a step.

    Raises:
        NoGuaranteeError: there are several.
    """
    if batches != 1:
        raise NoGuaranteeError(
            f"gradients of {batches} batches would be added up to a step, and a record may be in "
            "each: take batches of the size wanted, split by Opacus' BatchMemoryManager"
        )


def _require_batch_size(optimizer: DPOptimizer, plan: Plan) -> None:
    """The divisor of the sum. Opacus rounds qN down, and divides it among the ranks."""
    if optimizer.loss_reduction != "mean":
        return
    divisor = float(optimizer.expected_batch_size) * world_size()
    if not abs(divisor - plan.expected_batch_size) < 1:
        raise NoGuaranteeError(
            f"sums are divided by {divisor:g}, the plan expects batches of "
            f"{plan.expected_batch_size:g}"
        )
