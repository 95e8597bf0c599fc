"""The server: it averages what the sites send, and holds public records only."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from sites.task import load_records, make_model
from training_client.integrations.flower.strategy import (
    BudgetedAverage,
    load_parameters,
    parameters_of,
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, folder = context.run_config, Path(str(context.run_config["folder"]))
    examples, targets = load_records(folder / "public.npz")
    model = make_model(examples.shape[1], int(targets.max()) + 1)

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        load_parameters(model, arrays)
        with torch.no_grad():
            correct = model(examples).argmax(1) == targets
        return MetricRecord({"accuracy": float(correct.float().mean())})

    strategy = BudgetedAverage(
        job=str(config["job"]),
        learning_rate=float(config["learning-rate"]),
        nodes_min=int(config["sites"]),
        folder=folder,
    )
    result = strategy.start(
        grid,
        parameters_of(model),
        num_rounds=int(config["rounds"]),
        timeout=float(config["round-seconds"]),
        evaluate_fn=evaluate,
    )
    score = dict(evaluate(0, result.arrays))
    (folder / "result.json").write_text(json.dumps(score))
