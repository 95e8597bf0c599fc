"""What goes in and what comes out, field by field. Names are the wire contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.config import JsonDict, JsonValue

from accountant_service import mechanisms
from accountant_service.accountants import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.guarantee import NeighbouringRelation, Status
from accountant_service.mechanisms import DpSgd, MechanismError, Sampling
from accountant_service.mechanisms.codec import COUNT_MAX, NOISE_MAX, NOISE_MIN

MECHANISM_PLACEHOLDER: Final = "x-mechanism"  # replaced by a reference when OpenAPI is built


def _known_method(name: object) -> str:
    if not isinstance(name, str) or name not in ACCOUNTANTS:
        raise ValueError("must be one of " + ", ".join(ACCOUNTANTS))
    return name


MechanismField = Annotated[
    Any,  # a Mechanism; named so, pydantic would describe the dataclasses a second time
    PlainValidator(mechanisms.from_json),
    WithJsonSchema({"type": "object", MECHANISM_PLACEHOLDER: True}),
]
MethodField = Annotated[
    str,
    PlainValidator(_known_method),
    WithJsonSchema({"type": "string", "enum": list(ACCOUNTANTS)}),
]
DeltaField = Annotated[float, Field(ge=1e-50, lt=1, description="δ, from 1e-50 to below 1")]
EpsilonField = Annotated[float, Field(ge=0, le=1e6, description="ε, from 0 to 1e6")]
TargetField = Annotated[float, Field(gt=0, le=1e6, description="ε not to exceed, up to 1e6")]

_RUN: Final[JsonDict] = {
    "kind": "dp_sgd",
    "noise_multiplier": 1.1,
    "sample_rate": 0.01,
    "steps": 1000,
}


@dataclass(frozen=True, slots=True)
class Unread:
    """A body too large to be read in the serving process: a computation process reads it.

    Attributes:
        raw: as it came.
    """

    raw: bytes


UNREAD_PASSES: Final = WrapValidator(
    lambda value, read: value if isinstance(value, Unread) else read(value)
)


class _Strict(BaseModel):
    """No coercion, no unknown fields, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _Relation(_Strict):
    neighbouring_relation: Annotated[NeighbouringRelation, Field(strict=False)] = (
        NeighbouringRelation.ADD_OR_REMOVE_ONE
    )


class _Certified(_Relation):
    tolerance: Annotated[
        float | None,
        Field(
            ge=1e-7,
            le=0.5,
            description="relative width that the proved interval must have (of ε: relative to at "
            "least 0.05); without one, 1e-3 is aimed at and what is reached is answered",
        ),
    ] = None


class EpsilonRequest(_Certified):
    """What ε does a mechanism have at δ?"""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "delta": 1e-5}]})
    mechanism: MechanismField
    delta: DeltaField
    method: MethodField = DEFAULT_METHOD


class DeltaRequest(_Certified):
    """What δ does a mechanism have at ε?"""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "epsilon": 2.0}]})
    mechanism: MechanismField
    epsilon: EpsilonField
    method: MethodField = DEFAULT_METHOD


class _Run(_Relation):
    """A run with one field left open: what the three solvers have in common."""

    epsilon: TargetField
    delta: DeltaField
    method: MethodField = DEFAULT_METHOD
    sampling: Sampling = "poisson"
    sample_rate: float | None = None
    steps: int | None = None
    dataset_size: int | None = None
    batch_size: int | None = None
    epochs: float | None = None

    solved_for: ClassVar[str]
    stand_in: ClassVar[float]

    def run(self) -> DpSgd:
        """The run with the field to solve for filled in by a stand-in."""
        given = self.model_dump(
            include={"sampling", "sample_rate", "steps", "dataset_size", "batch_size", "epochs"},
            exclude_none=True,
        )
        noise = getattr(self, "noise_multiplier", None)
        fields = {"kind": "dp_sgd", "noise_multiplier": noise, **given}
        run = mechanisms.from_json(fields | {self.solved_for: self.stand_in})
        assert isinstance(run, DpSgd)
        return run

    @model_validator(mode="after")
    def _describes_a_run(self) -> _Run:
        if getattr(self, self.solved_for, None) is not None:
            raise MechanismError((f"/{self.solved_for}", "is what is solved for: leave it out"))
        self.run()
        return self


class NoiseMultiplierRequest(_Run):
    """How much noise does a run need to stay within ε at δ?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"sample_rate": 0.01, "steps": 1000, "epsilon": 2.0, "delta": 1e-5}]
        }
    )
    solved_for = "noise_multiplier"
    stand_in = 1.0


class _NoisyRun(_Run):
    noise_multiplier: Annotated[float, Field(ge=NOISE_MIN, le=NOISE_MAX)]


class StepsRequest(_NoisyRun):
    """How many steps can a run make within ε at δ?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"noise_multiplier": 1.1, "sample_rate": 0.01, "epsilon": 2.0, "delta": 1e-5}
            ]
        }
    )
    solved_for = "steps"
    stand_in = 1


class SampleRateRequest(_NoisyRun):
    """How large may a run's samples be within ε at δ?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"noise_multiplier": 1.1, "steps": 1000, "epsilon": 2.0, "delta": 1e-5}]
        }
    )
    sampling: Literal["poisson"] = "poisson"
    solved_for = "sample_rate"
    stand_in = 0.01


_Methods = Annotated[list[MethodField], Field(min_length=1, max_length=len(ACCOUNTANTS))]


class CompareRequest(_Certified):
    """What does every method say, and what is proved?"""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "delta": 1e-5}]})
    mechanism: MechanismField
    delta: DeltaField
    methods: _Methods | None = None


class CurveRequest(_Relation):
    """How does ε grow along the steps of a run?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "mechanism": _RUN,
                    "delta": 1e-5,
                    "methods": ["pld", "subsampled_rdp"],
                    "points": 10,
                }
            ]
        }
    )
    mechanism: MechanismField
    delta: DeltaField
    methods: _Methods = Field(default_factory=lambda: [DEFAULT_METHOD])
    points: Annotated[int, Field(ge=1, le=200)] = 50

    @model_validator(mode="after")
    def _is_a_run(self) -> CurveRequest:
        if not isinstance(self.mechanism, DpSgd):
            raise MechanismError(("/mechanism/kind", "must be dp_sgd: a curve follows its steps"))
        return self


class TradeOffRequest(_Relation):
    """What can a membership attacker achieve at best?"""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "prior": 0.5}]})
    mechanism: MechanismField
    prior: Annotated[float, Field(ge=1e-9, le=1 - 1e-9)] = 0.5
    points: Annotated[int, Field(ge=2, le=1000)] = 101


class BatchItem(_Strict):
    """One question of a batch: the path it would be sent to, and its body."""

    path: str
    body: dict[str, Any]


class BatchRequest(_Strict):
    """Up to 1 000 questions, answered in order, each on its own."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"requests": [{"path": "/v1/epsilon", "body": {"mechanism": _RUN, "delta": 1e-5}}]}
            ]
        }
    )
    requests: Annotated[list[BatchItem], Field(min_length=1, max_length=1000)]


# --- answers: documentation of what `views` writes, checked against it by the tests


class AssumptionView(_Strict):
    """One hypothesis of the method's theorem."""

    statement: str
    holds: bool
    source: str


class CertifiedEpsilon(_Strict):
    """A proved interval around the true ε."""

    epsilon_lower: float
    epsilon_upper: float


class CertifiedDelta(_Strict):
    """A proved interval around the true δ."""

    delta_lower: float
    delta_upper: float


_ASSUMPTIONS: Final[list[JsonValue]] = [
    {
        "statement": "each release is dominated by a pair of one-dimensional distributions",
        "holds": True,
        "source": "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11",
    }
]
_GUARANTEE: Final[JsonDict] = {
    "epsilon": 1.51537,
    "delta": 1e-05,
    "method": "pld",
    "status": "proven",
    "certified": {"epsilon_lower": 1.51536, "epsilon_upper": 1.51537},
    "certified_reason": None,
    "warnings": [],
    "neighbouring_relation": "add_or_remove_one",
    "sampling": "poisson",
    "assumptions": _ASSUMPTIONS,
    "optimal_order": None,
    "conversion": None,
    "mechanism_hash": "sha256:0000000000000000000000000000000000000000000000000000000000000000",
    "accountant_version": "0.1.0",
}


class GuaranteeView(_Strict):
    """A claim of (ε, δ)-differential privacy and how far it can be trusted."""

    model_config = ConfigDict(json_schema_extra={"examples": [_GUARANTEE]})
    epsilon: float
    delta: float
    method: str
    status: Annotated[Status, Field(strict=False)]
    certified: CertifiedEpsilon | CertifiedDelta | None = None
    certified_reason: str | None = None
    warnings: list[str] = Field(
        default_factory=list,
        description="why `certified` is wider than the tolerance, where it is",
    )
    neighbouring_relation: Annotated[NeighbouringRelation, Field(strict=False)]
    sampling: str
    assumptions: list[AssumptionView]
    optimal_order: float | None = None
    conversion: str | None = None
    mechanism_hash: str
    accountant_version: str


class NoiseMultiplierAnswer(_Strict):
    """The least noise multiplier that meets the target."""

    noise_multiplier: float
    guarantee: GuaranteeView


class UndecidedView(_Strict):
    """One step more is neither proved to meet the target nor to miss it."""

    margin: float = Field(description="the most that its true ε differs from the target")


class StepsAnswer(_Strict):
    """The largest number of steps that meets the target; `next` is one step more, too much."""

    steps: Annotated[int, Field(le=COUNT_MAX)]
    guarantee: GuaranteeView
    next: GuaranteeView
    undecided: UndecidedView | None = Field(
        default=None,
        description="where the proved interval of `next` contains the target; null where `next` "
        "is proved to be too much",
    )


class SampleRateAnswer(_Strict):
    """The largest sample rate that meets the target."""

    sample_rate: float
    guarantee: GuaranteeView


class InapplicableView(_Strict):
    """A method without an answer, and why."""

    method: str
    code: str
    reason: str


class CompareAnswer(_Strict):
    """Every method's answer beside the certified one."""

    certified: GuaranteeView | None = None
    certified_reason: str | None = None
    guarantees: list[GuaranteeView | InapplicableView]


class CurveView(_Strict):
    """One method's ε at each step count."""

    method: str
    status: Annotated[Status, Field(strict=False)]
    epsilon: list[float | None]
    warnings: list[str] = Field(
        default_factory=list,
        description="why a proved interval along the curve is wider than 1e-3, where one is",
    )
    assumptions: list[AssumptionView]


class CurveAnswer(_Strict):
    """ε along the steps."""

    steps: list[int]
    curves: list[CurveView | InapplicableView]


class IntervalView(_Strict):
    """A proved interval."""

    lower: float
    upper: float


class GaussianDpView(_Strict):
    """The Gaussian mechanism whose trade-off is nearest: its μ, and the most they differ."""

    mu: float
    error: float


class TradeOffAnswer(_Strict):
    """The best a membership attacker can do, each value between proved bounds.

    At each false-positive rate: the least false-negative rate, and the posterior probability that
    an accused record is present.
    """

    false_positive_rates: list[float]
    false_negative_rates_lower: list[float]
    false_negative_rates_upper: list[float]
    membership_advantage: IntervalView
    prior: float
    attack_success: IntervalView
    posterior_lower: list[float]
    posterior_upper: list[float]
    gaussian_dp: GaussianDpView
    mechanism_hash: str
    assumptions: list[AssumptionView]


class MethodView(_Strict):
    """An accounting method."""

    method: str
    title: str
    source: str
    needs: str
    proves: str
    default: bool


class MethodsAnswer(_Strict):
    """Every accounting method."""

    methods: list[MethodView]


class BatchResult(_Strict):
    """The answer to one question of a batch, or its problem."""

    status: int
    body: dict[str, Any]


class BatchAnswer(_Strict):
    """The answers, in the order of the questions."""

    results: list[BatchResult]


class HealthAnswer(_Strict):
    """Whether the process, or the service with all it needs, is well."""

    status: Literal["ok"]


# One example for every schema of the OpenAPI document that has none of its own.
_CURVE: Final[JsonDict] = {
    "method": "pld",
    "status": "proven",
    "epsilon": [1.0826, 1.51537],
    "assumptions": _ASSUMPTIONS,
}
EXAMPLES: Final[JsonDict] = {
    "AssumptionView": {"statement": "q < 1/σ", "holds": True, "source": "papers/001, Theorem 3"},
    "CertifiedEpsilon": {"epsilon_lower": 1.51536, "epsilon_upper": 1.51537},
    "CertifiedDelta": {"delta_lower": 9.99e-06, "delta_upper": 1e-05},
    "NoiseMultiplierAnswer": {"noise_multiplier": 0.9593, "guarantee": _GUARANTEE},
    "StepsAnswer": {
        "steps": 1724,
        "guarantee": _GUARANTEE,
        "next": _GUARANTEE,
        "undecided": None,
    },
    "UndecidedView": {"margin": 2e-9},
    "SampleRateAnswer": {"sample_rate": 0.01, "guarantee": _GUARANTEE},
    "InapplicableView": {
        "method": "mma",
        "code": "method-not-applicable",
        "reason": "mma has no formula for laplace noise",
    },
    "CompareAnswer": {
        "certified": _GUARANTEE,
        "certified_reason": None,
        "guarantees": [_GUARANTEE],
    },
    "CurveView": _CURVE,
    "CurveAnswer": {"steps": [500, 1000], "curves": [_CURVE]},
    "GaussianDpView": {"mu": 0.4065, "error": 0.0012},
    "IntervalView": {"lower": 0.1610, "upper": 0.1611},
    "TradeOffAnswer": {
        "false_positive_rates": [0.0, 0.1, 1.0],
        "false_negative_rates_lower": [1.0, 0.8, 0.0],
        "false_negative_rates_upper": [1.0, 0.8001, 0.0],
        "membership_advantage": {"lower": 0.1610, "upper": 0.1611},
        "prior": 0.5,
        "attack_success": {"lower": 0.5805, "upper": 0.5806},
        "posterior_lower": [0.5, 0.6666, 0.5],
        "posterior_upper": [0.5, 0.6667, 0.5],
        "gaussian_dp": {"mu": 0.4065, "error": 0.0012},
        "mechanism_hash": "sha256:" + 64 * "0",
        "assumptions": _ASSUMPTIONS,
    },
    "MethodView": {
        "method": "zcdp",
        "title": "Zero-concentrated DP",
        "source": "Bun & Steinke 2016",
        "needs": "Gaussian releases",
        "proves": "an upper bound of ε",
        "default": False,
    },
    "MethodsAnswer": {"methods": []},
    "BatchItem": {"path": "/v1/epsilon", "body": {"mechanism": _RUN, "delta": 1e-5}},
    "BatchResult": {"status": 200, "body": _GUARANTEE},
    "BatchAnswer": {"results": [{"status": 200, "body": _GUARANTEE}]},
    "HealthAnswer": {"status": "ok"},
    "NeighbouringRelation": "add_or_remove_one",
    "Status": "proven",
}


class AffordableView(BaseModel):
    """What would fit."""

    steps: int | None = Field(description="of this mechanism; null if without end")
    noise_multiplier: float | None = Field(description="with which the whole plan would fit")


class ProblemView(_Strict):
    """An RFC 9457 problem."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:privacy-accountant:problem:invalid-request",
                    "title": "The request is malformed",
                    "status": 422,
                    "detail": "/mechanism/noise_multiplier must be a number ≥ 0.01 and ≤ 1e+06",
                    "code": "invalid-request",
                    "errors": [
                        {
                            "pointer": "/mechanism/noise_multiplier",
                            "message": "must be a number ≥ 0.01 and ≤ 1e+06",
                        }
                    ],
                }
            ]
        }
    )
    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[dict[str, str]] = Field(default_factory=list)
    affordable: AffordableView | None = Field(
        default=None, description="with `budget-exhausted`: what would fit"
    )
