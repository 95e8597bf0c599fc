"""`clipped_sum` takes the path of the engine that it is told to, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layer_models import (
    POSITIONS,
    SIZE,
    WIDTH,
    WORDS,
    MeanOverPositions,
    TiedEmbedding,
    rows,
    sequences,
    tokens,
)
from training_client.lab.models import cross_entropy
from training_client.private_step.gradients import convolution_gradients, sequence_products
from training_client.private_step.gradients.chunked_gradients import ChunkedGradients
from training_client.private_step.gradients.convolution_gradients import ConvolutionProducts
from training_client.private_step.gradients.example_gradients import (
    MaterializedGradients,
    OuterProducts,
)
from training_client.private_step.gradients.sequence_products import SequenceProducts
from training_client.private_step.gradients.summed_gradients import SummedGradients
from training_client.private_step.gradients.token_gradients import TokenGradients
from training_client.private_step.kernels.sparse import SparseFactor
from training_client.private_step.layers.layer_uses import EnginePath
from training_client.private_step.layers.replayed_layers import LayerCall
from training_client.testing import clipped_sum

PATHS: tuple[EnginePath | None, ...] = (None, "gram", "product", "held", "replay")
STAGES = {  # what is called for the norms of gradients that are stored in this way
    "outer": (OuterProducts, "squared_norms"),
    "sequence": (SequenceProducts, "squared_norms"),
    "gram": (sequence_products, "gram_underflow"),  # an error term of Gram matrices only
    "product": (ChunkedGradients, "squared_norms"),  # a few examples' gradients at a time
    "tokens": (TokenGradients, "squared_norms"),
    "summed": (SummedGradients, "squared_norms"),
    "held": (MaterializedGradients, "squared_norms"),
    "replay": (LayerCall, "example_gradients"),
    "image": (ConvolutionProducts, "squared_norms"),
    "image-gram": (convolution_gradients, "gram_underflow"),
    "image-held": (ConvolutionProducts, "hold"),
    "sparse": (SparseFactor, "from_dense"),
}


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer whose only parameter is its weight: biases are always held."""
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows, rows, rows)[0].mean(1)
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "rows": (lambda: linear(WIDTH, 4), rows),
    "long sequences": (lambda: nn.Sequential(linear(WIDTH, 4), MeanOverPositions()), sequences),
    "short sequences": (
        lambda: nn.Sequential(linear(30, 40), MeanOverPositions()),
        lambda: torch.randn(SIZE, 2, 30, dtype=torch.float64),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(WORDS, 4), MeanOverPositions()), tokens),
    "attention": (lambda: Attention(), sequences),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(POSITIONS, 4, 3, bias=False), nn.Flatten()),
        sequences,
    ),
    "wide convolution": (
        lambda: nn.Sequential(nn.Conv1d(POSITIONS, 90, 6, bias=False), nn.Flatten()),
        sequences,
    ),
    "recurrent": (
        lambda: nn.Sequential(nn.GRU(WIDTH, 4, bias=False, batch_first=True), MeanOverPositions()),
        sequences,
    ),
}
WAYS = {  # for each model, the stages of each of PATHS
    "rows": ("outer", "sequence gram", "sequence product", "held", "held replay"),
    "long sequences": (
        "sequence product", "sequence gram", "sequence product", "held", "held replay",
    ),
    "short sequences": (
        "sequence gram", "sequence gram", "sequence product", "held", "held replay",
    ),
    "embedding": ("tokens", "tokens", "tokens", "held", "held replay"),
    "attention": (
        "sequence product", "sequence gram", "sequence product", "held", "held replay",
    ),
    "convolution": (
        "held image-held", "image image-gram", "image product", "held image-held",
        "held replay",
    ),
    "wide convolution": (
        "image product", "image image-gram", "image product", "held image-held",
        "held replay",
    ),
    "recurrent": (  # never replayed
        "sequence product", "sequence gram", "sequence product", "held",
        "sequence product",
    ),
}  # fmt: skip


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the stages that were called since the test began."""
    found: set[str] = set()

    def spy(stage: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*of: Any, **options: Any) -> Any:
            found.add(stage)
            return genuine(*of, **options)

        return call

    for stage, (owner, name) in STAGES.items():
        monkeypatch.setattr(owner, name, spy(stage, getattr(owner, name)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_forced_path_is_the_only_one_taken(name: str, called: set[str]) -> None:
    make, draw = MODELS[name]
    for path, way in zip(PATHS, WAYS[name], strict=True):
        torch.manual_seed(1)
        called.clear()
        clipped_sum(make().double(), draw(), torch.arange(SIZE) % 4, cross_entropy, 0.1, path=path)
        assert called == set(way.split()), path


def test_parts_of_different_kinds_are_held_only_if_that_is_forced(called: set[str]) -> None:
    for path in PATHS:
        called.clear()
        torch.manual_seed(1)
        net = TiedEmbedding().double()
        net.last.bias.requires_grad_(False)
        clipped_sum(net, tokens(), torch.arange(SIZE) % 4, cross_entropy, 0.1, path=path)
        assert ("summed" in called) == (path not in ("held", "replay"))
        assert ("held" in called) == (path in ("held", "replay"))
        assert ("replay" in called) == (path == "replay")


@pytest.mark.parametrize("sparse_inputs", [False, True])
def test_zeros_are_skipped_if_inputs_are_declared_sparse(
    sparse_inputs: bool, called: set[str]
) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(SIZE, 200) * (torch.rand(SIZE, 200) < 0.1)
    given = nn.Linear(200, 20), inputs, torch.arange(SIZE), cross_entropy, 0.1
    found = clipped_sum(*given, sparse_inputs=sparse_inputs)
    assert ("sparse" in called) == sparse_inputs
    for one, other in zip(found, clipped_sum(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown path 'other': use one of gram, product, held"):
        clipped_sum(
            nn.Linear(6, 4).double(), rows(), torch.zeros(SIZE).long(), cross_entropy, 1.0,
            path="other",  # type: ignore[arg-type]
        )  # fmt: skip
