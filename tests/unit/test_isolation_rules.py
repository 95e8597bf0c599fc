"""Each rule of isolation: what it says is one example's equals what is computed beside others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.random_programs import Program, random_program
from training_client.private_step.isolation.operations import (
    MixingError,
    UnknownError,
    signature_of,
    tensors_in,
)
from training_client.private_step.isolation.places import Place, rows_of_examples
from training_client.private_step.isolation.proof import prove
from training_client.private_step.isolation.rules import RULES
from training_client.private_step.isolation.trace import Together, Trace, followed

COUNT: Final = 3
Compute = Callable[[torch.Tensor], Any]


def positive(x: torch.Tensor) -> torch.Tensor:
    """Return symmetric positive definite matrices."""
    return x @ x.mT + 4 * torch.eye(x.shape[-2], dtype=x.dtype)


def image(x: torch.Tensor) -> torch.Tensor:
    """Return four channels of 2 × 3."""
    return x.view(-1, 4, 2, 3)


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Return a number from 0 to 3 for each row of 6."""
    return x.detach().sum(-1).sin().mul(2).add(2).long().clamp(0, 3)


def summed(x: torch.Tensor, *names: str, **options: Any) -> list[torch.Tensor]:
    """Return the results of methods along the last dimension but one, and the last."""
    return [
        each
        for name in names
        for dim in (1, 2)
        for each in tensors_in([getattr(x, name)(dim=dim, **options)], {})
    ]


def losses(kind: str, x: torch.Tensor, **options: Any) -> torch.Tensor:
    function: Any = getattr(functional, kind)
    return function(x, x.detach().flip(1).sigmoid(), reduction="none", **options)  # type: ignore[no-any-return]


def put(x: torch.Tensor, **values: Any) -> torch.Tensor:
    return x.clone().index_put_(**values)


def drawn(x: torch.Tensor, *names: str) -> list[torch.Tensor]:
    """Return random numbers of the examples' shape, times 0, beside the examples."""
    return [x + 0 * getattr(x.detach().clone(), f"{name}_")() for name in names]


# Functions of examples of shape (B, 4, 6) that use each operation, and of its gradients.
COMPUTE: dict[str, Compute] = {
    "losses": lambda x: [
        losses("mse_loss", x), losses("smooth_l1_loss", x), losses("huber_loss", x),
        losses("soft_margin_loss", x), losses("binary_cross_entropy_with_logits", x),
        losses("binary_cross_entropy", x.sigmoid()),
    ],
    "sums": lambda x: summed(
        x, "sum", "mean", "prod", "var", "std", "logsumexp", "nansum", "cumsum", "logcumsumexp",
        "cumprod", "amax", "amin", "norm",
    ),
    "choices": lambda x: summed(
        x, "max", "min", "median", "nanmedian", "mode", "sort", "cummax", "cummin", "aminmax",
        "count_nonzero", "any", "all", "argmax", "argmin", "argsort",
    ),
    "moments": lambda x: [*torch.var_mean(x, 1), *torch.std_mean(x, 2)],
    "more choices": lambda x: [
        *x.kthvalue(2, 1), *x.topk(2, 1), *x.topk(2, 2), torch.linalg.vector_norm(x, 3, 2),
        torch.argsort(x, dim=1, stable=True),
    ],
    "softmax": lambda x: [
        x.softmax(1), x.log_softmax(2), torch.ops.aten._safe_softmax(x, 2), functional.glu(x, 1),
    ],
    "order": lambda x: [x.flip(1), x.flip(1, 2), x.roll(1, 1), x.roll((1, 2), (1, 2))],
    "Fourier": lambda x: [
        torch.fft.rfft(x, dim=1).abs(), torch.fft.fft(x, dim=2).real,
        torch.fft.irfft(torch.fft.rfft(x, dim=2), n=6, dim=2),
    ],
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, :3].cos(), dim=1),
    "slices": lambda x: [
        torch.slice_scatter(x, x[:, :2].cos(), 1, 1, 3), x[:, 1:3], x[:, 2], x.unfold(2, 3, 2),
    ],
    "scatter": lambda x: [
        x.gather(2, chosen(x)[..., None]), x.scatter(2, chosen(x)[..., None], 0.5),
        x.scatter_add(1, chosen(x.mT)[:, None], x[:, :1]),
        x.scatter_reduce(2, chosen(x)[..., None], x[..., :1], "amax"),
    ],
    "rows by number": lambda x: [
        x.index_add(1, torch.tensor([2, 0]), x[:, :2]), x.index_fill(2, torch.tensor([1]), 0.0),
        x.index_copy(1, torch.tensor([2, 0]), x[:, :2].cos()),
        x.detach().index_reduce(1, torch.tensor([2]), x.detach()[:, :1], "amax"),
    ],
    "matrices": lambda x: [
        x.tril(), x.triu(1), torch.linalg.inv(positive(x)), torch.linalg.cholesky(positive(x)),
        *torch.linalg.qr(positive(x)), torch.linalg.solve(positive(x), x),
        torch.linalg.svdvals(x.detach()),
        torch.linalg.det(positive(x)), torch.linalg.eigvalsh(positive(x.detach())),
        torch.linalg.lu_factor(positive(x.detach()))[0],
    ],
    "triangles": lambda x: [
        torch.linalg.solve_triangular(positive(x).tril(), x, upper=False),
        torch.linalg.solve_triangular(torch.eye(6, dtype=x.dtype), x[:, 0].mT, upper=True).mT,
        torch.linalg.solve_triangular(
            torch.eye(6, dtype=x.dtype), x[:, 0], upper=True, left=False
        ),
    ],
    "distances": lambda x: [
        torch.cdist(x, x.cos()), torch.cdist(x[:, 0], torch.eye(6, dtype=x.dtype)),
        torch.cdist(torch.eye(6, dtype=x.dtype), x[:, 0]).mT,
    ],
    "shuffles": lambda x: [
        functional.pixel_shuffle(image(x), 2), functional.pixel_unshuffle(x.view(-1, 6, 2, 2), 2),
        functional.channel_shuffle(image(x), 2), functional.channel_shuffle(x, 2),
    ],
    "padding": lambda x: [
        functional.pad(x, (1, 1)), functional.pad(x, (1, 1, 0, 0, 0, 0)),
        *[functional.pad(x, (1, 1), mode) for mode in ("reflect", "replicate")],
        *[functional.pad(image(x), (1, 1, 1, 1), mode) for mode in ("reflect", "replicate")],
        *[
            functional.pad(x.view(-1, 1, 2, 2, 6), (1,) * 6, mode)
            for mode in ("reflect", "replicate")
        ],
    ],
    "pooling": lambda x: [
        functional.avg_pool1d(x, 2), functional.avg_pool2d(image(x), 2),
        functional.avg_pool3d(x.view(-1, 1, 2, 2, 6), 2), functional.max_pool1d(x, 2),
        functional.max_pool2d(image(x), 2), functional.max_pool3d(x.view(-1, 1, 2, 2, 6), 2),
        functional.adaptive_avg_pool1d(x, 4), functional.adaptive_avg_pool2d(image(x), (2, 2)),
        functional.adaptive_avg_pool3d(x.view(-1, 1, 2, 2, 6), 2),
        functional.adaptive_max_pool1d(x, 4), functional.adaptive_max_pool2d(image(x), (2, 2)),
        functional.adaptive_max_pool3d(x.view(-1, 1, 2, 2, 6), 2),
    ],
    "interpolation": lambda x: [
        *[
            functional.interpolate(x, size=5, mode=m)
            for m in ("nearest", "nearest-exact", "linear")
        ],
        *[
            functional.interpolate(image(x), size=(3, 4), mode=m)
            for m in ("nearest", "nearest-exact", "bilinear", "bicubic")
        ],
        *[
            functional.interpolate(x.view(-1, 1, 2, 2, 6), size=(3, 3, 3), mode=m)
            for m in ("nearest", "nearest-exact", "trilinear")
        ],
    ],
    "norms": lambda x: [
        functional.layer_norm(x, (6,)), functional.layer_norm(x, (4, 6)),
        functional.rms_norm(x, (6,)), functional.group_norm(x, 2), functional.instance_norm(x),
        torch.ops.aten._fused_rms_norm(x, [6], None, 1e-5)[0],
    ],
    "batch norm": lambda x: [
        functional.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double()),
        functional.batch_norm(x.transpose(0, 1), None, None, training=True).transpose(0, 1),
        torch.ops.aten._native_batch_norm_legit_no_training(
            x.detach(), None, None, torch.zeros(4).double(), torch.ones(4).double(), 0.1, 1e-5
        )[0],
        torch.ops.aten._native_batch_norm_legit.no_stats(
            x.detach().transpose(0, 1), None, None, True, 0.1, 1e-5
        )[0].transpose(0, 1),
        torch.ops.aten._batch_norm_no_update(
            x.detach(), None, None, torch.zeros(4).double(), torch.ones(4).double(), 0.1, 1e-5
        )[0],
    ],
    "convolutions": lambda x: [
        functional.conv1d(x, torch.ones(2, 4, 3).double()),
        functional.conv_transpose2d(image(x), torch.ones(4, 2, 2, 2).double()),
        functional.unfold(image(x), 2), functional.fold(x.view(-1, 4, 6), (3, 4), 2)[:, 0],
        functional.grid_sample(
            image(x), x[..., :4].reshape(-1, 4, 2, 2).tanh(), align_corners=False
        ),
        functional.grid_sample(
            x.view(-1, 1, 2, 2, 6), x[..., :3].reshape(-1, 1, 2, 2, 3).tanh(), align_corners=False
        ),
        functional.affine_grid(x[:, :2, :3], [len(x), 1, 2, 2], align_corners=False),
    ],
    "losses of classes": lambda x: [
        functional.nll_loss(x[:, 0], chosen(x[:, 1]), reduction="none"),
        functional.nll_loss(image(x), chosen(x[:, :2, :3].unsqueeze(3).expand(-1, 2, 3, 6)),
                            reduction="none"),
        functional.multi_margin_loss(x[:, 0], chosen(x[:, 1]), reduction="none"),
        functional.multilabel_margin_loss(
            x[:, 0], chosen(x[:, 1])[:, None].repeat(1, 6), reduction="none"
        ),
        functional.cross_entropy(x[:, 0], chosen(x[:, 1]), torch.arange(6.0).double(),
                                 reduction="none"),
    ],
    "CTC": lambda x: functional.ctc_loss(
        x.log_softmax(2).transpose(0, 1), chosen(x[:, :2]).clamp(min=1), (4,) * len(x),
        (2,) * len(x), reduction="none",
    ),
    "attention": lambda x: [
        functional.scaled_dot_product_attention(*[x.view(-1, 2, 2, 6)] * 3),
        functional.scaled_dot_product_attention(
            *[x.view(-1, 2, 2, 6)] * 3, attn_mask=x[:, :1, None, :2].detach()
        ),
    ],
    "products": lambda x: [
        x[:, 0] @ torch.ones(6, 2).double(), x @ x.mT, x @ torch.ones(6).double(),
        torch.addmm(x[:, 0, :2], x[:, 0], torch.ones(6, 2).double()),
        torch.baddbmm(x[..., :4], x, x.mT), torch.mv(x[:, 0], torch.ones(6).double()),
        torch.addmv(x[:, 0, 0], x[:, 0], torch.ones(6).double()),
        torch.addr(x[:, 0], x[:, 0, 0], torch.ones(6).double()),
        functional.bilinear(x, x.cos(), torch.ones(2, 6, 6).double()),
        torch.ops.aten._addmm_activation(
            torch.ones(2).double(), x.detach()[:, 0], torch.ones(6, 2).double()
        ),
    ],
    "joined": lambda x: [
        torch.cat([x, x.cos()], 1), torch.cat([x, x.cos()])[len(x) :], torch.stack([x, x.cos()], 1),
        torch.cat([x, torch.ones(len(x), 1, 6).double()], 1), x.repeat(1, 2, 1), x.repeat(2, 1, 1),
    ],
    "tables": lambda x: [
        functional.embedding(chosen(x), torch.eye(6).double()),
        torch.eye(6).double().index_select(0, chosen(x[:, 0])),
        x.index_select(2, torch.tensor([3, 1])),
        functional.embedding_bag(chosen(x), torch.eye(6).double(), mode="sum"),
        functional.embedding_bag(chosen(x), torch.eye(6).double(), mode="mean"),
        functional.embedding_bag(chosen(x), torch.eye(6).double().requires_grad_(), mode="sum"),
    ],
    "indices": lambda x: [
        x[torch.arange(len(x)), chosen(x[:, 0])], x[:, torch.tensor([3, 1])],
        torch.eye(6).double()[chosen(x[:, 0])], x[:, torch.tensor([1, 0]), torch.tensor([2, 2])],
        torch.ops.aten._unsafe_index(x, [None, torch.tensor([1, 0])]),
        put(x, indices=(torch.arange(len(x)), chosen(x[:, 0])), values=x[:, 0]),
        put(x, indices=(x > 0,), values=torch.tensor(0.5).double()),
        torch.ops.aten._unsafe_index_put(x, [None, torch.tensor([1])], x[:, :1].cos()),
        torch.ops.aten._index_put_impl_(x.clone(), [None, torch.tensor([1])], x[:, :1].cos()),
    ],
    "pointwise": lambda x: [
        x.clone(), x.float(), torch.empty_like(x).copy_(x), x.clone().fill_(2.0) * x,
        x.clone().zero_() * x, functional.threshold(x, 0.1, 0.2), x.isnan(),
        functional.prelu(x, torch.ones(4).double()), x.masked_fill(x > 0, 1.0),
        torch.bucketize(x.detach(), torch.tensor([0.0, 0.5]).double()),
    ],
    "activations": lambda x: [
        functional.softplus(x), functional.elu(x), functional.leaky_relu(x),
        functional.hardtanh(x), functional.hardswish(x), functional.hardsigmoid(x),
        functional.mish(x), functional.logsigmoid(x), functional.gelu(x), functional.silu(x),
        functional.relu6(x), x.sigmoid(), x.tanh(),
    ],
    "draws": lambda x: [
        *drawn(x, "normal", "uniform", "exponential", "cauchy", "log_normal", "random"),
        x + 0 * x.detach().clone().geometric_(0.5), x + 0 * torch.rand_like(x),
        x + 0 * torch.randn_like(x), x + 0 * torch.randint_like(x, 3),
        x + 0 * torch.bernoulli(x.detach().sigmoid()), x + 0 * torch.poisson(x.detach().abs()),
        x + 0 * torch.binomial(x.detach().abs().ceil(), x.detach().sigmoid()),
        x + 0 * torch.multinomial(x.detach()[:, 0].sigmoid(), 6, replacement=True)[:, None],
        x + 0 * torch.normal(x.detach(), 1.0), functional.dropout(x, 0.0),
        x * torch.native_dropout(x, 0.0, True)[1],
        x + 0 * torch._standard_gamma(x.exp()), x + 0 * torch._sample_dirichlet(x.detach().exp()),
        x + 0 * torch.distributions.Dirichlet(x.exp(), validate_args=False).rsample(),
    ],
    "recurrent": lambda x: RECURRENT(x.float())[0].double(),
}  # fmt: skip
RECURRENT: Final = nn.LSTM(6, 2, batch_first=True).requires_grad_(False)
# Their result is one of all examples.
COMBINE: Final[dict[str, Compute]] = {
    "dot": lambda x: torch.dot(x[:, 0, 0], x[:, 1, 0]),
    "vdot": lambda x: torch.vdot(x[:, 0, 0], x[:, 1, 0]),
    "addbmm": lambda x: torch.addbmm(torch.ones(4, 4).double(), x, x.mT),
    "trace": lambda x: x[:, 0].trace(),
    "histc": lambda x: torch.histc(x.detach()),
    "bincount": lambda x: torch.bincount(chosen(x[:, 0])),
    "mm": lambda x: x[:, 0].t() @ x[:, 1],
    "sum": lambda x: x.sum(0),
    "index": lambda x: x[torch.tensor([0, 1])],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "glu": lambda x: functional.glu(torch.cat([x, x]), 0),
    "topk": lambda x: [*x.topk(1, 0)],
    "kthvalue": lambda x: [*x.kthvalue(1, 0)],
    "Fourier": lambda x: torch.fft.fft(x, dim=0),
    "slice": lambda x: torch.slice_scatter(x, x.cos(), 0, 0, len(x)),
    "gather": lambda x: x.gather(0, chosen(x)[..., None] % len(x)),
    "scatter": lambda x: x.scatter_add(0, chosen(x)[..., None] % len(x), x[..., :1]),
    "index_add": lambda x: x.index_add(0, torch.tensor([0]), x.new_ones(1, 4, 6)),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), 1.0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "layer norm": lambda x: functional.layer_norm(x, x.shape),
    "padding": lambda x: functional.pad(x, (0, 0, 0, 0, 1, 0)),
    "triangle": lambda x: x[:, 0].tril(),
    **{
        name: lambda x, name=name: getattr(x.detach(), name)(dim=0)
        for name in (
            "sum", "mean", "prod", "var", "std", "logsumexp", "nansum", "cumsum", "logcumsumexp",
            "cumprod", "amax", "amin", "norm", "max", "min", "median", "nanmedian", "mode", "sort",
            "cummax", "cummin", "aminmax", "count_nonzero", "any", "all", "argmax", "argmin",
            "argsort", "softmax", "log_softmax",
        )
    },
}  # fmt: skip
# Rules for operations that no function of a CPU calls on examples, and why.
UNTESTED: Final[dict[str, str]] = {
    **dict.fromkeys(
        [
            *[
                f"_scaled_dot_product_{kind}_attention{tail}"
                for kind in ("flash", "efficient", "cudnn")
                for tail in ("", "_backward")
            ],
            "cudnn_batch_norm", "cudnn_batch_norm_backward", "_fused_rms_norm",
            "_fused_rms_norm_backward", "_batch_norm_with_update", "batch_norm_backward",
            "native_dropout_backward", "max_pool2d_backward",
        ],
        "of accelerators",
    ),
    **dict.fromkeys(
        [
            "argsort", "norm", "ger", "avg_pool1d", "max_pool1d", "max_pool1d_with_indices",
            "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "affine_grid_generator_backward",
        ],
        "made of others, which are tested",
    ),
    **dict.fromkeys(["_is_all_true", "_is_any_true"], "of PyTorch's own checks"),
}  # fmt: skip


class Names(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(signature_of(func).name)
        return func(*args, **(kwargs or {}))


def results(compute: Compute, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function computes, and the gradient of what has one."""
    x = x.detach().requires_grad_()
    outputs = list(tensors_in([compute(x)], {}))
    for each in list(outputs):
        if each.requires_grad and each.grad_fn is not None:
            ones = torch.ones_like(each)
            outputs += torch.autograd.grad(each, [x], ones, retain_graph=True, allow_unused=True)
    return [each for each in outputs if isinstance(each, torch.Tensor)]


def rows(tensor: torch.Tensor, place: Place, count: int, number: int) -> torch.Tensor:
    """Return the part of a result that is said to be one example's."""
    return rows_of_examples(tensor, place.dim, place, count).select(place.dim + 1, number)


def claimed(compute: Compute, x: torch.Tensor) -> list[tuple[torch.Tensor, Place]]:
    """Return the results, with the places that rules find of those that are of examples."""
    trace = Trace(len(x), list(RECURRENT.parameters()), {})
    given = x.clone()
    trace.tag(given, Place(0))
    with followed(trace):
        found = results(compute, given)
        with _disable_current_modes():
            places = [trace.place(each) for each in found]
    assert any(places)
    return [(each, place) for each, place in zip(found, places, strict=True) if place is not None]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", COMPUTE)
def test_what_rules_say_is_one_examples_does_not_depend_on_others(name: str) -> None:
    """Nor on its place, nor on how many there are."""
    torch.manual_seed(0)
    x, others = torch.randn(2, COUNT, 4, 6, dtype=torch.float64)
    found = claimed(COMPUTE[name], x)
    number, limit = 1, 1e-6 if name == "recurrent" else 1e-9
    beside = others.clone()
    beside[2] = x[number]
    few = torch.stack([x[number], others[0]])
    for batch, at in ((beside, 2), (few, 0)):
        for (result, place), (other, there) in zip(
            found, claimed(COMPUTE[name], batch), strict=True
        ):
            one, same = rows(result, place, COUNT, number), rows(other, there, len(batch), at)
            torch.testing.assert_close(one, same, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("name", COMBINE)
def test_a_result_of_all_examples_is_said_to_be_one(name: str) -> None:
    trace, x = Trace(COUNT, [], {}), torch.randn(COUNT, 4, 6, dtype=torch.float64)
    trace.tag(x, Place(0))
    with followed(trace):
        found = list(tensors_in([tuple(tensors_in([COMBINE[name](x)], {}))], {}))
    assert found
    assert all(isinstance(trace.tag_of(each), Together) for each in found)


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_each_rule_has_a_case() -> None:
    names = Names()
    torch.manual_seed(0)
    with names:
        for compute in (*COMPUTE.values(), *COMBINE.values()):
            results(compute, torch.randn(COUNT, 4, 6, dtype=torch.float64))
    exist = {
        name
        for name in RULES
        if hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_")
    }
    assert exist - names.found == set(UNTESTED)


# --- random programs


def losses_of(program: Program, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses of a program, and their gradients."""
    x = x.detach().requires_grad_()
    found = program(x)
    return [found, *torch.autograd.grad(found, [x], torch.ones_like(found))]


def is_proved(program: Program, x: torch.Tensor) -> bool:
    model = nn.Linear(1, 1)

    def run(part: torch.Tensor, trace: Trace) -> None:
        few = x[part]
        trace.tag(few, Place(0))
        with followed(trace), trace.forward_part():
            for each in losses_of(program, few):
                trace.require_rows(each)

    try:
        prove(run, torch.arange(5), model, {}, {})
    except (MixingError, UnknownError, RuntimeError, IndexError, ValueError):
        return False
    return True


def is_apart(program: Program, x: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Return whether an example has equal losses and gradients beside others, and elsewhere."""
    for size in sizes:
        others, at = torch.randn(size, *x.shape[1:], dtype=x.dtype), random.randrange(size)
        others[at] = x[1]
        for one, other in zip(losses_of(program, x), losses_of(program, others), strict=True):
            if one.shape[1:] != other.shape[1:] or len(other) != size:
                return False
            if not torch.allclose(one[1], other[at], rtol=1e-7, atol=1e-9, equal_nan=True):
                return False
    return True


@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=pytest.mark.nightly)])
def test_no_random_program_is_wrongly_proved(
    seed: int | None, request: pytest.FixtureRequest
) -> None:
    """The night draws 5 000 programs: none that mixes is proved."""
    count = 60 if seed is not None else 5000
    random.seed(seed if seed is not None else request.config.getoption("--night-seed"))
    torch.manual_seed(0)
    proved, mixing, wrong = 0, 0, list[str]()
    for _ in range(count):
        program, x = random_program(), torch.randn(5, 4, 6, dtype=torch.float64)
        try:
            apart = is_apart(program, x, (5, 2, 3, 4, 6, 7))
        except (RuntimeError, IndexError, ValueError):
            continue  # it does not run at every size
        is_found = is_proved(program, x)
        proved, mixing = proved + is_found, mixing + (not apart)
        if is_found and not apart:
            wrong.append(str(program))
    print(f"{proved} of {count} programs proved, {mixing} mix, {len(wrong)} wrongly proved")
    assert not wrong
    assert proved
    assert mixing
