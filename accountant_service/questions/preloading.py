"""The modules and filled caches that computation processes share."""

from __future__ import annotations

from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.filters import renyi
from accountant_service.mechanisms import DpSgd
from accountant_service.questions import answer_cache  # noqa: F401 - its processes need it


def fill_caches() -> None:
    """Run computations that fill caches."""
    calculator.epsilon(DpSgd(1.1, sample_rate=0.01, steps=1000), 1e-5)
    renyi.choose_filter(1.0, 1e-5, NeighbouringRelation.ADD_OR_REMOVE_ONE)
