"""A service of its own, people who use it, and a Chromium that looks at it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from accountant_service.app import create_app
from accountant_service.ledger.api_keys import Scope
from accountant_service.settings import Settings
from tests.support.databases import free_port
from tests.support.programs import awake

ROOT = Path(__file__).parents[2]
HTML_NAME = "<b>bold</b><script>alert(1)</script>"
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 1200}


@dataclass(frozen=True)
class Site:
    """The service with a dataset in use."""

    url: str
    keys: dict[str, str]
    open_run: str
    ended_run: str

    def post(self, path: str, body: Any) -> dict[str, Any]:
        headers = {
            "Authorization": f"Bearer {self.keys['admin']}",
            "Idempotency-Key": uuid.uuid4().hex,
        }
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=30)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found


def _keys(url: str) -> dict[str, str]:
    app = create_app(Settings(database_url=url))
    scopes = {"admin": Scope.ADMIN, "run": Scope.RUN}
    made = {who: app.state.keys.create([scope], who)[0] for who, scope in scopes.items()}
    app.state.keys.create([Scope.COMPUTE], HTML_NAME)
    app.state.repository.close()
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    database = f"sqlite:///{tmp_path_factory.mktemp('site')}/ledger.db"
    port = free_port()
    keys = _keys(database)
    server = subprocess.Popen(
        [Path(sys.executable).parent / "accountant", "serve", "--port", str(port)],
        env=os.environ | {"ACCOUNTANT_DATABASE_URL": database},
        cwd=ROOT,
    )
    try:
        url = awake(f"http://127.0.0.1:{port}")
        yield _furnished(Site(url, keys, "", ""))
    finally:
        server.terminate()
        server.wait(10)


def _furnished(bare: Site) -> Site:
    """A dataset nearly used up, one untouched; a run that has ended and one under way."""
    for name, epsilon in (("patients", 3.0), ("survey-2026", 8.0)):
        budget = {"epsilon": epsilon, "delta": 1e-5}
        bare.post("/v1/datasets", {"name": name, "size": 60_000, "budget": budget})
    runs = []
    for purpose in ("a first model, to see what is possible", HTML_NAME):
        path = "/v1/datasets/patients/reservations"
        run = bare.post(path, {"mechanism": RUN, "purpose": purpose})["id"]
        for block in range(10):
            body = {"steps": 60, "sequence": 60 * block}
            bare.post(f"/v1/reservations/{run}/grants", body)
        runs.append(run)
    bare.post(f"/v1/reservations/{runs[0]}/commit", {})
    return Site(bare.url, bare.keys, runs[1], runs[0])


@pytest.fixture(scope="module")  # not longer: its event loop would be in the way of other tests
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium; Debian has it: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
