"""The formats that can be imported: one file each, and the search for the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.importing import dp_event, flower, jax_privacy, nvflare, opacus, plain_run
from accountant_service.importing.document import (
    DocumentError,
    Json,
    Part,
    parse_text,
    require_bounded,
)
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported
from accountant_service.importing.runs import read_sampling
from accountant_service.importing.sampling import apply_facts
from accountant_service.number_format import round_nearest as shown


@dataclass(frozen=True, slots=True)
class Format:
    """A format of documents that can be imported, with its detector and its parser.

    Attributes:
        title: the documents in words.
        detect: returns whether a document is of this kind.
        read: reads it.
    """

    title: str
    detect: Callable[[Json], bool]
    read: Callable[[Part, Facts], Imported]


FORMATS: Final[Mapping[str, Format]] = {
    "dp_event": Format("an event of dp_accounting", dp_event.detect, dp_event.read),
    "jax_privacy": Format("a configuration of jax_privacy", jax_privacy.detect, jax_privacy.read),
    "nvflare": Format("the filters of an NVFlare job", nvflare.detect, nvflare.read),
    "flower": Format("a mod or strategy of Flower", flower.detect, flower.read),
    "opacus": Format("an accountant or arguments of Opacus", opacus.detect, opacus.read),
    "run": Format("a training run: noise, sizes, steps", plain_run.detect, plain_run.read),
}


def read_document(document: Json, facts: Facts, format_name: str | None = None) -> Imported:
    """Parse a document in its format, and add the findings that need no accounting.

    Args:
        document: parsed JSON, or text.
        facts: what the document does not say.
        format_name: a name in `FORMATS`; found from the document by default.

    Raises:
        DocumentError: the document is malformed, or of no known format.
    """
    if isinstance(document, str):
        document = parse_text(document)
    require_bounded(document)
    chosen = format_name or find_format(document)
    part, pointer = Part(document), ""
    if isinstance(document, dict):
        sampling, pointer = read_sampling(part, facts)
        facts = replace(
            facts, sampling=facts.sampling or sampling, relation=_read_relation(part, facts)
        )
    found = FORMATS[chosen].read(part, facts)
    if pointer:
        found = replace(found, sampling_pointer=pointer)
    found = apply_facts(found, facts)
    claims = found.claims
    if facts.epsilon is not None:
        claims = (*claims, Claim(facts.epsilon, facts.delta, ""))
    delta = facts.delta if facts.delta is not None else found.delta
    return _check_delta(replace(found, claims=claims, delta=delta))


def _read_relation(document: Part, facts: Facts) -> NeighbouringRelation | None:
    """Return the neighbouring relation that the document says, or the one stated beside it.

    Raises:
        DocumentError: the document contradicts the stated relation.
    """
    given = document.find("neighboring_relation", "neighbouring_relation")
    if given is None:
        return facts.relation
    names = dp_event.RELATIONS | {str(each): each for each in NeighbouringRelation}
    relation = names[given.choice(names)]
    if facts.relation not in (None, relation):
        raise given.fault(
            f"is {relation}, and {facts.relation} is stated with the import: correct one of them"
        )
    return relation


def find_format(document: Json) -> str:
    """Detect the format of a document, and return its name.

    Raises:
        DocumentError: it has none of the formats.
    """
    for name, each in FORMATS.items():
        if each.detect(document):
            return name
    titles = "; ".join(each.title for each in FORMATS.values())
    raise DocumentError(("", f"must be one of: {titles}"))


def _check_delta(found: Imported) -> Imported:
    """Add a finding if δ is at least one over the number of records."""
    size, delta = found.dataset_size, found.delta
    if size is None or delta is None or delta < 1 / size:
        return found
    message = (
        f"δ = {shown(delta)} is not below 1/N = {1 / size:.3g}: publishing a record at random, "
        f"or one of {size}, satisfies it"
    )
    finding = Finding("delta-too-large", "", message, f"choose δ well below {1 / size:.3g}")
    return replace(found, findings=(*found.findings, finding))
