"""Every kind of mechanism is described in words, a run and its step alike."""

from __future__ import annotations

import pytest

from accountant_service.mechanisms import from_json

GAUSSIAN = {"kind": "gaussian", "noise_multiplier": 2}
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.1, "steps": 100}
SIZES = {"dataset_size": 1000, "batch_size": 50}


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (RUN | {"sample_rate": 0.01}, "DP-SGD, q = 0.01, σ = 1.1, Poisson sampling"),
        (
            RUN | SIZES | {"sampling": "fixed_size"},
            "DP-SGD, q = 0.05, σ = 1.1, samples of fixed size",
        ),
        (RUN | {"sample_rate": 1, "sampling": "none"}, "DP-SGD, σ = 1.1, no sampling"),
        (GAUSSIAN, "Gaussian noise, σ = 2"),
        ({"kind": "laplace", "noise_multiplier": 2}, "Laplace noise, b/C = 2"),
        (
            {"kind": "diagonal_gaussian", "sensitivities": [3, 4], "noise_stds": [1, 1]},
            "Gaussian noise, σ* = 0.2",
        ),
        (
            {"kind": "poisson_sampled", "sample_rate": 0.1, "mechanism": GAUSSIAN},
            "Gaussian noise, σ = 2, q = 0.1, Poisson sampling",
        ),
        (
            {"kind": "fixed_size_sampled", "mechanism": GAUSSIAN} | SIZES,
            "Gaussian noise, σ = 2, samples of 50 of 1000 records",
        ),
        ({"kind": "repeated", "count": 5, "mechanism": GAUSSIAN}, "Gaussian noise, σ = 2"),
        ({"kind": "composed", "mechanisms": [GAUSSIAN, GAUSSIAN]}, "2 mechanisms together"),
    ],
)
def test_mechanisms_are_described_in_words(mechanism: dict[str, object], words: str) -> None:
    assert from_json(mechanism).describe_step() == words
