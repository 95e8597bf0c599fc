"""The hypotheses under which a filter may charge a release by its dominating pair, and in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.accounting.methods.base import report_contradictions
from accountant_service.errors import MethodNotApplicableError
from accountant_service.ledger.errors import ChargeUndecidedError
from accountant_service.numerics.time_limit import limit_time

_SECONDS_MAX: Final = 3.0  # of CPU time, to decide one charge


def require_proof(question: Question) -> None:
    """Raise unless every release of a mechanism has a proved dominating pair.

    Raises:
        MethodNotApplicableError: a hypothesis of its accounting fails, or it has no pair.
    """
    for atom in question.form.all_atoms:
        if atom.sampling == "shuffled":
            raise MethodNotApplicableError(
                "the ledger cannot charge shuffled batches. Use sampling poisson or fixed_size, or "
                "sampling none with one step an epoch",
                atom.pointer,
            )
    for assumption in ACCOUNTANTS["pld"].check_assumptions(question):
        if not assumption.holds:
            raise MethodNotApplicableError(f"a hypothesis fails: {assumption.statement}")


@contextmanager
def limit_seconds(question: Question, about: str, undecided: str) -> Iterator[None]:
    """Context manager that limits the CPU time of one charge; a timeout refuses the plan.

    Args:
        question: the plan.
        about: what is computed, for the message about bounds that contradict each other.
        undecided: the message of the refusal, with a place for the seconds.

    Raises:
        ChargeUndecidedError: the time has passed without a decision.
        BoundsContradictError: two bounds on one δ contradict each other.
    """
    try:
        with report_contradictions(question, about), limit_time(_SECONDS_MAX):
            yield
    except TimeoutError:
        raise ChargeUndecidedError(undecided.format(f"{_SECONDS_MAX:g}")) from None
