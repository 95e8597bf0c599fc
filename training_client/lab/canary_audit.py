"""A lower bound on the ε of a run: an audit with canaries in one run.

Each of m canaries (examples made for the audit) is included with probability ½. After the run the
auditor guesses which were included, for the r canaries that he is most certain of. Under (ε, δ)-DP
the number of correct guesses is, up to δ, at most binomial with success probability e^ε/(1 + e^ε)
(Steinke, Nasr & Jagielski 2023, arXiv 2305.08846). More correct guesses refute the claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_EPSILON_MAX: Final = 50.0


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of a canary audit: a lower bound on ε, and the numbers of guesses behind it.

    Attributes:
        epsilon_lower: a lower bound on the run's ε, at the confidence asked for.
        correct: the number of correct guesses.
        guesses: r, the number of guesses.
        canaries: m, the number of canaries.
    """

    epsilon_lower: float
    correct: int
    guesses: int
    canaries: int


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on P(at least `correct` right guesses) if training is (ε, δ)-DP.

    With W binomial of r trials and success probability e^ε/(1 + e^ε) the bound is

        P(W ≥ v) + 2mδ·maxᵢ P(v − i ≤ W < v)/i,    i = 1, …, v.

    Args:
        correct: v, the number of correct guesses.
        guesses: r ≥ v, the number of guesses.
        canaries: m ≥ r, the number of canaries.
        epsilon: the claimed ε.
        delta: the claimed δ.
    """
    from scipy import stats  # imported when it is used: it takes more than a second

    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail = float(law.sf(correct - 1))
    if correct == 0 or delta == 0:
        return min(1.0, tail)
    below: NDArray[np.float64] = np.cumsum(law.pmf(np.arange(correct - 1, -1, -1)))
    spread = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * spread)


def audit_canaries(
    scores: torch.Tensor,
    took_part: torch.Tensor,
    guesses: int,
    delta: float,
    confidence: float = 0.95,
) -> AuditResult:
    """Compute a lower bound on ε from scores of canaries, each included with probability ½.

    Args:
        scores: one per canary; a higher score means that it was more likely included.
        took_part: whether each canary was included; drawn before the run with probability ½.
        guesses: the number of guesses, half of them for the highest and half for the lowest
            scores; chosen before the run.
        delta: the claimed δ.
        confidence: the probability with which the bound holds.
    """
    order = torch.argsort(scores, descending=True)
    half = guesses // 2
    correct = int(took_part[order[:half]].sum()) + int((~took_part[order[-half:]]).sum())
    low, high = 0.0, _EPSILON_MAX
    if p_value(correct, 2 * half, len(scores), 0.0, delta) > 1 - confidence:
        return AuditResult(0.0, correct, 2 * half, len(scores))
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        if p_value(correct, 2 * half, len(scores), middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return AuditResult(low, correct, 2 * half, len(scores))
