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
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.runs import (
    batches_per_epoch,
    check_rate,
    draw_as,
    poisson_run,
    read_delta,
    read_epochs,
    read_epsilon,
    read_noise,
    read_size,
    whole_steps,
)
from accountant_service.mechanisms.codec import COUNT_MAX

METHODS: Final = {"rdp": "subsampled_rdp", "gdp": "gdp_clt", "prv": "pld"}
_HISTORY_MAX: Final = 5000
_CHECKPOINT: Final = "privacy_accountant_state_dict"
_ARGUMENTS: Final = {
    "max_grad_norm", "max_per_sample_grad_norm", "poisson_sampling", "target_epsilon",
}  # fmt: skip


def detect(document: Json) -> bool:
    """Return whether a document is an accountant's history or the arguments of `make_private`."""
    if isinstance(document, dict):
        return bool(_ARGUMENTS & document.keys()) or any(
            name in document for name in ("history", _CHECKPOINT)
        )
    return isinstance(document, list) and all(
        isinstance(entry, list) and len(entry) == 3 for entry in document
    )


def read(document: Part, facts: Facts) -> Imported:
    """Read an accountant's history, or the arguments of `make_private`."""
    if isinstance(document.value, dict):
        state = document.find(_CHECKPOINT) or document
        if state.find("history") is None:
            return _read_arguments(document, facts)
        name = state.field("mechanism").choice(METHODS) if state.find("mechanism") else None
        return _read_history(state.field("history"), METHODS.get(name or ""), document, facts)
    return _read_history(document, None, None, facts)


def _read_history(history: Part, method: str | None, outer: Part | None, facts: Facts) -> Imported:
    """Read the entries (noise multiplier, sample rate, steps) of a history."""
    entries = history.items()
    if not 1 <= len(entries) <= _HISTORY_MAX:
        raise history.fault(f"must have 1 to {_HISTORY_MAX} entries")
    runs = [_read_entry(entry) for entry in entries]
    mechanism = (
        runs[0] if len(runs) == 1 else Node("composed", history.pointer, {"mechanisms": runs})
    )
    delta = read_delta(outer.find("delta", "target_delta")) if outer else None
    found = Imported(
        "an Opacus accountant's history",
        mechanism,
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        method=method,
        claims=_claims(outer, delta),
        dataset_size=facts.dataset_size,
    )
    return draw_as(check_rate(found, facts), facts.sampling, facts, history.pointer)


def _claims(outer: Part | None, delta: float | None) -> tuple[Claim, ...]:
    """Return the ε that a document claims."""
    claimed = outer.find("epsilon", "target_epsilon") if outer else None
    epsilon = read_epsilon(claimed)
    return () if claimed is None or epsilon is None else (Claim(epsilon, delta, claimed.pointer),)


def _read_entry(entry: Part) -> Node:
    """Read one entry of a history."""
    parts = entry.items()
    if len(parts) != 3:
        raise entry.fault("must be [noise multiplier, sample rate, steps]")
    noise, rate, steps = parts
    return poisson_run(
        entry.pointer, read_noise(noise), rate.number(0.0, 1.0), steps.whole(0, COUNT_MAX)
    )


def _read_arguments(arguments: Part, facts: Facts) -> Imported:
    """Read the arguments of `make_private` or `make_private_with_epsilon`."""
    size = read_size(arguments.find("dataset_size", "train_size")) or facts.dataset_size
    batch = read_size(arguments.find("batch_size")) or facts.batch_size
    drop_last = arguments.find("drop_last")
    per_epoch = None
    if size is not None and batch is not None:
        if batch > size:
            raise arguments.field("batch_size").fault(f"must be at most the {size} records")
        per_epoch = batches_per_epoch(
            size, batch, drop_last=drop_last is not None and drop_last.flag()
        )
    rate = _rate(arguments, per_epoch)
    noise = arguments.find("noise_multiplier", "sigma")
    delta = read_delta(arguments.find("target_delta", "delta"))
    claims = _claims(arguments, delta)
    method = arguments.find("accountant")
    run = poisson_run(
        arguments.pointer,
        None if noise is None else read_noise(noise),
        rate,
        _steps(arguments, per_epoch, rate),
    )
    if noise is None and not claims:
        raise arguments.field("noise_multiplier").fault("is required")
    found = Imported(
        "arguments of Opacus' make_private",
        run,
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        target=claims[0].epsilon if noise is None else None,
        method=METHODS[method.choice(METHODS) if method else "prv"],
        claims=claims,
        dataset_size=size,
    )
    known = Facts(size, batch)
    sampling, pointer = _sampling(arguments, facts)
    found = draw_as(check_rate(found, known), sampling, known, pointer)
    return _charge_adaptive_clipping(found, arguments)


def _rate(arguments: Part, per_epoch: int | None) -> float:
    """Return the sample rate: given, or one over the number of batches in an epoch."""
    given = arguments.find("sample_rate")
    if given is not None:
        return given.number(0.0, 1.0)
    if per_epoch is None:
        arguments.field("sample_rate")
    return 1.0 / (per_epoch or 1)


def _steps(arguments: Part, per_epoch: int | None, rate: float) -> int:
    """Return the number of steps: given, or that of the epochs."""
    given = arguments.find("steps")
    if given is not None:
        return given.whole(0, COUNT_MAX)
    epochs = read_epochs(arguments.field("epochs"))
    return whole_steps(epochs, per_epoch or max(1, round(1 / max(rate, 1e-12))))


def _sampling(arguments: Part, facts: Facts) -> tuple[str | None, str]:
    """Return how batches are drawn, and where the document says so."""
    given = arguments.find("poisson_sampling")
    if facts.sampling is not None:
        return facts.sampling, given.pointer if given else arguments.pointer
    if given is not None and not given.flag():
        return "shuffled", given.pointer
    return None, arguments.pointer


def _charge_adaptive_clipping(found: Imported, arguments: Part) -> Imported:
    """Return the runs with the noisy count of unclipped records charged, if there is one.

    With a noise multiplier z and a count of standard deviation s, the sum has the noise multiplier
    (z⁻² − (2s)⁻²)^(−1/2). By Andrew et al., arXiv 1905.03871v5, Theorem 1, both cost what z costs,
    if a record changes the count by ½. Opacus counts 0 and 1: it changes by 1.
    """
    clipping = arguments.find("clipping")
    if clipping is None or clipping.value != "adaptive" or found.mechanism is None:
        return found
    given = arguments.field("noise_multiplier", "sigma")
    noise, deviation = read_noise(given), read_noise(arguments.field("unclipped_num_std"))
    if noise >= 2 * deviation:
        raise arguments.field("unclipped_num_std").fault("must be more than half the noise")
    of_sum = (noise**-2 - (2 * deviation) ** -2) ** -0.5
    pair = [
        Node("gaussian", given.pointer, {"noise_multiplier": of_sum}),
        Node("gaussian", f"{arguments.pointer}/unclipped_num_std", {"noise_multiplier": deviation}),
    ]
    step = Node("composed", arguments.pointer, {"mechanisms": pair})
    fields = found.mechanism.fields
    if fields.get("sampling", "poisson") == "poisson":
        step = Node(
            "poisson_sampled",
            arguments.pointer,
            {"sample_rate": fields["sample_rate"], "mechanism": step},
        )
    total = (of_sum**-2 + deviation**-2) ** -0.5
    message = (
        f"the accountant charges the noise multiplier {noise:g} (before Opacus 1.6, {of_sum:.6g}), "
        f"as if a record changed the count of unclipped records, whose noise is {deviation:g}, by "
        "½; it changes by 1"
    )
    instead = (
        f"sum and count, if clipping norms are published, cost a noise multiplier of {total:.6g}"
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
