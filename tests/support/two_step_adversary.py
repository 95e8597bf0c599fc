"""An adversary in two steps, who chooses the second mechanism by the first one's result.

Mechanisms are laws of the privacy loss on two or three values; the adversary sees the first loss,
then plays whichever second mechanism the gate still admits. What it reaches is exact: the expected
δ of the second at what the first has left of ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from accountant_service.ledger.filters.base import Amounts

EPSILON, DELTA = 2.0, 1e-3
ORDERS = (4.0, 40.0)
# of an adversary's log-losses and log10-probabilities, and of its two later losses
BOUNDS = [(-3, 8), (-8, -0.3), (-3, 8), (-8, -0.3), (0.5, 10), (0.5, 10)]
# what the search found against a gate that admits a step while some order has room
CUNNING = (0.198, -1.375, -0.215, -4.949, 2.318, 1.831)

Law = tuple[np.ndarray, np.ndarray]  # losses, and probabilities under P
Gate = Callable[[Amounts], bool]  # of micro-nats at each order


def make_law(losses: Sequence[float], probabilities: Sequence[float]) -> Law | None:
    """Return a law with these losses; the rest of either distribution is one more outcome."""
    loss, p = np.array(losses), np.array(probabilities)
    rest, rest_q = 1 - p.sum(), 1 - (p * np.exp(-loss)).sum()
    if rest <= 1e-12 or rest_q <= 1e-12:
        return None
    return np.append(loss, math.log(rest / rest_q)), np.append(p, rest)


def charge(of: Law) -> Amounts:
    """Return the micro-nats of a law at each order, in the worse direction, rounded up."""
    loss, p = of
    forth = [math.log((p * np.exp((a - 1) * loss)).sum()) / (a - 1) for a in ORDERS]
    back = [math.log((p * np.exp(-a * loss)).sum()) / (a - 1) for a in ORDERS]
    return tuple(math.ceil(1e6 * max(both)) for both in zip(forth, back, strict=True))


def add(first: Amounts, second: Amounts) -> Amounts:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def most_likely(loss: float, taken: Amounts, gate: Gate) -> Law | None:
    """Return the law with one such loss, as likely as the gate admits."""

    def is_admitted(log_p: float) -> bool:
        found = make_law([loss], [math.exp(log_p)])
        return found is not None and gate(add(taken, charge(found)))

    low, high = -32.0, min(0.0, loss) - 1e-3
    if not is_admitted(low):
        return None
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_admitted(middle) else (low, middle)
    return make_law([loss], [math.exp(low)])


def attained(by: Sequence[float], gate: Gate) -> float:
    """Return the adversary's δ over the promised one."""
    a, log_pa, b, log_pb, *later = by
    first = make_law([a, b], [10**log_pa, 10**log_pb])
    if first is None or not gate(charge(first)):
        return 0.0
    total = 0.0
    for loss, probability in zip(*first, strict=True):
        best = max(-math.expm1(EPSILON - loss), 0.0)
        for second in (most_likely(later_loss, charge(first), gate) for later_loss in later):
            if second is not None:
                gain = np.maximum(-np.expm1(EPSILON - loss - second[0]), 0.0)
                best = max(best, float(second[1] @ gain))
        total += probability * best
    return total / DELTA


def attained_at_once(gate: Gate) -> float:
    """Return the same of the best single law with one large loss."""
    best = 0.0
    for loss in EPSILON + np.geomspace(0.01, 2.0, 60):
        law = most_likely(float(loss), (0, 0), gate)
        if law is not None:
            best = max(best, float(law[1] @ np.maximum(-np.expm1(EPSILON - law[0]), 0.0)))
    return best / DELTA
