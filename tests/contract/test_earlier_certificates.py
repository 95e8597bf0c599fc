"""Certificates of every format still verify, and `verify` says what format 1 does not cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from accountant_service import cli
from accountant_service.ledger import certificate

ISSUED = Path(__file__).parent / "fixtures" / "certificates"
NAMES = [f"certificate-1-{name}" for name in ("whole", "stopped", "released", "replace-one")]
LATER = ["certificate-2-stopped", "certificate-2-renyi", "certificate-3-stopped"]


def verified(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["verify", str(file), *options])


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_certificate_verifies_and_says_what_it_leaves_open(name: str) -> None:
    file = ISSUED / f"{name}.json"
    document: dict[str, Any] = json.loads(file.read_text())
    told = verified(file, "--public-key", document["public_key"].upper())
    assert (told.exit_code, told.stderr) == (0, "")
    steps = document["steps"]
    assert (
        f"it does not cover a run that was planned with more than these {steps} steps"
        in told.stdout
    )
    assert "steps reserved;" not in told.stdout  # it does not say
    as_json = json.loads(verified(file, "--json").stdout)
    assert (as_json["faults"], as_json["steps_reserved"]) == ([], None)
    assert as_json["steps_granted"] == steps
    assert len(as_json["not_covered"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_an_altered_certificate_does_not_verify(name: str, tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads((ISSUED / f"{name}.json").read_text())
    file = tmp_path / "certificate.json"
    for altered in (
        {"steps": 1},
        {"steps_reserved": document["steps"]},
        {"format": "privacy-accountant-certificate/2", "steps_reserved": document["steps"]},
        {"guarantee": document["guarantee"] | {"epsilon": 0.01}},
    ):
        file.write_text(json.dumps(document | altered))
        assert verified(file).exit_code == 1, altered


@pytest.mark.parametrize("name", LATER)
def test_a_certificate_of_a_later_format_verifies_with_all_that_it_covers(name: str) -> None:
    file = ISSUED / f"{name}.json"
    document: dict[str, Any] = json.loads(file.read_text())
    as_json = json.loads(verified(file, "--public-key", document["public_key"], "--json").stdout)
    assert (as_json["faults"], as_json["not_covered"]) == ([], [])
    assert as_json["steps_reserved"] == document["steps_reserved"]


@pytest.mark.parametrize("name", [*NAMES, *LATER])
def test_a_certificate_that_names_no_model_is_about_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    told = verified(ISSUED / f"{name}.json", "--model", str(tmp_path / "model.pt"))
    assert told.exit_code == 1
    assert told.stderr.startswith("it names no model")


def test_format_3_states_records_dates_and_mu() -> None:
    document = json.loads((ISSUED / "certificate-3-stopped.json").read_text())
    assert document["dataset_size"] == 60000
    assert document["guarantee"]["gaussian_dp"]["slack"] == document["guarantee"]["delta"]
    assert 0 < document["guarantee"]["gaussian_dp"]["mu"] < 1
    assert set(document["dates"]) == {"dataset_created", "run_ended", "issued"}
    assert document["declared"] == {}


def test_a_mu_that_is_too_small_is_a_fault() -> None:
    document = json.loads((ISSUED / "certificate-3-stopped.json").read_text())
    document["guarantee"]["gaussian_dp"]["mu"] *= 0.9
    faults, _ = certificate.check(document)
    assert any(fault.startswith("the stated μ is 0.47") for fault in faults)


@pytest.mark.parametrize("name", [NAMES[0], *LATER])
@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400, '"\\ud800"'])
def test_a_number_that_no_issuer_writes_is_a_fault(name: str, number: str, tmp_path: Path) -> None:
    """It ended with a traceback once."""
    document: dict[str, Any] = json.loads((ISSUED / f"{name}.json").read_text())
    file = tmp_path / "certificate.json"
    for field in ("dataset_size", "steps", "steps_reserved", "epsilon", "delta"):
        altered = json.loads(json.dumps(document))
        part = altered["guarantee"] if field in altered["guarantee"] else altered
        part[field] = "HERE"
        file.write_text(json.dumps(altered).replace('"HERE"', number))
        told = verified(file)
        assert told.exit_code in (1, 2), (field, told.output)
        assert told.exception is None or isinstance(told.exception, SystemExit), field
        assert told.stderr
