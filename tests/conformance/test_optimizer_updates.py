"""Without noise and clipping, every optimizer's updates equal those of its reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.clipped_sums import Tensors, ellipsoid, per_example, random_like
from tests.support.optimizer_cases import PLAN, PUBLIC, QUIET, REFERENCES, build_optimizer
from tests.support.pairwise import pairwise
from tests.support.small_models import batch, model, unbudgeted
from training_client.lab.models import cross_entropy
from training_client.optimizers import AdaDps
from training_client.private_step import AffineMap, Transform
from training_client.private_step.blocks import cut_into_blocks

pytestmark = pytest.mark.usefixtures("quiet")
Rule = Callable[..., torch.Tensor]


class Memory(defaultdict[int, torch.Tensor]):
    """A statistic of each parameter, at first 0."""

    def __init__(self) -> None:
        super().__init__(lambda: torch.zeros((), dtype=torch.float64))

    def moves(self, at: int, decay: float, new: torch.Tensor) -> None:
        """Move a statistic towards a new value; without decay add the value."""
        self[at] = self[at] + new if decay == 1 else decay * self[at] + (1 - decay) * new


def require_equal(private: nn.Module, plain: nn.Module) -> None:
    """Raise unless two models have the same parameters up to rounding."""
    for a, b in zip(private.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


USUAL_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dp_sgd", {"momentum": 0.9}),
    ("dp_sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("dp_sgd", {"momentum": 0.9, "dampening": 0.5}),
    ("dp_adam", {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    ("dp_adamw", {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    ("dp_rmsprop", {"alpha": 0.8, "eps": 1e-3, "momentum": 0.9, "centered": True}),
    ("dp_rmsprop", {"weight_decay": 0.1}),
    ("dp_adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "usual"), [*((name, {}) for name in REFERENCES), *USUAL_OPTIONS])
def test_without_noise_and_clipping_it_equals_the_plain_optimizer(
    name: str, usual: dict[str, Any]
) -> None:
    private, plain, (examples, labels) = model(), model(), batch()
    options = {"epsilon": 1e-30, "beta": 1e9} if name.startswith("ada") else {}
    if name in ("adadp", "adan"):
        options |= {"threshold": 0.0, "beta": 1e9}
    reference: Any = REFERENCES[name](list(plain.parameters()))
    if usual:
        reference = type(reference)(plain.parameters(), lr=0.05, **usual)
    optimizer = build_optimizer(name, private, QUIET, learning_rate=0.05, **options, **usual)
    for _ in range(5):
        optimizer.step(examples, labels, cross_entropy)
        reference.zero_grad()
        (cross_entropy(plain(examples), labels).sum() / 32).backward()
        reference.step()
    require_equal(private, plain)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adamw", "adadp", "pi_adam", "adadps", "adal"])
def test_an_unknown_option_is_named_beside_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} has no option gamma, source: .*automatic_cl"):
        build_optimizer(name, model(), PLAN, gamma=1.0, source=None)


def compare_with_rule(name: str, rule: Rule, **options: Any) -> None:
    """Raise unless an optimizer makes the steps of a second implementation.

    Args:
        name: of the optimizer.
        rule: returns a parameter's step at learning rate 1, from the number of the step, the number
            of the parameter, each private example's gradient, and the mean gradient of the state's
            source.
        options: of the optimizer.
    """
    private, plain = model(), model()
    optimizer = build_optimizer(name, private, QUIET, learning_rate=0.01, **options)
    is_public = optimizer.source.proven and options.get("state", "public") == "public"
    source = options.get("public", PUBLIC) if is_public else batch()
    for step in range(1, 11):
        optimizer.step(*batch(), cross_entropy)
        gradients, others = per_example(plain, *batch()), per_example(plain, *source)
        with torch.no_grad():
            for at, p in enumerate(plain.parameters()):
                p -= 0.01 * rule(step, at, gradients[at], others[at].mean(0))
    require_equal(private, plain)


@pytest.mark.spread(first=3)
@pytest.mark.parametrize("own_squares", [False, True])
@pytest.mark.parametrize("kind", ["adam", "rmsprop", "adagrad"])
def test_without_noise_and_clipping_pigdo_equals_its_row_of_table_1(
    kind: str, own_squares: bool
) -> None:
    """With s and f of the mean gradient from before the step.

    With own squares it is every example's f/√s, as in the paper; no ε is printed there.
    """
    first, second, f, s = 0.9, 0.999, Memory(), Memory()
    decay = 1.0 if kind == "adagrad" else second

    def rule(step: int, at: int, each: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        is_adam, mean, squares = kind == "adam", each.mean(0), s[at]
        given = each if own_squares else mean
        taken = (first * f[at] + (1 - first) * given) / (1 - first**step) if is_adam else given
        if own_squares:
            squares = s[at] + given**2 if decay == 1 else decay * s[at] + (1 - decay) * given**2
        share = 1 - second ** (step if own_squares else step - 1)
        squares = squares / share if is_adam and share > 0 else squares
        f.moves(at, first, mean)
        s.moves(at, decay, mean**2)
        found = taken / (squares.sqrt() + (0.0 if own_squares else 1e-3))
        return found.mean(0) if own_squares else found

    options: dict[str, Any] = {}
    if own_squares:
        options = {"own_squares": True, "epsilon": 0.0, "public": batch(), "state": "public"}
    compare_with_rule(f"pi_{kind}", rule, **options)


def test_with_own_squares_state_privatised_is_refused() -> None:
    for kind in ("adam", "rmsprop", "adagrad"):
        with pytest.raises(ValueError, match="use state public or raw"):
            build_optimizer(f"pi_{kind}", model(), PLAN, own_squares=True)


@pytest.mark.spread(first=3)
@pytest.mark.parametrize(
    "case",
    pairwise(
        statistic=["rmsprop", "adam", "adagrad", "known"],
        momentum=[0.0, 0.7],
        first=[0.0, 0.9],
        state=["public", "privatised"],
    ),
    ids=str,
)
def test_without_noise_and_clipping_adadps_descends_over_its_statistic(
    case: dict[str, Any],
) -> None:
    """With A and m from before the step, or a known A: (β₁m + (1 − β₁)g)/((1 − β₁ᵗ)A)."""
    statistic, momentum, decay, epsilon = case["statistic"], case["momentum"], 0.8, 1e-2
    known = [each.abs() + 0.1 for each in random_like(model(), 6)]
    first = 0.0 if statistic == "known" else case["first"]
    v, s, m = Memory(), Memory(), Memory()

    def rule(step: int, at: int, each: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        share = 1 - decay ** (step - 1) if statistic == "adam" and step > 1 else 1.0
        over = (s[at] / share).sqrt() + epsilon if step > 1 else torch.ones_like(other)
        over = known[at] if statistic == "known" else over
        moment = (first * m[at] + (1 - first) * each.mean(0)) / (1 - first**step)
        v[at] = momentum * v[at] + moment / over
        m.moves(at, first, other)
        s.moves(at, 1.0 if statistic == "adagrad" else decay, other**2)
        return v[at]

    moments = {"statistic": statistic, "first": first}
    side = {"side_information": known} if statistic == "known" else moments
    options = {"momentum": momentum, "decay": decay, "epsilon": epsilon, "state": case["state"]}
    compare_with_rule("adadps", rule, **options, **side)


def test_the_first_moment_of_adadps_is_of_a_statistic_and_below_1() -> None:
    known = [torch.ones_like(p) for p in model().parameters()]
    for options, said in (
        ({"first": 1.0}, "expected first in"),
        ({"first": -0.1}, "expected first in"),
        ({"first": 0.9, "side_information": known}, "side information has none"),
    ):
        with pytest.raises(ValueError, match=said):
            AdaDps(model(), unbudgeted(PLAN), learning_rate=0.1, **options)


@pytest.mark.parametrize(("name", "first"), [("dp_r_pub", 0.0), ("dp_adam_pub", 0.9)])
def test_without_noise_and_clipping_baselines_descend_over_a_public_statistic(
    name: str, first: float
) -> None:
    """With A that includes this step's public gradient."""
    decay, epsilon, f, s = 0.8, 1e-2, Memory(), Memory()

    def rule(step: int, at: int, each: torch.Tensor, public: torch.Tensor) -> torch.Tensor:
        share = 1 - decay**step if name == "dp_adam_pub" else 1.0
        s.moves(at, decay, public**2)
        f.moves(at, first, each.mean(0))
        return f[at] / (1 - first**step) / ((s[at] / share).sqrt() + epsilon)

    compare_with_rule(name, rule, decay=decay, epsilon=epsilon)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_rmsprop", "dp_adagrad", "adadp"])
def test_transposed_weights_in_memory_are_trained_alike(name: str) -> None:
    """PyTorch's fused optimizers read parameters and gradients in memory order."""
    found = []
    for turned in (False, True):
        net = model()
        if turned:
            weight = net[0].weight.detach()
            net[0].weight = nn.Parameter(weight.T.contiguous().T)
        optimizer = build_optimizer(name, net, QUIET)
        for _ in range(3):
            optimizer.step(*batch(), cross_entropy)
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-12)


def test_side_information_scales_gradients_before_the_clip() -> None:
    """A ∝ how often a feature occurs: with A = 1 it is DP-SGD, and steps scale by 1/A."""
    found = []
    for size in (1.0, 4.0):
        net = model()
        known = [torch.full_like(p, size) for p in net.parameters()]
        before = [p.detach().clone() for p in net.parameters()]
        optimizer = AdaDps(net, unbudgeted(QUIET), learning_rate=0.1, side_information=known)
        optimizer.step(*batch(), cross_entropy)
        found.append([b - p.detach() for b, p in zip(before, net.parameters(), strict=True)])
    for one, four in zip(*found, strict=True):
        assert torch.allclose(one, 4 * four, rtol=1e-9)


# --- the gradient that a noisy sum tells


def affine_maps(transform: Transform, like: Tensors) -> list[AffineMap]:
    """Return D and b of whole parameters."""
    return [
        transform.for_block(block).for_piece(piece)
        for block in cut_into_blocks(like)
        for piece in block.pieces
    ]


def test_the_estimated_squared_gradient_has_the_noise_variance_removed() -> None:
    """If ∇² is well above the noise, its estimate is near it; otherwise it is small."""
    generator = torch.Generator().manual_seed(6)
    exact = torch.tensor([0.0, 3.0]).repeat(20_000, 1)
    scales, shifts = torch.tensor([2.0, 0.5]).expand_as(exact), torch.ones_like(exact)
    transform = Transform.fixed(1.0, [scales], [shifts])
    noise = 0.4 * torch.randn(exact.shape, generator=generator)
    (affine,) = affine_maps(transform, [exact])
    means, squares = affine.gradient_moments(scales * (exact + shifts) + noise, 0.4)
    small, large = squares.mean(0).tolist()
    assert small < 0.5 * (0.4 / 2.0) ** 2
    assert large == pytest.approx(9.0, rel=0.02)
    assert means.mean(0).tolist() == pytest.approx([0.0, 3.0], abs=0.02)


def test_half_axes_give_the_noise_of_lemma_1() -> None:
    """σᵢ = σ√m·sᵢ on the gradient: Σ sᵢ²/σᵢ² = 1/σ², with equality (papers/000, Lemma 1)."""
    axes = [torch.tensor([0.5, 2.0]), torch.tensor([[0.1, 3.0, 1.0]])]
    transform, sigma = ellipsoid(axes), 2.0
    noise = [
        affine.gradient_moments(torch.full_like(s, sigma * transform.bound), 0.0)[0]
        for affine, s in zip(affine_maps(transform, axes), axes, strict=True)
    ]
    total = sum(float((s / n).square().sum()) for s, n in zip(axes, noise, strict=True))
    assert total == pytest.approx(1 / sigma**2)
