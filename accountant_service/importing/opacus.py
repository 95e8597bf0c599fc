"""Opacus: an accountant's state or history, and the arguments of `make_private`.

Opacus 1.6.0: `make_private` sets the sample rate to 1/len(data_loader), and its accountant records
the noise multiplier and that rate at every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing.document import Json, Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Facts, Imported, Node
from accountant_service.importing.runs import (
    poisson_run,
    read_claims,
    read_delta,
    read_noise,
    read_run,
    read_size,
)
from accountant_service.mechanisms.codec import COUNT_MAX
from accountant_service.number_format import round_nearest as shown

METHODS: Final = {"rdp": "subsampled_rdp", "gdp": "gdp_clt", "prv": "pld"}
_HISTORY_MAX: Final = 5000
_CHECKPOINT: Final = "privacy_accountant_state_dict"
_ARGUMENTS: Final = {
    "max_grad_norm", "max_per_sample_grad_norm", "poisson_sampling", "target_epsilon",
    "unclipped_num_std",
}  # fmt: skip


def detect(document: Json) -> bool:
    """Return whether a document is an Opacus history or the arguments of `make_private`."""
    if isinstance(document, dict):
        return bool(_ARGUMENTS & document.keys()) or any(
            name in document for name in ("history", _CHECKPOINT)
        )
    return isinstance(document, list) and all(
        isinstance(entry, list) and len(entry) == 3 for entry in document
    )


def read(document: Part, facts: Facts) -> Imported:
    """Import an Opacus accountant's history, or the arguments of `make_private`."""
    if isinstance(document.value, dict):
        state = document.find(_CHECKPOINT) or document
        if state.find("history") is None:
            return _read_arguments(document, facts)
        name = state.field("mechanism").choice(METHODS) if state.find("mechanism") else None
        return _read_history(state.field("history"), METHODS.get(name or ""), document, facts)
    return _read_history(document, None, None, facts)


def _read_history(history: Part, method: str | None, outer: Part | None, facts: Facts) -> Imported:
    """Import an Opacus accountant's history: a list of (noise multiplier, sample rate, steps)."""
    entries = history.items()
    if not 1 <= len(entries) <= _HISTORY_MAX:
        raise history.fault(f"must have 1 to {_HISTORY_MAX} entries")
    runs = [_read_entry(entry) for entry in entries]
    mechanism = (
        runs[0] if len(runs) == 1 else Node("composed", history.pointer, {"mechanisms": runs})
    )
    delta = read_delta(outer.find("delta", "target_delta")) if outer else None
    size, batch = facts.dataset_size, facts.batch_size
    if outer is not None:
        size = read_size(outer.find("dataset_size", "train_size"), size)
        batch = read_size(outer.find("batch_size"), batch)
    return Imported(
        "an Opacus accountant's history",
        mechanism,
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        method=method,
        claims=read_claims(outer, delta),
        dataset_size=size,
        batch_size=batch,
        sampling_pointer=history.pointer,
        has_loader_rate=True,
    )


def _read_entry(entry: Part) -> Node:
    """Return the run that one (noise multiplier, sample rate, steps) entry describes."""
    parts = entry.items()
    if len(parts) != 3:
        raise entry.fault("must be [noise multiplier, sample rate, steps]")
    noise, rate, steps = parts
    return poisson_run(
        entry.pointer, read_noise(noise), rate.number(0.0, 1.0), steps.whole(0, COUNT_MAX)
    )


def _read_arguments(arguments: Part, facts: Facts) -> Imported:
    """Import the arguments of `make_private` or `make_private_with_epsilon`."""
    method = arguments.find("accountant")
    found = read_run(arguments, facts, "arguments of Opacus' make_private", by_loader=True)
    found = replace(found, method=METHODS[method.choice(METHODS) if method else "prv"])
    return _add_adaptive_clipping(found, arguments, facts.sampling)


def _add_adaptive_clipping(found: Imported, arguments: Part, sampling: str | None) -> Imported:
    """Add the cost of adaptive clipping, which releases a noisy count, if it is used.

    With a noise multiplier z and a count of standard deviation s, the sum has the noise multiplier
    (z⁻² − (2s)⁻²)^(−1/2). By Andrew et al., arXiv 1905.03871v5, Theorem 1, both cost what z costs,
    if a record changes the count by ½. Opacus counts 0 and 1: it changes by 1. If all batches have
    the same size, and another record takes the place of the one that leaves or is replaced, then
    the same noise on a count of ±½ releases as much: it differs by half of that size. Each record
    then adds a vector of norm 1/z at most to the sum and the count, in units of their noise, so z
    holds. A Poisson batch has no fixed size, and a record that is not in it adds 0, not ±½.
    """
    clipping = arguments.find("clipping")
    if clipping is None or clipping.value != "adaptive" or found.mechanism is None:
        return found
    given = arguments.field("noise_multiplier", "sigma")
    noise, deviation = read_noise(given), read_noise(arguments.field("unclipped_num_std"))
    if noise >= 2 * deviation:
        raise arguments.field("unclipped_num_std").fault("must be more than half the noise")
    if _keeps_size(found.relation, sampling):
        return found
    of_sum = (noise**-2 - (2 * deviation) ** -2) ** -0.5
    pair = [
        Node("gaussian", given.pointer, {"noise_multiplier": of_sum}),
        Node("gaussian", f"{arguments.pointer}/unclipped_num_std", {"noise_multiplier": deviation}),
    ]
    step = Node("composed", arguments.pointer, {"mechanisms": pair})
    fields = found.mechanism.fields
    step = Node(
        "poisson_sampled",
        arguments.pointer,
        {"sample_rate": fields["sample_rate"], "mechanism": step},
    )
    total = (of_sum**-2 + deviation**-2) ** -0.5
    message = (
        f"the accountant charges the noise multiplier {shown(noise)} (before Opacus 1.6, "
        f"{shown(of_sum)}), "
        f"as if a record changed the count of unclipped records, whose noise is "
        f"{shown(deviation)}, by "
        "½; it changes by 1"
    )
    instead = (
        f"sum and count, if clipping norms are published, cost a noise multiplier of {shown(total)}"
    )
    return replace(
        found,
        mechanism=Node(
            "repeated", arguments.pointer, {"count": fields["steps"], "mechanism": step}
        ),
        accounted=found.accounted or found.mechanism,
        findings=(
            *found.findings,
            Finding("adaptive-clip-count", clipping.pointer, message, instead),
        ),
    )


def _keeps_size(relation: NeighbouringRelation, sampling: str | None) -> bool:
    """Return whether batches have a fixed size, and another record takes a changed one's place."""
    if relation is NeighbouringRelation.REPLACE_ONE:
        return sampling in ("fixed_size", "shuffled", "none")
    return relation is NeighbouringRelation.ADD_OR_REMOVE_ONE and sampling == "fixed_size"
