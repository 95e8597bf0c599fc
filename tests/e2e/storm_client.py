"""One client process of a storm: reserve, grant, commit, and log what was acknowledged.

    python storm_client.py KEY DATASET LOG PORT...

Every line of the log is one acknowledged fact, written and flushed before the next request.
"""

from __future__ import annotations

import json
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 12}
PATIENCE = 600.0


def main(key: str, dataset: str, log: str, ports: list[str]) -> None:
    chance = random.Random(log)
    started = time.monotonic()
    with httpx.Client(timeout=10) as http, open(log, "a") as acknowledged:

        def write(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            """One write, repeated under one key until a server answers it."""
            headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
            while time.monotonic() - started < PATIENCE:
                url = f"http://127.0.0.1:{chance.choice(ports)}{path}"
                try:
                    answer = http.post(url, json=body, headers=headers)
                    if answer.status_code < 500:
                        return answer.status_code, answer.json()
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
            raise SystemExit("no server answered")

        while not Path(log).with_name("stop").exists():
            status, run = write(f"/v1/datasets/{dataset}/reservations", {"mechanism": RUN})
            if status == 409:
                return
            assert status == 201, run
            granted = 0
            while granted < run["steps_reserved"]:
                body = {"steps": 4, "sequence": granted}
                status, after = write(f"/v1/reservations/{run['id']}/grants", body)
                assert status == 200, after
                granted = after["steps_granted"]
                fact = {"reservation": run["id"], "granted": granted}
                acknowledged.write(json.dumps(fact) + "\n")
                acknowledged.flush()
            end = chance.choice(["commit", "release"])
            status, after = write(f"/v1/reservations/{run['id']}/{end}", {})
            assert status == 200, after


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
