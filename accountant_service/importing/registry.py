"""The formats that can be imported: one file each, and the search for the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing import (
    diffprivlib,
    dp_event,
    flower,
    jax_privacy,
    nvflare,
    opacus,
    opendp,
    plain_run,
)
from accountant_service.importing.document import (
    DocumentError,
    Json,
    Part,
    parse_text,
    require_bounded,
)
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported
from accountant_service.importing.keys import Fields, Table
from accountant_service.importing.runs import read_sampling
from accountant_service.importing.sampling import apply_facts, has_single_releases
from accountant_service.importing.unit import apply_microbatches, apply_unit
from accountant_service.writing.number_format import round_nearest as shown

_Constructors = Mapping[str, tuple[str, ...]]
_ANY_LIBRARY: Final = ("PyTorch", "TensorFlow", "JAX")  # of a document that names no tool


@dataclass(frozen=True, slots=True)
class Format:
    """A format of documents that can be imported, with its table of keys and its parser.

    Attributes:
        title: the documents in words.
        keys: the keys that it knows.
        detect: returns whether a document is of this kind.
        read: reads it.
        constructors: names of the positional arguments of the tool's classes.
        prefixes: that its keys may have.
        libraries: names of those that may draw its noise, as in `noise_tails`.
    """

    title: str
    keys: Table
    detect: Callable[[Fields], bool]
    read: Callable[[Fields, Facts], Imported]
    constructors: _Constructors = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    def find_fields(self, root: Part) -> Fields:
        """Return the keys of a document as this format knows them."""
        return Fields(root, self.keys, self.constructors, self.prefixes)


FORMATS: Final[Mapping[str, Format]] = {
    "dp_event": Format(
        "an event of dp_accounting",
        dp_event.KEYS,
        dp_event.detect,
        dp_event.read,
        libraries=_ANY_LIBRARY,
    ),
    "jax_privacy": Format(
        "a configuration of jax_privacy",
        jax_privacy.KEYS,
        jax_privacy.detect,
        jax_privacy.read,
        jax_privacy.CONSTRUCTORS,
        libraries=("JAX",),
    ),
    "nvflare": Format(
        "the filters of an NVFlare job",
        nvflare.KEYS,
        nvflare.detect,
        nvflare.read,
        nvflare.CONSTRUCTORS,
    ),
    "flower": Format(
        "a mod or strategy of Flower",
        flower.KEYS,
        flower.detect,
        flower.read,
        flower.CONSTRUCTORS,
        flower.PREFIXES,
    ),
    "diffprivlib": Format(
        "a BudgetAccountant of diffprivlib",
        diffprivlib.KEYS,
        diffprivlib.detect,
        diffprivlib.read,
        diffprivlib.CONSTRUCTORS,
    ),
    "opendp": Format("a measure and a distance of OpenDP", opendp.KEYS, opendp.detect, opendp.read),
    "opacus": Format(
        "an accountant or arguments of Opacus",
        opacus.KEYS,
        opacus.detect,
        opacus.read,
        libraries=("PyTorch",),
    ),
    "run": Format(
        "a training run: noise, sizes, steps",
        plain_run.KEYS,
        plain_run.detect,
        plain_run.read,
        libraries=_ANY_LIBRARY,
    ),
}


def read_document(document: Json, facts: Facts, format_name: str | None = None) -> Imported:
    """Parse a document in its format, and add the findings that need no accounting.

    Args:
        document: parsed JSON, or text.
        facts: what the document does not say.
        format_name: a name in `FORMATS`; found from the document by default.

    Raises:
        DocumentError: the document is malformed, of no known format, or contradicts itself.
    """
    if isinstance(document, str):
        document = parse_text(document)
    require_bounded(document)
    root = flower.select_app_config(Part(document))
    chosen = FORMATS[format_name or find_format(root)]
    fields = chosen.find_fields(root)
    fields.require_agreement()
    sampling, pointer = read_sampling(fields, facts)
    facts = replace(facts, sampling=sampling, relation=_read_relation(fields, facts))
    read = found = chosen.read(fields, facts)
    if pointer:
        found = replace(found, sampling_pointer=pointer)
    found = apply_unit(apply_microbatches(apply_facts(found, facts), fields), fields)
    found = _report_keys(_report_several_runs(found, fields), fields)
    claims = found.claims
    if facts.epsilon is not None:
        claims = (*claims, Claim(facts.epsilon, facts.delta, ""))
    delta = facts.delta if facts.delta is not None else found.delta
    libraries = chosen.libraries if _is_noise_drawn_once(read, fields) else ()
    return _check_delta(replace(found, claims=claims, delta=delta, libraries=libraries))


def _is_noise_drawn_once(found: Imported, fields: Fields) -> bool:
    """Return whether one draw of its noise multiplier hides a record's clip norm on a coordinate.

    If not, no bound of δ follows from where draws end: the clip norms of layers are smaller than
    that of all, correlated noise and that of a secure mode are sums of draws, and some multipliers
    cover several releases, or records in several batches.
    """
    clipping, secure, records = (
        fields.find_known(name) for name in ("clipping", "secure_mode", "records_per_user")
    )
    if clipping is not None and clipping.value not in (None, "flat"):
        return False
    if (secure is not None and secure.value) or (records is not None and records.value != 1):
        return False
    return found.groups == 1 and has_single_releases(found)


def _report_several_runs(found: Imported, fields: Fields) -> Imported:
    """Add a finding if two sections have the length of a run: each may describe one."""
    second = fields.find_second_length()
    if second is None:
        return found
    finding = Finding(
        "several-runs",
        second.pointer,
        "a second section states the length of a run, and the computed cost is that of one run",
        "state the length in one section; import several runs as the history of an accountant, or "
        "each by itself",
    )
    return found.unless("the sections describe one run", finding)


def _report_keys(found: Imported, fields: Fields) -> Imported:
    """Add the findings about a stated seed, and about keys that no reader asked for."""
    seed = fields.find_known("seed")
    if seed is not None:
        message = "who knows the seed can compute the noise and subtract it"
        finding = Finding("seed-stated", seed.pointer, message, "draw it anew, and keep it secret")
        found = replace(found, findings=(*found.findings, finding))
    unread = fields.report_unread()
    return found.unless("the keys that were not read change nothing", *unread) if unread else found


def _read_relation(fields: Fields, facts: Facts) -> NeighbouringRelation | None:
    """Return the neighbouring relation that the document says, or the one stated beside it.

    Raises:
        DocumentError: the document contradicts the stated relation.
    """
    given = fields.find("neighbouring_relation")
    if given is None:
        return facts.relation
    names = dp_event.RELATIONS | {str(each): each for each in NeighbouringRelation}
    relation = names[given.choice(names)]
    if facts.relation not in (None, relation):
        raise given.fault(
            f"is {relation}, and {facts.relation} is stated with the import: correct one of them"
        )
    return relation


def find_format(root: Part) -> str:
    """Detect the format of a document, and return its name.

    Raises:
        DocumentError: it has none of the formats.
    """
    for name, each in FORMATS.items():
        if each.detect(each.find_fields(root)):
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
