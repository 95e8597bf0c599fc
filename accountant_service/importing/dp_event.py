"""dp_accounting: a `DpEvent` as its `repr`, or as a JSON tree with `class_name`.

`dp_event.py` of dp_accounting 0.6.0, and the events that follow it up to commit b5b0286. A noise
multiplier there is relative to the sensitivity under the accountant's own neighbouring relation;
here it is relative to the clipping norm C. Under replace-one that sensitivity is 2C, so the noise
multiplier doubles; under the other two it is C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import CLASS_NAME, Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Facts, Imported, Node
from accountant_service.importing.keys import (
    CLAIM,
    POST_PROCESSING,
    SAMPLING,
    SIZES,
    UNIT,
    Fields,
    acts,
    harmless,
    is_event,
    join,
)
from accountant_service.importing.runs import (
    poisson_run,
    read_claims,
    read_delta,
    read_noise,
    read_size,
)
from accountant_service.mechanisms.json_form import DEPTH_MAX
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.numerics.floats import rounding

RELATIONS: Final = {
    "ADD_OR_REMOVE_ONE": NeighbouringRelation.ADD_OR_REMOVE_ONE,
    "REPLACE_ONE": NeighbouringRelation.REPLACE_ONE,
    "REPLACE_SPECIAL": NeighbouringRelation.ZERO_OUT_ONE,
}
_UNSUPPORTED: Final = {
    "NonPrivateDpEvent": "has no privacy guarantee",
    "UnsupportedDpEvent": "stands for an analysis that dp_accounting does not have",
    "SampledWithReplacementDpEvent": (
        "samples with replacement, for which no dominating pair is proved here. Sample without "
        "replacement, or Poisson"
    ),
}
KEYS: Final = join(
    acts("event dp_event", "the event", is_whole=True),
    *SIZES,
    *SAMPLING,
    *CLAIM,
    *UNIT,
    harmless(f"{CLASS_NAME} module_name", "the object around the event, such as a plan"),
    harmless(
        "clipped_grad batch_selection_strategy noise_addition_transform",
        "of a plan of jax_privacy, which the event describes",
        is_whole=True,
    ),
    *POST_PROCESSING,
)


def detect(fields: Fields) -> bool:
    """Return whether a document is a dp_accounting event, or an object that holds one."""
    return is_event(fields.root) or fields.has_event()


def read(fields: Fields, facts: Facts) -> Imported:
    """Import a dp_accounting event, alone or with neighbouring relation, δ and ε."""
    event = fields.root if is_event(fields.root) else fields.find_event() or fields.field("event")
    relation = facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE
    delta = read_delta(fields.find("delta"))
    return Imported(
        "a dp_accounting event",
        _as_run(read_event(event, relation)),
        relation,
        delta,
        claims=read_claims(fields, delta),
        findings=() if facts.relation else (_RELATION_NOT_STATED,),
        dataset_size=read_size(fields.find("dataset_size"), facts.dataset_size),
        batch_size=read_size(fields.find("batch_size"), facts.batch_size),
        sampling_pointer=event.pointer,
        is_sampling_stated=True,
    )


def _as_run(node: Node) -> Node:
    """Convert repeated Poisson-sampled Gaussian noise to the equivalent `dp_sgd` run."""
    sampled = node.fields.get("mechanism")
    if not isinstance(sampled, Node) or sampled.kind != "poisson_sampled":
        return node
    if node.kind != "repeated":
        return node
    noise, rate = sampled.fields["mechanism"], sampled.fields["sample_rate"]
    if noise.kind != "gaussian":
        return node
    return poisson_run(node.pointer, noise.fields["noise_multiplier"], rate, node.fields["count"])


_RELATION_NOT_STATED: Final = Finding(
    "relation-not-stated",
    "",
    "an event does not say which datasets are neighbours; its accountant does",
    "the computed cost is for add_or_remove_one, the default of dp_accounting",
)


def read_event(event: Part, relation: NeighbouringRelation, depth: int = DEPTH_MAX) -> Node:
    """Return the mechanism that a `DpEvent` describes.

    Raises:
        DocumentError: the event is malformed or not supported.
    """
    name = event.class_name
    if name in _UNSUPPORTED:
        raise event.fault(f"{name} {_UNSUPPORTED[name]}")
    if name is None or name not in EVENTS:
        raise event.fault(f"must be an event: one of {', '.join(EVENTS)}")
    if depth == 0:
        raise event.fault(f"must be nested at most {DEPTH_MAX} deep")
    names, reader = EVENTS[name]
    known = event.named_arguments(names)
    unknown = set(known.value) - {CLASS_NAME, "module_name", *names}
    if unknown:
        raise event.fault(f"{name} has no attribute {sorted(unknown)[0]}")
    return reader(known, lambda inner: read_event(inner, relation, depth - 1), relation)


def _read_noise_multiplier(
    event: Part, relation: NeighbouringRelation, name: str = "noise_multiplier"
) -> float:
    """Return an event's noise multiplier under the relation: noise over clipping norm."""
    return read_noise(event.field(name)) * relation.sensitivity


_Reader = Callable[[Part, Callable[[Part], Node], NeighbouringRelation], Node]


def _read_gaussian(event: Part, _: Any, relation: NeighbouringRelation) -> Node:
    """Return the Gaussian noise that an event describes."""
    return Node(
        "gaussian", event.pointer, {"noise_multiplier": _read_noise_multiplier(event, relation)}
    )


def _read_laplace(event: Part, _: Any, relation: NeighbouringRelation) -> Node:
    """Return the Laplace noise that an event describes."""
    return Node(
        "laplace", event.pointer, {"noise_multiplier": _read_noise_multiplier(event, relation)}
    )


def _read_nothing(event: Part, _: Any, __: Any) -> Node:
    """Return a mechanism that releases nothing, for an event without a release."""
    return Node("composed", event.pointer, {"mechanisms": []})


def _read_self_composed(event: Part, inner: Callable[[Part], Node], _: Any) -> Node:
    """Return the repeated mechanism that an event describes."""
    count = event.field("count").whole(0, COUNT_MAX)
    fields = {"count": count, "mechanism": inner(event.field("event"))}
    return Node("repeated", event.pointer, fields)


def _read_composed(event: Part, inner: Callable[[Part], Node], _: Any) -> Node:
    """Return the composition of mechanisms that an event describes."""
    events = [inner(each) for each in event.field("events").items()]
    return Node("composed", event.pointer, {"mechanisms": events})


def _read_poisson(event: Part, inner: Callable[[Part], Node], _: Any) -> Node:
    """Return the mechanism on a Poisson sample that an event describes."""
    rate = event.field("sampling_probability").number(0.0, 1.0)
    fields = {"sample_rate": rate, "mechanism": inner(event.field("event"))}
    return Node("poisson_sampled", event.pointer, fields)


def _read_without_replacement(event: Part, inner: Callable[[Part], Node], _: Any) -> Node:
    """Return the mechanism on a sample of fixed size that an event describes."""
    size = event.field("source_dataset_size").whole(1, COUNT_MAX)
    fields = {
        "dataset_size": size,
        "batch_size": event.field("sample_size").whole(1, size),
        "mechanism": inner(event.field("event")),
    }
    return Node("fixed_size_sampled", event.pointer, fields)


def _read_truncated_poisson(event: Part, _: Any, relation: NeighbouringRelation) -> Node:
    """Return the Gaussian noise on a truncated Poisson sample that an event describes."""
    fields = {
        "dataset_size": event.field("dataset_size").whole(1, COUNT_MAX),
        "sample_rate": event.field("sampling_probability").number(0.0, 1.0),
        "batch_size_max": event.field("truncated_batch_size").whole(1, COUNT_MAX),
        "mechanism": _read_gaussian(event, None, relation),
    }
    return Node("truncated_poisson_sampled", event.pointer, fields)


def _read_tree(event: Part, _: Any, relation: NeighbouringRelation) -> Node:
    """Return the Gaussian noise of the ⌈log₂(steps + 1)⌉ tree nodes that contain one record.

    Kairouz et al. 2021, arXiv 2103.00039, appendix D: each record is in one tree.
    """
    if relation is not NeighbouringRelation.ZERO_OUT_ONE:
        raise event.fault("needs the neighboring_relation REPLACE_SPECIAL, as in dp_accounting")
    counts = event.field("step_counts")
    parts = counts.items() if isinstance(counts.value, list) else [counts]
    steps = max((part.whole(1, COUNT_MAX) for part in parts), default=1)
    inner = _read_gaussian(event, None, relation)
    return Node("repeated", event.pointer, {"count": steps.bit_length(), "mechanism": inner})


def _read_zcdp(event: Part, _: Any, __: Any) -> Node:
    """Return the (ξ, ρ)-zCDP mechanism that an event describes.

    Its Rényi divergence of order α is at most ξ + ρα (Bun & Steinke 2016, arXiv 1605.02065v1,
    Definition 1.1). With ρ = 0 the loss is at most ξ; else the bound is taken at a grid of orders.
    """
    rho = event.field("rho").number(0.0, 1e6)
    shift = event.find("xi")
    xi = 0.0 if shift is None else shift.number(0.0, 1e6)
    if xi == 0:
        return Node("zcdp", event.pointer, {"rho": rho})
    if rho == 0:
        return Node("approximate_dp", event.pointer, {"epsilon": xi, "delta": 0.0})
    divergences = [rounding.up(rounding.up(rho * order) + xi) for order in _ORDERS]
    return Node("rdp", event.pointer, {"orders": list(_ORDERS), "divergences": divergences})


_ORDERS: Final = tuple(1 + 10 ** (i / 50 - 3) for i in range(401))  # 1.001 to 100001


def _read_epsilon_delta(event: Part, _: Any, __: Any) -> Node:
    """Return any (ε, δ)-DP release, which is all that an event says."""
    fields = {name: event.field(name).value for name in ("epsilon", "delta")}
    return Node("approximate_dp", event.pointer, fields)


def _read_by_epsilon(kind: str) -> _Reader:
    """Return the reader of an event with ε alone, as the mechanism of this kind."""
    return lambda event, _, __: Node(kind, event.pointer, {"epsilon": event.field("epsilon").value})


def _read_discrete_gaussian(event: Part, _: Any, __: Any) -> Node:
    """Return the discrete Gaussian noise that an event describes.

    One integer changes by a whole number. In several dimensions, or if their number is not stated,
    the release is Δ²/(2σ²)-zCDP (Canonne et al. 2020, arXiv 2004.00010v5, Theorem 14).
    """
    sigma = event.field("sigma").number(0.0, 1e6, above=True)
    width, dimension = event.find("sensitivity"), event.find("dimension")
    sensitivity = 1.0 if width is None else width.number(0.0, 1e6, above=True)
    if dimension is not None and dimension.whole(1, COUNT_MAX) == 1:
        if sensitivity < 1:
            return _read_nothing(event, None, None)
        fields = {"noise_std": sigma, "sensitivity": int(sensitivity)}
        return Node("discrete_gaussian", event.pointer, fields)
    rho = rounding.up(rounding.up((rounding.up(sensitivity / sigma)) ** 2) / 2)
    return Node("zcdp", event.pointer, {"rho": rho})


def _read_mixture(event: Part, _: Any, relation: NeighbouringRelation) -> Node:
    """Return Gaussian noise whose mean is drawn from a list."""
    if relation is NeighbouringRelation.REPLACE_ONE:
        raise event.fault("is about a record that is added or removed, not replaced")
    spread = event.field("standard_deviation").number(0.0, 1e9, above=True)
    means, part = _list_means(event.field("sensitivities")), event.field("sampling_probs")
    chances = [each.number(0.0, 1.0) for each in part.items()]
    if len(chances) != len(means) or abs(math.fsum(chances) - 1) > _ROUNDED:
        raise part.fault("must add up to 1, one for each of the sensitivities")
    drawn: dict[float, float] = {}
    for mean, chance in sorted(zip(means, chances, strict=True)):
        if chance > 0:
            drawn[mean] = drawn.get(mean, 0.0) + chance
    unit = min((mean for mean in drawn if mean > 0), default=0.0)
    if unit == 0:
        return _read_nothing(event, None, None)
    fields = {
        "noise_multiplier": spread / unit,
        "shifts": [mean / unit for mean in drawn],
        "probabilities": list(drawn.values()),
    }
    return Node("gaussian_mixture", event.pointer, fields)


def _list_means(part: Part) -> list[float]:
    """Return a list of means; Python's `range(n)` or `range(first, end)` counts as one."""
    if part.class_name != "range":
        return [each.number(0.0, 1e9) for each in part.items()]
    bounds = part.named_arguments(("end",) if "1" not in part.fields() else ("first", "end"))
    first = bounds.find("first")
    start = 0 if first is None else first.whole(0, _MEANS_MAX)
    return [float(mean) for mean in range(start, bounds.field("end").whole(1, _MEANS_MAX))]


_MEANS_MAX: Final = 1000
_ROUNDED: Final = 1e-9


def _read_discrete_laplace(event: Part, _: Any, __: Any) -> Node:
    """Return discrete Laplace noise; its scale is one over the event's noise parameter."""
    parameter = event.field("noise_parameter").number(0.0, 1e6, above=True)
    fields = {
        "scale": 1 / parameter,
        "sensitivity": event.field("sensitivity").whole(1, COUNT_MAX),
    }
    return Node("discrete_laplace", event.pointer, fields)


def _read_randomized_response(event: Part, _: Any, __: Any) -> Node:
    """Return the randomized response that an event describes."""
    fields = {
        "categories": event.field("num_buckets").whole(2, COUNT_MAX),
        "flip_probability": event.field("noise_parameter").number(0.0, 1.0),
    }
    return Node("randomized_response", event.pointer, fields)


def _read_repeat_and_select(event: Part, inner: Callable[[Part], Node], _: Any) -> Node:
    """Return the private selection (best of a random number of runs) that an event describes."""
    shape, mean = event.field("shape"), event.field("mean").number(0.0, 1e9, above=True)
    named = {"1": "geometric", "0": "logarithmic", "inf": "poisson"}
    name = named.get(str(shape.value).removesuffix(".0"), "negative_binomial")
    repeats: dict[str, Any] = {"distribution": name, "mean": mean}
    if name == "negative_binomial":
        repeats["shape"] = shape.number(0.0, 1e9)
    fields = {"repeats": repeats, "mechanism": inner(event.field("event"))}
    return Node("private_selection", event.pointer, fields)


EVENTS: Final[dict[str, tuple[tuple[str, ...], _Reader]]] = {
    "NoOpDpEvent": ((), _read_nothing),
    "GaussianDpEvent": (("noise_multiplier",), _read_gaussian),
    "LaplaceDpEvent": (("noise_multiplier",), _read_laplace),
    "SelfComposedDpEvent": (("event", "count"), _read_self_composed),
    "ComposedDpEvent": (("events",), _read_composed),
    "PoissonSampledDpEvent": (("sampling_probability", "event"), _read_poisson),
    "SampledWithoutReplacementDpEvent": (
        ("source_dataset_size", "sample_size", "event"),
        _read_without_replacement,
    ),
    "TruncatedSubsampledGaussianDpEvent": (
        ("dataset_size", "sampling_probability", "truncated_batch_size", "noise_multiplier"),
        _read_truncated_poisson,
    ),
    "SingleEpochTreeAggregationDpEvent": (("noise_multiplier", "step_counts"), _read_tree),
    "ZCDpEvent": (("rho", "xi"), _read_zcdp),
    "DiscreteLaplaceDpEvent": (("noise_parameter", "sensitivity"), _read_discrete_laplace),
    "RandomizedResponseDpEvent": (("noise_parameter", "num_buckets"), _read_randomized_response),
    "RepeatAndSelectDpEvent": (("event", "mean", "shape"), _read_repeat_and_select),
    "EpsilonDeltaDpEvent": (("epsilon", "delta"), _read_epsilon_delta),
    "DiscreteGaussianDpEvent": (("sigma", "sensitivity", "dimension"), _read_discrete_gaussian),
    "ExponentialMechanismDpEvent": (("epsilon",), _read_by_epsilon("exponential")),
    "PermuteAndFlipDpEvent": (("epsilon",), _read_by_epsilon("permute_and_flip")),
    "MixtureOfGaussiansDpEvent": (
        ("standard_deviation", "sensitivities", "sampling_probs"),
        _read_mixture,
    ),
}
