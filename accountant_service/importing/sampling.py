"""Apply what is stated about sampling, sizes and neighbours to every sampled release of a document.

A statement acts on all sampled releases of the mechanism, wherever they stand in it. If it cannot
act on one of them, the document is refused: no statement is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import DocumentError
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Facts, Imported, Node
from accountant_service.writing.number_format import round_nearest as shown

_RATE_TOLERANCE: Final = 1e-6  # relative; rates are often printed with few digits
_SAMPLES: Final = ("poisson_sampled", "truncated_poisson_sampled", "fixed_size_sampled")


def apply_facts(found: Imported, facts: Facts) -> Imported:
    """Return the imported document as it is run: with the stated sampling, sizes and neighbours.

    Args:
        found: the document as its tool accounts for it.
        facts: what is stated in the document or beside it.

    Raises:
        DocumentError: a statement contradicts the document, or cannot act on a release of it.
    """
    found = replace(
        found,
        dataset_size=found.dataset_size or facts.dataset_size,
        batch_size=found.batch_size or facts.batch_size,
    )
    if found.mechanism is None:
        return found
    if facts.relation not in (None, found.relation):
        message = (
            f"has neighbours by {found.relation}, and the neighbouring relation {facts.relation} "
            "is stated: leave it out"
        )
        raise DocumentError(("", message))
    size, batch = found.dataset_size, found.batch_size
    if size is not None and batch is not None and batch > size:
        raise DocumentError(("", f"has batches of {batch}, which must be at most {size} records"))
    if any(_sampled_releases(found.mechanism)):
        return _draw_as(_check_stated(_check_sizes(found), facts), facts)
    _require_no_sample(found, facts.sampling or found.sampling)
    return found


def _require_no_sample(found: Imported, sampling: str | None) -> None:
    """Raise DocumentError if samples are stated for a document without a sampled release."""
    has_batches = _has_several_batches((found.dataset_size, found.batch_size))
    if has_batches or sampling not in (None, "none"):
        is_sampled = sampling not in (None, "none")
        given = f"{sampling} sampling" if is_sampled else f"a batch size of {found.batch_size}"
        message = (
            f"has no sampled release, and {given} is stated: describe the sampling in the "
            "document, or leave the statement out"
        )
        raise DocumentError((found.sampling_pointer, message))


def _sampled_releases(node: Node) -> Iterator[Node]:
    """Yield all sampled releases in a mechanism; of a sample within a sample, the outer one."""
    if node.kind == "dp_sgd" or node.kind in _SAMPLES:
        yield node
        return
    for each in _inner_nodes(node):
        yield from _sampled_releases(each)


def has_single_releases(found: Imported) -> bool:
    """Return whether no sample of an imported mechanism has several releases."""
    samples = [] if found.mechanism is None else _sampled_releases(found.mechanism)
    return all(each.kind in ("dp_sgd", "gaussian") for each in map(_release_of, samples))


def _release_of(sample: Node) -> Node:
    """Return what is released of a sample; a training run's noise is in itself."""
    inner = sample.fields.get("mechanism")
    return inner if isinstance(inner, Node) else sample


def _inner_nodes(node: Node) -> list[Node]:
    """Return the mechanisms that a mechanism is made of."""
    inner = [node.fields.get("mechanism"), *node.fields.get("mechanisms", [])]
    return [each for each in inner if isinstance(each, Node)]


def _change_inner(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return a mechanism with each of the mechanisms that it is made of changed."""
    changed: dict[str, Any] = {}
    if "mechanism" in node.fields:
        changed["mechanism"] = change(node.fields["mechanism"])
    if "mechanisms" in node.fields:
        changed["mechanisms"] = [change(each) for each in node.fields["mechanisms"]]
    return node.but(**changed) if changed else node


def _change_sampled(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return a mechanism with each of its sampled releases changed."""
    if node.kind == "dp_sgd" or node.kind in _SAMPLES:
        return change(node)
    return _change_inner(node, lambda each: _change_sampled(each, change))


def _is_nested(release: Node) -> bool:
    """Return whether a sampled release samples again within its sample."""
    return any(True for each in _inner_nodes(release) for _ in _sampled_releases(each))


def _check_stated(found: Imported, facts: Facts) -> Imported:
    """Rest the cost on Poisson samples if nothing says how batches are drawn; add a finding.

    Not if they are all the data. A tool whose documentation has a default says it by its form.
    """
    assert found.mechanism is not None
    if facts.sampling or found.sampling or found.is_sampling_stated:
        return found
    if all(each.fields.get("sample_rate") == 1.0 for each in _sampled_releases(found.mechanism)):
        return found
    finding = Finding(
        "sampling-not-stated",
        found.sampling_pointer,
        "nothing says how batches are drawn: the computed cost is that of Poisson samples, where "
        "each record is drawn independently",
        "state sampling: poisson, fixed_size or shuffled. Most loaders shuffle, which costs more",
    )
    return found.unless("batches are Poisson samples", finding)


def _check_sizes(found: Imported) -> Imported:
    """Replace sample rates and sizes that contradict the stated sizes; add a finding about it.

    A loader has ⌊N/B⌋ or ⌈N/B⌉ batches. Some tools use its inverse as the rate, and Opacus also
    draws at that rate.
    """
    assert found.mechanism is not None
    wrong: list[tuple[Node, Node]] = []

    def check(release: Node) -> Node:
        """Return a sampled release with the stated sizes."""
        right = _resize(release, found)
        if right != release:
            wrong.append((release, right))
        return right

    mechanism = _change_sampled(found.mechanism, check)
    if not wrong:
        return found
    return replace(
        found,
        mechanism=mechanism,
        accounted=found.accounted or found.mechanism,
        findings=(*found.findings, _report_sizes(*wrong[0], found)),
    )


def _resize(release: Node, found: Imported) -> Node:
    """Return a sampled release with the rate or the sizes of its sample as they are stated."""
    size, batch = found.dataset_size, found.batch_size
    if batch is not None and _is_nested(release):
        raise DocumentError((release.pointer, _NESTED.format("the stated batch size")))
    if release.kind == "fixed_size_sampled":
        stated = {"dataset_size": size, "batch_size": batch}
        return release.but(**{name: each for name, each in stated.items() if each is not None})
    if release.kind == "truncated_poisson_sampled" and size is not None:
        release = release.but(dataset_size=max(1, size // found.groups))
    if size is None or batch is None:
        return release
    if found.groups > 1:
        low = high = rate = min(1.0, batch * found.groups / size)
    else:
        rate, high = batch / size, 1 / (size // batch)
        low = 1 / math.ceil(size / batch) if found.has_loader_rate else rate
    given = release.fields["sample_rate"]
    if low * (1 - _RATE_TOLERANCE) <= given <= high * (1 + _RATE_TOLERANCE):
        return release
    return release.but(sample_rate=rate)


_NESTED: Final = (
    "samples within a sample, and {} does not say which of the two samples it is about: leave it "
    "out, and describe both samples in the document"
)


def _report_sizes(release: Node, right: Node, found: Imported) -> Finding:
    """Return the finding that a sampled release contradicts the stated sizes."""
    size, batch = found.dataset_size, found.batch_size
    if release.fields.get("sample_rate") != right.fields.get("sample_rate"):
        given, rate = release.fields["sample_rate"], right.fields["sample_rate"]
        message = (
            f"the sample rate is {shown(given)}, but batches of {batch} of {size} records have a "
            f"rate of {shown(rate)}: a factor of {given / rate:.3g}"
        )
    else:
        sizes, stated = (
            f"{fields['dataset_size']} records"
            + (f" in batches of {fields['batch_size']}" if "batch_size" in fields else "")
            for fields in (release.fields, right.fields)
        )
        message = f"the document samples {sizes}, and {stated} are stated"
    return Finding(
        "sample-rate-mismatch",
        release.pointer,
        message,
        "the computed cost is that of the rate of these sizes",
    )


def _draw_as(found: Imported, facts: Facts) -> Imported:
    """Replace the sampling that the tool assumes by the stated one; add a finding.

    Shuffled batches have a proved cost only if neighbours have the same number of records: they
    do, unless a relation is stated.
    """
    assert found.mechanism is not None
    sampling, relation = facts.sampling or found.sampling, found.relation
    if sampling is None:
        return found
    if sampling != "poisson" and found.groups > 1:
        message = (
            f"draws Poisson samples from {found.groups} groups in turn, and {sampling} sampling is "
            "stated: the cost of correlated noise is not proved for it. Draw Poisson samples, or "
            "describe the run as a mechanism of the kind matrix_factorization"
        )
        raise DocumentError((found.mechanism.pointer, message))
    for release in _sampled_releases(found.mechanism):
        _require_compatible(release, sampling)
    if sampling == "poisson":
        return found
    sizes = (found.dataset_size, found.batch_size)
    drawn = {
        "shuffled": lambda node: _count_epochs(_shuffle(node, _has_several_batches(sizes)), found),
        "none": lambda node: _change_sampled(node, _use_all),
        "fixed_size": lambda node: _change_sampled(node, lambda each: _fix_size(each, sizes)),
    }[sampling](found.mechanism)
    if drawn == found.mechanism:
        return found
    _require_whole_epochs(drawn)
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    if sampling == "shuffled" and added and facts.relation is None:
        relation = NeighbouringRelation.ZERO_OUT_ONE
    message, instead = _SAMPLING_TEXTS[sampling]
    finding = Finding(_SAMPLING_CODES[sampling], found.sampling_pointer, message, instead)
    return replace(
        found,
        mechanism=drawn,
        accounted=found.accounted or found.mechanism,
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
        "the loader cuts the data into batches, in shuffled or in fixed order; the accountant "
        "charges Poisson samples, where each record is drawn independently",
        "the computed cost is that of shuffled batches, for which no amplification is proved; it "
        "holds for neighbours with the same number of records. Draw Poisson batches, or put each "
        "record into a batch at random anew each epoch (balls in bins)",
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


def _require_compatible(release: Node, sampling: str) -> None:
    """Raise DocumentError if the stated sampling cannot act on a sampled release."""
    if release.kind == "fixed_size_sampled" and sampling in ("poisson", "shuffled"):
        message = (
            f"draws a sample of fixed size at every step, and {sampling} sampling is stated: "
            "leave that out, or describe the sampling in the document as it is"
        )
        raise DocumentError((release.pointer, message))
    if sampling != "none" and _is_nested(release):
        raise DocumentError((release.pointer, _NESTED.format(f"{sampling} sampling")))


def _use_all(release: Node) -> Node:
    """Return a release on all the data in place of one on a sample."""
    is_full = release.fields.get("sample_rate") == 1.0
    if release.kind == "dp_sgd":
        return release if is_full else release.but(sampling="none", sample_rate=1.0)
    inner = _change_sampled(release.fields["mechanism"], _use_all)
    return release.but(mechanism=inner) if is_full and release.kind == "poisson_sampled" else inner


def _has_several_batches(sizes: tuple[int | None, int | None]) -> bool:
    """Return whether the sizes of dataset and batch are known and differ."""
    size, batch = sizes
    return size is not None and batch is not None and batch < size


def _fix_size(release: Node, sizes: tuple[int | None, int | None]) -> Node:
    """Return a release on a sample of fixed size in place of one on a Poisson sample."""
    if release.kind == "fixed_size_sampled":
        return release
    size, batch = sizes
    if size is None or batch is None:
        message = "needs dataset_size and batch_size: fixed_size sampling is stated"
        raise DocumentError((release.pointer, message))
    fixed = {"dataset_size": size, "batch_size": batch}
    if release.kind == "dp_sgd":
        return release.but(sampling="fixed_size", sample_rate=None, **fixed)
    fields = {**fixed, "mechanism": release.fields["mechanism"]}
    return Node("fixed_size_sampled", release.pointer, fields)


def _shuffle(node: Node, has_several: bool, steps: int = 1) -> Node:
    """Return a mechanism whose sampled releases are runs over shuffled batches.

    A run with the sample rate 1 uses all the data at each step, unless `has_several` says that the
    data have several batches.
    """
    if node.kind == "repeated" and node.fields["mechanism"].kind in _SAMPLES:
        run = _shuffle(node.fields["mechanism"], has_several, node.fields["count"])
        is_run = run.kind == "dp_sgd"
        return replace(run, pointer=node.pointer) if is_run else node.but(mechanism=run)
    if node.kind != "dp_sgd" and node.kind not in _SAMPLES:
        return _change_inner(node, lambda each: _shuffle(each, has_several))
    rate = node.fields["sample_rate"]
    if rate == 1.0 and not has_several and node.kind != "truncated_poisson_sampled":
        return node
    if node.kind == "dp_sgd":
        return node.but(sampling="shuffled")
    inner = node.fields["mechanism"]
    precision = _precision(inner)
    if not precision:
        message = (
            "is on a sample, and shuffled sampling is stated, which is proved for Gaussian noise "
            "only: leave the sampling out, or describe the batches of an epoch as one release on "
            "all the data"
        )
        raise DocumentError((inner.pointer, message))
    fields = {"noise_multiplier": precision**-0.5, "sample_rate": rate, "steps": steps}
    return Node("dp_sgd", node.pointer, {**fields, "sampling": "shuffled"})


def _count_epochs(node: Node, found: Imported) -> Node:
    """Return a shuffled run with the epochs that are stated, or the most that its steps can be."""
    if node.kind != "dp_sgd" or node.fields.get("sampling") != "shuffled":
        return node
    if found.epochs is not None:
        stated = {"dataset_size": found.dataset_size, "batch_size": found.batch_size}
        return node.but(sample_rate=None, steps=None, epochs=found.epochs, **stated)
    if found.epoch_batches is not None:
        return node.but(sample_rate=min(1.0, 1 / found.epoch_batches))
    return node


def _precision(node: Node) -> float | None:
    """Return σ⁻² of the release that Gaussian releases on one sample equal; None for others."""
    if node.kind == "gaussian":
        return float(node.fields["noise_multiplier"] ** -2)
    inner = [_precision(each) for each in _inner_nodes(node)]
    present = [each for each in inner if each is not None]
    if node.kind not in ("repeated", "composed") or len(present) < len(inner):
        return None
    return math.fsum(present) * (node.fields["count"] if node.kind == "repeated" else 1)


def _require_whole_epochs(mechanism: Node) -> None:
    """Raise DocumentError if shuffled runs with different noise begin within an epoch.

    A record is in one batch of each epoch. If an epoch has batches of two runs, the record may be
    in two batches of the run with less noise and in none of the other.
    """
    runs = [
        each
        for each in _sampled_releases(mechanism)
        if each.kind == "dp_sgd" and each.fields.get("sampling") == "shuffled"
    ]
    if len({each.fields.get("noise_multiplier") for each in runs}) <= 1:
        return
    for run in runs:
        epochs = run.fields["steps"] * run.fields["sample_rate"]
        if abs(epochs - round(epochs)) > _RATE_TOLERANCE * max(1.0, epochs):
            message = (
                f"makes {shown(epochs)} epochs, and shuffled runs with different noise must make "
                "whole epochs each: begin each run with a new epoch, and round its steps up"
            )
            raise DocumentError((run.pointer, message))
