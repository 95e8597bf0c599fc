"""The demo: a dataset's budget, a run within it, a refused run, and the first run's certificate."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

REFUSED = 3
LEDGER = "ledger.db"
CHECKPOINT = "checkpoint.pt"
INTERRUPTED = 130
PROGRAMS = Path(sys.executable).parent


def find_free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, seconds: float = 30.0) -> None:
    """Wait until the service answers its health check."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=1):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def create_dataset(
    url: str,
    key: str,
    budget: dict[str, float],
    name: str = "mnist",
    size: int = 60_000,
    privacy_unit: str = "record",
) -> None:
    """Create a dataset with a privacy budget, through the API; by default of MNIST's size."""
    body = {"name": name, "size": size, "budget": budget, "privacy_unit": privacy_unit}
    headers = {
        "Authorization": f"Bearer {key}",
        "Idempotency-Key": f"the-demonstration-of-{name}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(f"{url}/v1/datasets", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=30).close()


def create_ledger_url(folder: Path) -> str:
    """Return the database URL of a new ledger in a folder; delete an earlier demo's ledger.

    With its ledger an interrupted demo's checkpoint is deleted: nothing could continue it. The
    checkpoint of a run that is no demo's stays, and `accountant-train` says what to do about it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = list(folder.glob(f"{LEDGER}*"))  # with what SQLite keeps beside it
    for old in earlier:
        old.unlink()
    if earlier and (folder / CHECKPOINT).exists():
        (folder / CHECKPOINT).unlink()
        print("An earlier demo did not end; this one begins anew")
    return f"sqlite:///{folder.resolve() / LEDGER}"


def interrupt(*_: object) -> None:
    """Signal handler: treat SIGTERM like Ctrl-C, so that the service is stopped."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; return the exit code of the training run, or of the checks."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # programs print between
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    given = sys.argv[1:]
    folder = Path(given[given.index("--output") + 1] if "--output" in given else "runs/mnist")
    environment = os.environ | {"ACCOUNTANT_DATABASE_URL": create_ledger_url(folder)}

    def accountant(*arguments: str) -> subprocess.CompletedProcess[str]:
        """Run an `accountant` command against the demo's service."""
        command = [PROGRAMS / "accountant", *arguments]
        return subprocess.run(
            command, env=environment, check=False, text=True, stdout=subprocess.PIPE
        )

    signal.signal(signal.SIGTERM, interrupt)
    key = accountant("keys", "create", "--scope", "admin").stdout.strip()
    service = subprocess.Popen(
        [PROGRAMS / "accountant", "serve", "--port", str(port)], env=environment
    )
    try:
        wait_until_healthy(url)
        create_dataset(url, key, {"epsilon": 2.0, "delta": 1e-5})
        print("Dataset 'mnist' may give out ε = 2 at δ = 1e-05")

        def train(*arguments: str) -> int:
            """Run `accountant-train` against the demo's service; return the exit code."""
            command = [PROGRAMS / "accountant-train", "run", "--service", url]
            command += ["--dataset", "mnist", "--optimizer", "adadp", *arguments]
            keyed = environment | {"ACCOUNTANT_API_KEY": key}
            return subprocess.run(command, env=keyed, check=False).returncode

        code = train(*given)
        if code:
            return code
        print("Once more, with as little noise as if nothing had been spent:")
        if train("--noise-multiplier", "1.0") != REFUSED:
            print("the second run should have been refused")
            return 1
        certificate = folder / "certificate.json"
        print("The certificate:", certificate.read_text())
        for check in (("verify", str(certificate)), ("ledger", "verify")):
            done = accountant(*check)
            print(f"accountant {' '.join(check)}:", done.stdout.strip().replace("\n", "; "))
            code = code or done.returncode
        print(f"To look at it: make look, then sign in with the key {key}")
        return code
    except KeyboardInterrupt:
        print("Interrupted. Run it again to begin anew")
        return INTERRUPTED
    finally:
        service.terminate()
        service.wait(20)


if __name__ == "__main__":
    sys.exit(main())
