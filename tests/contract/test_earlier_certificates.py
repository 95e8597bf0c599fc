"""Certificates issued before format 2 still verify, and `verify` says what they do not cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from accountant_service import cli

ISSUED = Path(__file__).parent / "fixtures" / "certificates"
NAMES = [f"certificate-1-{name}" for name in ("whole", "stopped", "released", "replace-one")]


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
