"""A Flower app that also records what really leaves a site, and what the server uses of it.

The records are independent of the ledger and of the files that sites and server write: they are
made where noise is drawn, where a site's app returns its reply, and where the server reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

RECORDS: Final = "records"  # the folder, beside those of the sites and the server
SERVER: Final = "server"
STOP: Final = "stop-before-reply"  # a file in a site's folder
_MODULE: Final = """
from tests.support import recorded_flower
recorded_flower.{function}()
from sites import {module}
app = {module}.app
"""


def recorded_app(app: Path, folder: Path) -> Path:
    """Return a copy of a Flower app whose site and server record."""
    copied = shutil.copytree(app, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    text = (copied / "pyproject.toml").read_text()
    for module, function in (("client_app", "record_site"), ("server_app", "record_server")):
        recorded = copied / "sites" / f"recorded_{module}.py"
        recorded.write_text(_MODULE.format(function=function, module=module))
        assert f"sites.{module}:app" in text
        text = text.replace(f"sites.{module}:app", f"sites.recorded_{module}:app")
    (copied / "pyproject.toml").write_text(text)
    return copied


def append_record(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Append a line to the records of a site or the server."""
    (folder / RECORDS).mkdir(exist_ok=True)
    with (folder / RECORDS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def record_site() -> None:
    """Record the releases and their noise, and the replies, of the site in this process."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from training_client.private_step import private_sum
    from training_client.private_step.rounded_gaussian import NoiseGrid

    genuine_release, genuine_noise = private_sum.PrivateSum.release, NoiseGrid.add_noise
    genuine_call = ClientApp.__call__
    homes: list[Path] = []  # of the site whose message is answered

    def record(**entry: Any) -> None:
        """Append a line to the site's records."""
        append_record(homes[-1].parent, homes[-1].name, entry)

    def release(self: Any, *given: Any) -> Any:
        """Record a release, before it is made."""
        record(event="release")
        return genuine_release(self, *given)

    def add_noise(grid: Any, total: Any, factor: float, key: bytes) -> None:
        """Add noise, and record it."""
        before = total * factor
        genuine_noise(grid, total, factor, key)
        record(event="noise", values=(total - before).flatten().tolist())

    def call(self: Any, message: Message, context: Context) -> Message:
        """Answer a message, and record the reply before it is sent; stop if the test asks for it.

        Raises:
            Exception: as the site's app.
        """
        homes.append(Path(str(context.node_config["folder"])))
        reply = genuine_call(self, message, context)
        parts = {name: dict(part) for name, part in reply.content.items()}
        sent = [value for each in parts.get("arrays", {}).values() for value in each.numpy().flat]
        record(
            event="reply",
            node=context.node_id,
            keys={name: sorted(part) for name, part in parts.items()},
            outcome=parts["outcome"],
            contribution=[float(value) for value in sent],
        )
        if sent and (homes[-1] / STOP).exists():
            (homes[-1] / STOP).unlink()
            record(event="stopped", process=os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        return reply

    private_sum.PrivateSum.release = release  # type: ignore[method-assign]
    NoiseGrid.add_noise = add_noise  # type: ignore[method-assign]
    ClientApp.__call__ = call  # type: ignore[method-assign,unused-ignore]


def record_server() -> None:
    """Record which nodes' contributions the server uses in each round."""
    from training_client.integrations.flower.strategy import BudgetedAverage

    genuine = BudgetedAverage.aggregate_train

    def aggregate_train(self: BudgetedAverage, server_round: int, replies: Iterable[Any]) -> Any:
        """Record the nodes, and make the round."""
        assert self.folder is not None
        received = list(replies)
        used = [
            each.metadata.src_node_id
            for each in received
            if self._has_contribution(server_round, each)
        ]
        append_record(self.folder.parent, SERVER, {"round": server_round, "nodes": used})
        return genuine(self, server_round, received)

    BudgetedAverage.aggregate_train = aggregate_train  # type: ignore[method-assign]
