"""Certificates: signed statements about a run that anyone can verify and recompute.

A certificate states what NIST SP 800-226 tells an evaluator to check: the unit of privacy, the
neighbouring relation, the trust model, the mechanism with all of its parameters, how composition is
accounted, ε and δ, and what the claim covers.

The claim about the run alone covers the whole plan that was reserved, however many steps were
granted. A run may be stopped because of what its steps showed, and then ε of the granted steps is
too small a claim (decision 0004). Certificates of format 1 made that claim and do not state the
number of steps reserved; they are still accepted.

Format 3 adds the number of records, μ of Gaussian differential privacy, dates, and what the
training program declared when it committed the run. Certificates of format 2 are still accepted.
The certificate of a run on several datasets has `datasets`, each with its budget and what the run
took of it, and null as `dataset`; `dataset_size` is the number of their records together.
`dates.dataset_closed` is null, or missing in earlier certificates, if the dataset was not closed
when the certificate was issued.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import (
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)
from accountant_service.accounting.methods import Question
from accountant_service.accounting.risk import GaussianMu
from accountant_service.errors import AccountingError
from accountant_service.ledger import signing
from accountant_service.ledger.rules import (
    NOTHING_DECLARED,
    Dataset,
    Declaration,
    Reservation,
)
from accountant_service.ledger.step_plan import charged_form, with_steps
from accountant_service.mechanisms import Mechanism, canonical_form
from accountant_service.version import __version__
from accountant_service.writing import number_format
from accountant_service.writing.canonical_json import read_json

FORMAT: Final = "privacy-accountant-certificate/3"
_FORMAT_2: Final = "privacy-accountant-certificate/2"
TRUST_MODEL: Final = "central: a trusted curator holds the data and adds the noise"
_FORMAT_1: Final = "privacy-accountant-certificate/1"
_FORMATS: Final = (FORMAT, _FORMAT_2, _FORMAT_1)
_ONE_RECORD: Final = (
    ", for one record of one of the datasets; a record in several of them is charged in each"
)
_PROVED_SHARE: Final = 0.99  # of the bound: earlier versions may have proved a little less
_LIST: Final = "certificates"  # the only name in a file with several
# the errors with which a document is refused that no issuer has made
_UNREADABLE: Final = (
    AccountingError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError, mechanisms.MechanismError,
)  # fmt: skip
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run: its time, and the facts that the training program stated.

    Attributes:
        at: microseconds since 1970; None if there is no entry.
        declared: what the training program stated about the run.
    """

    at: int | None
    declared: Declaration = NOTHING_DECLARED


def issue(
    ended: Sequence[tuple[Dataset, Reservation, RunEnd]], seed: bytes, issued_at: int
) -> Document:
    """Return the signed certificate of a run, with the guarantee of its whole plan.

    Args:
        ended: each dataset of the run, its reservation that has ended, and how that ended.
        seed: the 32 bytes of the signing key.
        issued_at: microseconds since 1970.
    """
    dataset, run, end = ended[0]
    policy = dataset.policy
    plan = with_steps(mechanisms.from_json(run.mechanism), run.steps_reserved)
    delta = min(each.policy.delta for each, _, _ in ended)  # it implies the others
    claim = calculator.prove_epsilon(plan, policy.relation, delta)
    subject = _describe_dataset(dataset, end) if run.joint is None else _describe_datasets(ended)
    document: Document = {
        "format": FORMAT,
        "reservation": run.identifier if run.joint is None else run.joint.identifier,
        "state": run.state.value,
        **{name: subject[name] for name in ("dataset", "dataset_size")},
        "privacy_unit": dataset.privacy_unit,
        "neighbouring_relation": policy.relation.value,
        "trust_model": TRUST_MODEL,
        "mechanism": mechanisms.to_json(plan),
        "mechanism_hash": claim.mechanism_hash,
        "sampling": claim.sampling,
        "steps_reserved": run.steps_reserved,
        "steps": run.steps_granted,
        "guarantee": {
            "epsilon": claim.epsilon,
            "delta": claim.delta,
            "method": claim.method,
            "status": claim.status.value,
            "certified": _describe_interval(claim.certified),
            "scope": "fixed_plan",
            "covers": "this run alone: all steps reserved, wherever it stopped, as planned before"
            + ("" if run.joint is None else _ONE_RECORD),
            "assumptions": [each.statement for each in claim.assumptions],
            "gaussian_dp": _describe_mu(plan, policy.relation, delta),
        },
        **{name: subject[name] for name in ("datasets", "budget") if name in subject},
        "declared": end.declared.entry_fields(),
        **{name: subject[name] for name in ("record",) if name in subject},
        "accountant_version": __version__,
        "issued_at": issued_at / 1e6,
        "dates": subject["dates"] | {"issued": format_time(issued_at)},
    }
    return signing.sign(document, seed)


def _describe_dataset(dataset: Dataset, end: RunEnd) -> Document:
    """Return what a certificate states about a dataset, its budget and its record."""
    policy = dataset.policy
    return {
        "dataset": dataset.name,
        "dataset_size": dataset.size,
        "budget": {
            "epsilon": policy.epsilon,
            "delta": policy.delta,
            "scope": "filter_budget",
            "covers": "everything ever released from this dataset, however it was chosen; the unit "
            "is one record",
            "composition": policy.description,
            "filter": {"filter": policy.name} | policy.entry_fields(),
        },
        "record": {"entries": dataset.version, "head": dataset.head},
        "dates": {
            "dataset_created": format_time(dataset.created_at),
            "dataset_closed": None if dataset.closed_at is None else format_time(dataset.closed_at),
            "run_ended": None if end.at is None else format_time(end.at),
        },
    }


def _describe_datasets(ended: Sequence[tuple[Dataset, Reservation, RunEnd]]) -> Document:
    """Return what the certificate of a run on several datasets states about each of them."""
    return {
        "dataset": None,
        "dataset_size": sum(dataset.size for dataset, _, _ in ended),
        "datasets": [
            _describe_dataset(dataset, end)
            | {"reservation": run.identifier, "charged": _describe_charge(dataset, run)}
            for dataset, run, end in sorted(ended, key=lambda each: each[0].name)
        ],
        "dates": {},
    }


def _describe_charge(dataset: Dataset, run: Reservation) -> Document:
    """Return what an ended run took of a dataset's budget: its share, and in its units."""
    policy = dataset.policy
    amounts = policy.balance_fields(run.taken, policy.nothing)
    return {"share": min(policy.share_of(run.taken), 1.0)} | {
        name.removeprefix("spent_"): each
        for name, each in amounts.items()
        if name.startswith("spent_")
    }


def _describe_interval(interval: Interval | None) -> dict[str, float] | None:
    """Return a certified interval of ε as a JSON object for the certificate."""
    if interval is None:
        return None
    return {"epsilon_lower": interval.lower, "epsilon_upper": interval.upper}


def format_time(microseconds: int) -> str:
    """Return a time as ISO 8601 date and time in UTC, to the second."""
    moment = datetime.fromtimestamp(microseconds // 10**6, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _describe_mu(
    plan: Mechanism, relation: NeighbouringRelation, slack: float
) -> dict[str, float] | None:
    """Return, as JSON, a μ for which the plan provably is μ-Gaussian DP; None if unknown.

    The claim holds up to `slack`, which may be subtracted from the Gaussian trade-off curve.
    """
    bounds = _bound_mu(plan, relation, slack)
    return None if bounds is None else {"mu": bounds.upper, "slack": slack}


def _bound_mu(plan: Mechanism, relation: NeighbouringRelation, slack: float) -> Interval | None:
    """Return bounds on the least μ for which the plan is μ-Gaussian DP; None if none is proved.

    The claim holds up to `slack`, which may be subtracted from the Gaussian trade-off curve.
    """
    try:
        bounds = GaussianMu(slack).risk(Question(canonical_form(plan), relation))
    except AccountingError:
        return None
    return bounds if math.isfinite(bounds.upper) else None


def read(text: str) -> Document:
    """Parse a certificate's JSON text.

    Raises:
        ValueError: the text is not a JSON object, an object has a name twice, so that programs
            would read different values, or a string is not Unicode.
    """
    document = read_json(text)
    if not isinstance(document, dict):
        raise ValueError("it must be a JSON object")
    return document


def split(document: Document) -> list[Document]:
    """Return the certificates in a document: its own, or those that it lists for a run's phases.

    Raises:
        ValueError: the list is empty, or not one of JSON objects.
    """
    if document.keys() != {_LIST}:
        return [document]
    listed = document[_LIST]
    if not (isinstance(listed, list) and listed and all(isinstance(x, dict) for x in listed)):
        raise ValueError(f"{_LIST} must be a list of certificates")
    return listed


def list_gaps(document: Document) -> list[str]:
    """Return warnings about facts that a certificate does not cover."""
    if document.get("format") != _FORMAT_1:
        return []
    return [
        f"a run that was planned with more than these {document.get('steps')} steps and stopped "
        "early: this format does not state the steps reserved. Ask the issuer for a new certificate"
    ]


def get_model_sha256(document: Document) -> str | None:
    """Return the hash of the model's file that a certificate names; None if it names none."""
    declared = document.get("declared")
    named = declared.get("model_sha256") if isinstance(declared, dict) else None
    return named if isinstance(named, str) else None


def find_model_faults(document: Document, model_sha256: str) -> list[str]:
    """Return the reasons why a certificate is not about the model with this file hash.

    Args:
        document: the parsed certificate. Its signature, which `check` verifies, covers the hash.
        model_sha256: the hash of the model's file, in lower-case hexadecimal.
    """
    named = get_model_sha256(document)
    if named is None:
        return [
            "it names no model, so it is about no particular one: the training program declares "
            "the model's hash when it commits the run"
        ]
    if named != model_sha256:
        return [f"it is about another model: it names SHA-256 {named}, this is {model_sha256}"]
    return []


def check(document: Document, public_key: str | None = None) -> tuple[list[str], Guarantee | None]:
    """Verify a certificate: return its faults, and its recomputed guarantee.

    Args:
        document: the parsed certificate.
        public_key: the issuer's, in upper- or lowercase hexadecimal; the document's own unless
            given.
    """
    if document.keys() == {_LIST}:
        return ["it is a list of the certificates of a run's phases: pass one of them"], None
    if document.get("format") not in _FORMATS:
        return [f"the format is not {FORMAT}"], None
    try:
        faults = signing.find_signature_faults(document, public_key)
    except _UNREADABLE as error:
        return [f"it is not a certificate: {error!r}"], None
    try:
        found = _recompute(document)
        return faults + _find_claim_faults(document, found), found
    except _UNREADABLE as error:
        return [*faults, f"its mechanism cannot be accounted for: {error}"], None


def _recompute(document: Document) -> Guarantee:
    """Compute the guarantee of the mechanism that a certificate states.

    Raises:
        ValueError: the certificate's δ is no δ.
    """
    delta = float(document["guarantee"]["delta"])
    if not 0 <= delta < 1:
        raise ValueError(f"δ must be at least 0 and below 1, not {delta}")
    mechanism = mechanisms.from_json(document["mechanism"])
    relation = NeighbouringRelation(document["neighbouring_relation"])
    return calculator.prove_epsilon(mechanism, relation, delta)


def _find_claim_faults(document: Document, found: Guarantee) -> list[str]:
    """Return the faults of a certificate's claimed guarantee, compared with the recomputed one."""
    stated = document["guarantee"]
    faults = [
        *_find_step_faults(document),
        *_find_size_faults(document),
        *_find_mu_faults(document),
    ]
    charged = charged_form(mechanisms.from_json(document["mechanism"])).hash  # of earlier versions
    if document["mechanism_hash"] not in (found.mechanism_hash, charged):
        faults.append("the mechanism does not match the stated hash")
    if found.status is not Status.PROVEN or stated["status"] != Status.PROVEN.value:
        faults.append("the guarantee is not proven")
    least = found.epsilon if found.certified is None else found.certified.lower
    if not float(stated["epsilon"]) >= least:
        faults.append(
            f"the stated ε is {stated['epsilon']}, "
            f"but ε is at least {number_format.round_down(least)}"
        )
    elif not float(stated["epsilon"]) >= _PROVED_SHARE * found.epsilon:
        faults.append(
            f"the stated ε is {stated['epsilon']}, "
            f"but no ε below {number_format.round_up(found.epsilon)} is proved"
        )
    return faults


def _find_mu_faults(document: Document) -> list[str]:
    """Return a fault if the stated μ of Gaussian DP is below the proved lower bound."""
    stated = document["guarantee"].get("gaussian_dp")
    if stated is None:
        return []
    plan = mechanisms.from_json(document["mechanism"])
    relation = NeighbouringRelation(document["neighbouring_relation"])
    bounds = _bound_mu(plan, relation, float(stated["slack"]))
    if bounds is None:
        return ["a μ is stated, but none can be computed for its mechanism"]
    if not float(stated["mu"]) >= bounds.lower:
        least = number_format.round_down(bounds.lower)
        return [f"the stated μ is {stated['mu']}, but μ is at least {least}"]
    if not float(stated["mu"]) >= _PROVED_SHARE * bounds.upper:
        proved = number_format.round_up(bounds.upper)
        return [f"the stated μ is {stated['mu']}, but no μ below {proved} is proved"]
    return []


def _find_size_faults(document: Document) -> list[str]:
    """Return a fault for each number of records in the mechanism that the dataset does not have."""
    if "dataset_size" not in document:  # older formats do not state it
        return []
    plan = mechanisms.from_json(document["mechanism"])
    records = int(document["dataset_size"])
    sizes = [int(each["dataset_size"]) for each in document.get("datasets", [])]
    if sizes and sum(sizes) != records:
        return [f"its datasets have {sum(sizes)} records, not {records}"]
    found = mechanisms.find_dataset_size_mismatches(records, plan)
    return [
        f"{each.pointer} of its mechanism is {each.stated}, of {each.records} records"
        for each in found
        if each.is_overstated
    ]


def _find_step_faults(document: Document) -> list[str]:
    """Return a fault if the claimed guarantee does not cover all reserved steps."""
    if document["format"] == _FORMAT_1:
        return []
    reserved, granted = int(document["steps_reserved"]), int(document["steps"])
    plan = mechanisms.from_json(document["mechanism"])
    whole = canonical_form(with_steps(plan, reserved)).hash == canonical_form(plan).hash
    return [] if whole and 0 <= granted <= reserved else [
        f"{reserved} steps reserved and {granted} granted do not match its mechanism"
    ]  # fmt: skip
