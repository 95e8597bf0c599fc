"""Request and answer models of `POST /v1/plan`. Field names are the wire contract."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from accountant_service.accounting import planner
from accountant_service.accounting.methods import DEFAULT_METHOD
from accountant_service.mechanisms import MechanismError
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.questions.models import (
    GUARANTEE_EXAMPLE,
    Answer,
    GuaranteeView,
    PositiveDeltaField,
    RelationRequest,
    TargetField,
)
from accountant_service.questions.question_fields import OnPage

_EXAMPLES_MAX: Final = 10**15
_EPOCHS_MAX: Final = 1e6
_SizeField = Annotated[int | None, Field(ge=1, le=COUNT_MAX)]


class PlanRequest(RelationRequest):
    """Plan a run: batch size, steps and noise within a budget and a compute limit."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "epsilon": 2.0,
                    "delta": 1e-5,
                    "dataset_size": 60000,
                    "epochs": 20,
                    "batch_size": 256,
                    "sampling": "poisson",
                    "points": 5,
                }
            ]
        }
    )
    no_answer = "no noise multiplier that reaches the budget"

    epsilon: Annotated[
        TargetField,
        Field(description="ε that the run must not exceed, such as 2"),
        OnPage("2", "Budget", "ε", slider=(-1, 1.3)),
    ]
    delta: Annotated[PositiveDeltaField, Field(description="δ of the budget, such as 1e-5")]
    dataset_size: Annotated[
        int,
        Field(ge=1, le=COUNT_MAX, description="number of records"),
        OnPage("60000", "Records", "N"),
    ]
    epochs: Annotated[
        float | None,
        Field(
            gt=0,
            le=_EPOCHS_MAX,
            description="compute limit: passes over the dataset; without it, `examples`, or "
            "`batch_size` times `steps`",
        ),
        OnPage("20", "Epoch limit", "E", slider=(-1, 3)),
    ] = None
    examples: Annotated[
        int | None,
        Field(
            ge=1,
            le=_EXAMPLES_MAX,
            description="compute limit instead of epochs: batch size times steps",
        ),
    ] = None
    batch_size: Annotated[
        _SizeField,
        Field(description="today's choice, to compare with"),
        OnPage("256", "Batch size today", "B"),
    ] = None
    steps: Annotated[
        _SizeField,
        Field(
            description="today's steps, with `batch_size`; as many as the limit allows by default"
        ),
        OnPage(label="Steps today", symbol="T", hint="as many as the epochs allow by default"),
    ] = None
    sampling: Annotated[
        Literal["poisson", "balls_in_bins", "both"],
        Field(description="how batches may be drawn"),
        OnPage(),
    ] = "both"
    points: Annotated[
        int,
        Field(
            ge=2,
            le=planner.POINTS_MAX,
            description="batch sizes for each sampling, beside the recommended one",
        ),
    ] = 20
    smallest_batch_size: Annotated[
        _SizeField, Field(description="smallest batch size to plan; chosen by default")
    ] = None
    largest_batch_size: Annotated[
        _SizeField, Field(description="largest batch size to plan; chosen by default")
    ] = None
    steps_min: Annotated[
        int,
        Field(ge=1, le=COUNT_MAX, description="fewest steps of a recommended run, if possible"),
    ] = planner.STEPS_MIN

    def goal(self) -> planner.Goal:
        """Return the goal of planning: budget, dataset and compute limit."""
        return planner.Goal(
            self.epsilon,
            self.delta,
            self.dataset_size,
            self._example_limit(),
            self.neighbouring_relation,
            self.steps_min,
        )

    def samplings(self) -> tuple[planner.PlannedSampling, ...]:
        """Return the samplings to plan for: Poisson, balls-in-bins, or both."""
        return planner.SAMPLINGS if self.sampling == "both" else (self.sampling,)

    def batches(self) -> planner.BatchRange:
        """Return the range of batch sizes."""
        return planner.BatchRange(self.points, self.smallest_batch_size, self.largest_batch_size)

    def current(self) -> planner.CurrentChoice | None:
        """Return the user's current batch size and steps, or None if they are not given."""
        if self.batch_size is None:
            return None
        return planner.CurrentChoice(self.batch_size, self.steps)

    def _example_limit(self) -> int:
        """Return the compute limit as a number of processed examples; 0 if it is not given."""
        if self.examples is not None:
            return self.examples
        if self.epochs is not None:
            return round(self.epochs * self.dataset_size)
        return (self.batch_size or 0) * (self.steps or 0)

    @model_validator(mode="after")
    def _check_plan(self) -> PlanRequest:
        """Check that one compute limit is given, and that batch sizes fit it and the dataset."""
        faults = [*self._limit_faults(), *self._batch_faults()]
        if faults:
            raise MechanismError(*faults)
        return self

    def _limit_faults(self) -> list[tuple[str, str]]:
        """Return faults in the compute limit, each as JSON pointer and message."""
        if self.steps is not None and self.batch_size is None:
            return [("/batch_size", "is required with steps: both are today's choice")]
        if self.epochs is not None and self.examples is not None:
            return [("/examples", "must be left out if epochs are given: one limits the other")]
        limit = self._example_limit()
        if not limit:
            return [
                ("/epochs", "is required as the compute limit; or examples; or batch_size, steps")
            ]
        if limit > _EXAMPLES_MAX:
            return [("/epochs", f"must allow at most {_EXAMPLES_MAX:g} examples")]
        if self.sampling == "balls_in_bins" and limit < self.dataset_size:
            return [("/epochs", "must be at least 1: balls_in_bins has whole epochs")]
        return []

    def _batch_faults(self) -> list[tuple[str, str]]:
        """Return faults in the batch sizes, each as JSON pointer and message."""
        size, limit = self.dataset_size, self._example_limit()
        most = min(size, limit or size)
        least = -(-limit // COUNT_MAX)  # smaller batches would take too many steps
        found = []
        for name in ("batch_size", "smallest_batch_size", "largest_batch_size"):
            value = getattr(self, name)
            allowed = size if name == "batch_size" else most
            reason = "which is dataset_size" if allowed == size else "the examples allowed"
            if value is not None and value > allowed:
                found.append((f"/{name}", f"must be at most {allowed}, {reason}"))
            elif value is not None and value < least:
                found.append((f"/{name}", f"must be at least {least}: {COUNT_MAX:g} steps at most"))
        if not found and self.sampling == "balls_in_bins" and self.batch_size is not None:
            found += self._bins_faults(self.batch_size)
        smallest, largest = self.smallest_batch_size, self.largest_batch_size
        if not found and smallest and largest and smallest > largest:
            found.append(("/smallest_batch_size", "must be at most largest_batch_size"))
        return found

    def _bins_faults(self, batch_size: int) -> list[tuple[str, str]]:
        """Return faults in today's choice, if it is made by balls in bins."""
        if self.dataset_size % batch_size:
            message = f"must divide dataset_size, which is {self.dataset_size}: balls_in_bins has "
            return [("/batch_size", message + "equal batches")]
        bins = self.dataset_size // batch_size
        if self.steps is not None and self.steps % bins:
            return [("/steps", f"must be a multiple of {bins}: balls_in_bins has whole epochs")]
        return []


_RUN: Final[JsonDict] = {
    "sampling": "poisson",
    "batch_size": 1600,
    "sample_rate": 0.026666666666666668,
    "steps": 750,
    "epochs": 20.0,
    "noise_multiplier": 1.6672,
    "effective_noise": 0.001042,
    "signal_to_noise": 26281.8,
    "epsilon": 1.99954,
}
_MECHANISM: Final[JsonDict] = {
    "kind": "dp_sgd",
    "noise_multiplier": 1.6672,
    "dataset_size": 60000,
    "batch_size": 1600,
    "steps": 750,
    "sampling": "poisson",
}
_COMMANDS: Final[JsonDict] = {
    "price": "accountant epsilon -n 60000 -b 1600 -t 750 -s 1.6672 -d 1e-5",
    "train": "accountant-train run --data mine --size 60000 --batch-size 1600 --steps 750 "
    "--noise-multiplier 1.6672 --epsilon 2 --delta 1e-5",
}
_CERTIFIED_RUN: Final[JsonDict] = {
    **_RUN,
    "mechanism": _MECHANISM,
    "guarantee": GUARANTEE_EXAMPLE,
    "commands": _COMMANDS,
}


class PlannedRunView(Answer):
    """A batch size with its steps and about the least noise within the budget."""

    model_config = ConfigDict(json_schema_extra={"examples": [_RUN]})
    sampling: Literal["poisson", "balls_in_bins"]
    batch_size: int = Field(description="expected number of records in a batch, B")
    sample_rate: float
    steps: int = Field(description="number of steps, T")
    epochs: float = Field(description="passes over the dataset")
    noise_multiplier: float = Field(description="σ, rounded up")
    effective_noise: float = Field(
        description="σ/B: standard deviation of the noise of an averaged gradient, over the "
        "clipping norm"
    )
    signal_to_noise: float = Field(
        description="B√T/σ: the clipping norm over the noise of the mean of all gradients"
    )
    epsilon: float = Field(description="a proved upper bound of ε, at most the budget's")


class CommandsView(Answer):
    """Command lines for a planned run."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COMMANDS]})
    price: str = Field(description="computes ε of the run")
    train: str | None = Field(
        description="trains the run on data of your own; null if `accountant-train` has no such "
        "guarantee"
    )


class CertifiedRunView(PlannedRunView):
    """A planned run with its mechanism and its guarantee."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CERTIFIED_RUN]})
    mechanism: dict[str, Any]
    guarantee: GuaranteeView
    commands: CommandsView


class AdviceView(Answer):
    """A warning or a note, with the publication that it rests on."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "code": "delta-too-large",
                    "severity": "warning",
                    "message": "δ = 0.001 is not below 1/N = 0.001",
                    "source": planner.PONOMAREVA,
                }
            ]
        }
    )
    code: str
    severity: Literal["warning", "note"]
    message: str
    source: str | None


class SourceView(Answer):
    """A publication that the advice rests on, and what it says."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"source": name, "says": says} for name, says in planner.SOURCES.items()]
        }
    )
    source: str
    says: str


class PlanAnswer(Answer):
    """The frontier of batch size, steps and noise within the budget, and a recommendation.

    Every `noise_multiplier` is rounded up, so that the proved upper bound of ε meets the budget.
    The recommendation is a rule of thumb; the privacy claims are proved.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "recommended": _CERTIFIED_RUN,
                    "reason": "With Poisson sampling, a batch of 1600 is the smallest that reaches "
                    "90 % of the best "
                    "signal-to-noise within the compute limit.",
                    "current": None,
                    "signal_to_noise_limit": 30093.1,
                    "examples": 1200000,
                    "method": DEFAULT_METHOD,
                    "runs": [_RUN],
                    "advice": [],
                    "sources": [],
                }
            ]
        }
    )
    recommended: CertifiedRunView
    reason: str = Field(description="why this run is recommended")
    current: CertifiedRunView | None = Field(
        default=None,
        description="today's choice with the least noise within the budget, if it was given",
    )
    signal_to_noise_limit: float = Field(
        description="N·μ: the signal-to-noise of full batches within the budget, at any number of "
        "steps"
    )
    examples: int = Field(description="the compute limit, in examples processed")
    method: str = Field(description="the accounting method that proves every claim")
    runs: list[PlannedRunView] = Field(description="by sampling and increasing batch size")
    advice: list[AdviceView]
    sources: list[SourceView]
