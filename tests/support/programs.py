"""Start programs as users do, and wait for servers."""

from __future__ import annotations

import json
import time
import urllib.request


def awake(url: str) -> str:
    """Wait until a server answers at an address, and return the address."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=1) as answer:
                assert json.load(answer) == {"status": "ok"}
                return url
        except OSError:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
