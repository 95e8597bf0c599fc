"""A mechanism with one number left free, such as a Laplace scale in a sum of releases.

Only fields are allowed that their kind marks with `Cost`: the cost rises, or falls, with them
throughout. A search for the boundary of a target needs that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.mechanisms.field_types import Cost, MechanismError
from accountant_service.mechanisms.json_form import fields_of, from_json
from accountant_service.mechanisms.kinds import KINDS, Mechanism

Json = Any

_PARAMETER: Final = "/parameter"  # where an error in the pointer is reported
_POSITIVE_MIN: Final = 1e-12  # tried instead of 0


@dataclass(frozen=True, slots=True)
class FreeParameter:
    """A number in a mechanism's document that is to be found.

    Attributes:
        document: the mechanism as JSON.
        path: the keys and indices that lead to the number.
        least, most: the numbers allowed.
        is_whole: whether only whole numbers are.
        cost_falls: whether a larger number costs less.
    """

    document: Json
    path: tuple[str | int, ...]
    least: float
    most: float
    is_whole: bool
    cost_falls: bool

    @property
    def name(self) -> str:
        """The name of the field, in words."""
        name = str(self.path[-1])
        return "repetitions" if name == "count" else name.replace("_", " ")

    @property
    def most_private(self) -> float:
        """The number with the lowest cost; a small one if that is 0."""
        return self.most if self.cost_falls else max(self.least, _POSITIVE_MIN)

    @property
    def least_private(self) -> float:
        """The number with the highest cost."""
        return max(self.least, _POSITIVE_MIN) if self.cost_falls else self.most

    def write(self, value: float) -> Json:
        """Return the document with this number."""
        return _replace(self.document, self.path, int(value) if self.is_whole else value)

    def with_value(self, value: float) -> Mechanism:
        """Return the mechanism with this number.

        Raises:
            MechanismError: the number contradicts another field.
        """
        return from_json(self.write(value))

    def others(self) -> Mechanism:
        """Return the mechanism without the releases that the number changes.

        Of a sum, the part with the number is left out; nothing is left of any other mechanism.
        """
        sums = [at for at, key in enumerate(self.path) if key == "mechanisms"]
        depth = sums[-1] + 2 if sums else 0
        document = self.write(self.most_private)
        part = document
        for key in self.path[:depth]:
            part = part[key]
        nothing = {"kind": "repeated", "count": 0, "mechanism": part}
        return from_json(_replace(document, self.path[:depth], nothing))


def free_parameter(document: Json, pointer: str) -> FreeParameter:
    """Return the free parameter at a JSON pointer into a mechanism's document.

    Args:
        document: the mechanism; the value at the pointer is ignored, and may be null.
        pointer: such as `/mechanism/noise_multiplier`.

    Raises:
        MechanismError: nothing that can be solved for is there, or the document is invalid.
    """
    path, node = _follow(document, pointer)
    kind, name = str(node.get("kind")), str(path[-1])
    found = fields_of(KINDS[kind]).get(name) if kind in KINDS else None
    if found is None or found.cost is None:
        known = sorted(
            f"{field.name} of {cls.kind}"
            for cls in KINDS.values()
            for field in fields_of(cls).values()
            if field.cost
        )
        raise MechanismError((_PARAMETER, "must point to one of: " + ", ".join(known)))
    if name in ("sample_rate", "steps") and node.get("sampling") in ("balls_in_bins", "shuffled"):
        message = "must not point to a run in epochs; solve for it with /v1/steps"
        raise MechanismError((_PARAMETER, message))
    free = FreeParameter(document, path, *found.range, found.cost is Cost.FALLS)
    try:
        free.with_value(free.most_private)
    except MechanismError as error:
        raise error.below("/mechanism") from None
    return free


def _follow(document: Json, pointer: str) -> tuple[tuple[str | int, ...], Mapping[str, Json]]:
    """Return the path of a JSON pointer, and the object that its last key belongs to.

    Raises:
        MechanismError: the pointer leads nowhere.
    """
    head, *tokens = pointer.split("/")
    node = document
    path: list[str | int] = []
    for number, token in enumerate(tokens, 1):
        is_last = number == len(tokens)
        if isinstance(node, dict) and (is_last or token in node):
            path.append(token)
            node = node if is_last else node[token]
        elif isinstance(node, list) and token.isdecimal() and int(token) < len(node) > 0:
            path.append(int(token))
            node = node[int(token)]
        else:
            break
    if head or not path or len(path) < len(tokens) or not isinstance(node, dict):
        message = f"must be a JSON pointer into the mechanism, not {pointer!r}"
        raise MechanismError((_PARAMETER, message))
    return tuple(path), node


def _replace(document: Json, path: tuple[str | int, ...], value: Json) -> Json:
    """Return a copy of a document with another value at a path."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(document, list):
        return [
            _replace(each, rest, value) if i == first else each for i, each in enumerate(document)
        ]
    return {**document, first: _replace(document.get(first), rest, value)}
