"""Request and answer models of the computation API. Field names are the wire contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.config import JsonDict, JsonValue

from accountant_service import importing, mechanisms
from accountant_service.accounting import risk, solver
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.accounting.methods import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.mechanisms import DpSgd, MechanismError, Sampling
from accountant_service.mechanisms.json_form import fields_of
from accountant_service.mechanisms.kinds import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.questions.question_fields import OnPage
from accountant_service.writing.number_format import round_nearest as shown

MECHANISM_PLACEHOLDER: Final = "x-mechanism"  # replaced by a reference when OpenAPI is built
RUN_FIELDS: Final = fields_of(DpSgd)


def _check_method(name: object) -> str:
    """Return the name of a known accounting method, or raise."""
    if not isinstance(name, str) or name not in ACCOUNTANTS:
        raise ValueError("must be one of " + ", ".join(ACCOUNTANTS))
    return name


def _check_format(name: object) -> str | None:
    """Return the name of a known import format, or None if none is given; raise for other names."""
    if name is not None and (not isinstance(name, str) or name not in importing.FORMATS):
        raise ValueError("must be one of " + ", ".join(importing.FORMATS))
    return name


MechanismField = Annotated[
    Any,  # a Mechanism; named so, pydantic would describe the dataclasses a second time
    PlainValidator(mechanisms.from_json),
    WithJsonSchema({"type": "object", MECHANISM_PLACEHOLDER: True}),
]
MethodField = Annotated[
    str,
    PlainValidator(_check_method),
    WithJsonSchema({"type": "string", "enum": list(ACCOUNTANTS)}),
    Field(description="the accounting method"),
]
DELTA_MIN: Final = 1e-50  # except 0


def _check_delta(value: float) -> float:
    """Return a δ that is 0 or not too small to compute with, or raise."""
    if 0 < value < DELTA_MIN:
        raise ValueError(f"must be 0, or ≥ {shown(DELTA_MIN)}")
    return value


_DELTA_ON_PAGE: Final = OnPage(
    "1e-5", "Failure probability", "δ", "well below 1 ÷ number of records", (-10, -2)
)
DeltaField = Annotated[
    float,
    Field(ge=0, lt=1, description="δ: 0, or from 1e-50 to below 1"),
    AfterValidator(_check_delta),
    _DELTA_ON_PAGE,
]
PositiveDeltaField = Annotated[
    float, Field(ge=DELTA_MIN, lt=1, description="δ, from 1e-50 to below 1"), _DELTA_ON_PAGE
]
EpsilonField = Annotated[float, Field(ge=0, le=1e6, description="ε, from 0 to 1e6")]
TargetField = Annotated[float, Field(gt=0, le=1e6)]

_RUN: Final[JsonDict] = {
    "kind": "dp_sgd",
    "noise_multiplier": 1.1,
    "sample_rate": 0.01,
    "steps": 1000,
}


@dataclass(frozen=True, slots=True)
class UnreadBody:
    """A request body too large to parse in the serving process; a computation process parses it.

    Attributes:
        raw: the bytes of the body.
    """

    raw: bytes


ALLOW_UNREAD_BODY: Final = WrapValidator(
    lambda value, validate: value if isinstance(value, UnreadBody) else validate(value)
)


class _StrictModel(BaseModel):
    """Base model: immutable, without coercion, unknown fields or infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Question(_StrictModel):
    """Base of the requests that have one answer.

    Attributes:
        no_answer: why there may be none, as the documentation says it.
    """

    no_answer: ClassVar[str] = "no finite ε"


class RelationRequest(Question):
    """Base of requests that choose a neighbouring relation."""

    neighbouring_relation: Annotated[
        NeighbouringRelation,
        Field(strict=False, description="the neighbouring relation"),
        OnPage(label="Neighbouring datasets"),
    ] = NeighbouringRelation.ADD_OR_REMOVE_ONE


class _CertifiedRequest(RelationRequest):
    """Base of requests that choose the width of the proved interval."""

    tolerance: Annotated[
        float | None,
        Field(
            ge=1e-7,
            le=0.5,
            description="largest allowed width of the proved interval, as a share of max(ε, 0.05), "
            "or of δ where δ is computed; without it the service aims at 1e-3 and returns what it "
            "reaches",
        ),
    ] = None


class EpsilonRequest(_CertifiedRequest):
    """Compute the ε of a run, or of any mechanism, at δ."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "delta": 1e-5}]})
    mechanism: MechanismField
    delta: DeltaField
    method: MethodField = DEFAULT_METHOD


class DeltaRequest(_CertifiedRequest):
    """Compute the δ of a run, or of any mechanism, at ε."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "epsilon": 2.0}]})
    mechanism: MechanismField
    epsilon: EpsilonField
    method: MethodField = DEFAULT_METHOD


TARGETS: Final = ("epsilon", "advantage", "attack_success", "true_positive_rate", "mu")
QUALIFIERS: Final = {
    "delta": ("epsilon", "mu"),
    "prior": ("attack_success",),
    "false_positive_rate": ("true_positive_rate",),
}
_RiskField = Annotated[float | None, Field(gt=0, lt=1)]


class _TargetRequest(RelationRequest):
    """Base of requests with a target: (ε, δ) or a risk."""

    no_answer = "no value that meets the target"

    epsilon: Annotated[
        TargetField | None,
        Field(description="target ε, such as 2; with `delta`"),
        OnPage("2", "Target", "ε", "the runs must not exceed it", (-1, 1.3)),
    ] = None
    delta: Annotated[
        DeltaField | None,
        Field(
            description="δ of the target; with `mu`, by how much the trade-off curve may miss it"
        ),
    ] = None
    advantage: Annotated[
        _RiskField, Field(description="largest membership advantage, such as 0.1, instead of ε")
    ] = None
    attack_success: Annotated[
        _RiskField,
        Field(description="largest success of guessing membership, such as 0.6, instead of ε"),
    ] = None
    prior: Annotated[
        float | None,
        Field(
            ge=1e-9,
            le=1 - 1e-9,
            description="with `attack_success`: probability of membership; 0.5 by default",
        ),
    ] = None
    true_positive_rate: Annotated[
        _RiskField,
        Field(description="largest rate, with `false_positive_rate`, instead of ε"),
    ] = None
    false_positive_rate: Annotated[
        float | None,
        Field(ge=1e-12, le=0.999, description="with `true_positive_rate`, such as 0.001"),
    ] = None
    mu: Annotated[
        float | None,
        Field(
            gt=0,
            le=1000,
            description="target μ of Gaussian DP, up to `delta` if that is given, instead of ε",
        ),
    ] = None
    method: MethodField = DEFAULT_METHOD
    earlier: Annotated[
        MechanismField | None,
        Field(description="releases made before, as JSON; all together must meet the target"),
    ] = None

    def target(self) -> solver.SolverTarget:
        """Return the privacy target that the run must meet.

        Raises:
            MechanismError: there is not exactly one target, or it is incomplete.
        """
        given = {name for name in TARGETS if getattr(self, name) is not None}
        if len(given) != 1:
            raise MechanismError(
                ("", "must have exactly one target: " + ", ".join(TARGETS) + f", not {len(given)}")
            )
        (name,) = given
        for other, allowed in QUALIFIERS.items():
            if getattr(self, other) is not None and name not in allowed:
                raise MechanismError((f"/{other}", "belongs to " + " or ".join(allowed)))
        if name == "epsilon":
            if self.epsilon is None or self.delta is None:
                raise MechanismError(("/delta", "is required with epsilon"))
            accountant = ACCOUNTANTS[self.method]
            relation = self.neighbouring_relation
            return solver.Target(
                accountant, relation, self.epsilon, self.delta, earlier=self.earlier
            )
        if self.method != DEFAULT_METHOD:
            raise MechanismError(("/method", f"must be {DEFAULT_METHOD} for a risk"))
        return self._risk_target(name)

    def _risk_target(self, name: str) -> solver.RiskTarget:
        """Return a target that limits the risk measure of this name.

        Raises:
            MechanismError: the risk is not above that of guessing.
        """
        measures: dict[str, Callable[[], risk.RiskMeasure]] = {
            "advantage": risk.Advantage,
            "attack_success": lambda: risk.AttackSuccess(self.prior or 0.5),
            "true_positive_rate": lambda: risk.TruePositiveRate(self.false_positive_rate or 0.0),
            "mu": lambda: risk.GaussianMu(self.delta or 0.0),
        }
        if name == "true_positive_rate" and self.false_positive_rate is None:
            raise MechanismError(("/false_positive_rate", "is required with true_positive_rate"))
        measure, limit = measures[name](), float(getattr(self, name))
        if limit <= measure.least():
            raise MechanismError(
                (
                    f"/{name}",
                    f"must be above {shown(measure.least())}, which guessing achieves",
                )
            )
        return solver.RiskTarget(measure, self.neighbouring_relation, limit, earlier=self.earlier)


def _of_run(name: str, **limits: Any) -> Any:
    """Return the description of a field as that of a run has it."""
    return Field(description=RUN_FIELDS[name].about, **limits)


class _RunRequest(_TargetRequest):
    """A DP-SGD run with one unknown parameter, and a target: (ε, δ) or a risk."""

    sampling: Annotated[Sampling, _of_run("sampling"), OnPage()] = "poisson"
    sample_rate: Annotated[float | None, _of_run("sample_rate"), OnPage("0.01", slider=(-4, 0))] = (
        None
    )
    steps: Annotated[int | None, _of_run("steps"), OnPage("1000", slider=(0, 6))] = None
    dataset_size: Annotated[
        int | None, _of_run("dataset_size"), OnPage("60000", "Records", "N")
    ] = None
    batch_size: Annotated[int | None, _of_run("batch_size"), OnPage("600", symbol="B")] = None
    epochs: Annotated[float | None, _of_run("epochs"), OnPage("10", symbol="E")] = None

    solved_for: ClassVar[str]
    placeholder: ClassVar[float]
    left_out: ClassVar[tuple[str, ...]] = ()  # besides: what would determine it

    def run(self) -> DpSgd:
        """Return the run with a placeholder value for the unknown parameter."""
        known = self.model_dump(include=set(RUN_FIELDS), exclude_none=True)
        run = mechanisms.from_json({"kind": "dp_sgd", **known, self.solved_for: self.placeholder})
        assert isinstance(run, DpSgd)
        return run

    @model_validator(mode="after")
    def _check_run(self) -> _RunRequest:
        """Check that the run is valid and leaves out the parameter to solve for."""
        if getattr(self, self.solved_for, None) is not None:
            raise MechanismError(
                (f"/{self.solved_for}", "is the parameter to solve for: leave it out")
            )
        faults: list[tuple[str, str]] = []
        for check in (self.target, self.run):
            try:
                check()
            except MechanismError as error:
                faults += error.faults
        if faults:
            raise MechanismError(*faults)
        return self


class NoiseMultiplierRequest(_RunRequest):
    """Find the least noise multiplier with which a run meets an (ε, δ) or risk target."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"sample_rate": 0.01, "steps": 1000, "epsilon": 2.0, "delta": 1e-5}]
        }
    )
    solved_for = "noise_multiplier"
    placeholder = 1.0


class _NoisyRunRequest(_RunRequest):
    """Base of requests for a run whose noise multiplier is known."""

    noise_multiplier: Annotated[
        float,
        _of_run("noise_multiplier", ge=NOISE_MIN, le=NOISE_MAX),
        OnPage("1.1", slider=(-0.5, 1.5)),
    ]


class StepsRequest(_NoisyRunRequest):
    """Find the largest number of steps with which a run meets an (ε, δ) or risk target."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"noise_multiplier": 1.1, "sample_rate": 0.01, "epsilon": 2.0, "delta": 1e-5}
            ]
        }
    )
    solved_for = "steps"
    placeholder = 0
    left_out = ("epochs",)


class SampleRateRequest(_NoisyRunRequest):
    """Find the largest sample rate with which a run meets an (ε, δ) or risk target."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"noise_multiplier": 1.1, "steps": 1000, "epsilon": 2.0, "delta": 1e-5}]
        }
    )
    steps: Annotated[int, _of_run("steps")]
    sampling: Annotated[Literal["poisson"], _of_run("sampling")] = "poisson"
    solved_for = "sample_rate"
    placeholder = 0.01
    left_out = ("dataset_size", "batch_size", "epochs", "sampling")


class SolveRequest(_TargetRequest):
    """Find the value of a mechanism's parameter that costs most within an (ε, δ) or risk target."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "mechanism": {
                        "kind": "repeated",
                        "count": 3,
                        "mechanism": {"kind": "laplace", "noise_multiplier": None},
                    },
                    "parameter": "/mechanism/noise_multiplier",
                    "epsilon": 1.0,
                    "delta": 0,
                }
            ]
        }
    )
    mechanism: Annotated[
        dict[str, Any],
        Field(
            description="any mechanism as JSON; the parameter's value is ignored, and may be null"
        ),
    ]
    parameter: Annotated[
        str,
        Field(
            max_length=1000,
            description="where the number is in the mechanism, as a JSON pointer, such as "
            "/mechanism/noise_multiplier; it may be a noise multiplier, scale, flip_probability, "
            "sample_rate, steps, count, records, epsilon, delta, mu or rho",
        ),
    ]

    def free_parameter(self) -> mechanisms.FreeParameter:
        """Return the free parameter of the mechanism.

        Raises:
            MechanismError: the pointer leads to nothing that can be solved for.
        """
        return mechanisms.free_parameter(self.mechanism, self.parameter)

    @model_validator(mode="after")
    def _check_parameter(self) -> SolveRequest:
        """Check the target, the pointer and the mechanism."""
        self.target()
        self.free_parameter()
        return self


_Methods = Annotated[list[MethodField], Field(min_length=1, max_length=len(ACCOUNTANTS))]


class CompareRequest(_CertifiedRequest):
    """Compare the ε of all methods with what is proved."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "delta": 1e-5}]})
    mechanism: MechanismField
    delta: DeltaField
    methods: Annotated[_Methods | None, Field(description="names of methods; all by default")] = (
        None
    )


class CurveRequest(RelationRequest):
    """Compute ε after each of several step counts of a run."""

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
    methods: _Methods = Field(
        default_factory=lambda: [DEFAULT_METHOD], description="the accounting methods"
    )
    points: Annotated[
        int, Field(ge=1, le=200, description="number of step counts, evenly spaced")
    ] = 50

    @model_validator(mode="after")
    def _check_mechanism_is_run(self) -> CurveRequest:
        """Check that the mechanism is a DP-SGD run, which has steps."""
        if not isinstance(self.mechanism, DpSgd):
            raise MechanismError(
                ("/mechanism/kind", "must be dp_sgd: the curve follows the steps of a run")
            )
        return self


class TradeOffRequest(RelationRequest):
    """Compute the trade-off curve of the best membership attacker."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mechanism": _RUN, "prior": 0.5}]})
    mechanism: MechanismField
    prior: Annotated[
        float,
        Field(ge=1e-9, le=1 - 1e-9, description="probability that a record in question was used"),
    ] = 0.5
    points: Annotated[
        int, Field(ge=2, le=1000, description="number of false-positive rates, from 0 to 1")
    ] = 101
    false_positive_rates: Annotated[
        list[Annotated[float, Field(ge=0, le=1)]] | None,
        Field(
            min_length=1,
            max_length=1000,
            description="the rates to answer for, instead of `points` rates from 0 to 1",
        ),
    ] = None

    @model_validator(mode="after")
    def _check_rates(self) -> TradeOffRequest:
        """Check that the rates are chosen in one way."""
        if self.false_positive_rates is not None and "points" in self.model_fields_set:
            raise MechanismError(("/points", "must be left out if false_positive_rates are given"))
        return self


class ImportRequest(Question):
    """Import a configuration or history of another tool: its mechanism, its cost and a lint."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "document": {"history": [[1.1, 0.01, 1000]], "mechanism": "rdp"},
                    "delta": 1e-5,
                    "dataset_size": 60000,
                    "batch_size": 600,
                }
            ]
        }
    )
    no_answer = "no noise that reaches the ε that the document targets"

    document: Annotated[
        str | dict[str, Any] | list[Any],
        Field(description="the document: JSON, or text that is JSON, TOML, YAML or a Python repr"),
    ]
    format: Annotated[
        str | None,
        PlainValidator(_check_format),
        WithJsonSchema(
            {"anyOf": [{"type": "string", "enum": list(importing.FORMATS)}, {"type": "null"}]}
        ),
        Field(description="the tool that wrote the document; found from it by default"),
        OnPage(label="Tool"),
    ] = None
    delta: Annotated[
        DeltaField | None,
        Field(description="δ, if the document names none"),
        OnPage("1e-5", "Failure probability", "δ"),
    ] = None
    epsilon: Annotated[
        TargetField | None,
        Field(description="an ε that is claimed"),
        OnPage(label="Claimed", symbol="ε"),
    ] = None
    dataset_size: Annotated[
        int | None,
        Field(ge=1, le=COUNT_MAX, description="number of records, if the document does not say"),
        OnPage("60000", "Records", "N"),
    ] = None
    batch_size: Annotated[
        int | None,
        Field(ge=1, le=COUNT_MAX, description="expected batch size, if the document does not say"),
        OnPage(symbol="B"),
    ] = None
    sampling: Annotated[
        Literal["poisson", "fixed_size", "shuffled", "none"] | None,
        Field(description="how batches are drawn, if the document does not say"),
        OnPage(label="How batches are drawn"),
    ] = None
    neighbouring_relation: Annotated[
        NeighbouringRelation | None,
        Field(strict=False, description="the neighbouring relation, if the document does not say"),
        OnPage(label="Neighbouring datasets"),
    ] = None

    def read(self) -> importing.Imported:
        """Parse the document; return its mechanism, its claims and the findings."""
        facts = importing.Facts(
            self.dataset_size,
            self.batch_size,
            self.sampling,
            self.epsilon,
            self.delta,
            self.neighbouring_relation,
        )
        return importing.read_document(self.document, facts, self.format)

    @model_validator(mode="after")
    def _check_document(self) -> ImportRequest:
        """Check that the document can be read, and that it or the request names δ."""
        try:
            found = self.read()
            importing.require_valid(found)
        except importing.DocumentError as error:
            raise MechanismError(
                *(("/document" + pointer, message) for pointer, message in error.faults)
            ) from None
        if found.delta is None and found.mechanism is not None:
            raise MechanismError(("/delta", "is required: the document names no δ"))
        return self


class BatchItem(_StrictModel):
    """One request of a batch: its path and its body."""

    path: str
    body: dict[str, Any]


class BatchRequest(_StrictModel):
    """Up to 1 000 requests, answered in order and independently."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"requests": [{"path": "/v1/epsilon", "body": {"mechanism": _RUN, "delta": 1e-5}}]}
            ]
        }
    )
    requests: Annotated[
        list[BatchItem],
        Field(min_length=1, max_length=1000, description="the questions, each with its path"),
    ]


# --- answers, built by `views`


class Answer(_StrictModel):
    """Base model of answers and their parts."""

    @classmethod
    def of(cls, source: object, **changes: Any) -> Self:
        """Build the model from an object's attributes, without validation.

        Args:
            source: has an attribute for each field that is not in `changes`.
            changes: values of the fields that are not copied.
        """
        copied = {name: getattr(source, name) for name in cls.model_fields if name not in changes}
        return cls.model_construct(**copied, **changes)  # type: ignore[return-value]


class AssumptionView(Answer):
    """One hypothesis of the method's theorem, and whether it holds."""

    statement: str
    holds: bool
    source: str


class CertifiedEpsilon(Answer):
    """A proved interval around the true ε."""

    epsilon_lower: float
    epsilon_upper: float


class CertifiedDelta(Answer):
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
GUARANTEE_EXAMPLE: Final[JsonDict] = {
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


def _guarantee_example(lower: float, upper: float) -> JsonDict:
    """Return the example of a guarantee with another proved interval of ε."""
    certified: JsonDict = {"epsilon_lower": lower, "epsilon_upper": upper}
    return GUARANTEE_EXAMPLE | {"epsilon": upper, "certified": certified}


class GuaranteeView(Answer):
    """A claim of (ε, δ)-differential privacy, its status and the hypotheses it rests on."""

    model_config = ConfigDict(json_schema_extra={"examples": [GUARANTEE_EXAMPLE]})
    epsilon: float
    delta: float
    method: str
    status: Annotated[Status, Field(strict=False)]
    certified: CertifiedEpsilon | CertifiedDelta | None = None
    certified_reason: str | None = None
    warnings: list[str] = Field(
        default_factory=list,
        description="reasons why `certified` is wider than the tolerance, if it is",
    )
    neighbouring_relation: Annotated[NeighbouringRelation, Field(strict=False)]
    sampling: str
    assumptions: list[AssumptionView]
    optimal_order: float | None = None
    conversion: str | None = None
    mechanism_hash: str
    accountant_version: str


_BOUNDS_STATUS: Final = (
    "`proven`, or `estimate` if a hypothesis fails: then neither bound is proved"
)


class RiskView(Answer):
    """Bounds of the risk that was solved for. They are proved if `status` is `proven`.

    `mu` with `delta`: the run is (ε, δ_μ(ε) + delta)-DP at every ε, δ_μ that of the Gaussian
    mechanism, so that no attack's true-positive rate exceeds that against it by more than `delta`.
    """

    lower: float
    upper: float
    status: Annotated[Status, Field(strict=False, description=_BOUNDS_STATUS)]


class NoiseMultiplierAnswer(Answer):
    """The least noise multiplier that meets the target, with its guarantee."""

    noise_multiplier: float
    guarantee: GuaranteeView
    risk: RiskView | None = None


class SolveAnswer(Answer):
    """The value of a free parameter that costs most within the target, with its guarantee.

    A whole number is the largest that meets the target, and `next` is the guarantee of one more.
    """

    parameter: str
    value: float | int
    mechanism: dict[str, Any]
    guarantee: GuaranteeView
    next: GuaranteeView | None = None
    risk: RiskView | None = None
    undecided: UndecidedView | None = None


class UndecidedView(Answer):
    """An undecided next step: neither proved to meet the target nor proved to miss it."""

    margin: float = Field(
        description="largest possible difference between its true ε, or risk, and the target"
    )


class StepsAnswer(Answer):
    """The largest number of steps that meets the target; `next` is for one more step."""

    steps: Annotated[int, Field(le=COUNT_MAX)]
    guarantee: GuaranteeView
    next: GuaranteeView
    risk: RiskView | None = None
    undecided: UndecidedView | None = Field(
        default=None,
        description="set if the proved interval of `next` contains the target; null if `next` is "
        "proved to exceed it",
    )


class SampleRateAnswer(Answer):
    """The largest sample rate that meets the target, with its guarantee."""

    sample_rate: float
    guarantee: GuaranteeView
    risk: RiskView | None = None


class InapplicableView(Answer):
    """A method that does not apply, and the reason."""

    method: str
    code: str
    reason: str


class CompareAnswer(Answer):
    """The certified guarantee and the answer of each method."""

    certified: GuaranteeView | None = None
    certified_reason: str | None = None
    guarantees: list[GuaranteeView | InapplicableView]


class CurveView(Answer):
    """One method's ε at each step count."""

    method: str
    status: Annotated[Status, Field(strict=False)]
    epsilon: list[float | None]
    warnings: list[str] = Field(
        default_factory=list,
        description="reasons why proved intervals along the curve are wider than 1e-3, if any are",
    )
    assumptions: list[AssumptionView]


class CurveAnswer(Answer):
    """ε after each step count, one curve for each method."""

    steps: list[int]
    curves: list[CurveView | InapplicableView]


class IntervalView(Answer):
    """A lower and an upper bound."""

    lower: float
    upper: float


class GaussianDpView(Answer):
    """The Gaussian mechanism with the nearest trade-off curve: its μ and the largest difference."""

    mu: float
    error: float


class TradeOffAnswer(Answer):
    """The trade-off curve of the best membership attacker, each value between two bounds.

    The bounds are proved if `status` is `proven`. For each false-positive rate: the least
    false-negative rate, and the posterior probability that a record is present if the attacker says
    so.
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
    status: Annotated[Status, Field(strict=False, description=_BOUNDS_STATUS)]
    assumptions: list[AssumptionView]


class FindingView(Answer):
    """Something wrong, or worth knowing, in an imported document."""

    code: str
    severity: Annotated[importing.Severity, Field(strict=False)]
    pointer: str = Field(description="JSON pointer into the document")
    message: str
    instead: str = Field(description="what is true instead, or what to do")


class CheckedClaimView(Answer):
    """An (ε, δ) that is claimed, and what is proved about it."""

    pointer: str
    epsilon: float
    delta: float
    status: Annotated[Status, Field(strict=False)]
    verdict: Annotated[importing.Verdict, Field(strict=False)]
    true_epsilon: IntervalView | None = Field(description="proved bounds of ε at the claimed δ")
    true_delta: IntervalView | None = Field(
        description="proved bounds of δ at the claimed ε, if the claim is refuted"
    )


class NoiseTailView(Answer):
    """A lower bound of δ at every ε, if this generator draws the noise: it has a largest draw."""

    generator: str = Field(description="library, precision and device")
    largest_draw: float = Field(description="of a standard normal number, or of a pair's radius")
    delta_lower: float


class ImportAnswer(Answer):
    """An imported document: its mechanism, what that costs, its claims and the findings."""

    tool: str
    verdict: Annotated[
        importing.Verdict,
        Field(
            strict=False,
            description="of the worst claim; without a claim, of the tool's own accountant",
        ),
    ]
    summary: str = Field(description="the verdict in a sentence")
    mechanism: dict[str, Any] | None
    neighbouring_relation: Annotated[NeighbouringRelation, Field(strict=False)]
    guarantee: GuaranteeView | None
    guarantee_reason: str | None
    claims: list[CheckedClaimView]
    findings: list[FindingView]
    noise_tails: list[NoiseTailView] = Field(
        description="where the generators end that may draw the tool's noise, and what that costs"
    )


class MethodView(Answer):
    """An accounting method."""

    method: str
    title: str
    source: str
    needs: str
    proves: str
    default: bool


class MethodsAnswer(Answer):
    """All accounting methods."""

    methods: list[MethodView]


class BatchResult(Answer):
    """The answer to one request of a batch, or its problem."""

    status: int
    body: dict[str, Any]


class BatchAnswer(Answer):
    """The answers to a batch, in the order of the requests."""

    results: list[BatchResult]


class HealthAnswer(Answer):
    """The answer of a health check that succeeds."""

    status: Literal["ok"]


# Examples of the schemas in the OpenAPI document that carry none of their own.
_CURVE: Final[JsonDict] = {
    "method": "pld",
    "status": "proven",
    "epsilon": [1.0826, 1.51537],
    "assumptions": _ASSUMPTIONS,
}
_NOISE_TAIL: Final[JsonDict] = {
    "generator": "PyTorch, float32, CPU",
    "largest_draw": 5.768107546403532,
    "delta_lower": 1.49e-05,
}
EXAMPLES: Final[JsonDict] = {
    "AssumptionView": {
        "statement": "q < 1/σ",
        "holds": True,
        "source": "Ding et al. 2021, Theorem 3",
    },
    "CertifiedEpsilon": {"epsilon_lower": 1.51536, "epsilon_upper": 1.51537},
    "CertifiedDelta": {"delta_lower": 9.99e-06, "delta_upper": 1e-05},
    "NoiseMultiplierAnswer": {
        "noise_multiplier": 0.9593,
        "guarantee": GUARANTEE_EXAMPLE,
        "risk": None,
    },
    "StepsAnswer": {
        "steps": 1725,
        "guarantee": _guarantee_example(1.99983, 1.99984),
        "next": _guarantee_example(2.00043, 2.00044),
        "undecided": None,
    },
    "SolveAnswer": {
        "parameter": "/mechanism/noise_multiplier",
        "value": 3.0,
        "mechanism": {
            "kind": "repeated",
            "count": 3,
            "mechanism": {"kind": "laplace", "noise_multiplier": 3.0},
        },
        "guarantee": GUARANTEE_EXAMPLE,
        "next": None,
        "risk": None,
        "undecided": None,
    },
    "UndecidedView": {"margin": 2e-9},
    "RiskView": {"lower": 0.0999999, "upper": 0.1, "status": "proven"},
    "SampleRateAnswer": {
        "sample_rate": 0.01,
        "guarantee": GUARANTEE_EXAMPLE,
        "risk": None,
    },
    "InapplicableView": {
        "method": "mma",
        "code": "method-not-applicable",
        "reason": "mma has no formula for laplace noise",
    },
    "CompareAnswer": {
        "certified": GUARANTEE_EXAMPLE,
        "certified_reason": None,
        "guarantees": [GUARANTEE_EXAMPLE],
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
        "status": "proven",
        "assumptions": _ASSUMPTIONS,
    },
    "FindingView": {
        "code": "delta-too-large",
        "severity": "warning",
        "pointer": "",
        "message": "δ = 0.001 is not below 1/N = 0.001",
        "instead": "choose δ well below 0.001",
    },
    "CheckedClaimView": {
        "pointer": "/epsilon",
        "epsilon": 1.0,
        "delta": 1e-05,
        "status": "refuted",
        "verdict": "too_small",
        "true_epsilon": {"lower": 1.51536, "upper": 1.51537},
        "true_delta": {"lower": 0.0008, "upper": 0.0009},
    },
    "ImportAnswer": {
        "tool": "an Opacus accountant's history",
        "verdict": "holds_but_loose",
        "summary": "The tool's ε = 1.71175 at δ = 1e-5 holds but is loose: the true ε is at most "
        "1.516.",
        "mechanism": _RUN,
        "neighbouring_relation": "add_or_remove_one",
        "guarantee": GUARANTEE_EXAMPLE,
        "guarantee_reason": None,
        "claims": [],
        "findings": [],
        "noise_tails": [_NOISE_TAIL],
    },
    "NoiseTailView": _NOISE_TAIL,
    "Severity": "error",
    "Verdict": "holds",
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
    "BatchResult": {"status": 200, "body": GUARANTEE_EXAMPLE},
    "BatchAnswer": {"results": [{"status": 200, "body": GUARANTEE_EXAMPLE}]},
    "HealthAnswer": {"status": "ok"},
    "NeighbouringRelation": "add_or_remove_one",
    "Status": "proven",
}


class AffordableView(BaseModel):
    """The steps, or the noise, with which a mechanism fits the remaining budget."""

    steps: int | None = Field(description="steps of this mechanism that fit; null if unlimited")
    noise_multiplier: float | None = Field(
        description="noise multiplier with which the whole plan fits"
    )


class ProblemView(Answer):
    """An RFC 9457 problem document."""

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
        default=None, description="with `budget-exhausted` and `cap-exhausted`: what would fit"
    )
