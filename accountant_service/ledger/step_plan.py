"""A mechanism divided into the equal steps that the ledger grants and charges."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accountant_service.mechanisms import (
    CanonicalForm,
    DpSgd,
    Mechanism,
    Repeated,
    canonical_form,
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A mechanism divided into equal steps; each one that is granted spends budget.

    Attributes:
        mechanism: all steps together.
        step_mechanism: one step.
        step: one step, in the form that is charged.
        steps: the number of steps; 1 for a mechanism that repeats nothing.
        canonical: all steps together, in the form that is charged.
    """

    mechanism: Mechanism
    step_mechanism: Mechanism
    step: CanonicalForm
    steps: int
    canonical: CanonicalForm

    @classmethod
    def of(cls, mechanism: Mechanism) -> StepPlan:
        """Divide a mechanism into its steps."""
        one, steps = _divide(mechanism)
        return cls(mechanism, one, charged_form(one), steps, charged_form(mechanism))

    def with_steps(self, steps: int) -> StepPlan:
        """Return the plan with `steps` of the same steps."""
        return StepPlan.of(with_steps(self.mechanism, steps))


def charged_form(mechanism: Mechanism) -> CanonicalForm:
    """Return the canonical form that a ledger charges: of the only part with releases, if so.

    Its hash is the one that ledgers store: they never had another for parts without releases.
    """
    return canonical_form(mechanism).of_common_part()


def _divide(mechanism: Mechanism) -> tuple[Mechanism, int]:
    """Return one step of a mechanism, and the number of equal steps in it."""
    match mechanism:
        case DpSgd() if mechanism.sampling != "shuffled" and mechanism.step_count() > 0:
            unit = mechanism.unit_steps()
            return replace(mechanism, steps=unit, epochs=None), mechanism.step_count() // unit
        case Repeated(count, inner) if count > 0:
            return inner, count
        case _:
            return mechanism, 1


def with_steps(mechanism: Mechanism, steps: int) -> Mechanism:
    """Return a mechanism with another number of steps; one without releases is unchanged."""
    if not canonical_form(mechanism).atom_counts:
        return mechanism
    match mechanism:
        case DpSgd():
            return replace(mechanism, steps=steps * mechanism.unit_steps(), epochs=None)
        case Repeated():
            return replace(mechanism, count=steps)
        case _:
            return Repeated(steps, mechanism)
