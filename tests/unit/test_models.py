"""Models by name: shapes, losses one an example, and that each can be trained privately."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.small_models import sum_clipped
from training_client.errors import DataError
from training_client.lab.data import Dataset
from training_client.lab.models import (
    CLASSES,
    MODELS,
    RECONSTRUCTION,
    SIDE_STATISTICS,
    autoencoder,
    logistic,
    make_model,
    side_information,
    squared_error,
)
from training_client.lab.train import evaluate
from training_client.lab.warm_start import warm_start
from training_client.private_step import Clipper, Transform


def two_classes(rows: int = 64) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    examples = torch.randn(rows, 6, generator=generator)
    labels = (examples[:, 0] > 0).long()
    return Dataset(examples, labels, examples, labels, classes=2, images=(1, 2, 3))


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_can_be_clipped_with_its_own_loss(name: str) -> None:
    objective = MODELS[name].objective
    data = objective.with_targets(two_classes())
    model = make_model(name, data, hidden=8)
    clipped, mean = sum_clipped(
        Clipper(model), data.train_examples, data.train_labels, objective.loss, Transform(1e-3)
    )
    assert [each.shape for each in clipped] == [p.shape for p in model.parameters()]
    losses = objective.loss(model(data.train_examples), data.train_labels)
    assert losses.shape == (64,)
    assert float(losses.detach().mean()) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each == "cnn" else each for each in MODELS],
)
def test_warm_starts_learn_what_the_model_is_for(name: str) -> None:
    objective = MODELS[name].objective
    data = objective.with_targets(two_classes(400))
    torch.manual_seed(0)
    model = make_model(name, data, hidden=32)
    before = evaluate(model, data, objective)
    public = (data.train_examples, data.train_labels)
    warm_start(model, public, objective.loss, 150, learning_rate=1e-2)
    after = evaluate(model, data, objective)
    if objective.reconstructs:
        assert after < 0.8 * before
    else:
        assert after > max(before, 0.9)
    assert all(p.grad is None for p in model.parameters())


def test_the_logistic_loss_is_the_papers() -> None:
    found = logistic(torch.tensor([[2.0], [2.0], [-3.0]]), torch.tensor([1, 0, 0]))
    margins = torch.tensor([2.0, -2.0, 3.0])
    assert torch.allclose(found, torch.log1p(torch.exp(-margins)))


def test_an_autoencoders_targets_are_its_inputs() -> None:
    data = two_classes()
    assert CLASSES.with_targets(data) is data
    assert RECONSTRUCTION.with_targets(data).train_labels is data.train_examples
    ones, zeros = torch.ones(2, 3), torch.zeros(2, 3)
    assert squared_error(ones, zeros).tolist() == [1.0, 1.0]


def test_the_papers_autoencoder_has_its_size() -> None:
    size = sum(each.numel() for each in autoencoder(784, 1000).parameters())
    assert 2_800_000 < size < 2_900_000


def test_models_that_do_not_match_the_data_are_named() -> None:
    with pytest.raises(DataError, match="there are mlp, cnn, linear, logistic, autoencoder"):
        make_model("resnet", two_classes())
    with pytest.raises(DataError, match="takes images"):
        make_model("cnn", replace(two_classes(), images=None))
    data = two_classes()
    three = Dataset(data.train_examples, data.train_labels, data.test_examples, data.test_labels, 3)
    with pytest.raises(DataError, match="supports 2 classes, the data have 3"):
        make_model("logistic", three)


def test_side_information_weighs_the_inputs_of_the_first_layer_only() -> None:
    model = make_model("mlp", two_classes(), hidden=3)
    weights, *others = side_information(model, torch.tensor([1.0, 1, 1, 1, 2, 0]))
    assert weights.shape == (3, 6)
    assert weights[1].tolist() == [1.0, 1, 1, 1, 2, pytest.approx(1e-6)]
    assert all(torch.equal(each, torch.ones_like(each)) for each in others)
    assert [each.shape for each in others] == [p.shape for p in model.parameters()][1:]


def test_side_information_is_capped_and_weighed_against_the_other_parameters() -> None:
    model, frequencies = (
        make_model("mlp", two_classes(), hidden=3),
        torch.tensor([8.0, 1, 1, 1, 1, 0]),
    )
    rows = {
        kind: side_information(model, frequencies / 10, kind, cap=2.0, others=20.0)
        for kind in SIDE_STATISTICS
    }
    assert rows["frequency"][0][0].tolist() == [2.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert rows["equal"][0][0].tolist() == [1.0] * 6
    assert all(bool((each == 20).all()) for row in rows.values() for each in row[1:])
    many = torch.linspace(1, 0.1, 120)
    weights = side_information(nn.Linear(120, 2), many, "common")[0][1]
    assert float(weights[0] / weights[-1]) == pytest.approx(20.0)
    assert len(set(weights.tolist())) == 2
    assert int((weights == weights[0]).sum()) == 100
    inverse = side_information(nn.Linear(2, 2), torch.tensor([0.5, 0.01]), "tf-idf")[0][0]
    idf = 0.5 * math.log(2), 0.01 * math.log(100)  # a token's mean TF-IDF, counted once a record
    assert float(inverse[1] / inverse[0]) == pytest.approx(idf[0] / idf[1], rel=1e-5)
    for wrong in ({"statistic": "size"}, {"cap": 0.5}, {"others": 0.0}, {"others": math.inf}):
        with pytest.raises(DataError):
            side_information(model, frequencies, **wrong)
