"""One client process of a storm: reserve, read, grant, commit, and log every call.

Some runs are of another mechanism than the dataset's reference, some are on a second dataset too,
and some end early.

    python storm_client.py KEY DATASET OTHER_DATASET LOG PORT...

Every line of the log is one answered call (see `tests/support/linearizability.py`), written and
flushed before the next one is made. A client that is stopped ends between two calls.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

# without sampling, for which exchanges are decided fast
RUN = {"kind": "dp_sgd", "noise_multiplier": 60.0, "sample_rate": 1.0, "sampling": "none",
       "steps": 12}  # fmt: skip
PLANS = {"usual": RUN, "other": RUN | {"noise_multiplier": 90.0}}
OTHERS_EVERY = 6  # reservations of a client, of which one is of the other plan
JOINT_EVERY = 4  # of which one is a run on both datasets
PATIENCE = 600.0
Answer = tuple[int, dict[str, Any]]


def describe_reservation(names: list[str], plan: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return path and body of the request that reserves a plan on one dataset or on several."""
    if len(names) == 1:
        return f"/v1/datasets/{names[0]}/reservations", {"mechanism": plan}
    return "/v1/reservations", {"datasets": names, "mechanism": plan}


def main(key: str, dataset: str, other: str, log: str, ports: list[str]) -> None:
    chance = random.Random(log)
    started = time.monotonic()
    with httpx.Client(timeout=10) as http, open(log, "a") as history:

        def call(
            kind: str, method: str, path: str, body: dict[str, Any] | None = None, plan: str = ""
        ) -> Answer:
            """One call, repeated under one key until a server answers it."""
            headers = {"Authorization": f"Bearer {key}"}
            if body is not None:
                headers["Idempotency-Key"] = uuid.uuid4().hex
            start = time.monotonic_ns()
            while time.monotonic() - started < PATIENCE:
                url = f"http://127.0.0.1:{chance.choice(ports)}{path}"
                with contextlib.suppress(httpx.HTTPError):
                    answer = http.request(method, url, json=body, headers=headers)
                    if answer.status_code < 500:
                        end, status, found = time.monotonic_ns(), answer.status_code, answer.json()
                        line = {"kind": kind, "start": start, "end": end, "status": status}
                        line |= {"plan": plan}
                        history.write(json.dumps(line | {"answer": found}) + "\n")
                        history.flush()
                        return status, found
                    assert answer.status_code == 503, answer.text
                    assert int(answer.headers["Retry-After"]) >= 1
                time.sleep(0.05)
            raise SystemExit("no server answered")

        def goes_on() -> bool:
            return not Path(log).with_name("stop").exists()

        turn, only_usual = int(Path(log).stem.split("-")[1]), False
        while goes_on():
            name = "usual" if only_usual or turn % OTHERS_EVERY else "other"
            turn += 1
            names = chance.sample([dataset, other], 2) if turn % JOINT_EVERY == 0 else [dataset]
            path, plan = describe_reservation(names, PLANS[name])
            status, run = call("reserve", "POST", path, plan, name)
            if status == 409 and name == "usual":
                return
            if status == 409:
                only_usual = True
                continue
            assert status == 201, run
            granted, last = 0, chance.choice([4, 12, 12])
            while granted < last:
                body = {"steps": 4, "sequence": granted}
                status, after = call("grant", "POST", f"/v1/reservations/{run['id']}/grants", body)
                assert status == 200, after
                granted = after["steps_granted"]
                status, seen = call("read", "GET", f"/v1/datasets/{dataset}")
                assert status == 200, seen
            end = chance.choice(["commit", "release"])
            status, after = call(end, "POST", f"/v1/reservations/{run['id']}/{end}", {})
            assert status == 200, after


if __name__ == "__main__":
    _, key, dataset, other, log, *ports = sys.argv
    main(key, dataset, other, log, ports)
