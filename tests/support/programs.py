"""Programs that are started as users start them."""

from __future__ import annotations

import json
import time
import urllib.request


def awake(url: str) -> str:
    """The same address, when somebody answers there."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=1) as answer:
                assert json.load(answer) == {"status": "ok"}
                return url
        except OSError:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
