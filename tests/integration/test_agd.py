"""AGD charges a ledger's dataset for every release before it makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.support.training_bench import ROWS, Bench, small
from training_client.lab.agd import Agd, LedgerGate, train_agd
from training_client.lab.models import cross_entropy


@pytest.mark.slow
def test_each_release_of_agd_is_charged_before_it_is_made_until_none_fits(bench: Bench) -> None:
    """Gradients and selections alternate; their sum by the ledger stays below its budget."""
    body = {
        "name": bench.name, "size": ROWS, "budget": {"epsilon": 3.0, "delta": 1e-5},
        "filter": "renyi",  # very different releases share the budget
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {bench.token}", "Idempotency-Key": bench.name}
    assert bench.api.post("/v1/datasets", json=body, headers=headers).status_code == 201
    data, net = small(Path()), nn.Linear(8, 2)
    gate = LedgerGate(bench.service("http://test", api_key=bench.token), bench.name, 1e-5)
    found = train_agd(
        net, data.train_examples, data.train_labels, cross_entropy, gate,
        Agd(clip_norm=1.0, noise_multiplier=6.0, selection_epsilon=0.2, growth=0.5),
    )  # fmt: skip
    charged = [body["mechanism"] for path, body in bench.asked if path.endswith("/reservations")]
    kinds = [each["kind"] for each in charged]
    assert found.steps + found.failures >= 5
    assert set(kinds) == {"dp_sgd", "permute_and_flip"}
    gradients = [each for each in charged if each["kind"] == "dp_sgd"]
    assert all(each["sample_rate"] == 1.0 for each in gradients)
    assert gradients[0]["noise_multiplier"] == 6.0
    spent = bench.dataset()
    assert 2.0 < spent["spent"]["epsilon"] <= 3.0
    assert spent["held"]["epsilon"] == 0.0
    granted = sum(path.endswith("/grants") for path, _ in bench.asked)
    assert granted == len(charged) - 1  # the last reservation did not fit
    made = found.steps + found.failures
    assert kinds.count("permute_and_flip") in (made, made + 1)
    assert all(bool(each.isfinite().all()) for each in net.parameters())
