"""The whole thing once: start the service, train on MNIST within ε = 2, stop the service."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PROGRAMS = Path(sys.executable).parent


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, seconds: float = 30.0) -> None:
    """Return when the service answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=1):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> int:
    """Run the demonstration; the exit code is the training run's."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ACCOUNTANT_DATABASE_URL": f"sqlite:///{folder}/accountant.db"}
        command = [PROGRAMS / "accountant", "serve", "--port", str(port)]
        service = subprocess.Popen(command, env=environment)
        try:
            wait_until_healthy(url)
            arguments = sys.argv[1:] or ["--epsilon", "2", "--delta", "1e-5"]
            training = [PROGRAMS / "accountant-train", "run", "--service", url, *arguments]
            return subprocess.run(training, check=False).returncode
        finally:
            service.terminate()
            service.wait(20)


if __name__ == "__main__":
    sys.exit(main())
