"""Opacus: an accountant's state or history, and the arguments of `make_private`.

Opacus 1.6.0: `make_private` sets the sample rate to 1/len(data_loader), and its accountant records
the noise multiplier and that rate at every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part, shorten
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Facts, Imported, Node
from accountant_service.importing.keys import (
    CLAIM,
    POST_PROCESSING,
    SAMPLING,
    SEED,
    SIZES,
    UNIT,
    Fields,
    acts,
    harmless,
    join,
)
from accountant_service.importing.runs import (
    RUN,
    check_epochs,
    poisson_run,
    read_claims,
    read_delta,
    read_epochs,
    read_noise,
    read_run,
    read_size,
)
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.writing.number_format import round_nearest as shown

METHODS: Final = {"rdp": "subsampled_rdp", "gdp": "gdp_clt", "prv": "pld"}
_HISTORY_MAX: Final = 5000
KEYS: Final = join(
    acts(
        "history",
        "the accountant's list of [noise multiplier, sample rate, steps]; keys of a run beside it "
        "are compared with it",
        is_whole=True,
    ),
    acts("mechanism accountant", "the accountant whose ε is compared: rdp, gdp or prv"),
    *RUN,
    *SIZES,
    *SAMPLING,
    *CLAIM,
    *UNIT,
    acts("clipping", "adaptive: a noisy count is released as well; flat and per_layer: nothing"),
    acts("unclipped_num_std", "standard deviation of that count"),
    harmless(
        "target_unclipped_quantile clipbound_learning_rate max_clipbound min_clipbound "
        "rand_on_empty",
        "post-processing of the noisy sum and count",
    ),
    harmless("alphas", "the Rényi orders of the accountant; all are used here"),
    harmless(
        "module_state_dict optimizer_state_dict noise_scheduler_state_dict "
        "grad_clip_scheduler_state_dict",
        "parameters in a checkpoint",
        is_whole=True,
    ),
    harmless("secure_mode secure_rng", "the guarantee is about noise from a secure generator"),
    SEED,
    *POST_PROCESSING,
)
_CLIPPINGS: Final = ("flat", "per_layer", "adaptive")


def detect(fields: Fields) -> bool:
    """Return whether a document is an Opacus history or the arguments of `make_private`."""
    entries = fields.root.value
    if isinstance(entries, list | tuple):
        return all(isinstance(entry, list | tuple) and len(entry) == 3 for entry in entries)
    return fields.has("history") or fields.has_any_spelled(
        "max_grad_norm",
        "max_per_sample_grad_norm",
        "poisson_sampling",
        "target_epsilon",
        "unclipped_num_std",
    )


def read(fields: Fields, facts: Facts) -> Imported:
    """Import an Opacus accountant's history, or the arguments of `make_private`."""
    if isinstance(fields.root.value, list | tuple):
        return _read_history(fields.root, fields, facts)
    history = fields.find("history")
    return (
        _read_arguments(fields, facts) if history is None else _read_history(history, fields, facts)
    )


def _read_history(history: Part, fields: Fields, facts: Facts) -> Imported:
    """Import an Opacus accountant's history: a list of (noise multiplier, sample rate, steps)."""
    entries = history.items()
    if not 1 <= len(entries) <= _HISTORY_MAX:
        raise history.fault(f"must have 1 to {_HISTORY_MAX} entries")
    runs = [_read_entry(entry) for entry in entries]
    mechanism = (
        runs[0] if len(runs) == 1 else Node("composed", history.pointer, {"mechanisms": runs})
    )
    size = read_size(fields.find("dataset_size"), facts.dataset_size)
    batch = read_size(fields.find("batch_size"), facts.batch_size)
    rate = max(runs[0].fields["sample_rate"], 1e-12)
    _compare_with(runs, fields, size / batch if size and batch else 1 / rate)
    delta, method = read_delta(fields.find("delta")), fields.find("mechanism")
    found = Imported(
        "an Opacus accountant's history",
        mechanism,
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        method=METHODS[method.choice(METHODS)] if method else None,
        claims=read_claims(fields, delta),
        dataset_size=size,
        batch_size=batch,
        sampling_pointer=history.pointer,
        has_loader_rate=True,
    )
    is_sampled = any(run.fields["sample_rate"] < 1.0 for run in runs)
    return _draw_by_default(found, history.pointer, facts) if is_sampled else found


def _compare_with(runs: list[Node], fields: Fields, per_epoch: float) -> None:
    """Raise DocumentError if keys of a run beside a history differ from the history."""
    recorded = {
        "noise_multiplier": {run.fields["noise_multiplier"] for run in runs},
        "sample_rate": {run.fields["sample_rate"] for run in runs},
        "steps": {sum(run.fields["steps"] for run in runs)},
    }
    for name, values in recorded.items():
        part = fields.find(name)
        if part is not None and any(value != part.value for value in values):
            among = ", ".join(shown(value) for value in sorted(values)[:3])
            raise part.fault(f"is {shorten(part.value)}, and the history has {among}: correct one")
    if len(recorded["sample_rate"]) == 1 and (epochs := fields.find("epochs")) is not None:
        check_epochs(epochs, max(recorded["steps"]), read_epochs(epochs), per_epoch)


def _read_entry(entry: Part) -> Node:
    """Return the run that one (noise multiplier, sample rate, steps) entry describes."""
    parts = entry.items()
    if len(parts) != 3:
        raise entry.fault("must be [noise multiplier, sample rate, steps]")
    noise, rate, steps = parts
    return poisson_run(
        entry.pointer, read_noise(noise), rate.number(0.0, 1.0), steps.whole(0, COUNT_MAX)
    )


def _read_arguments(fields: Fields, facts: Facts) -> Imported:
    """Import the arguments of `make_private` or `make_private_with_epsilon`."""
    method = fields.find("mechanism")
    found = read_run(fields, facts, "arguments of Opacus' make_private", by_loader=True)
    found = replace(found, method=METHODS[method.choice(METHODS) if method else "prv"])
    found = _add_adaptive_clipping(found, fields, facts.sampling)
    return _draw_by_default(found, fields.root.pointer, facts)


def _draw_by_default(found: Imported, pointer: str, facts: Facts) -> Imported:
    """Add a note that Opacus' documented default says how batches are drawn, if it does."""
    if facts.sampling is not None:
        return found
    finding = Finding(
        "sampling-by-default",
        pointer,
        "poisson_sampling is not stated: make_private draws Poisson samples by default",
        "state poisson_sampling",
    )
    return replace(found, findings=(*found.findings, finding), is_sampling_stated=True)


def _add_adaptive_clipping(found: Imported, fields: Fields, sampling: str | None) -> Imported:
    """Add the cost of adaptive clipping, which releases a noisy count, if it is used.

    With a noise multiplier z and a count of standard deviation s, the sum has the noise multiplier
    (z⁻² − (2s)⁻²)^(−1/2). By Andrew et al., arXiv 1905.03871v5, Theorem 1, both cost what z costs,
    if a record changes the count by ½. Opacus counts 0 and 1: it changes by 1. If all batches have
    the same size, and another record takes the place of the one that leaves or is replaced, then
    the same noise on a count of ±½ releases as much: it differs by half of that size. Each record
    then adds a vector of norm 1/z at most to the sum and the count, in units of their noise, so z
    holds. A Poisson batch has no fixed size, and a record that is not in it adds 0, not ±½.
    """
    clipping = fields.find("clipping")
    if clipping is None or clipping.choice(_CLIPPINGS) != "adaptive" or found.mechanism is None:
        return found
    given, counted = fields.field("noise_multiplier"), fields.field("unclipped_num_std")
    noise, deviation = read_noise(given), read_noise(counted)
    if noise >= 2 * deviation:
        raise counted.fault("must be more than half the noise")
    if _keeps_size(found.relation, sampling):
        return found
    of_sum = (noise**-2 - (2 * deviation) ** -2) ** -0.5
    pair = [
        Node("gaussian", given.pointer, {"noise_multiplier": of_sum}),
        Node("gaussian", counted.pointer, {"noise_multiplier": deviation}),
    ]
    where, run = fields.root.pointer, found.mechanism.fields
    step = Node("composed", where, {"mechanisms": pair})
    step = Node("poisson_sampled", where, {"sample_rate": run["sample_rate"], "mechanism": step})
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
        mechanism=Node("repeated", where, {"count": run["steps"], "mechanism": step}),
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
