"""Only a model with a valid certificate about its file passes the gate of registries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from accountant_service import cli
from training_client.errors import NoGuaranteeError
from training_client.integrations import certified_models
from training_client.integrations.certified_models import require_certified


class Files(NamedTuple):
    """A model, its certificate and the ledger's public key."""

    model: Path
    certificate: Path
    public_key: str


def run(*words: str) -> str:
    found = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout.strip()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("certified")
    model, certificate = folder / "model.pt", folder / "certificate.json"
    model.write_bytes(b"model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{folder}/accountant.db")
        patch.delenv("ACCOUNTANT_API_KEY", raising=False)
        run("dataset", "create", "people", "-n", "1000", "-E", "1", "-d", "1e-5")
        held = run("run", "reserve", "people", "-b", "10", "-s", "20", "-t", "30")
        run("run", "grant", held, "-t", "30")
        run("run", "commit", held, "--model", str(model))
        run("run", "certificate", held, "-o", str(certificate))
    return Files(model, certificate, json.loads(certificate.read_text())["public_key"])


@pytest.mark.slow
def test_the_certified_model_passes_and_nothing_else(files: Files, tmp_path: Path) -> None:
    document = require_certified(*files[:2], public_key=files.public_key)
    assert document == json.loads(files.certificate.read_text())
    other = tmp_path / "other.pt"
    other.write_bytes(b"modem")
    key = files.public_key
    for model, certificate, public_key, why in (
        (other, files.certificate, key, "it is about another model"),
        (files.model, files.certificate, "00" * 32, "not signed with the given public key"),
        (files.model, tmp_path / "none.json", key, "No such file"),
        (tmp_path / "none.pt", files.certificate, key, "cannot read the file"),
    ):
        with pytest.raises(NoGuaranteeError, match="has no valid certificate: .*" + why):
            require_certified(model, certificate, public_key=public_key)


def test_without_a_clear_answer_nothing_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, model, certificate = (tmp_path / each for each in ("accountant", "model", "document"))
    model.write_bytes(b"model")
    certificate.write_text("{}")
    found: str | None = str(program)
    monkeypatch.setattr(certified_models.shutil, "which", lambda *_, **__: found)
    for printed, code in (
        ("", 0), ("valid", 0), ("[]", 0), ("{}", 0), ('{"faults": null}', 0), ('{"faults": []}', 1),
    ):  # fmt: skip
        program.write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
        program.chmod(0o755)
        with pytest.raises(NoGuaranteeError):
            require_certified(model, certificate, public_key="00" * 32)
    program.write_text("#!/bin/sh\necho '{\"faults\": []}'\n")
    assert require_certified(model, certificate, public_key="00" * 32) == {}  # only this is clear
    found = None
    with pytest.raises(NoGuaranteeError, match="the program accountant is not installed here"):
        require_certified(model, certificate, public_key="00" * 32)
