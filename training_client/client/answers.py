"""Answers of the accounting service, as dataclasses that refuse what breaks the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training_client.errors import ServiceConfusedError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Guarantee:
    """An (ε, δ) guarantee computed by the service, with the status of its proof.

    Attributes:
        epsilon: ε, rounded up; ≥ 0.
        delta: δ, in [0, 1].
        method: the accounting method.
        status: "proven" or, from some methods, "estimate".
        document: the service's whole answer.
    """

    epsilon: float
    delta: float
    method: str
    status: str
    document: Json

    @classmethod
    def from_json(cls, document: Any) -> Guarantee:
        """Parse a guarantee from a response's JSON.

        Raises:
            ServiceConfusedError: a field is missing or out of range.
        """
        try:
            found = cls(
                float(document["epsilon"]),
                float(document["delta"]),
                str(document["method"]),
                str(document["status"]),
                document,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceConfusedError(f"the answer is not a guarantee: {error!r}") from None
        if not (math.isfinite(found.epsilon) and found.epsilon >= 0 and 0 <= found.delta <= 1):
            raise ServiceConfusedError(
                f"the answer is not a guarantee: ε = {found.epsilon}, δ = {found.delta}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers of several accounting methods to one question, and the proved interval of ε.

    Attributes:
        epsilon_lower: a proved lower bound of ε; None if there is no proved interval.
        epsilon_upper: a proved upper bound of ε; None if there is no proved interval.
        guarantees: the guarantee of each method that has an answer, by the method's name; its
            status may be "refuted".
        reasons: why each other method has no answer, by the method's name.
        document: the service's whole answer.
    """

    epsilon_lower: float | None
    epsilon_upper: float | None
    guarantees: Mapping[str, Guarantee]
    reasons: Mapping[str, str]
    document: Json

    @classmethod
    def from_json(cls, document: Json) -> Comparison:
        """Parse a comparison of methods from a response's JSON.

        Raises:
            ServiceConfusedError: a field is missing or out of range.
        """
        try:
            answers = {str(each["method"]): each for each in document["guarantees"]}
            proved = (document["certified"] or {}).get("certified") or {}
            reasons = {
                name: str(each["reason"]) for name, each in answers.items() if "reason" in each
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ServiceConfusedError(f"the answer is not a comparison: {error!r}") from None
        guarantees = {
            name: Guarantee.from_json(each) for name, each in answers.items() if name not in reasons
        }
        lower, upper = proved.get("epsilon_lower"), proved.get("epsilon_upper")
        return cls(lower, upper, guarantees, reasons, document)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run within a budget: batch size, steps, and nearly the least noise that suffices.

    Attributes:
        sampling: "poisson" or "balls_in_bins".
        batch_size: expected number of records in a batch, B.
        sample_rate: batch size over dataset size.
        steps: number of steps, T.
        epochs: passes over the dataset.
        noise_multiplier: σ, rounded up.
        effective_noise: σ/B: noise of an averaged gradient, over the clipping norm.
        signal_to_noise: B√T/σ.
        epsilon: a proved upper bound of ε.
        mechanism: the run as JSON, of the recommended run and today's choice.
        commands: command lines that compute its ε and train it, of the same runs.
    """

    sampling: str
    batch_size: int
    sample_rate: float
    steps: int
    epochs: float
    noise_multiplier: float
    effective_noise: float
    signal_to_noise: float
    epsilon: float
    mechanism: Json = field(default_factory=dict)
    commands: Json = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Any, epsilon: float) -> PlannedRun:
        """Parse a planned run from a response's JSON.

        Args:
            document: JSON.
            epsilon: the ε of the budget.

        Raises:
            ServiceConfusedError: a field is missing, or the run's ε exceeds that of the budget.
        """
        try:
            known = {
                name: document[name]
                for name in cls.__dataclass_fields__
                if name in document or name not in ("mechanism", "commands")
            }
            found = cls(**known)
            fits = found.epsilon <= epsilon and found.steps >= 1 and found.noise_multiplier > 0
        except (KeyError, TypeError) as error:
            raise ServiceConfusedError(f"the answer is not a planned run: {error!r}") from None
        if not fits:
            raise ServiceConfusedError(f"the planned run is outside the budget: {found}")
        return found


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Possible runs within a privacy budget and a compute limit, one of them recommended.

    Attributes:
        recommended: the recommended run.
        reason: why it is recommended.
        current: today's choice with the least noise within the budget, if it was given.
        runs: the frontier, by sampling and increasing batch size.
        warnings: what is probably wrong, in words.
        document: the service's whole answer.
    """

    recommended: PlannedRun
    reason: str
    current: PlannedRun | None
    runs: tuple[PlannedRun, ...]
    warnings: tuple[str, ...]
    document: Json

    @classmethod
    def from_json(cls, document: Json, epsilon: float) -> BudgetPlan:
        """Parse the possible runs within a budget of ε from a response's JSON.

        Raises:
            ServiceConfusedError: a field is missing, or a run exceeds the budget.
        """
        try:
            current, advice = document["current"], document["advice"]
            return cls(
                PlannedRun.from_json(document["recommended"], epsilon),
                str(document["reason"]),
                None if current is None else PlannedRun.from_json(current, epsilon),
                tuple(PlannedRun.from_json(each, epsilon) for each in document["runs"]),
                tuple(str(a["message"]) for a in advice if a["severity"] == "warning"),
                document,
            )
        except (KeyError, TypeError) as error:
            raise ServiceConfusedError(f"the answer is not a plan: {error!r}") from None
