"""A server process that tests kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.support.databases import free_port

PROGRAMS = Path(sys.executable).parent


class Server:
    """A server process that can be killed and started again on its port."""

    def __init__(self, url: str, folder: Path) -> None:
        self.port = free_port()
        self._environment = os.environ | {"ACCOUNTANT_DATABASE_URL": url}
        self._log = folder / f"server-{self.port}.log"
        self.start()

    def start(self) -> None:
        """Start the server process."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAMS / "accountant", "serve", "--port", str(self.port)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        """Kill the server process with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
