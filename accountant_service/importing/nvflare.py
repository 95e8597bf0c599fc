"""NVFlare: the filters on what a client sends, from a job's configuration or by themselves.

NVFlare at commit f3b7c1bf: `app_common/filters/svt_privacy.py` and `percentile_privacy.py`. FLIP's
`LocalDifferentialPrivacy` (londonaicentre/FLIP pull request 1146) is Flower's `LocalDpMod`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing import flower
from accountant_service.importing.document import CLASS_NAME, Json, Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.keys import (
    CLAIM,
    CLASS,
    POST_PROCESSING,
    SAMPLING,
    Fields,
    acts,
    harmless,
    join,
)
from accountant_service.importing.runs import EPSILON_MAX, read_delta, read_epsilon, read_size
from accountant_service.writing.number_format import round_nearest as shown

_FILTERS: Final = "task_result_filters"
_HEURISTICS: Final = {
    "PercentilePrivacy": "shares what is above a percentile and clips it; it adds no noise",
    "GaussianPrivacy": (
        "adds noise in proportion to a percentile of the update itself, which it does not clip"
    ),
    "ExcludeVars": "leaves out some variables; it adds no noise",
    "StatisticsPrivacyFilter": "hides small counts; its noise has no stated sensitivity",
}
_LOCAL: Final = "LocalDifferentialPrivacy"
_NAMES: Final = ("SVTPrivacy", _LOCAL, *_HEURISTICS)
CONSTRUCTORS: Final[dict[str, tuple[str, ...]]] = dict.fromkeys(_NAMES, ())
KEYS: Final = join(
    acts(_FILTERS, "filters on what a client sends; the last one with noise counts", is_whole=True),
    acts("scopes", "of a site's policy: objects with `task_result_filters`", is_whole=True),
    acts("path", "the class of a single filter"),
    acts("args", "its arguments", is_whole=True),
    acts("num_rounds rounds", "rounds, in each of which a client sends one update"),
    acts("parameters num_parameters", "of the model, of which SVTPrivacy releases a fraction"),
    *CLAIM,
    *SAMPLING,
    *CLASS,
    harmless("task_data_filters", "filters on what a client receives", is_whole=True),
    harmless(
        "format_version executors components default_scope workflows tasks id",
        "other parts of a job",
        is_whole=True,
    ),
    *POST_PROCESSING,
)
# Arguments of SVTPrivacy.
SVT: Final = join(
    acts("epsilon", "of the selection of values; 0.1 by default"),
    acts("epsilon_release", "of the released values"),
    acts("noise_var", "of each released value, without `epsilon_release`; 0.1 by default"),
    acts("fraction", "of the values that is released; 0.1 by default"),
    acts("parameters", "number of values"),
    harmless("gamma tau data_kinds replace replace_value name path", "clips and names values"),
    *CLASS,
)


def detect(fields: Fields) -> bool:
    """Return whether a document is an NVFlare job's configuration or one privacy filter."""
    return fields.has(_FILTERS) or fields.has("scopes") or _name(fields.root.value) in _NAMES


def _name(document: Json) -> str:
    """Return a filter's class name without its module path, or an empty string."""
    if not isinstance(document, dict):
        return ""
    named = (document.get(key) for key in ("path", "name", CLASS_NAME))
    return next((str(each).rsplit(".", 1)[-1] for each in named if each is not None), "")


def read(fields: Fields, facts: Facts) -> Imported:
    """Import an NVFlare job's configuration, or one of its privacy filters."""
    filters = [each for each in _filters(fields) if _name(each.value) in _NAMES]
    if not filters:
        raise fields.root.fault(f"has no privacy filter: one of {', '.join(_NAMES)}")
    rounds = read_size(fields.find("num_rounds")) or 1
    delta = read_delta(fields.find("delta")) if facts.delta is None else facts.delta
    findings = tuple(
        _report_no_guarantee(each) for each in filters if _name(each.value) in _HEURISTICS
    )
    noisy = [each for each in filters if _name(each.value) not in _HEURISTICS]
    if not noisy:
        return Imported("an NVFlare configuration", None, findings=findings)
    last = noisy[-1]  # what comes before is post-processed
    found = (
        _read_svt(last, fields, rounds)
        if _name(last.value) == "SVTPrivacy"
        else _read_local(last, fields, rounds)
    )
    delta = delta if found.delta is None else found.delta
    return replace(found, delta=delta, findings=(*findings, *found.findings))


def _filters(fields: Fields) -> list[Part]:
    """Return the privacy filters on client results in an NVFlare job, of all scopes and tasks."""
    document = fields.root
    if _name(document.value) in _NAMES:
        fields.find("path"), fields.find("args")
        return [document]
    scopes = fields.find("scopes")
    holders = scopes.items() if scopes else [document]
    fields.find(_FILTERS)
    entries = [each for h in holders if (f := h.find(_FILTERS)) for each in f.items()]
    nested = [inner for each in entries if (f := each.find("filters")) for inner in f.items()]
    found = [*nested, *(each for each in entries if each.find("filters") is None)]
    for each in found:
        if not isinstance(each.value, dict):
            raise each.fault("must be an object")
    return found


def _report_no_guarantee(part: Part) -> Finding:
    """Return the finding that a filter gives no privacy guarantee."""
    name = _name(part.value)
    return Finding(
        "no-guarantee",
        part.pointer,
        f"{name} {_HEURISTICS[name]}: it is not differentially private at any ε",
        "clip each update to a norm C and add Gaussian noise in proportion to C",
    )


def _arguments(part: Part) -> Part:
    """Return a filter's arguments: its field `args`, or its other fields."""
    return part.find("args") or part


def _read_local(part: Part, fields: Fields, rounds: int) -> Imported:
    """Import FLIP's filter, which clips and adds noise as Flower's `LocalDpMod` does."""
    found = flower.read_local(fields.inside(_arguments(part), flower.LOCAL), rounds)
    return replace(found, tool="FLIP's LocalDifferentialPrivacy filter")


def _read_svt(part: Part, fields: Fields, rounds: int) -> Imported:
    """Import the sparse-vector (SVT) filter: ε of the selection plus ε of the released values.

    The released values have the budget `epsilon_release`; by default it is the number of released
    values times `noise_var`.
    """
    arguments = fields.inside(_arguments(part), SVT)
    where = arguments.root.pointer

    def value(name: str) -> Part:
        """Return an argument, or the constructor's default for it."""
        return arguments.find(name) or Part(0.1, f"{where}/{name}")

    epsilon = value("epsilon")
    selection = epsilon.number(0.0, EPSILON_MAX, above=True)
    release = read_epsilon(arguments.find("epsilon_release"))
    per_value = value("noise_var").number(0.0, EPSILON_MAX)
    fraction = value("fraction").number(0.0, 1.0)
    parameters = read_size(fields.find("parameters"), read_size(arguments.find("parameters")))
    claim = Claim(selection, None, epsilon.pointer)
    if release is None and parameters is None:
        finding = Finding(
            "release-budget",
            where,
            f"epsilon = {shown(selection)} is the budget of the selection; the released values "
            f"have that of noise_var = {shown(per_value)} for each released parameter",
            "state the number of parameters of the model, or set epsilon_release",
        )
        return Imported("NVFlare's SVTPrivacy filter", None, claims=(claim,), findings=(finding,))
    if release is None:
        release = min(parameters or 1, math.ceil((parameters or 1) * fraction)) * per_value
    total = selection + release
    finding = Finding(
        "release-budget",
        where,
        f"epsilon = {shown(selection)} is the budget of the selection only; the released values "
        f"have {shown(release)} more",
        f"one message is {shown(total)}-DP, and {rounds} of them {shown(rounds * total)}-DP",
    )
    message = Node("approximate_dp", where, {"epsilon": total, "delta": 0.0})
    return Imported(
        "NVFlare's SVTPrivacy filter",
        Node("repeated", part.pointer, {"count": rounds, "mechanism": message}),
        NeighbouringRelation.REPLACE_ONE,
        claims=(replace(claim, mechanism=message),),
        findings=(finding,),
    )
