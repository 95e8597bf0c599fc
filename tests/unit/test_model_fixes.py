"""`fix` returns a copy of a model that is trained, with a line for each change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.clipped_sums import per_example
from training_client.lab.models import cross_entropy
from training_client.optimizers import fix
from training_client.testing import clipped_sum


class Attention(nn.Module):
    """A model whose attention has the examples in the second dimension, with a mask."""

    def __init__(self, attention: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attention, self.call, self.last = attention, call, nn.Linear(8, 4)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.call(self.attention, examples.transpose(0, 1)).mean(0))
        return found


def mask(positions: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(positions)


def layer(kind: Any, **more: Any) -> Any:
    return kind(8, 2, dim_feedforward=16, dropout=0.0, **more)


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(
        nn.MultiheadAttention(8, 2),
        lambda part, rows: part(rows, rows, value=rows, attn_mask=mask(len(rows)))[0],
    ),
    "encoder": lambda: Attention(
        nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), 2, enable_nested_tensor=False),
        lambda part, rows: part(rows, mask=mask(len(rows))),
    ),
    "decoder": lambda: Attention(
        nn.TransformerDecoder(layer(nn.TransformerDecoderLayer), 1),
        lambda part, rows: part(tgt=rows[:3], memory=rows),
    ),
    "transformer": lambda: Attention(
        layer(nn.Transformer, num_encoder_layers=1, num_decoder_layers=1),
        lambda part, rows: part(rows, rows[1:]),
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_examples_second_computes_as_before_and_is_trained(name: str) -> None:
    torch.manual_seed(1)
    net, examples, labels = ATTENTION[name](), torch.randn(6, 5, 8), torch.arange(6) % 4
    with pytest.warns(UserWarning, match="examples along the second dimension"):
        clipped_sum(net, examples, labels, cross_entropy, 1.0)
    fixed, changes = fix(net)
    assert changes == [
        f"attention: {type(net.attention).__name__} with batch_first=True inside, called as before"
    ]
    assert list(fixed.state_dict()) == list(net.state_dict())
    assert torch.allclose(fixed(examples), net(examples), atol=1e-6)
    wanted = [each.sum(0) for each in per_example(net, examples, labels)]
    found = clipped_sum(fixed, examples, labels, cross_entropy, 1e6)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other.view_as(one), atol=1e-4)
    again, changes = fix(fixed)
    assert not changes
    assert torch.allclose(again(examples), net(examples), atol=1e-6)


class Residual(nn.Module):
    """Two convolutions with batch norm, of which one is used twice, around a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.again, self.act = self.norm, nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.act(self.again(self.conv(self.act(self.norm(images)))))
        return images + torch.as_tensor(found)


def test_norms_of_batches_and_activations_in_place_are_replaced() -> None:
    torch.manual_seed(1)
    net: Any = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), Residual(), nn.InstanceNorm2d(6, track_running_stats=True),
        nn.BatchNorm2d(6, affine=False), nn.Flatten(), nn.Linear(96, 64), nn.BatchNorm1d(64),
        nn.Linear(64, 4),
    ).double()  # fmt: skip
    with torch.no_grad():
        net[1].norm.weight.normal_()
    net[6].bias.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    fixed, changes = fix(net)
    assert changes == [
        "1.norm: BatchNorm2d → GroupNorm(3, 6); its running statistics are dropped",
        "2: InstanceNorm2d tracks no running statistics",
        "3: BatchNorm2d → GroupNorm(3, 6); its running statistics are dropped",
        "6: BatchNorm1d → GroupNorm(1, 64); its running statistics are dropped",
    ]
    assert fixed[1].norm is fixed[1].again
    assert torch.equal(fixed[1].norm.weight, net[1].norm.weight)
    assert not fixed[6].bias.requires_grad
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    examples, labels = torch.randn(5, 2, 4, 4).double(), torch.arange(5) % 4
    found = clipped_sum(fixed, examples, labels, cross_entropy, 1e6)
    wanted = [each.sum(0) for each in per_example(fixed, examples, labels)]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other.view_as(one))


class Own(nn.TransformerEncoderLayer):
    """A layer whose forward pass may have its own arguments."""


def test_attention_inside_modules_of_others_is_called_as_before() -> None:
    own: Any = layer(Own)
    rows = torch.randn(5, 6, 8)
    for net in (own, nn.TransformerEncoder(own, 1, enable_nested_tensor=False)):
        fixed, changes = fix(net)
        assert changes[0].endswith(
            "MultiheadAttention with batch_first=True inside, called as before"
        )
        assert torch.allclose(fixed(rows), net(rows), atol=1e-6)
        assert torch.allclose(fixed(rows[:, 0]), net(rows[:, 0]), atol=1e-6)  # one example


def test_what_needs_no_change_is_left() -> None:
    for net in (nn.Linear(3, 2), nn.MultiheadAttention(8, 2, batch_first=True)):
        assert fix(net)[1] == []
    whole, changes = fix(nn.BatchNorm3d(64).eval())  # as a pretrained model is loaded
    assert isinstance(whole, nn.GroupNorm)
    assert changes == [
        "the model: BatchNorm3d → GroupNorm(32, 64); its running statistics are dropped"
    ]


def test_a_batch_norm_of_one_channel_has_one_group() -> None:
    assert fix(nn.BatchNorm2d(1))[0].num_groups == 1
