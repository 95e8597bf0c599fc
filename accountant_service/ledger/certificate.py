"""Certificates: what may be published about a run, signed, and re-computable by anyone.

A certificate names what NIST SP 800-226 tells an evaluator to look for: the unit of privacy, the
neighbouring relation, the trust model, the mechanism with all of its parameters, how composition is
accounted, ε and δ, and what the claim covers.

The claim of the run alone is that of the plan it reserved, however many of its steps were granted.
A run may be stopped because of what its steps showed, and then ε of the steps granted claims too
little (decision 0004). Certificates of format 1 made that claim and did not say how many steps were
reserved; they are still read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from accountant_service import __version__, digits, mechanisms
from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.errors import (
    AccountingError,
    MethodNotApplicableError,
    TooExpensiveError,
)
from accountant_service.guarantee import Guarantee, Interval, NeighbouringRelation, Status
from accountant_service.ledger.model import Dataset, Reservation
from accountant_service.mechanisms import DpSgd, Mechanism, Repeated, canonical_form

FORMAT: Final = "privacy-accountant-certificate/2"
_STEPS_GRANTED_ONLY: Final = "privacy-accountant-certificate/1"
_FORMATS: Final = (FORMAT, _STEPS_GRANTED_ONLY)
Document = dict[str, Any]


def with_steps(mechanism: Mechanism, steps: int) -> Mechanism:
    """Return a plan with a number of steps of its own; a plan that releases nothing as it is."""
    if not canonical_form(mechanism).parts:
        return mechanism
    match mechanism:
        case DpSgd():
            return replace(mechanism, steps=steps, epochs=None)
        case Repeated():
            return replace(mechanism, count=steps)
        case _:
            return Repeated(steps, mechanism)


def certified(mechanism: Mechanism, relation: NeighbouringRelation, delta: float) -> Guarantee:
    """The narrowest proven guarantee: `pld`, or Rényi's where that has no formula or no end."""
    question = Question(canonical_form(mechanism), relation)
    try:
        return ACCOUNTANTS["pld"].epsilon(question, delta)
    except (MethodNotApplicableError, TooExpensiveError):
        return ACCOUNTANTS["subsampled_rdp"].epsilon(question, delta)


def issue(dataset: Dataset, run: Reservation, seed: bytes, issued_at: int) -> Document:
    """Return the signed certificate of a run: the guarantee of its whole plan.

    Args:
        dataset: that it drew on.
        run: a reservation that has ended.
        seed: 32 bytes of the signing key.
        issued_at: microseconds since 1970.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # 7 MB, rarely

    policy = dataset.policy
    plan = with_steps(mechanisms.from_json(run.mechanism), run.steps_reserved)
    claim = certified(plan, policy.relation, policy.delta)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    document = {
        "format": FORMAT,
        "reservation": run.identifier,
        "state": run.state.value,
        "dataset": dataset.name,
        "privacy_unit": dataset.privacy_unit,
        "neighbouring_relation": policy.relation.value,
        "trust_model": "central: a trusted curator holds the data and adds the noise",
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
            "certified": _interval(claim.certified),
            "scope": "fixed_plan",
            "covers": "this run alone: all steps reserved, wherever it stopped, as planned before",
            "assumptions": [each.statement for each in claim.assumptions],
        },
        "budget": {
            "epsilon": policy.epsilon,
            "delta": policy.delta,
            "scope": "filter_budget",
            "covers": "everything ever released from this dataset, however it was chosen",
            "composition": f"Rényi filter of order {policy.order:g}",
        },
        "record": {"entries": dataset.version, "head": dataset.head},
        "accountant_version": __version__,
        "issued_at": issued_at / 1e6,
        "public_key": key.public_key().public_bytes_raw().hex(),
    }
    return document | {"signature": key.sign(_text(document)).hex()}


def _interval(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"epsilon_lower": interval.lower, "epsilon_upper": interval.upper}


def _text(document: Document) -> bytes:
    unsigned = {name: value for name, value in document.items() if name != "signature"}
    return json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()


def read(text: str) -> Document:
    """Return the JSON object in a text.

    Raises:
        ValueError: it is none, or a name is there twice: readers would differ about what it says.
    """
    document = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_number)
    if not isinstance(document, dict):
        raise ValueError("it must be a JSON object")
    return document


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> Document:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"the name {repeated[0]!r} is there more than once in one object")
    return dict(pairs)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def not_covered(document: Document) -> list[str]:
    """Return what a certificate leaves open that a reader may take it to say."""
    if document.get("format") != _STEPS_GRANTED_ONLY:
        return []
    return [
        f"a run that was to make more than these {document.get('steps')} steps and stopped early: "
        "this format does not name the steps reserved. Ask the issuer for a new certificate"
    ]


def check(document: Document, public_key: str | None = None) -> tuple[list[str], Guarantee | None]:
    """What is wrong with a certificate, and the guarantee computed anew.

    Args:
        document: as it was read.
        public_key: the issuer's, in hexadecimal of either case, where it is known; else the
            document's own.
    """
    if document.get("format") not in _FORMATS:
        return [f"the format is not {FORMAT}"], None
    try:
        faults = _signature_faults(document, public_key)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"it is no certificate: {error!r}"], None
    try:
        found = _recomputed(document)
        return faults + _claim_faults(document, found), found
    except (AccountingError, mechanisms.MechanismError, KeyError, TypeError, ValueError) as error:
        return [*faults, f"its mechanism cannot be accounted for: {error}"], None


def _signature_faults(document: Document, public_key: str | None) -> list[str]:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    faults = []
    if public_key is not None and document["public_key"].lower() != public_key.lower():
        faults.append("it is not signed with the given public key")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        key.verify(bytes.fromhex(document["signature"]), _text(document))
    except InvalidSignature:
        faults.append("the signature does not fit: the document was altered")
    return faults


def _recomputed(document: Document) -> Guarantee:
    mechanism = mechanisms.from_json(document["mechanism"])
    relation = NeighbouringRelation(document["neighbouring_relation"])
    return certified(mechanism, relation, float(document["guarantee"]["delta"]))


def _claim_faults(document: Document, found: Guarantee) -> list[str]:
    """What a certificate states otherwise than its mechanism was found to be."""
    stated = document["guarantee"]
    faults = _steps_faults(document)
    if found.mechanism_hash != document["mechanism_hash"]:
        faults.append("the mechanism does not have the stated hash")
    if found.status is not Status.PROVEN or stated["status"] != Status.PROVEN.value:
        faults.append("the guarantee is not proven")
    least = found.epsilon if found.certified is None else found.certified.lower
    if not float(stated["epsilon"]) >= least:
        faults.append(f"ε is stated as {stated['epsilon']}, and is at least {digits.down(least)}")
    return faults


def _steps_faults(document: Document) -> list[str]:
    """The claim must be of all the steps that were reserved."""
    if document["format"] == _STEPS_GRANTED_ONLY:
        return []
    reserved, granted = int(document["steps_reserved"]), int(document["steps"])
    plan = mechanisms.from_json(document["mechanism"])
    whole = canonical_form(with_steps(plan, reserved)).hash == canonical_form(plan).hash
    return [] if whole and 0 <= granted <= reserved else [
        f"{reserved} steps reserved and {granted} granted are not those of its mechanism"
    ]  # fmt: skip
