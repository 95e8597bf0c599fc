"""Training runs in other tools' words: sizes, rates and steps, as nodes of this service."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.mechanisms.codec import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.number_format import round_nearest as shown

DELTA_MIN: Final = 1e-50
DELTA_MAX: Final = 1 - 1e-9
EPSILON_MAX: Final = 1e6
_EPOCHS_MAX: Final = 1e6
_RATE_TOLERANCE: Final = 1e-6  # relative; rates are often printed with few digits


def read_noise(part: Part) -> float:
    """Return a document's noise multiplier.

    Raises:
        DocumentError: it is outside the limits of this service; without noise nothing is private.
    """
    return part.number(NOISE_MIN, NOISE_MAX)


def read_size(part: Part | None) -> int | None:
    """Return a number of records, clients or steps; None if it is not given."""
    return None if part is None else part.whole(1, COUNT_MAX)


def read_delta(part: Part | None) -> float | None:
    """Return a stated δ, after checking its range; None if it is not given."""
    return None if part is None else part.number(DELTA_MIN, DELTA_MAX)


def read_epsilon(part: Part | None) -> float | None:
    """Return an ε, claimed or targeted, after checking its range; None if it is not given."""
    return None if part is None else part.number(0.0, EPSILON_MAX, above=True)


def read_epochs(part: Part) -> float:
    """Return a document's number of epochs."""
    return part.number(0.0, _EPOCHS_MAX, above=True)


def batches_per_epoch(dataset_size: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Return the number of batches that a data loader has in an epoch."""
    whole, rest = divmod(dataset_size, batch_size)
    return max(1, whole + (rest > 0 and not drop_last))


def poisson_run(pointer: str, noise: float | None, rate: float, steps: int) -> Node:
    """Return a run of Poisson-sampled Gaussian releases, which the document has at `pointer`."""
    known = {} if noise is None else {"noise_multiplier": noise}
    return Node("dp_sgd", pointer, {**known, "sample_rate": rate, "steps": steps})


def read_claims(part: Part | None, delta: float | None) -> tuple[Claim, ...]:
    """Return the document's ε as a claim at δ; empty if it states none."""
    claimed = part.find("epsilon", "target_epsilon") if part else None
    epsilon = read_epsilon(claimed)
    return () if claimed is None or epsilon is None else (Claim(epsilon, delta, claimed.pointer),)


def read_run(run: Part, facts: Facts, tool: str, *, by_loader: bool) -> Imported:
    """Import a training run: its noise, its sizes or sample rate, and its steps or epochs.

    Args:
        run: the object.
        facts: what the document does not say.
        tool: the document in words.
        by_loader: whether the sample rate is one over the number of batches of a data loader,
            and not the batch size over the number of records.
    """
    size = read_size(run.find("dataset_size", "train_size")) or facts.dataset_size
    batch = read_size(run.find("batch_size")) or facts.batch_size
    per_epoch = None
    if size is not None and batch is not None:
        if batch > size:
            raise run.field("batch_size").fault(f"must be at most the {size} records")
        per_epoch = size / batch
    if per_epoch is not None and by_loader:
        drop_last = run.find("drop_last")
        per_epoch = batches_per_epoch(
            size or 1, batch or 1, drop_last=drop_last is not None and drop_last.flag()
        )
    rate, noise = _read_rate(run, per_epoch), run.find("noise_multiplier", "sigma")
    steps = _read_steps(run, per_epoch or 1 / max(rate, 1e-12))
    delta = read_delta(run.find("target_delta", "delta"))
    claims = read_claims(run, delta)
    if noise is None and not claims:
        run.field("noise_multiplier")
    found = Imported(
        tool,
        poisson_run(run.pointer, None if noise is None else read_noise(noise), rate, steps),
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        target=claims[0].epsilon if noise is None else None,
        claims=claims,
        dataset_size=size,
    )
    known = Facts(size, batch)
    sampling, pointer = _read_sampling(run, facts)
    return draw_as(check_rate(found, known), sampling, known, pointer)


def _read_rate(run: Part, per_epoch: float | None) -> float:
    """Return the stated sample rate, or one over the number of batches per epoch."""
    given = run.find("sample_rate")
    if given is None and per_epoch is not None:
        return 1.0 / per_epoch
    return run.field("sample_rate").number(0.0, 1.0)


def _read_steps(run: Part, per_epoch: float) -> int:
    """Return the stated number of steps, or epochs times batches per epoch, rounded up."""
    given = run.find("steps")
    if given is not None:
        return given.whole(0, COUNT_MAX)
    steps = math.ceil(read_epochs(run.field("epochs")) * per_epoch * (1 - 1e-12))
    if steps > COUNT_MAX:
        raise run.field("epochs").fault(f"must be at most {shown(COUNT_MAX)} steps")
    return steps


def _read_sampling(run: Part, facts: Facts) -> tuple[str | None, str]:
    """Return how batches are drawn, and a JSON pointer to where the document says so."""
    given, flag = run.find("sampling"), run.find("poisson_sampling")
    pointer = next((each.pointer for each in (given, flag) if each is not None), run.pointer)
    if facts.sampling is not None:
        return facts.sampling, pointer
    if given is not None:
        return given.choice(("poisson", "shuffled", "fixed_size", "none")), pointer
    return ("shuffled" if flag is not None and not flag.flag() else None), pointer


def draw_as(found: Imported, sampling: str | None, facts: Facts, pointer: str) -> Imported:
    """Replace the Poisson sampling that a tool assumes by the actual `sampling`; add a finding.

    Args:
        found: with the runs that the tool accounts for, Poisson sampled.
        sampling: how batches are drawn; None and "poisson" change nothing.
        facts: sizes, for batches of fixed size.
        pointer: where the document says how batches are drawn.
    """
    if found.mechanism is None or sampling in (None, "poisson"):
        return found
    sizes = (facts.dataset_size or found.dataset_size, facts.batch_size)
    run = _replace_sampling(found.mechanism, str(sampling), sizes)
    if run == found.mechanism:
        return found
    message, instead = _SAMPLING_TEXTS[str(sampling)]
    finding = Finding(_SAMPLING_CODES[str(sampling)], pointer, message, instead)
    accounted = found.accounted or found.mechanism
    relation = found.relation
    if sampling == "shuffled" and relation is NeighbouringRelation.ADD_OR_REMOVE_ONE:
        relation = NeighbouringRelation.ZERO_OUT_ONE
    return replace(
        found,
        mechanism=run,
        accounted=accounted,
        relation=relation,
        findings=(*found.findings, finding),
    )


_SAMPLING_CODES: Final = {
    "shuffled": "shuffled-as-poisson",
    "none": "unsampled-as-sampled",
    "fixed_size": "fixed-size-as-poisson",
}
_SAMPLING_TEXTS: Final = {
    "shuffled": (
        "the loader shuffles the data and cuts it into batches; the accountant charges Poisson "
        "samples, where each record is drawn independently",
        "the computed cost is that of shuffled batches, for which no amplification is proved; "
        "neighbours have the same number of records. Draw Poisson batches, or put each record "
        "into a batch at random anew each epoch (balls in bins)",
    ),
    "none": (
        "every step uses all the data; the accountant charges a sample",
        "the computed cost is without amplification by sampling",
    ),
    "fixed_size": (
        "batches have a fixed size; the accountant charges Poisson samples",
        "the computed cost is that of batches of fixed size, where another record takes the "
        "place of the one that is left out",
    ),
}


def _replace_sampling(node: Node, sampling: str, sizes: tuple[int | None, int | None]) -> Node:
    """Replace the sampling of all DP-SGD runs in a mechanism; `sizes` are of dataset and batch."""
    if node.kind == "dp_sgd":
        if node.fields.get("sample_rate") == 1.0:
            return node
        size, batch = sizes
        if sampling == "fixed_size" and size and batch:
            fixed = {"dataset_size": size, "batch_size": batch, "sample_rate": None}
            return node.but(sampling=sampling, **fixed)
        everything = {"sample_rate": 1.0} if sampling == "none" else {}
        return node.but(sampling=sampling, **everything)
    if node.kind == "poisson_sampled" and sampling == "none":
        inner: Node = node.fields["mechanism"]
        return inner
    changed = {
        name: [_replace_sampling(each, sampling, sizes) for each in value]
        if isinstance(value, list) and all(isinstance(each, Node) for each in value)
        else _replace_sampling(value, sampling, sizes)
        if isinstance(value, Node)
        else value
        for name, value in node.fields.items()
    }
    return replace(node, fields=changed)


def check_rate(found: Imported, facts: Facts) -> Imported:
    """Replace sample rates that contradict batch and dataset size; add a finding about it.

    A loader has ⌊N/B⌋ or ⌈N/B⌉ batches, and some tools use its inverse as the rate.
    """
    size, batch = facts.dataset_size or found.dataset_size, facts.batch_size
    if found.mechanism is None or size is None or batch is None or batch > size:
        return found
    low, high = 1 / math.ceil(size / batch), 1 / (size // batch)
    wrong = [
        run
        for run in runs_of(found.mechanism)
        if "sample_rate" in run.fields
        and not low * (1 - _RATE_TOLERANCE)
        <= run.fields["sample_rate"]
        <= high * (1 + _RATE_TOLERANCE)
    ]
    if not wrong:
        return found
    given = wrong[0].fields["sample_rate"]
    finding = Finding(
        "sample-rate-mismatch",
        wrong[0].pointer,
        f"the sample rate is {shown(given)}, but batches of {batch} of {size} records have a "
        f"rate of "
        f"{shown(batch / size)}: a factor of {given * size / batch:.3g}",
        "the computed cost is that of the rate of these sizes",
    )
    return replace(
        found,
        mechanism=_replace_rate(found.mechanism, wrong, batch / size),
        accounted=found.accounted or found.mechanism,
        findings=(*found.findings, finding),
    )


def runs_of(node: Node) -> list[Node]:
    """Return all DP-SGD runs in a mechanism."""
    if node.kind == "dp_sgd":
        return [node]
    inner = node.fields.get("mechanisms", [node.fields.get("mechanism")])
    return [run for each in inner if isinstance(each, Node) for run in runs_of(each)]


def _replace_rate(node: Node, wrong: list[Node], rate: float) -> Node:
    """Replace the sample rate of those runs in a mechanism that are listed in `wrong`."""
    if node in wrong:
        return node.but(sample_rate=rate)
    if "mechanisms" in node.fields:
        return node.but(
            mechanisms=[_replace_rate(n, wrong, rate) for n in node.fields["mechanisms"]]
        )
    if "mechanism" in node.fields:
        return node.but(mechanism=_replace_rate(node.fields["mechanism"], wrong, rate))
    return node
