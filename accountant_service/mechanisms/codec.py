"""Read mechanism trees from JSON, write them, and describe them as a JSON schema.

One table lists the fields of each kind; reading, writing and the schema use it. Limits are checked
on the raw document before any recursion, so that no input can exhaust the stack or the memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Final

from accountant_service.canonical_json import escape_pointer
from accountant_service.mechanisms.tree import (
    ApproximateDp,
    BallsInBins,
    BandedMatrixFactorization,
    Composed,
    DiagonalGaussian,
    DiscreteGaussian,
    DiscreteLaplace,
    DpSgd,
    Exponential,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    Gdp,
    Laplace,
    MatrixFactorization,
    Mechanism,
    Parallel,
    PermuteAndFlip,
    PoissonSampled,
    PrivacyProfile,
    PrivateSelection,
    RandomizedResponse,
    Rdp,
    Repeated,
    Repeats,
    ShuffledReports,
    TreeAggregation,
    TruncatedLaplace,
    TruncatedPoissonSampled,
    UserLevel,
    Zcdp,
)
from accountant_service.number_format import round_nearest as shown

DEPTH_MAX: Final = 32  # nested mechanisms
NODES_MAX: Final = 10_000  # mechanisms in one tree
COORDINATES_MAX: Final = 100_000  # of one diagonal_gaussian
COUNT_MAX: Final = 1_000_000_000  # repetitions, steps, records
_RATE_ROUNDING: Final = 1e-9  # relative, of a rate that stands for one over a whole number
BINS_MAX: Final = 100_000  # batches of an epoch of balls-in-bins sampling
RATE_MIN: Final = 1e-12  # sample rates below are 0 or refused
# Noise multipliers outside these limits are refused: double precision is not enough for them.
NOISE_MIN: Final = 0.01
NOISE_MAX: Final = 1e6
LOSS_MAX: Final = 100.0  # greatest ε of a release; beyond it nobody is protected
SENSITIVITY_MAX: Final = 100_000  # of an integer
_CURVE_ROUNDING: Final = 0.01  # relative, that a printed curve may be off
MATRIX_STEPS_MAX: Final = 100_000  # of correlated noise
_MATRIX_WORK_MAX: Final = 10_000_000  # participations times coefficients
POINTS_MAX: Final = 4096  # of a privacy profile or Rényi curve
RECORDS_MAX: Final = 256  # of one person
MIXTURE_SHIFTS_MAX: Final = 1000  # of one gaussian_mixture
_SUM_ROUNDING: Final = 1e-9  # that the sum of a list of probabilities may differ from 1

Json = Any  # a parsed JSON document


class MechanismError(ValueError):
    """An invalid mechanism description, with the JSON pointer of each fault.

    Attributes:
        faults: pairs of a JSON pointer, relative to the mechanism, and a message.
    """

    def __init__(self, *faults: tuple[str, str]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{pointer or '/'} {message}" for pointer, message in faults))


@dataclass(frozen=True)
class _FieldType:
    """A field's JSON schema, and the function that reads and checks its value."""

    schema: Mapping[str, Json]
    read: Callable[[Json, str], Any]


def _number_type(
    low: float, high: float, *, open_low: bool = False, whole: bool = False
) -> _FieldType:
    """Return the type of a number from `low` to `high`; `open_low` excludes `low` itself."""
    kind = "a whole number" if whole else "a number"
    sign = ">" if open_low else "≥"
    expected = f"must be {kind} {sign} {shown(low)} and ≤ {shown(high)}"

    def read(value: Json, pointer: str) -> float:
        """Return the value as a number within limits; else raise an error at `pointer`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MechanismError((pointer, expected))
        if not (low <= value <= high) or (open_low and value == low) or (whole and value % 1):
            raise MechanismError((pointer, expected))
        return int(value) if whole else float(value)

    bound = "exclusiveMinimum" if open_low else "minimum"
    return _FieldType({"type": "integer" if whole else "number", bound: low, "maximum": high}, read)


def _rate_type() -> _FieldType:
    """Return the type of a sample rate: 0, or at least `RATE_MIN` and at most 1."""
    positive = _number_type(RATE_MIN, 1.0)
    expected = f"must be 0, or a number ≥ {shown(RATE_MIN)} and ≤ 1"

    def read(value: Json, pointer: str) -> float:
        """Return the value as a sample rate; else raise an error at `pointer`."""
        if value == 0 and not isinstance(value, bool):
            return 0.0
        try:
            return float(positive.read(value, pointer))
        except MechanismError:
            raise MechanismError((pointer, expected)) from None

    return _FieldType({"type": "number", "minimum": 0, "maximum": 1}, read)


def _number_list_type(item: _FieldType, expected: str, most: int) -> _FieldType:
    """Return the type of a list of 1 to `most` numbers; `expected` describes it in errors."""

    def read(value: Json, pointer: str) -> tuple[float, ...]:
        """Return the value as a tuple of numbers; else raise an error at `pointer`."""
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise MechanismError((pointer, f"must be a list of 1 to {most} {expected}"))
        return tuple(item.read(each, f"{pointer}/{i}") for i, each in enumerate(value))

    return _FieldType(
        {"type": "array", "items": item.schema, "minItems": 1, "maxItems": most}, read
    )


# words of names that titles of kinds and fields write differently
_WORDS: Final = {
    "dp": "DP",
    "gaussian": "Gaussian",
    "gdp": "GDP",
    "laplace": "Laplace",
    "max": "at most",
    "min": "minimum",
    "poisson": "Poisson",
    "rdp": "RDP",
    "sgd": "SGD",
    "std": "standard deviation",
    "stds": "standard deviations",
    "zcdp": "zCDP",
}


def _titled(schema: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Return a field's schema with a title for forms; a `$ref` schema is returned unchanged."""
    return dict(schema) if "$ref" in schema else {"title": _title(name), **schema}


def _title(name: str) -> str:
    """Return a kind's or field's name as a form shows it, such as "Noise multiplier"."""
    first, *others = name.split("_")
    start = _WORDS.get(first, first)
    start = start.capitalize() if start.islower() else start
    return " ".join([start, *(_WORDS.get(word, word) for word in others)])


def _repeats_type() -> _FieldType:
    """Return the field type of a distribution of the number of runs."""
    distributions = ("geometric", "logarithmic", "negative_binomial", "poisson")
    known = {
        "distribution": _choice_type(*distributions),
        "mean": _number_type(1.0, 1e6, open_low=True),
        "shape": _number_type(0.0, 1e3),
    }

    def read(value: Json, pointer: str) -> Repeats:
        """Return the value as a distribution of run counts; else raise an error at `pointer`."""
        if not isinstance(value, dict):
            raise MechanismError((pointer, "must be an object with distribution and mean"))
        needed = {"distribution", "mean"}
        if value.get("distribution") == "negative_binomial":
            needed.add("shape")
        faults = [(f"{pointer}/{each}", "is required") for each in needed - value.keys()]
        faults += [
            (f"{pointer}/{escape_pointer(name)}", "is not a field of repeats")
            for name in value.keys() - needed
        ]
        if faults:
            raise MechanismError(*sorted(faults))
        return Repeats(
            **{each: known[each].read(value[each], f"{pointer}/{each}") for each in needed}
        )

    schema = {
        "type": "object",
        "properties": {name: _titled(each.schema, name) for name, each in known.items()},
        "required": ["distribution", "mean"],
        "additionalProperties": False,
    }
    return _FieldType(schema, read)


def _choice_type(*options: str) -> _FieldType:
    """Return the type of a string that is one of the options."""

    def read(value: Json, pointer: str) -> str:
        """Return the value as one of the options; else raise an error at `pointer`."""
        if value not in options:
            raise MechanismError((pointer, "must be one of " + ", ".join(options)))
        return str(value)

    return _FieldType({"type": "string", "enum": list(options)}, read)


_REFERENCE: Final = {"$ref": "#/components/schemas/Mechanism"}
_NOISE: Final = _number_type(NOISE_MIN, NOISE_MAX)
_RATE: Final = _rate_type()
_COORDINATES: Final = _number_list_type(
    _number_type(0.0, 1e150, open_low=True), "numbers > 0", COORDINATES_MAX
)
_LOSS: Final = _number_type(0.0, LOSS_MAX)
_DELTA: Final = _number_type(0.0, 1.0)
_SENSITIVITY: Final = _number_type(1, SENSITIVITY_MAX, whole=True)
_COUNT: Final = _number_type(0, COUNT_MAX, whole=True)
_SIZE: Final = _number_type(1, COUNT_MAX, whole=True)
_BINS: Final = _number_type(1, BINS_MAX, whole=True)
_MECHANISM: Final = _FieldType(_REFERENCE, lambda value, pointer: _read(value, pointer))
_MECHANISMS: Final = _FieldType(
    {"type": "array", "items": _REFERENCE, "maxItems": NODES_MAX},
    lambda value, pointer: _read_mechanisms(value, pointer),
)

_FIELDS: Final[Mapping[type, Mapping[str, _FieldType]]] = {
    Gaussian: {"noise_multiplier": _NOISE},
    Laplace: {"noise_multiplier": _NOISE},
    DiagonalGaussian: {"sensitivities": _COORDINATES, "noise_stds": _COORDINATES},
    PoissonSampled: {"sample_rate": _RATE, "mechanism": _MECHANISM},
    FixedSizeSampled: {"dataset_size": _SIZE, "batch_size": _SIZE, "mechanism": _MECHANISM},
    BallsInBins: {"bins": _BINS, "mechanism": _MECHANISM, "selections": _BINS},
    Repeated: {"count": _COUNT, "mechanism": _MECHANISM},
    Composed: {"mechanisms": _MECHANISMS},
    DpSgd: {
        "noise_multiplier": _NOISE,
        "sample_rate": _RATE,
        "steps": _COUNT,
        "dataset_size": _SIZE,
        "batch_size": _SIZE,
        "epochs": _number_type(0.0, 1e6),
        "sampling": _choice_type("poisson", "fixed_size", "balls_in_bins", "shuffled", "none"),
    },
    RandomizedResponse: {
        "categories": _number_type(2, COUNT_MAX, whole=True),
        "flip_probability": _number_type(RATE_MIN, 1.0),
    },
    DiscreteLaplace: {
        "scale": _number_type(NOISE_MIN, NOISE_MAX),
        "sensitivity": _SENSITIVITY,
    },
    DiscreteGaussian: {
        "noise_std": _number_type(NOISE_MIN, 1e4),
        "sensitivity": _SENSITIVITY,
    },
    Exponential: {"epsilon": _number_type(1e-6, LOSS_MAX)},
    PermuteAndFlip: {"epsilon": _number_type(1e-6, LOSS_MAX)},
    TruncatedLaplace: {
        "scale": _number_type(NOISE_MIN, NOISE_MAX),
        "bound": _number_type(0.0, 1e9, open_low=True),
        "sensitivity": _number_type(0.0, NOISE_MAX, open_low=True),
    },
    MatrixFactorization: {
        "noise_multiplier": _NOISE,
        "coefficients": _number_list_type(
            _number_type(0.0, 1e6), "decreasing numbers ≥ 0", COORDINATES_MAX
        ),
        "steps": _number_type(1, MATRIX_STEPS_MAX, whole=True),
        "min_separation": _SIZE,
        "participations": _SIZE,
    },
    BandedMatrixFactorization: {
        "noise_multiplier": _NOISE,
        "coefficients": _number_list_type(_number_type(0.0, 1e6), "numbers ≥ 0", COORDINATES_MAX),
        "steps": _SIZE,
        "groups": _SIZE,
        "sample_rate": _RATE,
    },
    TreeAggregation: {
        "noise_multiplier": _NOISE,
        "steps": _number_type(1, MATRIX_STEPS_MAX, whole=True),
        "participations": _SIZE,
        "min_separation": _SIZE,
    },
    PrivateSelection: {"repeats": _repeats_type(), "mechanism": _MECHANISM},
    ShuffledReports: {"reports": _SIZE, "mechanism": _MECHANISM},
    Parallel: {"mechanisms": _MECHANISMS},
    ApproximateDp: {"epsilon": _LOSS, "delta": _DELTA},
    Gdp: {"mu": _number_type(1 / NOISE_MAX, 1 / NOISE_MIN)},
    Zcdp: {"rho": _number_type(1e-12, LOSS_MAX)},
    Rdp: {
        "orders": _number_list_type(
            _number_type(1.0, 1e6, open_low=True), "increasing orders > 1", POINTS_MAX
        ),
        "divergences": _number_list_type(
            _number_type(0.0, 1e6), "increasing divergences ≥ 0", POINTS_MAX
        ),
    },
    PrivacyProfile: {
        "epsilons": _number_list_type(
            _number_type(0.0, 500.0), "increasing numbers ≥ 0", POINTS_MAX
        ),
        "deltas": _number_list_type(_DELTA, "decreasing probabilities", POINTS_MAX),
    },
    UserLevel: {
        "records": _number_type(1, RECORDS_MAX, whole=True),
        "mechanism": _MECHANISM,
    },
    GaussianMixture: {
        "noise_multiplier": _NOISE,
        "shifts": _number_list_type(
            _number_type(0.0, 1e9), "increasing numbers ≥ 0", MIXTURE_SHIFTS_MAX
        ),
        "probabilities": _number_list_type(
            _DELTA, "probabilities that add up to 1", MIXTURE_SHIFTS_MAX
        ),
    },
    TruncatedPoissonSampled: {
        "dataset_size": _SIZE,
        "sample_rate": _RATE,
        "batch_size_max": _SIZE,
        "mechanism": _MECHANISM,
    },
}
_KINDS: Final[Mapping[str, type]] = {str(cls.kind): cls for cls in _FIELDS}  # type: ignore[attr-defined]

_EXAMPLES: Final[Mapping[str, Json]] = {
    "gaussian": {"kind": "gaussian", "noise_multiplier": 1.1},
    "laplace": {"kind": "laplace", "noise_multiplier": 2.0},
    "diagonal_gaussian": {
        "kind": "diagonal_gaussian",
        "sensitivities": [12, 6],
        "noise_stds": [17, 8.5],
    },
    "poisson_sampled": {
        "kind": "poisson_sampled",
        "sample_rate": 0.01,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.1},
    },
    "fixed_size_sampled": {
        "kind": "fixed_size_sampled",
        "dataset_size": 60000,
        "batch_size": 600,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.1},
    },
    "balls_in_bins": {
        "kind": "balls_in_bins",
        "bins": 100,
        "selections": 1,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.1},
    },
    "repeated": {
        "kind": "repeated",
        "count": 1000,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 40.0},
    },
    "composed": {
        "kind": "composed",
        "mechanisms": [
            {"kind": "gaussian", "noise_multiplier": 4.0},
            {"kind": "laplace", "noise_multiplier": 2.0},
        ],
    },
    "dp_sgd": {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1000},
    "randomized_response": {
        "kind": "randomized_response",
        "categories": 4,
        "flip_probability": 0.6,
    },
    "discrete_laplace": {"kind": "discrete_laplace", "scale": 5.0, "sensitivity": 1},
    "discrete_gaussian": {"kind": "discrete_gaussian", "noise_std": 4.0, "sensitivity": 1},
    "exponential": {"kind": "exponential", "epsilon": 0.5},
    "permute_and_flip": {"kind": "permute_and_flip", "epsilon": 0.5},
    "truncated_laplace": {
        "kind": "truncated_laplace",
        "scale": 2.0,
        "bound": 30.0,
        "sensitivity": 1.0,
    },
    "matrix_factorization": {
        "kind": "matrix_factorization",
        "noise_multiplier": 4.0,
        "coefficients": [1.0, 0.5, 0.375],
        "steps": 1000,
        "min_separation": 100,
        "participations": 10,
    },
    "banded_matrix_factorization": {
        "kind": "banded_matrix_factorization",
        "noise_multiplier": 4.0,
        "coefficients": [1.0, 0.5, 0.375],
        "steps": 1000,
        "groups": 10,
        "sample_rate": 0.1,
    },
    "tree_aggregation": {
        "kind": "tree_aggregation",
        "noise_multiplier": 6.0,
        "steps": 1000,
        "participations": 1,
        "min_separation": 1,
    },
    "private_selection": {
        "kind": "private_selection",
        "repeats": {"distribution": "poisson", "mean": 10},
        "mechanism": {"kind": "gaussian", "noise_multiplier": 4.0},
    },
    "shuffled_reports": {
        "kind": "shuffled_reports",
        "reports": 10000,
        "mechanism": {
            "kind": "randomized_response",
            "categories": 4,
            "flip_probability": 0.6,
        },
    },
    "parallel": {
        "kind": "parallel",
        "mechanisms": [
            {"kind": "gaussian", "noise_multiplier": 4.0},
            {"kind": "laplace", "noise_multiplier": 2.0},
        ],
    },
    "approximate_dp": {"kind": "approximate_dp", "epsilon": 0.1, "delta": 1e-7},
    "gdp": {"kind": "gdp", "mu": 0.7},
    "zcdp": {"kind": "zcdp", "rho": 0.05},
    "rdp": {"kind": "rdp", "orders": [2, 4, 8], "divergences": [0.1, 0.2, 0.5]},
    "privacy_profile": {
        "kind": "privacy_profile",
        "epsilons": [0, 1, 2],
        "deltas": [0.3, 0.01, 1e-5],
    },
    "user_level": {
        "kind": "user_level",
        "records": 4,
        "mechanism": {
            "kind": "poisson_sampled",
            "sample_rate": 0.01,
            "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0},
        },
    },
    "gaussian_mixture": {
        "kind": "gaussian_mixture",
        "noise_multiplier": 4.0,
        "shifts": [0, 1, 2.5],
        "probabilities": [0.9, 0.08, 0.02],
    },
    "truncated_poisson_sampled": {
        "kind": "truncated_poisson_sampled",
        "dataset_size": 1000,
        "sample_rate": 0.02,
        "batch_size_max": 40,
        "mechanism": {"kind": "gaussian", "noise_multiplier": 1.2},
    },
}


def from_json(document: Json) -> Mechanism:
    """Read a mechanism from a parsed JSON document.

    Raises:
        MechanismError: the description is invalid; the error lists the faults found.
    """
    _require_bounded_size(document)
    mechanism = _read(document, "")
    if _count_releases(mechanism) > COUNT_MAX:
        raise MechanismError(("", f"must make at most {COUNT_MAX} releases in all"))
    return mechanism


def to_json(mechanism: Mechanism) -> dict[str, Json]:
    """Return the JSON form of a mechanism; `from_json` reads it back as an equal mechanism."""
    return {"kind": mechanism.kind} | {
        field.name: _write(value)
        for field in fields(mechanism)
        if (value := getattr(mechanism, field.name)) is not None
    }


def find_range(kind: str, field: str) -> tuple[float, float, bool]:
    """Return the least and the greatest number that a field allows, and whether it must be whole.

    Args:
        kind: of mechanism.
        field: a number of this kind.
    """
    schema = _FIELDS[_KINDS[kind]][field].schema
    return float(schema["minimum"]), float(schema["maximum"]), schema["type"] == "integer"


def json_schema() -> dict[str, Json]:
    """Return JSON schemas by name: one per kind of mechanism, and `Mechanism`, their union."""
    components = {_component_name(cls): _kind_schema(cls) for cls in _FIELDS}
    references = {name: f"#/components/schemas/{name}" for name in components}
    union = {
        "oneOf": [{"$ref": reference} for reference in references.values()],
        "discriminator": {
            "propertyName": "kind",
            "mapping": {kind: references[_component_name(cls)] for kind, cls in _KINDS.items()},
        },
        "examples": [_EXAMPLES["dp_sgd"]],
    }
    return components | {"Mechanism": union}


def _component_name(cls: type) -> str:
    """Return the name of a kind of mechanism in the OpenAPI components."""
    return cls.__name__ + "Mechanism"


def _kind_schema(cls: Any) -> dict[str, Json]:
    """Return the JSON schema of one kind of mechanism, with titles and defaults for forms."""
    required = [f.name for f in fields(cls) if f.default is MISSING]
    defaults = {f.name: f.default for f in fields(cls) if f.default not in (MISSING, None)}
    return {
        "type": "object",
        "title": _title(cls.kind),
        "description": inspect.getdoc(cls),
        "properties": {"kind": {"const": cls.kind, "title": "Kind"}}
        | {
            name: _titled(field.schema, name)
            | ({"default": defaults[name]} if name in defaults else {})
            for name, field in _FIELDS[cls].items()
        },
        "required": ["kind", *required],
        "additionalProperties": False,
        "examples": [_EXAMPLES[cls.kind]],
    }


def _write(value: Any) -> Json:
    """Return the JSON form of a field's value: a mechanism, a tuple or a scalar."""
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    if isinstance(value, Repeats):
        return {k: v for k, v in asdict(value).items() if v is not None}
    return to_json(value) if type(value) in _FIELDS else value


def _require_bounded_size(document: Json) -> None:
    """Raise MechanismError if the document is too deep or has too many nodes."""
    waiting, nodes = [(document, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        nodes += 1
        if depth > DEPTH_MAX or nodes > NODES_MAX:
            limit = f"must hold at most {NODES_MAX} mechanisms, nested at most {DEPTH_MAX} deep"
            raise MechanismError(("", limit))
        if isinstance(node, dict):
            children = node.get("mechanisms")
            waiting += (
                [(child, depth + 1) for child in children] if isinstance(children, list) else []
            )
            waiting += [(node["mechanism"], depth + 1)] if "mechanism" in node else []


def _read(document: Json, pointer: str) -> Mechanism:
    """Read one mechanism of any kind; `pointer` locates it in error messages."""
    kinds = ", ".join(_KINDS)
    if not isinstance(document, dict):
        raise MechanismError((pointer, f"must be an object with a `kind`: one of {kinds}"))
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise MechanismError((f"{pointer}/kind", f"must be one of {kinds}"))
    cls = _KINDS[kind]
    mechanism: Mechanism = cls(**_read_fields(cls, document, pointer))
    _check_consistency(mechanism, pointer)
    return mechanism


def _read_fields(cls: Any, document: Mapping[str, Json], pointer: str) -> dict[str, Any]:
    """Read the fields of a mechanism of class `cls`; raise an error that lists every fault."""
    known, values = _FIELDS[cls], {}
    faults = [
        (f"{pointer}/{escape_pointer(name)}", "is not a field of " + cls.kind)
        for name in document.keys() - known.keys() - {"kind"}
    ]
    for field in fields(cls):
        if field.name not in document:
            if field.default is MISSING:
                faults.append((f"{pointer}/{field.name}", "is required"))
            continue
        try:
            values[field.name] = known[field.name].read(
                document[field.name], f"{pointer}/{field.name}"
            )
        except MechanismError as error:
            faults += error.faults
    if faults:
        raise MechanismError(*sorted(faults))
    return values


def _count_releases(mechanism: Mechanism) -> int:
    """Return the number of releases of a mechanism, with repetitions."""
    match mechanism:
        case Repeated(count, inner):
            return count * _count_releases(inner)
        case Composed(inners) | Parallel(inners):
            return sum(_count_releases(inner) for inner in inners)
        case (
            PoissonSampled()
            | FixedSizeSampled()
            | BallsInBins()
            | UserLevel()
            | TruncatedPoissonSampled()
            | PrivateSelection()
            | ShuffledReports()
        ):
            return _count_releases(mechanism.mechanism)
        case DpSgd():
            return mechanism.step_count()
        case BandedMatrixFactorization():
            return sum(count for _, count in mechanism.rounds())
        case _:
            return 1


def _read_mechanisms(document: Json, pointer: str) -> tuple[Mechanism, ...]:
    """Read a list of mechanisms; `pointer` locates it in error messages."""
    if not isinstance(document, list):
        raise MechanismError((pointer, "must be a list of mechanisms"))
    return tuple(_read(item, f"{pointer}/{i}") for i, item in enumerate(document))


def _check_consistency(mechanism: Mechanism, pointer: str) -> None:
    """Raise an error at `pointer` if the fields of a mechanism contradict each other."""
    match mechanism:
        case DiagonalGaussian(sensitivities, noise_stds):
            if len(sensitivities) != len(noise_stds):
                raise MechanismError(
                    (
                        f"{pointer}/noise_stds",
                        f"must have {len(sensitivities)} numbers, as many as sensitivities",
                    )
                )
            _check_diagonal(mechanism, pointer)
        case FixedSizeSampled(dataset_size, batch_size):
            if batch_size > dataset_size:
                raise MechanismError((f"{pointer}/batch_size", "must be at most dataset_size"))
        case BallsInBins(bins, inner, selections):
            if selections > bins:
                raise MechanismError(
                    (f"{pointer}/selections", f"must be at most bins, which is {bins}")
                )
            _require_gaussian(inner, f"{pointer}/mechanism")
        case DpSgd():
            _check_dp_sgd(mechanism, pointer)
        case _:
            _check_other_kind(mechanism, pointer)


def _check_other_kind(mechanism: Mechanism, pointer: str) -> None:
    """Continue `_check_consistency` with the remaining kinds; raise an error at `pointer`."""
    match mechanism:
        case DiscreteLaplace(scale, sensitivity):
            _require_enough_noise(f"{pointer}/scale", scale, sensitivity / LOSS_MAX)
        case DiscreteGaussian(noise_std, sensitivity):
            _require_enough_noise(f"{pointer}/noise_std", noise_std, sensitivity / 14)
        case TruncatedLaplace(scale, bound, sensitivity):
            _require_enough_noise(f"{pointer}/scale", scale, sensitivity / LOSS_MAX)
            if scale > NOISE_MAX * sensitivity:  # as Laplace noise: smaller losses underflow
                message = f"must be ≥ the scale divided by {shown(NOISE_MAX)}"
                raise MechanismError((f"{pointer}/sensitivity", message))
            if bound < sensitivity:
                raise MechanismError((f"{pointer}/bound", "must be ≥ the sensitivity"))
        case MatrixFactorization() | BandedMatrixFactorization() | TreeAggregation():
            _check_correlated_noise(mechanism, pointer)
        case ShuffledReports(_, inner):
            _require_local_randomizer(inner, f"{pointer}/mechanism")
        case Rdp() | PrivacyProfile() | GaussianMixture():
            _check_lists(mechanism, pointer)
        case _:
            pass


def _check_lists(mechanism: Rdp | PrivacyProfile | GaussianMixture, pointer: str) -> None:
    """Raise an error at `pointer` if two lists do not describe any mechanism together."""
    match mechanism:
        case Rdp(orders, divergences):
            _require_paired(pointer, "orders", orders, "divergences", divergences)
            _check_renyi_curve(orders, divergences, pointer)
        case PrivacyProfile(epsilons, deltas):
            _require_paired(pointer, "epsilons", epsilons, "deltas", deltas)
            _check_profile(epsilons, deltas, pointer)
        case GaussianMixture(noise_multiplier, shifts, probabilities):
            _require_paired(pointer, "shifts", shifts, "probabilities", probabilities)
            if abs(math.fsum(probabilities) - 1) > _SUM_ROUNDING:
                raise MechanismError((f"{pointer}/probabilities", "must add up to 1"))
            largest = mechanism.drawn()[0][-1]
            if largest == 0:
                raise MechanismError((f"{pointer}/shifts", "must have one > 0 that may be drawn"))
            _check_sensitivity(noise_multiplier, largest, pointer)


def _check_correlated_noise(
    run: MatrixFactorization | BandedMatrixFactorization | TreeAggregation, pointer: str
) -> None:
    """Raise an error at `pointer` if a run with correlated noise has no proved finite cost."""
    match run:
        case MatrixFactorization():
            _check_coefficients(run, pointer)
        case BandedMatrixFactorization():
            _check_bands(run, pointer)
        case TreeAggregation():
            _check_tree(run, pointer)


def _check_coefficients(run: MatrixFactorization, pointer: str) -> None:
    """Raise an error at `pointer` if a run's sensitivity is unproved, or slow to compute."""
    for i in range(1, len(run.coefficients)):
        if run.coefficients[i] > run.coefficients[i - 1]:
            raise MechanismError((f"{pointer}/coefficients/{i}", "must not exceed the one before"))
    _check_participations(run, pointer)
    if run.participations * len(run.coefficients) > _MATRIX_WORK_MAX:
        message = f"times participations must be at most {_MATRIX_WORK_MAX}"
        raise MechanismError((f"{pointer}/coefficients", message))
    _check_sensitivity(run.noise_multiplier, run.sensitivity(), pointer)


def _check_bands(run: BandedMatrixFactorization, pointer: str) -> None:
    """Raise an error at `pointer` if there are more bands than groups, or noise is out of range."""
    if len(run.coefficients) > run.groups:
        message = f"must be at most {run.groups} numbers, as many as groups"
        raise MechanismError((f"{pointer}/coefficients", message))
    for norm, _ in run.rounds():
        _check_sensitivity(run.noise_multiplier, norm, pointer)


def _check_tree(run: TreeAggregation, pointer: str) -> None:
    """Raise an error at `pointer` if participations are impossible, or noise is out of range."""
    _check_participations(run, pointer)
    _, squared = run.squared_sensitivity_bounds()
    _check_sensitivity(run.noise_multiplier, math.sqrt(squared), pointer)


def _check_participations(run: MatrixFactorization | TreeAggregation, pointer: str) -> None:
    """Raise an error at `pointer` if a run is too short for so many separated participations."""
    if run.participations > -(-run.steps // run.min_separation):
        message = "must be possible: at most steps/min_separation, rounded up"
        raise MechanismError((f"{pointer}/participations", message))


def _check_sensitivity(noise_multiplier: float, sensitivity: float, pointer: str) -> None:
    """Raise an error at `pointer` if noise divided by sensitivity is outside the limits."""
    if not sensitivity or not NOISE_MIN <= noise_multiplier / sensitivity <= NOISE_MAX:
        message = f"must be ≥ {shown(NOISE_MIN)} and ≤ {shown(NOISE_MAX)} times the sensitivity"
        raise MechanismError((f"{pointer}/noise_multiplier", f"{message} {shown(sensitivity)}"))


def _require_enough_noise(pointer: str, noise: float, least: float) -> None:
    """Raise an error at `pointer` if a noise scale is below the `least` that is allowed."""
    if noise < least:
        raise MechanismError((pointer, f"must be ≥ {shown(least)} at this sensitivity"))


def _require_paired(
    pointer: str, name: str, values: tuple[float, ...], other: str, others: tuple[float, ...]
) -> None:
    """Raise an error at `pointer` unless `values` increase and `others` has as many numbers."""
    for i in range(1, len(values)):
        if values[i] <= values[i - 1]:
            raise MechanismError((f"{pointer}/{name}/{i}", "must be greater than the one before"))
    if len(others) != len(values):
        message = f"must have {len(values)} numbers, as many as {name}"
        raise MechanismError((f"{pointer}/{other}", message))


def _check_renyi_curve(
    orders: tuple[float, ...], divergences: tuple[float, ...], pointer: str
) -> None:
    """Raise an error at `pointer` if no mechanism has these Rényi divergences at these orders.

    A hundredth is allowed for rounding.
    """
    for i in range(1, len(orders)):
        if divergences[i] < divergences[i - 1] * (1 - _CURVE_ROUNDING):
            message = "must not decrease: a Rényi divergence increases with its order"
            raise MechanismError((f"{pointer}/divergences/{i}", message))
    moments = [(order - 1) * each for order, each in zip(orders, divergences, strict=True)]
    at = _find_nonconvex([1.0, *orders], [0.0, *moments])
    if at is not None:
        message = "lies above the chord of its neighbours: (order − 1)·divergence must be convex"
        raise MechanismError((f"{pointer}/divergences/{at - 1}", message))


def _check_profile(epsilons: tuple[float, ...], deltas: tuple[float, ...], pointer: str) -> None:
    """Raise an error at `pointer` unless δ decreases with ε, convex in e^ε, as any profile does.

    A hundredth is allowed for rounding.
    """
    for i in range(1, len(deltas)):
        if deltas[i] > deltas[i - 1]:
            raise MechanismError((f"{pointer}/deltas/{i}", "must not exceed the one before"))
    at = _find_nonconvex([math.exp(each) for each in epsilons], deltas)
    if at is not None:
        message = "lies above the chord of its neighbours: δ must be convex in e^ε"
        raise MechanismError((f"{pointer}/deltas/{at}", message))


def _find_nonconvex(x: Sequence[float], values: Sequence[float]) -> int | None:
    """Return the first index where values are clearly not convex as a function of x, or None."""
    for i in range(1, len(x) - 1):
        share = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
        chord = values[i - 1] + share * (values[i + 1] - values[i - 1])
        if values[i] > chord * (1 + _CURVE_ROUNDING):
            return i
    return None


def _check_diagonal(mechanism: DiagonalGaussian, pointer: str) -> None:
    """Raise an error at `pointer` if the fields of a diagonal Gaussian contradict each other."""
    try:
        equivalent = mechanism.noise_multiplier()
    except (OverflowError, ZeroDivisionError):
        equivalent = math.nan
    if not NOISE_MIN <= equivalent <= NOISE_MAX:
        message = (
            "must be equivalent to a noise multiplier "
            f"≥ {shown(NOISE_MIN)} and ≤ {shown(NOISE_MAX)}"
        )
        raise MechanismError((f"{pointer}/noise_stds", message))


def _require_gaussian(mechanism: Mechanism, pointer: str) -> None:
    """Raise an error at `pointer` unless a mechanism makes Gaussian releases on all records."""
    match mechanism:
        case Gaussian() | DiagonalGaussian():
            return
        case Repeated(_, inner):
            _require_gaussian(inner, f"{pointer}/mechanism")
        case Composed(inners):
            for number, inner in enumerate(inners):
                _require_gaussian(inner, f"{pointer}/mechanisms/{number}")
        case _:
            message = "must be Gaussian noise without sampling: balls_in_bins is the sampling"
            raise MechanismError((pointer, message))


def _require_local_randomizer(mechanism: Mechanism, pointer: str) -> None:
    """Raise an error at `pointer` unless a mechanism is known to be ε-DP on one input."""
    match mechanism:
        case RandomizedResponse() | DiscreteLaplace() | Exponential() | PermuteAndFlip():
            return
        case ApproximateDp(_, delta):
            if delta > 0:
                message = "must be 0: shuffled_reports needs an ε-DP mechanism"
                raise MechanismError((f"{pointer}/delta", message))
        case _:
            kinds = "randomized_response, discrete_laplace, exponential, permute_and_flip or "
            message = f"must be an ε-DP mechanism of one input: {kinds}approximate_dp with delta 0"
            raise MechanismError((pointer, message))


def _check_dp_sgd(run: DpSgd, pointer: str) -> None:
    """Raise an error at `pointer` if the fields of a training run contradict each other."""
    sizes = run.dataset_size is not None and run.batch_size is not None
    partial = (run.dataset_size is None) != (run.batch_size is None)
    faults = []
    is_rate_known = run.sampling == "none" and not sizes  # then it is 1
    if partial or (sizes == (run.sample_rate is not None) and not is_rate_known):
        given = "sample_rate, or dataset_size and batch_size"
        faults.append((pointer, f"must give either {given}"))
    if (run.steps is None) == (run.epochs is None) or (run.epochs is not None and not sizes):
        faults.append((pointer, "must give either steps, or epochs beside dataset_size"))
    if faults:
        raise MechanismError(*faults)
    if run.dataset_size is not None and (run.batch_size or 0) > run.dataset_size:
        raise MechanismError((f"{pointer}/batch_size", "must be at most dataset_size"))
    if run.sampling == "fixed_size" and not sizes:
        raise MechanismError((pointer, "fixed_size sampling needs dataset_size and batch_size"))
    if run.sampling == "none" and run.rate() != 1.0:
        raise MechanismError((pointer, "sampling none uses all the data: sample_rate must be 1"))
    if run.step_count() > COUNT_MAX:
        raise MechanismError((f"{pointer}/epochs", f"must make at most {COUNT_MAX} steps"))
    if run.sampling == "balls_in_bins" and run.rate() > 0.0:
        _check_bins(run, pointer)


def _check_bins(run: DpSgd, pointer: str) -> None:
    """Raise an error at `pointer` unless a balls-in-bins run has whole epochs of equal batches."""
    bins = run.bins()
    whole = "balls_in_bins sampling needs a whole number of batches an epoch"
    if run.sample_rate is None and (run.batch_size or 1) * bins != run.dataset_size:
        message = (
            f"must divide dataset_size, which is {run.dataset_size}: {whole}. For {bins} batches, "
            f"give sample_rate {1 / bins!r} and steps instead of sizes"
        )
        raise MechanismError((f"{pointer}/batch_size", message))
    if run.sample_rate is not None and abs(run.sample_rate * bins - 1) > _RATE_ROUNDING:
        message = f"must be 1 divided by a whole number, such as {1 / bins!r}: {whole}"
        raise MechanismError((f"{pointer}/sample_rate", message))
    if bins > BINS_MAX:
        name = "sample_rate" if run.sample_rate is not None else "batch_size"
        raise MechanismError(
            (f"{pointer}/{name}", f"must make at most {BINS_MAX} batches an epoch")
        )
    if run.epochs is not None and run.epochs % 1:
        raise MechanismError((f"{pointer}/epochs", "must be whole: balls_in_bins has whole epochs"))
    if run.steps is not None and run.steps % bins:
        message = f"must be a multiple of {bins}: balls_in_bins has whole epochs"
        raise MechanismError((f"{pointer}/steps", message))
