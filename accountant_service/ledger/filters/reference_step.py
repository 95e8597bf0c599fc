"""The choice of a budget's reference step from a plan."""

from __future__ import annotations

from typing import Final

from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm, Gaussian, Mechanism

_STEPS: Final = 10**6  # of a budget that is counted in parts of a Gaussian release


def choose_reference_step(plan: StepPlan) -> Mechanism:
    """Return a step for counting a budget: the plan's own, or one equivalent Gaussian release.

    Args:
        plan: with at least one release.
    """
    counts = plan.step.atom_counts
    if is_unsampled_gaussian(plan.step):
        precision = sum(count / atom.noise_multiplier**2 for atom, count in counts)
        return Gaussian(precision**-0.5)
    return plan.step_mechanism


def divide_gaussian_step(step: Gaussian, steps: int) -> Gaussian:
    """Return a noisier Gaussian step, so that a budget is counted in small units.

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
