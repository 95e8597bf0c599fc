"""A Flower strategy that averages the contributions of all nodes whose budget allows a round.

It serves A-DDP (papers/003) and federated AdaDPS (papers/004, Algorithm 3). The server holds no
records and no budgets; of a node it knows which round it contributed to, and that it has left.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from training_client.errors import DataError
from training_client.integrations.flower.federated_average import descend_along_mean
from training_client.integrations.flower.messages import (
    ARRAYS,
    CONTRIBUTED,
    END_RUN,
    OUTCOME,
    PROTOCOL,
    ROUND,
    SPENT,
    TRAIN,
)

_LOGGER: Final = getLogger("flwr")
_POLL_SECONDS: Final = 0.2
CHECKPOINT: Final = "model.npz"
ROUNDS: Final = "rounds.jsonl"


def parameters_of(model: nn.Module) -> ArrayRecord:
    """Return all parameters of a model, as `BudgetedAverage` sends them."""
    return ArrayRecord(
        {name: Array(each.detach().cpu().numpy()) for name, each in model.named_parameters()}
    )


def load_parameters(model: nn.Module, arrays: ArrayRecord) -> None:
    """Copy parameters that `BudgetedAverage` returned into a model."""
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(torch.from_numpy(arrays[name].numpy().copy()))


@dataclass
class BudgetedAverage(Strategy):  # type: ignore[misc,unused-ignore]  # checked without flwr too
    """Trains in rounds: averages nodes' contributions, and drops nodes whose budget is spent.

    Training ends when all nodes have left, when a round and its repetitions have no contribution,
    or after `num_rounds` of `start`. With a folder
    the model is saved after each round, and a new `start` with the same job continues there.

    Attributes:
        job: the job's name: nodes use one reservation for all Flower runs of a job.
        learning_rate: η of the averaged contribution; 1 for federated AdaDPS, whose contributions
            are updates of the model.
        nodes_min: the number of connected nodes to wait for before the first round.
        wait_seconds: how long to wait for them.
        silent_rounds_max: how often a round without a contribution is tried again, if nodes are
            left: they may be slow, or connect again. Nodes may be charged for each try.
        folder: where the model (`model.npz`) and the list of rounds (`rounds.jsonl`) are saved.
    """

    job: str
    learning_rate: float
    nodes_min: int = 1
    wait_seconds: float = 600.0
    folder: Path | None = None
    silent_rounds_max: int = 2
    _departed: set[int] = field(default_factory=set, init=False)
    _arrays: ArrayRecord = field(default_factory=ArrayRecord, init=False)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = sys.maxsize,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Train until no node contributes, and end the run on all nodes.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: the model's parameters, from `parameters_of`.
            num_rounds: the maximum number of rounds; no limit by default.
            timeout: the seconds that a round waits for nodes. A later answer was charged to its
                node, and is not used.
            train_config: further settings for the nodes.
            evaluate_config: not used: nodes do not evaluate, since nothing would charge that.
            evaluate_fn: called with the round and the parameters after each round.
        """
        done, arrays = self._load(initial_arrays)
        self._wait_for_nodes(grid)
        result, silent = Result(arrays=arrays), 0
        while done < num_rounds and silent <= self.silent_rounds_max:
            sent = self.configure_train(done + 1, arrays, train_config or ConfigRecord(), grid)
            found, metrics = self.aggregate_train(
                done + 1, grid.send_and_receive(sent, timeout=timeout)
            )
            if found is None:
                if self._have_all_left(grid):
                    break
                silent += 1
                continue
            done, arrays, silent = done + 1, found, 0
            self._save(done, arrays, metrics)
            if evaluate_fn is not None and (shown := evaluate_fn(done, arrays)) is not None:
                result.evaluate_metrics_serverapp[done] = shown
        list(grid.send_and_receive(self._end_messages(done, grid), timeout=timeout))
        result.arrays = arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message with the parameters to every node that has not left."""
        self._arrays = arrays
        described = ConfigRecord({**config, **self._describe(server_round)})
        return [
            Message(
                RecordDict({ARRAYS: arrays, ROUND: described}), dst_node_id=node, message_type=TRAIN
            )
            for node in sorted(set(grid.get_node_ids()) - self._departed)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the parameters after the round, and the number of nodes that contributed to it.

        Both are None if no node contributed.
        """
        taken = [each for each in replies if self._has_contribution(server_round, each)]
        if not taken:
            return None, None
        contributions = [_to_tensors(each.content[ARRAYS]) for each in taken]
        after = _to_tensors(self._arrays)
        trained = [after[name] for name in contributions[0]]
        descend_along_mean(
            trained, [list(each.values()) for each in contributions], self.learning_rate
        )
        arrays = ArrayRecord({name: Array(each.numpy()) for name, each in after.items()})
        return arrays, MetricRecord({"contributions": len(taken)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no message: nodes refuse to evaluate, since no budget would pay for that."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None: nodes do not evaluate."""
        del server_round, replies
        return None

    def summary(self) -> None:
        """Log the job and the learning rate."""
        _LOGGER.log(INFO, "job %s, learning rate %g", self.job, self.learning_rate)

    def _has_contribution(self, server_round: int, reply: Message) -> bool:
        """Return whether a reply contributes to the round; drop a node whose budget is spent."""
        node = reply.metadata.src_node_id
        if reply.has_error():
            _LOGGER.log(WARNING, "node %d: %s", node, reply.error.reason)
            return False
        outcome = dict(reply.content.get(OUTCOME) or {})
        if outcome.get("protocol") != PROTOCOL or outcome.get("round") != server_round:
            _LOGGER.log(WARNING, "node %d: no answer to round %d", node, server_round)
            return False
        if outcome.get("state") == SPENT:
            self._departed.add(node)
            _LOGGER.log(INFO, "node %d has left: its budget is spent", node)
        return outcome.get("state") == CONTRIBUTED and self._fits(node, reply.content.get(ARRAYS))

    def _fits(self, node: int, contribution: Any) -> bool:
        """Return whether a contribution is finite and has the shapes of the model's parameters."""
        given = {name: each.numpy() for name, each in dict(contribution or {}).items()}
        known = {name: tuple(each.shape) for name, each in self._arrays.items()}
        fits = bool(given) and all(
            known.get(name) == each.shape and np.isfinite(each).all()
            for name, each in given.items()
        )
        if not fits:
            _LOGGER.log(WARNING, "node %d: its contribution does not fit the model", node)
        return fits

    def _end_messages(self, done: int, grid: Grid) -> list[Message]:
        """Return the messages by which nodes commit their runs."""
        content = {ROUND: ConfigRecord(self._describe(done))}
        return [
            Message(RecordDict(dict(content)), dst_node_id=node, message_type=END_RUN)
            for node in sorted(set(grid.get_node_ids()) - self._departed)
        ]

    def _describe(self, number: int) -> dict[str, str | int]:
        """Return the fields that describe a round to nodes."""
        return {"protocol": PROTOCOL, "job": self.job, "round": number}

    def _have_all_left(self, grid: Grid) -> bool:
        """Return whether nodes have left and no other node is connected."""
        return bool(self._departed) and self._departed >= set(grid.get_node_ids())

    def _wait_for_nodes(self, grid: Grid) -> None:
        """Wait until enough nodes are connected.

        Raises:
            DataError: too few are after `wait_seconds`.
        """
        deadline = time.monotonic() + self.wait_seconds
        while (connected := len(list(grid.get_node_ids()))) < self.nodes_min:
            if time.monotonic() > deadline:
                raise DataError(
                    f"{connected} nodes are connected after {self.wait_seconds:g} s, "
                    f"{self.nodes_min} are needed: start the others, or lower nodes_min"
                )
            time.sleep(_POLL_SECONDS)

    def _load(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """Return the number of finished rounds and the parameters: the saved ones, or `initial`.

        Raises:
            DataError: what is saved is of another job.
        """
        if self.folder is None or not (self.folder / CHECKPOINT).exists():
            return 0, initial
        with np.load(self.folder / CHECKPOINT) as saved:
            if str(saved["job"]) != self.job:
                raise DataError(f"{self.folder} holds the model of job {str(saved['job'])!r}")
            arrays = {name: Array(saved[f"parameter:{name}"]) for name in initial}
            return int(saved["rounds"]), ArrayRecord(arrays)

    def _save(self, done: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> None:
        """Replace the saved model atomically, and append the round to the log of rounds."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"part-{CHECKPOINT}"
        named = {f"parameter:{name}": each.numpy() for name, each in arrays.items()}
        np.savez(part, job=np.array(self.job), rounds=np.array(done), **named)
        part.replace(self.folder / CHECKPOINT)
        with (self.folder / ROUNDS).open("a") as file:
            file.write(json.dumps({"round": done, **dict(metrics or {})}) + "\n")


def _to_tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Return copies of arrays as tensors, by name."""
    return {name: torch.from_numpy(each.numpy().copy()) for name, each in arrays.items()}
