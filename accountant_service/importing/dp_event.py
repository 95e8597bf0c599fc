"""dp_accounting: a `DpEvent` as its `repr`, or as a JSON tree with `class_name`.

dp_accounting 0.6.0, `dp_event.py`. A noise multiplier there is relative to the sensitivity under
the accountant's own neighbouring relation; here it is relative to the clipping norm C. Under
replace-one that sensitivity is 2C, so the noise multiplier doubles; under the other two it is C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing.document import CLASS_NAME, Json, Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.runs import (
    poisson_run,
    read_delta,
    read_epsilon,
    read_noise,
    read_size,
)
from accountant_service.mechanisms.codec import COUNT_MAX, DEPTH_MAX

RELATIONS: Final = {
    "ADD_OR_REMOVE_ONE": NeighbouringRelation.ADD_OR_REMOVE_ONE,
    "REPLACE_ONE": NeighbouringRelation.REPLACE_ONE,
    "REPLACE_SPECIAL": NeighbouringRelation.ZERO_OUT_ONE,
}
_WRAPPED: Final = ("event", "dp_event")
_UNSUPPORTED: Final = {
    "NonPrivateDpEvent": "has no privacy guarantee",
    "UnsupportedDpEvent": "stands for an analysis that dp_accounting does not have",
    "SampledWithReplacementDpEvent": (
        "samples with replacement, for which no dominating pair is proved here. Sample without "
        "replacement, or Poisson"
    ),
    "MixtureOfGaussiansDpEvent": (
        "has no kind of its own here: describe the sampling of a person's records as user_level"
    ),
}


def detect(document: Json) -> bool:
    """Return whether a document is a dp_accounting event, or an object that holds one."""
    if not isinstance(document, dict):
        return False
    if str(document.get(CLASS_NAME, "")).endswith("DpEvent"):
        return True
    return any(detect(document[name]) for name in _WRAPPED if name in document)


def read(document: Part, facts: Facts) -> Imported:
    """Import a dp_accounting event, alone or with neighbouring relation, δ and ε."""
    wrapper = None
    if document.class_name is None or not document.class_name.endswith("DpEvent"):
        wrapper, document = document, document.field(*_WRAPPED)
    findings = () if facts.relation else (_RELATION_NOT_STATED,)
    relation = facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE
    size, batch = facts.dataset_size, facts.batch_size
    if wrapper is not None:
        size = read_size(wrapper.find("dataset_size", "train_size"), size)
        batch = read_size(wrapper.find("batch_size"), batch)
    delta = read_delta(wrapper.find("delta", "target_delta")) if wrapper else None
    claimed = wrapper.find("epsilon", "target_epsilon") if wrapper else None
    epsilon = read_epsilon(claimed)
    return Imported(
        "a dp_accounting event",
        _as_run(read_event(document, relation)),
        relation,
        delta,
        claims=(Claim(epsilon, delta, claimed.pointer),) if claimed and epsilon else (),
        findings=findings,
        dataset_size=size,
        batch_size=batch,
        sampling_pointer=document.pointer,
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
    if name is None or name not in _READERS:
        raise event.fault(f"must be an event: one of {', '.join(_READERS)}")
    if depth == 0:
        raise event.fault(f"must be nested at most {DEPTH_MAX} deep")
    names, reader = _READERS[name]
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
    """Return the ρ-zCDP mechanism that an event describes."""
    if (xi := event.find("xi")) is not None and xi.number(0.0, 1e6) > 0:
        raise xi.fault("must be 0: only ρ-zCDP is supported")
    rho = event.field("rho").number(0.0, 1e6)
    return Node("zcdp", event.pointer, {"rho": rho})


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


_READERS: Final[dict[str, tuple[tuple[str, ...], _Reader]]] = {
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
}
