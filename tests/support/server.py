"""A server process that tests ask, stop, kill and start again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.databases import free_port

PROGRAMS = Path(sys.executable).parent
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def program(source: Path | None = None) -> list[str]:
    """Return the command `accountant`; with `source`, for a process whose PYTHONPATH is that."""
    if source is None:
        return [str(PROGRAMS / "accountant")]
    check = f"assert accountant_service.__file__.startswith({str(source)!r})"
    run = "from accountant_service.cli import app; app()"
    return [sys.executable, "-c", f"import accountant_service; {check}; {run}"]


class Server:
    """A server process that can be killed and started again on its port.

    Args:
        url: of its database.
        folder: for its log.
        arguments: of `accountant serve`, after the port.
        source: a folder with another version of the service; None for the installed one.
        settings: environment variables.
    """

    def __init__(
        self, url: str, folder: Path, *arguments: str, source: Path | None = None, **settings: str
    ) -> None:
        self.port = free_port()
        self._program = program(source)
        if source is not None:
            settings["PYTHONPATH"] = str(source)
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = os.environ | {"ACCOUNTANT_DATABASE_URL": url} | settings
        self._arguments, self._folder = arguments, folder
        self._log = folder / f"server-{self.port}.log"
        self.start()

    def start(self) -> None:
        """Start the server process."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._program, "serve", "--port", str(self.port), *self._arguments],
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            try:
                if self.ask("GET", "/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log}")

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[int, bytes]:
        """Send one request on a connection of its own; return the answer's status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def total(self, metric: str) -> float:
        """Return a metric, added up over its labels."""
        _, text = self.ask("GET", "/metrics")
        families = text_string_to_metric_families(text.decode())
        return sum(s.value for family in families for s in family.samples if s.name == metric)

    def stop(self) -> int:
        """Ask the server to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """Kill the server process with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def log(self) -> str:
        """Return the server's log so far."""
        return self._log.read_text()
