"""The choice of a budget's reference step from a plan."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.ledger.step_plan import StepPlan, with_steps
from accountant_service.mechanisms import (
    CanonicalForm,
    Composed,
    Gaussian,
    Mechanism,
)

_STEPS: Final = 10**6  # of a budget that is counted in parts of a Gaussian release
_ROUNDING: Final = 1e-14  # relative: the parts of a Gaussian release together have less noise


def choose_reference_step(plan: StepPlan) -> Mechanism:
    """Derive from a plan the reference mechanism, in whose steps a budget is counted.

    It is the plan's own step; the one Gaussian release that is equivalent to it; or, for a plan of
    several mechanisms, the same part of each of them.

    Args:
        plan: with at least one release.
    """
    if is_unsampled_gaussian(plan.step):
        return _merge_gaussians([plan.step], 1)
    if isinstance(plan.step_mechanism, Composed):
        return _divide_composition(plan.step_mechanism)
    return plan.step_mechanism


def _divide_composition(composed: Composed) -> Mechanism:
    """Return the smallest mechanism whose repetition gives a whole composition.

    The numbers of steps are divided by their greatest common divisor k. Gaussian noise on the whole
    dataset can always be divided: k releases of noise multiplier σ·√k are as private as one of σ.
    """
    parts = [StepPlan.of(each) for each in composed.mechanisms]
    noises = [each.canonical for each in parts if is_unsampled_gaussian(each.canonical)]
    others = [each for each in parts if not is_unsampled_gaussian(each.canonical)]
    times = math.gcd(*(each.steps for each in others))
    if times == 1:
        return composed
    divided = [with_steps(each.mechanism, each.steps // times) for each in others]
    if any(each.atom_counts for each in noises):
        divided.append(_merge_gaussians(noises, times))
    return Composed(tuple(divided))


def _merge_gaussians(releases: list[CanonicalForm], parts: int) -> Gaussian:
    """Return the Gaussian release that, repeated `parts` times, costs as much as `releases`.

    It may be a little less private, by rounding, never more.
    """
    counts = [each for release in releases for each in release.atom_counts]
    precision = sum(count / atom.noise_multiplier**2 for atom, count in counts)
    exact = (precision / parts) ** -0.5
    return Gaussian(exact if parts == 1 else exact * (1 - _ROUNDING))


def divide_gaussian_step(step: Gaussian, steps: int) -> Gaussian:
    """Return a step with more noise, several of which cost as much as the given Gaussian step.

    k releases of noise multiplier σ·√k are as private as one of σ.

    Args:
        step: the release.
        steps: the number of such releases that the budget admits.
    """
    parts = max(_STEPS // max(steps, 1), 1)
    return Gaussian(step.noise_multiplier * parts**0.5)


def is_unsampled_gaussian(*steps: CanonicalForm) -> bool:
    """Return whether every release of these steps is Gaussian noise on the whole dataset."""
    return all(
        atom.noise == "gaussian" and atom.sampling == "none"
        for step in steps
        for atom, _ in step.atom_counts
    )
