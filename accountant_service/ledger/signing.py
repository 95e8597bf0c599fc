"""Ed25519 signatures of the ledger's documents: certificates and checkpoints."""

from __future__ import annotations

from typing import Any, Final

from accountant_service.writing.canonical_json import canonical_json

SIGNING_KEY: Final = "certificates"  # the server secret with the seed of the signing key
Json = dict[str, Any]


def sign(document: Json, seed: bytes) -> Json:
    """Return a document with the public key and the signature of everything else in it.

    Args:
        document: what `json.dumps` accepts.
        seed: the 32 bytes of the signing key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,  # 7 MB, rarely needed
    )

    key = Ed25519PrivateKey.from_private_bytes(seed)
    named = document | {"public_key": key.public_key().public_bytes_raw().hex()}
    return named | {"signature": key.sign(_signed_bytes(named)).hex()}


def derive_public_key(seed: bytes) -> str:
    """Return the public key of a signing key's seed, in hexadecimal."""
    return str(sign({}, seed)["public_key"])


def find_signature_faults(document: Json, public_key: str | None) -> list[str]:
    """Return the faults of a document's signature and public key.

    Args:
        document: as `sign` returns it, or altered since.
        public_key: the issuer's, in upper- or lowercase hexadecimal; the document's own if None.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the document has no signature.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    faults = []
    if public_key is not None and document["public_key"].lower() != public_key.lower():
        faults.append("it is not signed with the given public key")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        key.verify(bytes.fromhex(document["signature"]), _signed_bytes(document))
    except InvalidSignature:
        faults.append("the signature does not match: the document was altered")
    return faults


def _signed_bytes(document: Json) -> bytes:
    """Return the canonical JSON of a document without its signature."""
    unsigned = {name: value for name, value in document.items() if name != "signature"}
    return canonical_json(unsigned, ascii_only=True).encode()
