"""Apply what a document says about whom one guarantee protects, and what is clipped by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import shorten
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Imported, Node
from accountant_service.importing.keys import Fields, acts
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.numerics.floats import rounding
from accountant_service.writing.number_format import round_nearest as shown

MICROBATCHES: Final = (
    acts(
        "num_microbatches",
        "of TensorFlow Privacy: gradients clipped by themselves in a batch. Fewer than the batch "
        "has records: a record changes the sum by twice the clipping norm",
    ),
    acts("used_microbatching", "true: as if `num_microbatches` were below the batch size"),
)
_RECORDS: Final = ("record", "example", "sample", "item", "row", "instance", "sequence", "image")


def apply_unit(found: Imported, fields: Fields) -> Imported:
    """Return the document's cost for the unit of privacy that it states.

    Raises:
        DocumentError: its statements about the unit contradict each other, or cannot act.
    """
    given, unit = fields.find_known("records_per_user"), fields.find_known("privacy_unit")
    records = 1 if given is None else given.whole(1, COUNT_MAX)
    name = "" if unit is None else shorten(unit.value).lower().replace("_", "-")
    name = name.removesuffix("-level").removesuffix("s")
    if unit is not None and name not in _RECORDS and given is None:
        finding = Finding(
            "privacy-unit",
            unit.pointer,
            f"the unit of privacy is {name}, and the computed cost is that of one record",
            "state records_per_user, the most records that one has",
        )
        return found.unless(f"each {name} has one record", finding)
    if unit is not None and name in _RECORDS and records > 1:
        raise unit.fault(f"is {name}, and {records} records_per_user are stated: correct one")
    if given is None or records == 1 or found.mechanism is None:
        return found
    if found.target is not None:
        raise given.fault("needs a noise_multiplier: no noise is solved for several records")
    return replace(
        found,
        mechanism=_protect(found.mechanism, records),
        accounted=found.accounted or found.mechanism,
    )


def _protect(node: Node, records: int) -> Node:
    """Return a mechanism on data in which one person has up to `records` records.

    Batches of a shuffled epoch have together at most all records of the person, whose sums differ
    most if one batch has them all: the noise is that much smaller relative to them.
    """
    if node.kind == "dp_sgd" and node.fields.get("sampling") == "shuffled":
        noise = node.fields["noise_multiplier"]
        return node.but(noise_multiplier=rounding.down(noise / records))
    inner = node.fields.get("mechanism")
    if node.kind == "repeated" and isinstance(inner, Node) and inner.kind == "composed":
        return node.but(mechanism=_protect(inner, records))
    if node.kind == "composed":
        return node.but(mechanisms=[_protect(each, records) for each in node.fields["mechanisms"]])
    return Node("user_level", node.pointer, {"records": records, "mechanism": node})


def apply_microbatches(found: Imported, fields: Fields) -> Imported:
    """Return the cost of a run whose gradients are clipped in microbatches of several records.

    One record of a microbatch turns its gradient, of norm C at most, into any other: the sum moves
    by 2C. This needs the other records to stay in their microbatches, as they do if neighbours have
    the same number of records and the changed one only loses its contribution.

    Raises:
        DocumentError: the number of microbatches does not divide the batch, or noise is missing.
    """
    part, flag = fields.find_known("num_microbatches"), fields.find_known("used_microbatching")
    size, batch = 0, found.batch_size
    if part is not None:
        count = part.whole(1, COUNT_MAX)
        if batch is not None and batch % count:
            raise part.fault(f"must divide the batch of {batch} records")
        size = 0 if batch is None else batch // count
    several = flag.flag() if flag is not None else part is not None and size != 1
    if flag is not None and part is not None and size and several != (size > 1):
        raise flag.fault(f"is {str(several).lower()}, and a microbatch has {size} records")
    cause = part or flag
    if cause is None or not several or found.mechanism is None:
        return found
    if found.target is not None:
        raise cause.fault("needs a noise_multiplier: no noise is solved for microbatches")
    noise = found.mechanism.fields["noise_multiplier"] / 2
    finding = Finding(
        "microbatches",
        cause.pointer,
        f"gradients are clipped in microbatches of {size or 'several'} records, not one by one: a "
        "record changes the sum by up to twice the clipping norm",
        f"the computed cost is that of the noise multiplier {shown(noise)}; clip each record by "
        "itself (num_microbatches = batch_size)",
    )
    halved = replace(
        found,
        mechanism=found.mechanism.but(noise_multiplier=noise),
        accounted=found.accounted or found.mechanism,
        findings=(*found.findings, finding),
    )
    if found.relation is NeighbouringRelation.ZERO_OUT_ONE:
        return halved
    return halved.unless("a record's microbatch holds the same other records in both datasets")
