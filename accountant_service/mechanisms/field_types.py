"""Types of a mechanism's fields: the JSON schema of each, and how its value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from accountant_service.writing.number_format import round_nearest as shown

Json = Any  # a parsed JSON document
RATE_MIN: Final = 1e-12  # sample rates below are 0 or refused


class MechanismError(ValueError):
    """An invalid mechanism description, with the JSON pointer of each fault.

    Attributes:
        faults: pairs of a JSON pointer, relative to the mechanism, and a message.
    """

    def __init__(self, *faults: tuple[str, str]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{pointer or '/'} {message}" for pointer, message in faults))

    def below(self, pointer: str) -> MechanismError:
        """Return the error of a mechanism that has this one at `pointer`."""
        return MechanismError(*((f"{pointer}{inner}", message) for inner, message in self.faults))


class Cost(Enum):
    """The direction in which a mechanism's cost changes, throughout, while a number in it grows.

    The service can solve for a number that is marked so.
    """

    FALLS = "falls"
    RISES = "rises"


@dataclass(frozen=True, eq=False)
class FieldType:
    """A field's JSON schema, and the function that reads and checks its value.

    `read` takes the value and its JSON pointer, and raises `MechanismError`.
    """

    schema: Mapping[str, Json]
    read: Callable[[Json, str], Any]


def number(low: float, high: float, *, open_low: bool = False, whole: bool = False) -> FieldType:
    """Return the type of a number from `low` to `high`; `open_low` excludes `low` itself."""
    kind = "a whole number" if whole else "a number"
    sign = ">" if open_low else "≥"
    expected = f"must be {kind} {sign} {shown(low)} and ≤ {shown(high)}"

    def read(value: Json, pointer: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MechanismError((pointer, expected))
        if not (low <= value <= high) or (open_low and value == low) or (whole and value % 1):
            raise MechanismError((pointer, expected))
        return int(value) if whole else float(value) + 0.0  # -0.0 is 0

    bound = "exclusiveMinimum" if open_low else "minimum"
    return FieldType({"type": "integer" if whole else "number", bound: low, "maximum": high}, read)


def rate() -> FieldType:
    """Return the type of a sample rate: 0, or at least `RATE_MIN` and at most 1."""
    positive = number(RATE_MIN, 1.0)
    expected = f"must be 0, or a number ≥ {shown(RATE_MIN)} and ≤ 1"

    def read(value: Json, pointer: str) -> float:
        if value == 0 and not isinstance(value, bool):
            return 0.0
        try:
            return float(positive.read(value, pointer))
        except MechanismError:
            raise MechanismError((pointer, expected)) from None

    return FieldType({"type": "number", "minimum": 0, "maximum": 1}, read)


def numbers(item: FieldType, expected: str, most: int) -> FieldType:
    """Return the type of a list of 1 to `most` numbers; `expected` describes it in errors."""

    def read(value: Json, pointer: str) -> tuple[float, ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise MechanismError((pointer, f"must be a list of 1 to {most} {expected}"))
        return tuple(item.read(each, f"{pointer}/{i}") for i, each in enumerate(value))

    return FieldType({"type": "array", "items": item.schema, "minItems": 1, "maxItems": most}, read)


def choice(*options: str) -> FieldType:
    """Return the type of a string that is one of the options."""

    def read(value: Json, pointer: str) -> str:
        if value not in options:
            raise MechanismError((pointer, "must be one of " + ", ".join(options)))
        return str(value)

    return FieldType({"type": "string", "enum": list(options)}, read)
