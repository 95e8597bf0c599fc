"""A dataset in a ledger, and the trainer's commands with the service in the same process."""

from __future__ import annotations

import hashlib
import json
import signal
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from accountant_service.ledger.api_keys import Scope
from training_client.client import AccountingService
from training_client.lab import data as data_sets
from training_client.lab.cli import app, compare, run, together
from training_client.lab.cli.output_folders import LOCK
from training_client.lab.data import Dataset
from training_client.optimizers import PrivateOptimizer

ROWS = 400
NOTHING = {  # of a budget
    "epsilon": 0.0, "share": 0.0, "reference_steps": 0, "slack": 0.0, "added_epsilon": "0",
    "added_delta": "0",
}  # fmt: skip


def small(_: Path) -> Dataset:
    """Return a linearly separable data set with two classes."""
    examples = torch.rand(ROWS + 100, 8, generator=torch.Generator().manual_seed(2))
    labels = (examples[:, 0] > examples[:, 1]).long()
    return Dataset(examples[:ROWS], labels[:ROWS], examples[ROWS:], labels[ROWS:], classes=2)


def require_success(done: Result) -> Result:
    """Return a command's result, which must be a success."""
    assert done.exit_code == 0, done.output
    return done


def words_of(done: Result) -> str:
    """Return what a command printed, in one line."""
    return " ".join(done.output.replace("│", " ").split())


class Bench:
    """A dataset in a ledger, and the trainer's commands with the service in the same process."""

    def __init__(self, api: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api, self.folder, self.asked = api, folder, list[tuple[str, Any]]()
        self.refuse: str | None = None
        self.token, _ = api.app.state.keys.create([Scope.ADMIN])  # type: ignore[attr-defined]
        self.name = f"d{uuid.uuid4().hex[:8]}"
        known = replace(data_sets.DATASETS["adult"], load=small, train_size=ROWS)
        monkeypatch.setitem(data_sets.DATASETS, "small", known)
        monkeypatch.setattr("training_client.client.time.sleep", lambda _: None)
        for module in (run, compare, together):
            monkeypatch.setattr(module, "AccountingService", self.service)

    def service(self, url: str, *, api_key: str | None = None) -> AccountingService:
        """Return a client whose requests go to the service in this process."""
        return AccountingService(url, api_key=api_key, transport=httpx.MockTransport(self.handle))

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Record a request, and pass it to the service unless `refuse` is part of its path."""
        path, content = request.url.path, request.content
        self.asked.append((path, json.loads(content or b"null")))
        if self.refuse is not None and self.refuse in path:
            raise httpx.ConnectError("gone")
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Idempotency-Key", "Content-Type")
            if name in request.headers
        }
        answer = self.api.request(request.method, path, content=content, headers=headers)
        return httpx.Response(answer.status_code, content=answer.content)

    def give(self, epsilon: float) -> None:
        """Create the dataset with a budget of ε."""
        budget = {"epsilon": epsilon, "delta": 1e-5}
        headers = {"Authorization": f"Bearer {self.token}", "Idempotency-Key": self.name}
        body = {"name": self.name, "size": ROWS, "budget": budget}
        assert self.api.post("/v1/datasets", json=body, headers=headers).status_code == 201

    def dataset(self) -> Any:
        """Return the ledger's record of the dataset."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return self.api.get(f"/v1/datasets/{self.name}", headers=headers).json()

    def train(self, command: str, *arguments: str) -> Result:
        """Run a command of `accountant-train` on the small data set."""
        given = [command, "--data", "small", "--output", str(self.folder), *arguments]
        environment = {"ACCOUNTANT_API_KEY": self.token, "COLUMNS": "200", "NO_COLOR": "1"}
        return CliRunner().invoke(app, given, env=environment)

    def run(self, *arguments: str) -> Result:
        """Run `accountant-train run` with a small model and 30 steps."""
        usual = ["--batch-size", "20", "--hidden", "4", "--steps", "30"]
        return self.train("run", *usual, *arguments)

    def answer(self, *arguments: str) -> Any:
        """Run `accountant-train run`, which must succeed; return its answer as JSON."""
        return json.loads(require_success(self.run(*arguments, "--json")).stdout)

    def run_killed_at(self, step: int, *arguments: str) -> None:
        """Run, and end the run as if its process were killed before it makes a step."""
        with pytest.MonkeyPatch.context() as patch:
            made, genuine = self.counted(patch), PrivateOptimizer.step

            def dies(*of: Any) -> float:
                """End the run before the step, or make it."""
                if len(made) == step - 1:
                    raise KeyboardInterrupt
                return genuine(*of)

            patch.setattr(PrivateOptimizer, "step", dies)
            done = self.run(*arguments)
        assert done.exit_code == 130, done.output

    def require_uncharged(self) -> None:
        """Require that no budget of the dataset is held or spent."""
        found = self.dataset()
        assert (found["held"], found["spent"]) == (NOTHING, NOTHING)

    def leave_after(self, steps: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the service stop answering one kind of request after a number of steps."""
        genuine, made = PrivateOptimizer.step, []

        def step(*of: Any) -> float:
            """Make a step, and stop the service once enough were made."""
            made.append(1)
            if len(made) == steps:
                self.refuse = what
            return genuine(*of)

        monkeypatch.setattr(PrivateOptimizer, "step", step)

    def interrupt_at(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the user interrupt the run, as with Ctrl-C, when an optimizer begins this step."""
        made = self.counted(monkeypatch)
        genuine = PrivateOptimizer.step

        def interrupted(*of: Any) -> float:
            """Interrupt the run before the step, and make it."""
            if len(made) == step - 1:
                signal.raise_signal(signal.SIGINT)
            return genuine(*of)

        monkeypatch.setattr(PrivateOptimizer, "step", interrupted)

    def counted(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list that grows by one with every optimizer step made."""
        genuine, made = PrivateOptimizer.step, list[int]()

        def step(*of: Any) -> float:
            """Count a step, and make it."""
            made.append(1)
            return genuine(*of)

        monkeypatch.setattr(PrivateOptimizer, "step", step)
        return made

    def left(self) -> set[str]:
        """Return the names of the files in the output folder, without the lock."""
        return {file.name for file in self.folder.iterdir()} - {LOCK}

    def digest(self) -> str:
        """Return the SHA-256 hash of the saved model."""
        return hashlib.sha256((self.folder / "model.pt").read_bytes()).hexdigest()

    def read(self, name: str) -> Any:
        """Return the JSON document in a file of the output folder."""
        return json.loads((self.folder / name).read_text())
