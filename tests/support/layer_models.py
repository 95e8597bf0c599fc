"""Small models of every kind of layer that can be clipped, each with a batch of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

Examples = torch.Tensor | dict[str, Any]
SIZE = 6  # examples of a batch
POSITIONS = 7
WIDTH = 6
WORDS = 11


class MeanOverPositions(nn.Module):
    """The mean over the positions of a sequence; of a recurrent layer's outputs too."""

    def forward(self, rows: Any) -> torch.Tensor:
        found: torch.Tensor = (rows[0] if isinstance(rows, tuple) else rows).mean(1)
        return found


class OwnParameter(nn.Module):
    """A module with a parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.rand(WIDTH, 4)), nn.Linear(4, 4)
        self.more = nn.ParameterList([torch.rand(4)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows @ self.weight + self.more[0])
        return found


class TiedEmbedding(nn.Module):
    """A language model whose last layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, 5), nn.Linear(5, WORDS)
        self.last.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.words(tokens).tanh()).mean(1)
        return found[:, :4]


class LayerUsedTwice(nn.Module):
    """A model that applies one layer twice, and an embedding to two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 5, padding_idx=1), nn.Linear(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.words(tokens) + self.words(tokens.flip(1))
        found: torch.Tensor = self.layer(self.layer(rows.mean(1)).tanh())
        return found[:, :4]


class SelfAttention(nn.Module):
    """Attention of a sequence to itself; options are those of the layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.attention(rows, rows, rows)[0]).mean(1)
        return found


class CrossAttention(nn.Module):
    """Attention of one sequence to others, also of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.equal = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.other = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=3, vdim=4)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        back, short = rows.flip(1), rows[:, :3]
        one = self.equal(rows, back, back, need_weights=False)[0]
        two = self.equal(rows, short, short * 2, need_weights=False)[0]
        three = self.other(rows, short[..., :3], short[..., :4])[0]
        found: torch.Tensor = self.last(one + two + three).mean(1)
        return found


class RecurrentCells(nn.Module):
    """Cells that a model applies to one position after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(WIDTH, 5), nn.GRUCell(5, 4), nn.RNNCell(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state, hidden, last = None, None, None
        for position in range(rows.shape[1]):
            state = self.lstm(rows[:, position], state)
            hidden = self.gru(state[0], hidden)
            last = self.rnn(hidden, last)
        assert last is not None
        return last  # type: ignore[no-any-return]


class PackedRecurrence(nn.Module):
    """Two-directional LSTM layers on sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.recurrent(packed)
        found: torch.Tensor = self.last(torch.cat([hidden[-2], hidden[-1]], 1))
        return found


class SharedPositions(nn.Module):
    """An embedding of tokens, and one of positions that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 5), nn.Embedding(POSITIONS, 5)
        self.norm, self.last = nn.LayerNorm(5), nn.Linear(5, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        found: torch.Tensor = self.last(self.norm(self.words(tokens) + self.places(places)))
        return found.mean(1)


def rows() -> torch.Tensor:
    """Draw one row per example."""
    return torch.randn(SIZE, WIDTH, dtype=torch.float64)


def sequences() -> torch.Tensor:
    """Draw one sequence per example."""
    return torch.randn(SIZE, POSITIONS, WIDTH, dtype=torch.float64)


def tokens() -> torch.Tensor:
    """Draw one sequence of tokens per example."""
    return torch.randint(0, WORDS, (SIZE, POSITIONS))


def padded() -> dict[str, Any]:
    """Draw sequences of different lengths, with zeros after their ends."""
    found, lengths = sequences(), torch.tensor([7, 3, 1, 5, 7, 2])
    found[torch.arange(POSITIONS)[None] >= lengths[:, None]] = 0.0
    return {"rows": found, "lengths": lengths}


def _recurrent(kind: type[nn.RNNBase], width: int = 4, **options: Any) -> nn.Module:
    """Return a recurrent layer and a linear one."""
    return nn.Sequential(
        kind(WIDTH, 4, batch_first=True, **options), MeanOverPositions(), nn.Linear(width, 4)
    )


LAYER_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Examples]]] = {
    "linear on sequences": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 4),
                              MeanOverPositions()),
        sequences,
    ),
    "linear on sequences of sequences": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, POSITIONS)), nn.Linear(WIDTH, 4),
                              nn.Flatten(1, 2), MeanOverPositions()),
        sequences,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(WORDS, 5, padding_idx=2), nn.RMSNorm(5),
                              nn.Linear(5, 4), MeanOverPositions()),
        tokens,
    ),
    "bags, mean": (
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 5, mode="mean", padding_idx=2),
                              nn.Linear(5, 4)),
        tokens,
    ),
    "bags, sum": (
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 5, mode="sum"), nn.Linear(5, 4)), tokens
    ),
    "shared positions": (SharedPositions, tokens),
    "normalization": (
        lambda: nn.Sequential(nn.LayerNorm((POSITIONS, WIDTH)), nn.LayerNorm(WIDTH, bias=False),
                              nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4), MeanOverPositions()),
        sequences,
    ),
    "LSTM": (lambda: _recurrent(nn.LSTM, 8, num_layers=2, bidirectional=True), sequences),
    "LSTM with a projection": (lambda: _recurrent(nn.LSTM, 3, proj_size=3, bias=False), sequences),
    "GRU": (lambda: _recurrent(nn.GRU), sequences),
    "RNN": (lambda: _recurrent(nn.RNN, nonlinearity="relu"), sequences),
    "recurrent cells": (RecurrentCells, sequences),
    "packed sequences": (PackedRecurrence, padded),
    "attention": (SelfAttention, sequences),
    "attention with keys of its own": (lambda: SelfAttention(add_bias_kv=True), sequences),
    "cross attention": (CrossAttention, sequences),
    "transformer layer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
            MeanOverPositions(), nn.Linear(WIDTH, 4)),
        sequences,
    ),
    "own parameter": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), OwnParameter(), MeanOverPositions()),
        sequences,
    ),
    "PReLU": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.PReLU(5), nn.Linear(5, 4)), rows
    ),
    "bilinear": (lambda: BilinearModel(), rows),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(POSITIONS, 6, 3, padding=2, dilation=2),
                              nn.GroupNorm(2, 6), nn.Tanh(),
                              nn.Conv1d(6, 6, 2, 2, groups=3, bias=False),
                              nn.InstanceNorm1d(6, affine=True), nn.Flatten(), nn.Linear(18, 4)),
        sequences,
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose1d(POSITIONS, 3, 2), nn.Flatten(),
                              nn.Linear(3 * (WIDTH + 1), 4)),
        sequences,
    ),
    "circular convolution": (
        lambda: nn.Sequential(nn.Conv1d(POSITIONS, 3, 3, padding=1, padding_mode="circular"),
                              nn.Flatten(), nn.Linear(3 * WIDTH, 4)),
        sequences,
    ),
    "tied embedding": (TiedEmbedding, tokens),
    "layer used twice": (LayerUsedTwice, tokens),
}  # fmt: skip


class BilinearModel(nn.Module):
    """A layer of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, 4)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(examples, examples.flip(1))
        return found


def build(name: str, seed: int = 0) -> tuple[nn.Module, Examples, torch.Tensor]:
    """Return a model of `LAYER_MODELS` in double precision, a batch, and labels."""
    torch.manual_seed(seed)
    make_model, draw = LAYER_MODELS[name]
    return make_model().double(), draw(), torch.randint(0, 4, (SIZE,))


def to_single_precision(net: nn.Module, examples: Examples) -> tuple[nn.Module, Examples]:
    """Return a model and a batch in single precision; tokens and lengths stay integers."""
    if isinstance(examples, torch.Tensor):
        return net.float(), examples.float() if examples.is_floating_point() else examples
    return net.float(), examples | {"rows": examples["rows"].float()}


def select(examples: Examples, rows: slice | torch.Tensor) -> Examples:
    """Return some examples of a batch."""
    if isinstance(examples, torch.Tensor):
        return examples[rows]
    return {name: each[rows] if torch.is_tensor(each) else each for name, each in examples.items()}


def call(net: nn.Module, examples: Examples) -> torch.Tensor:
    """Return a model's predictions for a batch."""
    found: torch.Tensor = net(examples) if torch.is_tensor(examples) else net(**examples)  # type: ignore[arg-type]
    return found
