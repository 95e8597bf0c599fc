"""Certificates: what may be published about a run, signed, and re-computable by anyone.

A certificate names what NIST SP 800-226 tells an evaluator to look for: the unit of privacy, the
neighbouring relation, the trust model, the mechanism with all of its parameters, how composition is
accounted, ε and δ, and what the claim covers.
"""

from __future__ import annotations

import json
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

FORMAT: Final = "privacy-accountant-certificate/1"
Document = dict[str, Any]


def executed(mechanism: Mechanism, steps: int) -> Mechanism:
    """What a plan has released after so many granted steps: nothing, if it releases nothing."""
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
    """The certificate of what a run was granted.

    Args:
        dataset: that it drew on.
        run: a reservation.
        seed: 32 bytes of the signing key.
        issued_at: microseconds since 1970.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # 7 MB, rarely

    policy = dataset.policy
    released = executed(mechanisms.from_json(run.mechanism), run.steps_granted)
    claim = certified(released, policy.relation, policy.delta)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    document = {
        "format": FORMAT,
        "reservation": run.identifier,
        "state": run.state.value,
        "dataset": dataset.name,
        "privacy_unit": dataset.privacy_unit,
        "neighbouring_relation": policy.relation.value,
        "trust_model": "central: a trusted curator holds the data and adds the noise",
        "mechanism": mechanisms.to_json(released),
        "mechanism_hash": claim.mechanism_hash,
        "sampling": claim.sampling,
        "steps": run.steps_granted,
        "guarantee": {
            "epsilon": claim.epsilon,
            "delta": claim.delta,
            "method": claim.method,
            "status": claim.status.value,
            "certified": _interval(claim.certified),
            "scope": "fixed_plan",
            "covers": "this run alone, its plan fixed in advance",
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


def check(document: Document, public_key: str | None = None) -> tuple[list[str], Guarantee | None]:
    """What is wrong with a certificate, and the guarantee computed anew.

    Args:
        document: as it was read.
        public_key: the issuer's, in hexadecimal, where it is known; else the document's own.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    faults: list[str] = []
    try:
        if document["format"] != FORMAT:
            return [f"the format is not {FORMAT}"], None
        if public_key is not None and document["public_key"] != public_key:
            faults.append("it is not signed with the given public key")
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        key.verify(bytes.fromhex(document["signature"]), _text(document))
    except InvalidSignature:
        faults.append("the signature does not fit: the document was altered")
    except (KeyError, TypeError, ValueError) as error:
        return [f"it is no certificate: {error!r}"], None
    try:
        mechanism = mechanisms.from_json(document["mechanism"])
        relation = NeighbouringRelation(document["neighbouring_relation"])
        stated = document["guarantee"]
        found = certified(mechanism, relation, float(stated["delta"]))
        if found.mechanism_hash != document["mechanism_hash"]:
            faults.append("the mechanism does not have the stated hash")
        if found.status is not Status.PROVEN or stated["status"] != Status.PROVEN.value:
            faults.append("the guarantee is not proven")
        least = found.epsilon if found.certified is None else found.certified.lower
        if not float(stated["epsilon"]) >= least:
            faults.append(
                f"ε is stated as {stated['epsilon']}, and is at least {digits.down(least)}"
            )
    except (AccountingError, mechanisms.MechanismError, KeyError, TypeError, ValueError) as error:
        return [*faults, f"its mechanism cannot be accounted for: {error}"], None
    return faults, found
