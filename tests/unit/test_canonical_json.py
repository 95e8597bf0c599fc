"""The exact text of each hashed or signed document: it must never change."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from accountant_service.ledger import hash_chain
from accountant_service.mechanisms import canonical_form, from_json
from accountant_service.writing.canonical_json import (
    AmbiguousJsonError,
    canonical_json,
    require_unambiguous,
)

DOCUMENT = {"ε": 1e-05, "a": [1, 2.0, None, True], "b": {"ü": '"/\n', "c": 10**20}}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (  # entries of the ledger's hash chain
            {},
            '{"a":[1,2.0,null,true],"b":{"c":100000000000000000000,"ü":"\\"/\\n"},"ε":1e-05}',
        ),
        (  # certificates
            {"ascii_only": True},
            '{"a":[1,2.0,null,true],"b":{"c":100000000000000000000,"\\u00fc":"\\"/\\n"},'
            '"\\u03b5":1e-05}',
        ),
        (  # mechanism hashes, fingerprints of idempotent requests
            {"compact": False, "ascii_only": True},
            '{"a": [1, 2.0, null, true], "b": {"c": 100000000000000000000, '
            '"\\u00fc": "\\"/\\n"}, "\\u03b5": 1e-05}',
        ),
    ],
)
def test_each_format_has_its_exact_text(options: dict[str, bool], text: str) -> None:
    assert canonical_json(DOCUMENT, **options) == text
    assert json.loads(text) == DOCUMENT


def test_equal_documents_have_equal_text() -> None:
    reordered: dict[str, Any] = dict(reversed(DOCUMENT.items()))
    assert canonical_json(reordered) == canonical_json(DOCUMENT)


def test_the_hash_of_a_ledger_entry_is_that_of_its_text_after_the_previous_hash() -> None:
    body = hash_chain.encode_entry({"type": "created", "name": "ä", "sequence": 0})
    assert body == '{"name":"ä","sequence":0,"type":"created"}'
    expected = hashlib.sha256(f"{hash_chain.GENESIS}\n{body}".encode()).hexdigest()
    assert hash_chain.hash_entry(hash_chain.GENESIS, body) == expected


def test_the_hash_of_a_mechanism_is_that_of_its_sorted_atoms() -> None:
    run = {
        "kind": "composed",
        "mechanisms": [
            {"kind": "laplace", "noise_multiplier": 2},
            {
                "kind": "dp_sgd",
                "noise_multiplier": 1.1,
                "dataset_size": 1000,
                "batch_size": 10,
                "steps": 5,
                "sampling": "fixed_size",
            },
        ],
    }
    text = (
        r'[["[\"gaussian\", 1.1, \"fixed_size\", 0.01, [1000, 10], \"\"]", 5], '
        r'["[\"laplace\", 2.0, \"none\", 1.0, [], \"\"]", 1]]'
    )
    expected = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert canonical_form(from_json(run)).hash == expected


@pytest.mark.parametrize(
    "number",
    [
        "0.1",
        "0.10000000000000001",
        "0.1000000000000000",
        "1e-5",
        "5e-324",
        "-0.0",
        "1.0",
        "1" + "0" * 30 + ".0",
    ],
)
def test_numbers_of_doubles_keep_their_digits(number: str) -> None:
    require_unambiguous(f'{{"a": [{number}]}}')


@pytest.mark.parametrize(
    "number", ["0.1000000000000000001", "1.0000000000000001", "1e-400", "7e-324", "0." + "3" * 400]
)
def test_a_number_that_would_be_rounded_is_found(number: str) -> None:
    with pytest.raises(
        AmbiguousJsonError, match=r"^/a~1b/1 has more digits than double precision keeps"
    ):
        require_unambiguous(f'{{"a/b": [1, {number}]}}')
