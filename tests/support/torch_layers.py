"""A model for each class of `torch.nn` that has parameters, and for each way to compute weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.support.layer_models import SIZE, WORDS

WIDTH, HEADS = 8, 2
Make = Callable[[], nn.Module]
Use = Callable[[Any, torch.Tensor], Any]


class LayerModel(nn.Module):
    """A model of one layer; numbers of its output are reduced to four classes."""

    def __init__(self, layer: nn.Module, use: Use) -> None:
        super().__init__()
        self.layer, self._use = layer, use

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found = self._use(self.layer, examples)
        rows = (found[0] if isinstance(found, tuple) else found).flatten(1)
        parts: torch.Tensor = rows[:, : rows.shape[1] // 4 * 4].reshape(len(rows), 4, -1)
        return parts.tanh().sum(2)


def rows() -> torch.Tensor:
    """Draw one row per example."""
    return torch.randn(SIZE, WIDTH)


def sequences() -> torch.Tensor:
    """Draw one sequence per example."""
    return torch.randn(SIZE, 5, WIDTH)


def images(dimensions: int = 2) -> Callable[[], torch.Tensor]:
    """Return a function that draws an image of four channels per example."""
    return lambda: torch.randn(SIZE, 4, *[5] * dimensions)


def tokens() -> torch.Tensor:
    """Draw one sequence of tokens per example."""
    return torch.randint(0, WORDS, (SIZE, 5))


def target(examples: torch.Tensor) -> torch.Tensor:
    """Return a class, of 20, for each example."""
    return (3 * examples.sum(1).abs()).long() % 20


def call(layer: nn.Module, examples: torch.Tensor) -> Any:
    """Call a layer on the examples."""
    return layer(examples)


def call_twice(layer: nn.Module, examples: torch.Tensor) -> Any:
    """Call a layer that takes two inputs."""
    return layer(examples, examples.flip(1))


def attend(layer: nn.Module, examples: torch.Tensor) -> Any:
    """Call attention of a sequence to itself."""
    return layer(examples, examples, examples)


def losses(layer: nn.Module, examples: torch.Tensor) -> Any:
    """Call a layer that computes a loss; multiply it by four numbers."""
    return layer(examples, target(examples))[:, None] * torch.arange(4.0)


class Held(nn.Module):
    """A model whose parameters are in a list, or in a dictionary."""

    def __init__(self, parameters: nn.Module) -> None:
        super().__init__()
        self.held = parameters

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        (weight,) = self.held.parameters()
        return examples * weight


def attention(**options: Any) -> nn.MultiheadAttention:
    """Return an attention layer."""
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


def transformer(kind: Any, *more: int) -> nn.Module:
    """Return a transformer, or a layer of one."""
    found: nn.Module = kind(WIDTH, HEADS, *more, dim_feedforward=16, dropout=0.0, batch_first=True)
    return found


def weight_normalized_attention() -> nn.Module:
    """Return attention whose last linear map is normalized."""
    layer = attention()
    parametrizations.weight_norm(layer.out_proj)
    return layer


CLASSES: dict[str, tuple[Make, Callable[[], torch.Tensor], Use]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10], div_value=2),
        rows,
        lambda layer, examples: layer.log_prob(examples),
    ),
    "Bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 4), rows, call_twice),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3), images(1), call),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3), images(2), call),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3), images(3), call),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 4, 3), images(1), call),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 3), images(2), call),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 4, 3), images(3), call),
    "Embedding": (lambda: nn.Embedding(WORDS, 4), tokens, call),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(WORDS, 4), tokens, call),
    "GRU": (lambda: nn.GRU(WIDTH, 4, batch_first=True), sequences, call),
    "GRUCell": (lambda: nn.GRUCell(WIDTH, 4), rows, call),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), images(), call),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), images(1), call),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), images(2), call),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), images(3), call),
    "LSTM": (lambda: nn.LSTM(WIDTH, 4, batch_first=True), sequences, call),
    "LSTMCell": (lambda: nn.LSTMCell(WIDTH, 4), rows, call),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), rows, call),
    "Linear": (lambda: nn.Linear(WIDTH, 4), rows, call),
    "LinearCrossEntropyLoss": (
        lambda: nn.LinearCrossEntropyLoss(WIDTH, 20, reduction="none"),
        rows,
        losses,
    ),
    "MultiheadAttention": (attention, sequences, attend),
    "PReLU": (nn.PReLU, rows, call),
    "ParameterDict": (
        lambda: Held(nn.ParameterDict({"weight": torch.rand(WIDTH)})),
        rows,
        call,
    ),
    "ParameterList": (lambda: Held(nn.ParameterList([torch.rand(WIDTH)])), rows, call),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), rows, call),
    "RNN": (lambda: nn.RNN(WIDTH, 4, batch_first=True), sequences, call),
    "RNNCell": (lambda: nn.RNNCell(WIDTH, 4), rows, call),
    "Transformer": (lambda: transformer(nn.Transformer, 1, 1), sequences, call_twice),
    "TransformerDecoderLayer": (
        lambda: transformer(nn.TransformerDecoderLayer),
        sequences,
        call_twice,
    ),
    "TransformerEncoderLayer": (
        lambda: transformer(nn.TransformerEncoderLayer),
        sequences,
        call,
    ),
}

COMPUTED_WEIGHTS: dict[str, tuple[Make, Callable[[], torch.Tensor], Use]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 4)), rows, call),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, 4)), rows, call),
    "weight_norm of Conv2d": (
        lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        images(),
        call,
    ),
    "weight_norm of Embedding": (
        lambda: parametrizations.weight_norm(nn.Embedding(WORDS, 4)),
        tokens,
        call,
    ),
    "weight_norm of LSTMCell": (
        lambda: parametrizations.weight_norm(nn.LSTMCell(WIDTH, 4), "weight_hh"),
        rows,
        call,
    ),
    "weight_norm inside of attention": (weight_normalized_attention, sequences, attend),
    "an empty parameter": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 0), nn.Linear(0, 4)),
        rows,
        call,
    ),
}

_BATCH_NORM = r"\((Lazy|Sync)?BatchNorm.*use LayerNorm or GroupNorm"
_LAZY = r"\(Lazy\w+\) is not initialized: call the model on a few examples"
REFUSED_CLASSES: dict[str, tuple[Make, str]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), _BATCH_NORM),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), _BATCH_NORM),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), _BATCH_NORM),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), _BATCH_NORM),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, _BATCH_NORM),
    "LazyBatchNorm2d": (nn.LazyBatchNorm2d, _BATCH_NORM),
    "LazyBatchNorm3d": (nn.LazyBatchNorm3d, _BATCH_NORM),
    "LazyConv1d": (lambda: nn.LazyConv1d(4, 3), _LAZY),
    "LazyConv2d": (lambda: nn.LazyConv2d(4, 3), _LAZY),
    "LazyConv3d": (lambda: nn.LazyConv3d(4, 3), _LAZY),
    "LazyConvTranspose1d": (lambda: nn.LazyConvTranspose1d(4, 3), _LAZY),
    "LazyConvTranspose2d": (lambda: nn.LazyConvTranspose2d(4, 3), _LAZY),
    "LazyConvTranspose3d": (lambda: nn.LazyConvTranspose3d(4, 3), _LAZY),
    "LazyInstanceNorm1d": (
        lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=False),
        _LAZY,
    ),
    "LazyInstanceNorm2d": (
        lambda: nn.LazyInstanceNorm2d(affine=True, track_running_stats=False),
        _LAZY,
    ),
    "LazyInstanceNorm3d": (
        lambda: nn.LazyInstanceNorm3d(affine=True, track_running_stats=False),
        _LAZY,
    ),
    "LazyLinear": (lambda: nn.LazyLinear(4), _LAZY),
    "RNNBase": (lambda: nn.RNNBase("GRU", 8, 4), r"\(RNNBase\).*use RNN, GRU or LSTM"),
    "RNNCellBase": (
        lambda: nn.RNNCellBase(8, 4, bias=True, num_chunks=1),
        r"\(RNNCellBase\).*use RNNCell, GRUCell or LSTMCell",
    ),
}


class Complex(nn.Module):
    """A layer of complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))


REFUSED_LAYERS: dict[str, tuple[Make, str]] = {
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        r"parametrizations\.weight\.0 \(_SpectralNorm\).*use .*weight_norm",
    ),
    "weight_norm by a hook": (
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        r"\(Linear\).*use torch\.nn\.utils\.parametrizations\.weight_norm",
    ),
    "spectral_norm by a hook": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        r"\(Linear\).*use torch\.nn\.utils\.parametrizations\.weight_norm",
    ),
    "pruning": (
        lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
        r"\(Linear\).*call torch\.nn\.utils\.prune\.remove",
    ),
    "weight_norm of LSTM": (
        lambda: parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0"),
        r"\(ParametrizedLSTM\).*LSTMCell",
    ),
    "complex parameters": (Complex, r"\(Complex\).*weight.*real.*two parameters"),
    "complex Linear": (
        lambda: nn.Linear(4, 4, dtype=torch.complex64),
        r"\(Linear\).*weight.*real.*two parameters",
    ),
    "float16": (lambda: nn.Linear(4, 4).half(), r"\(Linear\) has torch.float16.*autocast"),
    "bfloat16": (lambda: nn.Linear(4, 4).bfloat16(), r"\(Linear\) has torch.bfloat16.*autocast"),
    "parameters without values": (
        lambda: nn.Linear(4, 4, device="meta"),
        r"\(Linear\).*weight without values: use to_empty",
    ),
    "bags, sparse": (
        lambda: nn.EmbeddingBag(5, 4, mode="sum", sparse=True),
        r"\(EmbeddingBag\).*sparse=False",
    ),
    "embedding, sparse": (lambda: nn.Embedding(5, 4, sparse=True), r"\(Embedding\).*sparse=False"),
    "embedding, scaled by frequency": (
        lambda: nn.Embedding(5, 4, scale_grad_by_freq=True),
        r"\(Embedding\).*scale_grad_by_freq=False",
    ),
    "running statistics": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "keeps"),
    "BatchNorm without parameters": (lambda: nn.BatchNorm1d(4, affine=False), "over the batch"),
    "RReLU": (nn.RReLU, r"\(RReLU\).*use LeakyReLU or PReLU"),
}


def classes_with_parameters() -> set[str]:
    """Return the names of the classes of `torch.nn` whose source makes a parameter or a layer.

    `Transformer*` without "Layer" are containers of given layers; `Transformer` makes them itself.
    """
    made = re.compile(r"Parameter\(|Linear\(|Layer\(")
    found = set()
    for name, kind in vars(nn).items():
        if inspect.isclass(kind) and issubclass(kind, nn.Module):
            bases = [each for each in kind.__mro__ if issubclass(each, nn.Module)]
            texts = [inspect.getsource(each) for each in bases if each is not nn.Module]
            if made.search(re.sub(r'r?""".*?"""', "", "".join(texts), flags=re.DOTALL)):
                found.add(name)
    return found
