"""OpenDP: the privacy measure and the distance of a measurement, `(output_measure, map(d_in))`.

OpenDP 0.16, `measures`: the measure says what the distance d_out means. Its
`FixedSmoothedMaxDivergence` is printed as `Approximate(MaxDivergence)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Facts, Imported, Node
from accountant_service.importing.keys import CLAIM, Fields, acts, harmless, join
from accountant_service.importing.runs import DELTA_MAX, EPSILON_MAX, read_claims, read_delta

_POINTS_MAX: Final = 1000
KEYS: Final = join(
    acts("measure output_measure", "the privacy measure: what `d_out` means", is_whole=True),
    acts("d_out", "the distance: ε, (ε, δ), ρ, or a list of (order, divergence)"),
    *CLAIM,
    harmless("name title description comment notes source date", "what the document is about"),
)


def detect(fields: Fields) -> bool:
    """Return whether a document is a measure of OpenDP with a distance."""
    items = fields.root.value
    if isinstance(items, list):
        return len(items) == 2 and _name(items[0]) in _READERS
    return fields.has("d_out")


def read(fields: Fields, facts: Facts) -> Imported:
    """Import a measure and a distance: any release with that guarantee."""
    if isinstance(fields.root.value, list):
        pair = fields.root.items()
        if len(pair) != 2:
            raise fields.root.fault("must be (measure, distance)")
        measure, distance = pair
    else:
        measure, distance = fields.field("measure"), fields.field("d_out")
    name = _name(measure.value)
    if name not in _READERS:
        raise measure.fault(f"must be one of {', '.join(map(str, _READERS))}")
    mechanism, delta = _READERS[name](distance)
    delta = delta if (stated := read_delta(fields.find("delta"))) is None else stated
    return Imported(
        "a measure and a distance of OpenDP",
        replace(mechanism, pointer=distance.pointer),
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        claims=read_claims(fields, delta),
        findings=() if facts.relation else (_RELATION_NOT_STATED,),
    )


_RELATION_NOT_STATED: Final = Finding(
    "relation-not-stated",
    "",
    "a measure and a distance do not say which datasets are neighbours; the input metric does",
    "the computed cost is for the neighbours at the distance d_in, whatever name they have here",
)


def _name(measure: object) -> str | None:
    """Return a measure's name without types and brackets; None if it is no name."""
    if isinstance(measure, dict):  # a constructor
        inner = _name(measure["0"]) if "0" in measure else None
        name = str(measure.get("class_name"))
        measure = f"{name}({inner})" if name == "Approximate" else name
    if not isinstance(measure, str):
        return None
    name = "".join(measure.split()).removesuffix("()")
    if name.startswith("Approximate("):
        return _FIXED if _name(name[len("Approximate(") : -1]) == _PURE else name
    return name.partition("(")[0].partition("<")[0]


def _read_pure(distance: Part) -> tuple[Node, float | None]:
    """Return an ε-DP release."""
    epsilon = distance.number(0.0, EPSILON_MAX)
    return Node("approximate_dp", "", {"epsilon": epsilon, "delta": 0.0}), 0.0


def _read_approximate(distance: Part) -> tuple[Node, float | None]:
    """Return an (ε, δ)-DP release, and its δ."""
    pair = _read_pair(distance, "(ε, δ)")
    epsilon, delta = pair[0].number(0.0, EPSILON_MAX), pair[1].number(0.0, DELTA_MAX)
    return Node("approximate_dp", "", {"epsilon": epsilon, "delta": delta}), delta


def _read_concentrated(distance: Part) -> tuple[Node, float | None]:
    """Return a ρ-zCDP release."""
    return Node("zcdp", "", {"rho": distance.number(0.0, EPSILON_MAX)}), None


def _read_renyi(distance: Part) -> tuple[Node, float | None]:
    """Return a release with a Rényi divergence at each of some orders.

    OpenDP's distance is a function of the order; the document has its values.
    """
    pairs = [_read_pair(each, "(order, divergence)") for each in distance.items()]
    if not 1 <= len(pairs) <= _POINTS_MAX:
        raise distance.fault(f"must have 1 to {_POINTS_MAX} pairs (order, divergence)")
    orders, divergences = ([each[at].number(0.0, EPSILON_MAX) for each in pairs] for at in range(2))
    return Node("rdp", "", {"orders": orders, "divergences": divergences}), None


def _read_pair(part: Part, what: str) -> list[Part]:
    """Return the two items of a list; `what` they are is for the message."""
    items = part.items()
    if len(items) != 2:
        raise part.fault(f"must be {what}")
    return items


_PURE: Final = "MaxDivergence"
_FIXED: Final = "FixedSmoothedMaxDivergence"
_READERS: Final[Mapping[str | None, Callable[[Part], tuple[Node, float | None]]]] = {
    _PURE: _read_pure,
    _FIXED: _read_approximate,
    "ZeroConcentratedDivergence": _read_concentrated,
    "RenyiDivergence": _read_renyi,
}
