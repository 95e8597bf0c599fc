"""How much privacy a run really gave, at least: an audit with canaries in a single run.

Each of m examples made for the purpose takes part with probability ½. After the run the auditor
guesses, for the r of them that he is surest of, which did. Under (ε, δ)-DP the number of right
guesses is, but for δ, at most binomial with success probability e^ε/(1 + e^ε) (Steinke, Nasr &
Jagielski 2023, arXiv 2305.08846): more of them than that allows refute the claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

_EPSILON_MAX: Final = 50.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit found.

    Attributes:
        epsilon_lower: with the confidence asked for, the run's ε is at least this.
        correct: right guesses.
        guesses: r.
        canaries: m.
    """

    epsilon_lower: float
    correct: int
    guesses: int
    canaries: int


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """An upper bound of the chance of so many right guesses, were the run (ε, δ)-DP.

    With W binomial of r trials and success e^ε/(1 + e^ε) it is

        P(W ≥ v) + 2mδ·maxᵢ P(v − i ≤ W < v)/i,    i = 1, …, v.

    Args:
        correct: v, right guesses.
        guesses: r ≥ v.
        canaries: m ≥ r.
        epsilon: of the claim.
        delta: of the claim.
    """
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail = float(law.sf(correct - 1))
    if correct == 0 or delta == 0:
        return min(1.0, tail)
    below: NDArray[np.float64] = np.cumsum(law.pmf(np.arange(correct - 1, -1, -1)))
    spread = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * spread)


def audit(
    scores: torch.Tensor,
    took_part: torch.Tensor,
    guesses: int,
    delta: float,
    confidence: float = 0.95,
) -> Verdict:
    """A lower bound of ε from how the canaries scored.

    Args:
        scores: of each canary, larger the likelier it took part.
        took_part: whether it did; drawn before the run, each with probability ½.
        guesses: how many to guess, the highest and the lowest half each; chosen before the run.
        delta: of the claim.
        confidence: that the bound holds.
    """
    order = torch.argsort(scores, descending=True)
    half = guesses // 2
    correct = int(took_part[order[:half]].sum()) + int((~took_part[order[-half:]]).sum())
    low, high = 0.0, _EPSILON_MAX
    if p_value(correct, 2 * half, len(scores), 0.0, delta) > 1 - confidence:
        return Verdict(0.0, correct, 2 * half, len(scores))
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        if p_value(correct, 2 * half, len(scores), middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return Verdict(low, correct, 2 * half, len(scores))
