"""Charge releases that other code makes, such as queries, before they are made.

sales = LedgerDataset(service, "sales-2026-10")
with sales.charge(laplace(10), "orders a day") as charge:
    publish(count + noise)
save(charge.certificate)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from training_client.client import AccountingService, Reservation

Json = Mapping[str, Any]


def laplace(scale: float) -> Json:
    """Return the mechanism of Laplace noise with this scale over the ℓ1 sensitivity."""
    return {"kind": "laplace", "noise_multiplier": float(scale)}


def gaussian(noise_multiplier: float) -> Json:
    """Return the mechanism of Gaussian noise with this σ over the ℓ2 sensitivity."""
    return {"kind": "gaussian", "noise_multiplier": float(noise_multiplier)}


def approximate_dp(epsilon: float, delta: float = 0.0) -> Json:
    """Return the mechanism of any release that is (ε, δ)-differentially private."""
    return {"kind": "approximate_dp", "epsilon": float(epsilon), "delta": float(delta)}


@dataclass(slots=True)
class Charge:
    """A release that was charged.

    Attributes:
        reservation: of the ledger, with all steps granted.
        certificate: the signed certificate; None until the context ends.
    """

    reservation: Reservation
    certificate: Json | None = None


class LedgerDataset:
    """A dataset of the ledger, or several that are used together.

    Args:
        service: the accounting service, with a key.
        names: the datasets' names in the ledger.
    """

    def __init__(self, service: AccountingService, *names: str) -> None:
        self._service, self._names = service, names

    @contextmanager
    def charge(self, mechanism: Json, purpose: str = "") -> Iterator[Charge]:
        """Context manager that charges a release before its body makes it.

        It stays charged if the body fails: something may have been released by then.

        Args:
            mechanism: of the release, as JSON.
            purpose: a note that the ledger keeps.

        Raises:
            BudgetExhaustedError: the release does not fit the remaining budget; the body is not
                run.
        """
        names = self._names[0] if len(self._names) == 1 else self._names
        run = self._service.reserve(names, mechanism, purpose)
        found = Charge(self._service.grant(run, run.steps_reserved))
        try:
            yield found
        finally:
            found.reservation = self._service.commit(found.reservation)
            found.certificate = self._service.certificate(found.reservation)
