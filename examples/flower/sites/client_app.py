"""A site: its records, its plan and its budget; only noisy contributions leave it."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from sites.task import load_records, make_model
from training_client.client import AccountingService
from training_client.integrations.flower.client_app import (
    granted_round,
    make_client_app,
    received_parameters,
    send_contribution,
)
from training_client.integrations.flower.round_budget import RoundBudget
from training_client.lab.federated import AdaptiveParticipant, Contributor, Participant
from training_client.lab.federated_averaging import FedAvgParticipant
from training_client.lab.models import cross_entropy
from training_client.plan import Plan


def folder_of(context: Context) -> Path:
    """Return this site's folder; Flower's simulation numbers its nodes from 0."""
    if "partition-id" in context.node_config:
        number = int(context.node_config["partition-id"]) + 1
        return Path(os.environ["SITES_FOLDER"]) / f"site-{number}"
    return Path(str(context.node_config["folder"]))


def settings_of(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder_of(context) / "site.json").read_text())
    return found


@cache
def connect(url: str) -> AccountingService:
    return AccountingService(url, api_key=os.environ["ACCOUNTANT_API_KEY"])


def open_budget(context: Context) -> RoundBudget:
    settings = settings_of(context)
    return RoundBudget(
        connect(settings["service"]),
        settings["dataset"],
        settings["delta"],
        Plan.from_document(settings["plan"]),
        settings["rounds"],
        settings["local_steps"],
        folder=folder_of(context),
    )


app = make_client_app(open_budget)


@app.train()
def train(message: Message, context: Context) -> Message:
    settings, budget = settings_of(context), granted_round()
    examples, targets = load_records(folder_of(context) / "records.npz")
    model = make_model(examples.shape[1], settings["classes"])
    site: Contributor
    if settings["method"] == "fedavg":
        site = FedAvgParticipant(
            settings["dataset"],
            model,
            examples,
            targets,
            budget,
            learning_rate=settings["learning_rate"],
            local_epochs=settings["local_epochs"],
        )
    elif settings["method"] == "adadps":
        scales = torch.tensor(settings["side_information"])
        site = AdaptiveParticipant(
            settings["dataset"],
            model,
            examples,
            targets,
            budget,
            side_information=[scales.expand(settings["classes"], -1), torch.ones_like(model.bias)],
            learning_rate=settings["learning_rate"],
            local_steps=settings["local_steps"],
        )
    else:
        site = Participant(settings["dataset"], model, examples, targets, budget)
    contribution = site.contribute(received_parameters(message), cross_entropy)
    return send_contribution(message, model, contribution)
