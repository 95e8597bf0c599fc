"""Programs that mix examples, depend on their places or on their number, and look-alikes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.clipped_sums import clip_rows, gradient_rows
from training_client.errors import UnsupportedModelError
from training_client.private_step import Clipper, Transform

WIDTH = 6
Use = Callable[[Any, torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Net(nn.Module):
    """Two layers, and between them a program that gets the model and the hidden values.

    Attributes:
        step: the number of the step, from 1.
        kept: whatever the program keeps.
    """

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use, self.step = use, 1
        self.kept: list[torch.Tensor] = []

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return self.last(self.use(self, self.first(examples).tanh()))  # type: ignore[no-any-return]


def losses_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")


def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, WIDTH), torch.randint(0, WIDTH, (size,))


def places(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(rows))


def column(rows: torch.Tensor) -> torch.Tensor:
    return places(rows)[:, None].double()


def summing() -> Callable[[float], float]:
    """Return a function that returns the sum of all that it was ever given."""
    given: list[float] = []
    return lambda value: given.append(value) or sum(given)  # type: ignore[func-returns-value]


def write(rows: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    found = rows.clone()
    found[at] = value
    return found


def masked_by(finite: Callable[[torch.Tensor], Any]) -> Use:
    """Return a program that adds a mask with −∞ and these values."""

    def use(_: Any, h: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(len(h), WIDTH)
        mask[:, 0] = -math.inf
        mask[:, 1] = finite(h)
        return (h + mask).softmax(1)

    return use


def parts_of_two(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, and the rows of the next examples, as parts of the same values."""
    two = torch.cat([h, h])
    return two[: len(h)], two[1 : len(h) + 1]


class Centred(torch.autograd.Function):
    """The identity, whose gradients are centred if `is_on`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, is_on: Callable[[], bool]) -> torch.Tensor:
        ctx.is_on = is_on
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient - gradient.mean(0) if ctx.is_on() else gradient, None


def hooked(h: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    found = h * 1.0
    found.register_hook(hook)
    return found


# By name: the operation of the message, and the program.
MIXING: dict[str, tuple[str, Use]] = {
    "centring": ("sub", lambda _, h: h - h.mean(0)),
    "softmax over examples": ("mul", lambda _, h: h * h.softmax(0)),
    "running sum": ("add", lambda _, h: h + h.cumsum(0)),
    "neighbour": ("add", lambda _, h: h + h.roll(1, 0)),
    "roll of all": ("add", lambda _, h: h + h.roll(1)),
    "reverse order": ("add", lambda _, h: h + h[places(h).flip(0)]),
    "shuffle": ("add", lambda _, h: h + h[torch.randperm(len(h))]),
    "drawn examples": ("add", lambda _, h: h + h[torch.randint(0, len(h), (len(h),))]),
    "the first": ("sub", lambda _, h: h - h[0]),
    "pairs": ("sub", lambda _, h: (h[:, None] - h[None]).mean(1)),
    "similarities": ("mm", lambda _, h: (h @ h.t()).tanh() @ h),
    "distances": ("_cdist_forward", lambda _, h: h + torch.cdist(h, h).mean(1, keepdim=True)),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda _, h: functional.scaled_dot_product_attention(*[h[None, None]] * 3)[0, 0],
    ),
    "batch norm": (
        "native_batch_norm",
        lambda _, h: functional.batch_norm(h, None, None, training=True),
    ),
    "convolution over examples": (
        "convolution",
        lambda _, h: functional.conv1d(h.t()[None], torch.ones(6, 6, 3), padding=1)[0].t(),
    ),
    "shift by one": ("cat", lambda _, h: h + torch.cat([torch.zeros(1, WIDTH), h[:-1]])),
    "two batches, regrouped": ("add", lambda _, h: h + torch.cat([h, h]).view(-1, 2, 6)[:, 0]),
    "transposed": ("add", lambda _, h: h + functional.layer_norm(h.t(), (len(h),)).t()),
    "written at a place": ("copy", lambda _, h: write(h, slice(1, None), h[:-1])),
    "number at a place": ("fill", lambda _, h: write(h, 0, 0.0)),
    "mean where a mask says": ("index_put", lambda _, h: write(h, h > 0, h.mean())),
    "position": ("mul", lambda _, h: h * column(h)),
    "table by position": ("mul", lambda _, h: h * torch.linspace(0, 1, 70)[places(h)][:, None]),
    "own column": ("index", lambda _, h: h * h[places(h), places(h) % WIDTH][:, None]),
    "scatter by position": ("scatter", lambda _, h: h.scatter(1, places(h)[:, None] % 6, 0.0)),
    "puts by position": (
        "index_put",
        lambda _, h: h + torch.zeros_like(h).index_put((places(h).flip(0),), h),
    ),
    "mask with −∞ and position": ("add", masked_by(places)),
    "mean in Python": ("_local_scalar_dense", lambda _, h: h * h.mean().item()),
    "sum by a function": ("apply_", lambda _, h: h * h.detach().clone().apply_(summing())),
    "another by a function": (
        "map_",
        lambda _, h: h * h.detach().clone().map_(h.detach().roll(1, 0), lambda _, other: other),
    ),
    "mean in NumPy": ("numpy", lambda _, h: h * float(h.detach().numpy().mean())),
    "branch": ("_local_scalar_dense", lambda _, h: h * 2 if h.mean() > 0 else h),
    "any as a number": ("mul", lambda _, h: h * (h > 1).any()),
    "gradients centred": ("sub", lambda _, h: Centred.apply(h, lambda: True)),
    "hook": ("mul", lambda _, h: hooked(h, lambda g: g * g.mean(0))),
    "inner gradient": (
        "mul",
        lambda _, h: h * torch.autograd.grad(h.sum(0).square().sum(), h, create_graph=True)[0],
    ),
    "bytes": ("add", lambda _, h: h + h.detach().view(torch.int64).flip(0).view(torch.float64)),
}
# Of the number of examples; there may be no single operation.
BY_NUMBER: dict[str, Use] = {
    "weights": lambda m, h: h + m.first.weight.detach()[0] * len(h),
    "scalar": lambda _, h: h / len(h),
    "group norm of one": lambda _, h: torch.native_group_norm(
        h, None, None, 1, h.numel(), 1, 1, 1e-5
    )[0],
    "tensor": lambda _, h: h * torch.tensor(1 / len(h)),
    "convolution": lambda _, h: functional.conv1d(h[:, None], torch.ones(1, 1, 1) * len(h))[:, 0],
    "scale of layer norm": lambda _, h: functional.layer_norm(h, (6,), torch.ones(6) * len(h)),
    "scale of group norm": lambda _, h: functional.group_norm(h, 2, torch.ones(6) * len(h)),
    "boundaries": lambda _, h: h * torch.bucketize(h.detach(), torch.tensor([0, 1 / len(h)])),
    "column": lambda _, h: h * h[:, len(h) % 2][:, None],
    "beginning": lambda _, h: functional.pad(h[:, len(h) % 2 : len(h) % 2 + 5], (0, 1)),
    "index": lambda _, h: h * h[:, torch.tensor([len(h) % 2])],
    "index_select": lambda _, h: h * h.index_select(1, torch.tensor([len(h) % 2])),
    "index_add": lambda _, h: h.index_add(1, torch.tensor([len(h) % 2]), h[:, :1]),
    "mask with −∞": masked_by(len),
    "mask of attention": lambda _, h: functional.scaled_dot_product_attention(
        *[h.view(-1, 1, 2, 3)] * 3, attn_mask=torch.eye(2) * len(h)
    ).flatten(1),
    "noise": lambda _, h: h + torch.randn_like(h) / len(h),
    "noise for all": lambda _, h: h + torch.randn(6) * torch.tensor(1 / len(h)),
    "dropout": lambda _, h: functional.dropout(h, 1 / (1 + len(h))),
    "dropout of weights": lambda _, h: h + functional.dropout(torch.ones(6) * len(h), 0.1),
    "deviation": lambda _, h: h + torch.empty(len(h), 1).normal_(0, 1 / len(h)),
    "probability": lambda _, h: h * torch.bernoulli(torch.full((6,), 1 / len(h))),
    "branch": lambda _, h: h * 2 if len(h) > 4 else h,
    "scalar of many": lambda _, h: h * min(1.0, 4 / len(h)),
    "tensor of many": lambda _, h: h * torch.tensor(min(1.0, 4 / len(h))),
    "dimension": lambda _, h: h - h.mean(0 if len(h) > 4 else 1, keepdim=True),
    "dimension by name": lambda _, h: torch.sort(h, stable=True, dim=0 if len(h) > 4 else 1)[0],
    "another tensor of many": lambda _, h: h + (h.flip(1), h.roll(1, 1))[len(h) > 2],
    "flag of many": lambda _, h: h * (len(h) > 4),
    "constant of many": lambda _, h: h * torch.tensor([1, 1, 1, 1, 1, 10 * (len(h) > 4)]),
    "type of many": lambda _, h: h * (3 * h.detach()).to(torch.bool if len(h) > 4 else torch.int64),
    "not a number of many": lambda _, h: h * (math.nan if len(h) > 4 else 1.0),
    "nearly one of few": lambda _, h: h * (len(h) if len(h) > 4 else 1 + 1e-12 * len(h)),
    "groups of many": lambda _, h: h.view(-1, max(1, len(h) // 4), 6).softmax(1).view(-1, 6),
}
MIXING_LOSSES: dict[str, tuple[str, Loss]] = {
    "mean": ("sub", lambda o, t: losses_of(o, t) - losses_of(o, t).mean()),
    "normaliser over tokens": ("div", lambda o, t: losses_of(o, t) / (t != -100).sum()),
    "hardest": ("ge", lambda o, t: losses_of(o, t) * (losses_of(o, t) >= losses_of(o, t).amax())),
    "class weights": ("index", lambda o, t: losses_of(o, t) * torch.bincount(t, minlength=6)[t]),
    "contrastive": ("mm", lambda o, t: losses_of(o @ o.t(), places(t))),
    "temperature": ("div", lambda o, t: losses_of(o / o.detach().std(), t)),
    "mixed labels": (
        "nll_loss_forward",
        lambda o, t: losses_of(o, t[torch.randperm(len(t))]),
    ),
    "same class": ("eq", lambda o, t: losses_of(o, t) * (t[:, None] == t[None]).sum(1)),
    "rank": ("mul", lambda o, t: losses_of(o, t) * o[:, 0].argsort()),
}


def clip(net: nn.Module, size: int = 5, loss: Loss = losses_of) -> Clipper:
    clipper = Clipper(net)
    clipper.clip(*draw(size), loss, Transform(1.0))
    return clipper


# an example alone has draws of its own, and is the first of its batch
DRAWS_BY_PLACE: dict[str, tuple[str, Use]] = {
    "noise by position": ("add", lambda _, h: h + torch.randn(len(h), 1) * column(h)),
    "probability by position": ("mul", lambda _, h: h * torch.bernoulli(column(h) / len(h))),
    "mean of noise by position": ("add", lambda _, h: h + torch.normal(column(h), 1.0)),
    "sorted noise": ("add", lambda _, h: h + torch.randn(len(h), 6).sort(0).values),
}


@pytest.mark.parametrize("name", DRAWS_BY_PLACE)
def test_draws_that_depend_on_the_place_meet_each_example_alone(name: str) -> None:
    operation, use = DRAWS_BY_PLACE[name]
    with pytest.warns(UserWarning, match=rf": {operation} in \w+\.py:\d+ .*example alone"):
        clip(Net(use), WIDTH)


@pytest.mark.parametrize("name", MIXING)
def test_a_program_that_mixes_examples_is_refused_with_its_operation(name: str) -> None:
    operation, use = MIXING[name]
    with pytest.raises(UnsupportedModelError, match=rf": {operation} in \w+\.py:\d+ \("):
        clip(Net(use), WIDTH)


@pytest.mark.parametrize("name", MIXING_LOSSES)
def test_a_loss_that_mixes_examples_is_refused_with_its_operation(name: str) -> None:
    operation, loss = MIXING_LOSSES[name]
    with pytest.raises(UnsupportedModelError, match=rf": {operation} in test_isolation.py:\d+ \("):
        clip(nn.Linear(WIDTH, WIDTH), 5, loss)


@pytest.mark.parametrize("name", BY_NUMBER)
def test_a_program_that_depends_on_the_number_of_examples_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        clip(Net(BY_NUMBER[name]), 8)


def test_a_number_that_a_layer_keeps_may_not_depend_on_the_number_of_examples() -> None:
    def normalize(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.norm.eps = 10.0 if len(h) > 4 else 1e-5
        return m.norm(h)  # type: ignore[no-any-return]

    net = Net(normalize)
    net.norm = nn.GroupNorm(2, WIDTH)
    with pytest.raises(UnsupportedModelError, match="given other numbers"):
        clip(net, 8)


def test_a_program_that_treats_one_example_alone_in_another_way_is_refused() -> None:
    net = Net(lambda _, h: (2 * h).exp() if len(h) == 1 else h)
    with pytest.raises(UnsupportedModelError, match="gets for one example depend on"):
        clip(net, 1)


# --- programs that begin to mix


def later(use: Use, before: Use = lambda _, h: h) -> Callable[[int], Use]:
    return lambda k: lambda m, h: use(m, h) if m.step >= k else before(m, h)


def keeps(what: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], Use]:
    """Return a program that keeps something of one step, and uses it in the next."""

    def make(k: int) -> Use:
        def use(m: Any, h: torch.Tensor) -> torch.Tensor:
            if m.step == k - 1:
                m.kept = [what(h)]
            return h - m.kept[0].mean() if m.step >= k else h

        return use

    return make


def scaled_from(k: int, value: Callable[[torch.Tensor], Any], otherwise: Any) -> Use:
    return lambda m, h: h * (value(h) if m.step >= k else otherwise)


BEGINNING: dict[str, Callable[[int], Use]] = {
    "centring": later(lambda _, h: h - h.mean(0), lambda _, h: h - h.mean(1, keepdim=True)),
    "reverse order": later(lambda _, h: h + h.flip(0), lambda _, h: h + h.flip(1)),
    "sorting": later(
        lambda _, h: torch.sort(h, stable=True, dim=0)[0],
        lambda _, h: torch.sort(h, stable=True, dim=1)[0],
    ),
    "the order of two arguments left out": later(
        lambda _, h: torch.cat([h, h], 1)[:, :6] + torch.cat([h, h]).view(-1, 6)[1 : len(h) + 1],
        lambda _, h: torch.cat([h, h])[: len(h)].view(-1, 6) + torch.cat([h, h], 1)[:, :6],
    ),
    "a mean in the place of a constant": lambda k: (
        lambda m, h: h - (torch.zeros(WIDTH), h.mean(0))[m.step >= k]
    ),
    "other rows in the place of its own": lambda k: (
        lambda m, h: h * 1.0 + (h, h.roll(1, 0))[m.step >= k]
    ),
    "a view in the place of another": lambda k: lambda m, h: h + parts_of_two(h)[m.step >= k],
    "scalar": lambda k: scaled_from(k, lambda h: 1 / len(h), 1.0),
    "tensor": lambda k: scaled_from(k, lambda h: torch.tensor(1 / len(h)), torch.tensor(1.0)),
    "statistic in NumPy": lambda k: scaled_from(k, lambda h: float(h.data.numpy().mean()), 1.0),
    "position": lambda k: lambda m, h: h + column(h) * (m.step >= k),
    "position beside": lambda k: (
        lambda m, h: write(column(h).repeat(1, WIDTH) * (m.step >= k), (slice(None), 0), h[:, 0])
    ),
    "gradients": lambda k: lambda m, h: Centred.apply(h, lambda: m.step >= k),
    "a hook": lambda k: lambda m, h: hooked(h, lambda g: g - g.mean(0) if m.step >= k else g),
    "a new hook": later(lambda _, h: hooked(h, lambda g: g - g.mean(0)), lambda _, h: h * 1.0),
}
KEEPING: dict[str, Callable[[int], Use]] = {
    "detached": keeps(torch.Tensor.detach),
    "data": keeps(lambda h: h.data),
    "one of two results": keeps(lambda h: h.max(1).values.detach()),
    "results of layer norm": keeps(lambda h: functional.layer_norm(h, (6,)).data),
}


def refused_in(make: Callable[[int], Use], step: int, **options: Any) -> None:
    net = Net(make(step))
    clipper = Clipper(net, **options)
    for number in range(1, step + 1):
        net.step = number
        if number == step:
            with pytest.raises(UnsupportedModelError, match="depend on other examples"):
                clipper.clip(*draw(6), losses_of, Transform(1.0))
        else:
            clipper.clip(*draw(6), losses_of, Transform(1.0))


@pytest.mark.parametrize(
    ("name", "step"),
    [*itertools.product(BEGINNING, [1, 2, 3, 9]), ("centring", 17), ("scalar", 17), ("a hook", 17)],
)
def test_a_program_that_begins_to_mix_is_refused_in_that_step(name: str, step: int) -> None:
    refused_in(BEGINNING[name], step)


@pytest.mark.parametrize("step", [2, 9])
@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 1}])
@pytest.mark.parametrize("name", KEEPING)
def test_what_is_kept_of_an_earlier_step_is_refused(
    name: str, step: int, options: dict[str, Any]
) -> None:
    refused_in(KEEPING[name], step, **options)


class Remembering(Net):
    """Keeps whole batches, and subtracts their mean once there are three."""

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        self.kept.append(examples)
        is_full = self.step >= 3
        return super().forward(examples - torch.cat(self.kept).mean(0) if is_full else examples)


def test_a_memory_of_batches_is_refused_when_it_is_used() -> None:
    net = Remembering(lambda _, h: h)
    clipper = Clipper(net)
    for net.step in range(1, 3):
        clipper.clip(*draw(6), losses_of, Transform(1.0))
    net.step = 3
    with pytest.raises(UnsupportedModelError, match="earlier step"):
        clipper.clip(*draw(6), losses_of, Transform(1.0))


# --- look-alikes


def masked_mean(h: torch.Tensor) -> torch.Tensor:
    mask = (h > 0).double()
    return h * (h * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def attend(h: torch.Tensor, **options: Any) -> torch.Tensor:
    rows = h.view(-1, 1, 2, 3)
    return functional.scaled_dot_product_attention(rows, rows, rows, **options).flatten(1)


def filled(h: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(len(h), 2, 3)
    for at in range(2):
        found[:, at] = h.view(-1, 2, 3)[:, 1 - at]
    return found.flatten(1)


CONSTANT = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
APART: dict[str, Use] = {
    "centred row": lambda _, h: h - h.mean(1, keepdim=True),
    "softmax": lambda _, h: h * h.softmax(1),
    "running sum": lambda _, h: h.cumsum(1),
    "rolled row": lambda _, h: h + h.roll(1, 1),
    "reversed row": lambda _, h: h + h.flip(1),
    "sorted row": lambda _, h: h.sort(1).values,
    "the largest": lambda _, h: h * h.topk(2, 1).values.sum(1, keepdim=True),
    "positions first": lambda _, h: (
        h.view(-1, 2, 3).transpose(0, 1).contiguous().cumsum(0).transpose(0, 1).flatten(1)
    ),
    "pairs of columns": lambda _, h: (h[:, :, None] - h[:, None]).abs().mean(1),
    "similarities of positions": lambda _, h: torch.einsum(
        "bik,bjk,bjl->bil", *[h.view(-1, 2, 3)] * 3
    ).flatten(1),
    "distances to points": lambda _, h: torch.cdist(h, CONSTANT.outer(CONSTANT)),
    "distances within": lambda _, h: (
        h + torch.cdist(h.view(-1, 2, 3), h.view(-1, 3, 2).mT).flatten(1).mean(1, keepdim=True)
    ),
    "attention": lambda _, h: attend(h),
    "causal attention": lambda _, h: attend(h, is_causal=True),
    "mask of positions": lambda _, h: attend(h, attn_mask=torch.eye(2).log().clamp(min=-9)),
    "mask of each example": lambda _, h: attend(
        h, attn_mask=torch.zeros(len(h), 1, 1, 2).masked_fill(h[:, None, None, :2] > 0.5, -1e9)
    ),
    "fixed batch norm": lambda _, h: functional.batch_norm(h, CONSTANT, CONSTANT.abs()),
    "instance norm": lambda _, h: functional.instance_norm(h.view(-1, 2, 3)).flatten(1),
    "group norm": lambda _, h: functional.group_norm(h, 2, CONSTANT),
    "layer norm": lambda _, h: functional.layer_norm(h, (6,), CONSTANT),
    "convolution": lambda _, h: functional.conv1d(h[:, None], torch.ones(1, 1, 3), padding=1)[:, 0],
    "pooling": lambda _, h: h + functional.max_pool1d(h, 3, 1, 1),
    "padded positions": lambda _, h: functional.pad(h.view(-1, 2, 3), (0, 0, 1, 0))[:, 1:].flatten(
        1
    ),
    "padding by nothing": lambda _, h: functional.pad(h[:, 1:], (1, 0, 0, 0)),
    "two batches": lambda _, h: torch.cat([h, 2 * h]).view(2, -1, 6).sum(0),
    "stacked": lambda _, h: torch.stack([h, h.tanh()], 1).mean(1),
    "written by position": lambda _, h: filled(h),
    "written column": lambda _, h: write(h, (slice(None), 0), 0.0),
    "written where a mask says": lambda _, h: write(h, h > 0, 0.0),
    "where": lambda _, h: torch.where(h > 0, h, CONSTANT),
    "masked mean": lambda _, h: masked_mean(h),
    "table": lambda _, h: h * CONSTANT[h.detach().argmax(1)][:, None],
    "own column": lambda _, h: h * h[places(h), h.detach().argmax(1)][:, None],
    "gather": lambda _, h: h * h.gather(1, h.detach().argmax(1, keepdim=True)),
    "scatter": lambda _, h: h.scatter(1, h.detach().argmax(1, keepdim=True), 0.0),
    "expanded positions": lambda _, h: h + CONSTANT.expand(len(h), WIDTH),
    "repeated positions": lambda _, h: h + CONSTANT.repeat(len(h), 1),
    "mask with −∞": masked_by(lambda _: 1.0),
    "whether all are large": lambda _, h: h if (h > 9).all() else h * 2,
    "whether all are set": lambda _, h: h * 2 if (h > 9).sum() == h.numel() else h,
    "Fourier": lambda _, h: torch.fft.fft(h.view(-1, 2, 3), dim=1).real.flatten(1),
    "gradient of each": lambda _, h: torch.autograd.grad(h.tanh().sum(), h, create_graph=True)[0],
    "own function": lambda _, h: Centred.apply(h, lambda: False),
    "hook": lambda _, h: hooked(h, lambda g: 2 * g / 2),
    "constant in Python": lambda _, h: h * float(CONSTANT.sum() + CONSTANT.tolist()[1]),
    "vmap": lambda _, h: torch.vmap(lambda row: row - row.mean())(h),
}
APART_LOSSES: dict[str, Loss] = {
    "smoothed": lambda o, t: functional.cross_entropy(o, t, label_smoothing=0.1, reduction="none"),
    "focal": lambda o, t: (1 - (-losses_of(o, t)).exp()).square() * losses_of(o, t),
    "weighted": lambda o, t: functional.cross_entropy(o, t, CONSTANT.abs(), reduction="none"),
    "weights by table": lambda o, t: losses_of(o, t) * CONSTANT.abs()[t],
    "one_hot": lambda o, t: (o.softmax(1) - functional.one_hot(t, WIDTH)).square().sum(1),
    "chosen": lambda o, t: -o.log_softmax(1)[torch.arange(len(t)), t],
    "chosen by a range": lambda o, t: -o.log_softmax(1)[range(len(t)), t],
    "normal": lambda o, t: -torch.distributions.Normal(
        o[:, 0], o[:, 1].exp(), validate_args=True
    ).log_prob(t.double()),
    "Gaussian of many": lambda o, _: -torch.distributions.MultivariateNormal(
        o[:, :2], torch.eye(2)
    ).log_prob(o[:, 2:4]),
    "Beta": lambda o, t: -torch.distributions.Beta(o[:, 0].exp(), o[:, 1].exp()).log_prob(
        (t + 1.0) / 8
    ),
    "CTC": lambda o, t: functional.ctc_loss(
        o.log_softmax(1)[None].repeat(3, 1, 1), t[:, None].clamp(min=1), (3,) * len(t),
        (1,) * len(t), reduction="none",
    ),
}  # fmt: skip
RANDOM: dict[str, Use] = {
    "dropout": lambda _, h: functional.dropout(h, 0.5),
    "dropout of positions": lambda _, h: h + functional.dropout(CONSTANT.expand(len(h), 6), 0.5),
    "noise": lambda _, h: h + 0.1 * torch.randn(len(h), 1),
    "depth": lambda _, h: h * torch.full((len(h), 1), 0.8).bernoulli(),
    "depth in place": lambda _, h: h * h.new_empty(len(h), 1).bernoulli_(0.8).div_(0.8),
    "by the row": lambda _, h: h * torch.bernoulli(CONSTANT.abs().expand(len(h), WIDTH)),
    "noise level": lambda _, h: h * CONSTANT[torch.randint(0, WIDTH, (len(h),))][:, None],
    "drawn columns": lambda _, h: h[:, torch.randperm(WIDTH)],
    "drawn in Python": lambda _, h: h * torch.rand(()).item(),
    "of another generator": lambda _, h: h * random.random(),
    "branch": lambda _, h: h.tanh() if torch.rand(()) < 0.5 else h,
    "annealed": lambda m, h: h * (0.1 * m.step),
}


@pytest.mark.parametrize("name", [*APART, *APART_LOSSES])
def test_a_look_alike_is_proved_and_its_clipped_sum_is_right(name: str) -> None:
    loss = APART_LOSSES.get(name, losses_of)
    net = Net(APART.get(name, lambda _, h: h))
    for size in (WIDTH, 1):
        clipper, batch = Clipper(net), draw(size)
        found = clipper.clip(*batch, loss, Transform(0.5))
        if size > 1:
            assert not clipper._checked.unproved  # private: what no message tells
        sums = clipper.zeros()
        for block in clipper.blocks:
            found.write_block(block, Transform(0.5).for_block(block), block.view_in(sums))
        gradients = gradient_rows(net, *batch, loss)
        exact = clip_rows(gradients, Transform(0.5), clipper.blocks).sum(0)
        torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("size", [WIDTH, 1])
def test_random_numbers_of_each_example_are_proved(name: str, size: int) -> None:
    net = Net(RANDOM[name])
    clipper = Clipper(net)
    for step in range(1, 7):
        net.step = step
        clipper.clip(*draw(size), losses_of, Transform(1.0))
    if size > 1:
        assert not clipper._checked.unproved  # private: what no message tells


def test_a_batch_that_is_given_again_is_no_memory() -> None:
    clipper, batch = Clipper(Net(lambda _, h: h)), draw(6)
    for _ in range(3):
        clipper.clip(*batch, losses_of, Transform(1.0))


def test_examples_may_be_the_targets_too() -> None:
    clipper, (rows, _) = Clipper(Net(lambda _, h: h)), draw(8)
    for size in (5, 8, 7):
        clipper.clip(rows[:size], rows[:size], lambda o, t: (o - t).square().sum(1), Transform(1.0))
    assert len(clipper._checked._proofs) == 1  # private: a proof shows in nothing but time


def test_a_parameter_that_takes_the_place_of_a_constant_is_seen_in_that_step() -> None:
    """Its operations are the same, but its layer does not show all of its gradient any more."""
    net, constant = Net(lambda _, h: h), torch.randn(WIDTH)

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        goal = constant if net.step == 1 else net.last.bias
        return functional.mse_loss(outputs, goal.expand_as(outputs), reduction="none").sum(1)

    clipper = Clipper(net)
    clipper.clip(*draw(6), loss, Transform(1.0))
    net.step = 2
    with pytest.raises(UnsupportedModelError, match=r"bias.* do not add up to its gradient"):
        clipper.clip(*draw(6), loss, Transform(1.0))


def test_an_index_of_rows_is_not_taken_for_one_of_columns() -> None:
    """It is proved anew, on three rows, which have no sixth."""
    index = torch.arange(WIDTH).roll(1)
    net = Net(lambda m, h: torch.ops.aten.index(h, [index] if m.step > 1 else [None, index]))
    clipper = Clipper(net)
    clipper.clip(*draw(WIDTH), losses_of, Transform(1.0))
    net.step = 2
    with pytest.raises(IndexError, match="out of bounds"):
        clipper.clip(*draw(WIDTH), losses_of, Transform(1.0))


def test_gradients_of_zero_are_added_up_again() -> None:
    gate = torch.zeros(1)
    net = Net(lambda m, h: gate * (m.last(h) + functional.linear(h, m.last.weight)))
    clipper = Clipper(net)
    for _ in range(2):
        clipper.clip(*draw(6), losses_of, Transform(1.0))
    gate += 1
    with pytest.raises(UnsupportedModelError, match="do not add up to its gradient"):
        clipper.clip(*draw(6), losses_of, Transform(1.0))


def test_targets_that_are_computed_from_parameters_are_refused() -> None:
    net, (rows, _) = Net(lambda _, h: h), draw(6)
    with pytest.raises(UnsupportedModelError, match=r"computed from parameters.*detach"):
        Clipper(net).clip(
            rows, net.last.bias.expand(6, -1), lambda o, t: (o - t).square().sum(1), Transform(1.0)
        )


def test_planned_changes_are_proved_at_some_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first change, the second, the fourth and the eighth."""
    net = Net(lambda m, h: h * (0.1 * m.step))
    clipper = Clipper(net)
    proved: list[int] = []
    checked = clipper._checked  # private: a proof shows in nothing but time
    prove = checked._prove
    monkeypatch.setattr(checked, "_prove", lambda *a: (proved.append(net.step), prove(*a))[1])
    for net.step in range(1, 13):
        clipper.clip(*draw(6), losses_of, Transform(1.0))
    assert proved == [1, 2, 3, 5, 9]
