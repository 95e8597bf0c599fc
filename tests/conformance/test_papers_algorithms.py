"""Every optimizer against pseudo-code written from its paper alone, with noise, over ten steps.

Both sides get the same noise and the same batch. The optimizers have the options that follow the
paper; `DIFFERENCES` names what remains or what a default changes, and where the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.clipped_sums import gradient_rows
from tests.support.small_models import batch, model, unbudgeted
from training_client.budget import NoBudget
from training_client.lab.federated import Participant, train_federated
from training_client.lab.federated_averaging import train_devices
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.rounding_bounds import sum_share
from training_client.private_step.sampling import PoissonSampler

STEPS, RATE, SIGMA, CLIP, LOT = 10, 0.05, 0.7, 0.5, 32
PLAN = Plan(dataset_size=2 * LOT, sample_rate=0.5, clip_norm=CLIP, noise_multiplier=SIGMA)
PUBLIC = batch(64)
Vector = torch.Tensor


def normal(step: int) -> Iterator[float]:
    """Yield the standard normal numbers of a step, coordinate by coordinate."""
    generator = torch.Generator().manual_seed(step)
    while True:
        yield from torch.randn(64, generator=generator, dtype=torch.float64).tolist()


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step draw `normal(step)`, scaled as the grid says, block after block."""
    open_steps: dict[int, tuple[int, Iterator[float]]] = {}

    def add(grid: NoiseGrid, total: torch.Tensor, factor: float, _: bytes) -> None:
        if id(grid) not in open_steps:  # a step has one grid
            open_steps[id(grid)] = len(open_steps), normal(len(open_steps))
            kept.append(grid)
        drawn = open_steps[id(grid)][1]
        noise = torch.tensor([next(drawn) for _ in range(total.numel())], dtype=total.dtype)
        total.add_(noise.view_as(total), alpha=grid.noise_deviation).mul_(factor)

    kept: list[NoiseGrid] = []
    monkeypatch.setattr(NoiseGrid, "add_noise", add)


class Paper:
    """The parts of pseudo-code: θ, the gradients g of a lot, and the noise of a step."""

    def __init__(self) -> None:
        self.net = model()
        self.theta = parameters_to_vector(self.net.parameters()).detach().clone()
        self.m = len(self.theta)

    def gradients(self, data: tuple[torch.Tensor, torch.Tensor] | None = None) -> Vector:
        """Return ∇ℓ(θ, x) of each example, one row each."""
        vector_to_parameters(self.theta, self.net.parameters())
        return gradient_rows(self.net, *(data or batch(LOT)))

    def noise(self, step: int) -> Vector:
        """Return N(0, I), with steps counted from 0, and raised as the rounding of sums needs."""
        drawn, raised = normal(step), 1 + sum_share(LOT)
        return torch.tensor([raised * next(drawn) for _ in range(self.m)], dtype=torch.float64)

    def zeros(self) -> Vector:
        return torch.zeros_like(self.theta)


def clip(g: Vector, bound: float = CLIP) -> Vector:
    """Return each row over max(1, ‖row‖₂/C)."""
    return g.div((g.norm(dim=1, keepdim=True) / bound).clamp_min(1))


def dp_sgd(paper: Paper) -> None:
    """Abadi et al. 2016, Algorithm 1, on which papers/002 speaks."""
    for t in range(STEPS):
        g = clip(paper.gradients()).sum(0) + SIGMA * CLIP * paper.noise(t)
        paper.theta -= RATE * g / LOT


def dp_adam(paper: Paper) -> None:
    """papers/004, Algorithm 2."""
    m, v = paper.zeros(), paper.zeros()
    for t in range(STEPS):
        g = (clip(paper.gradients()).sum(0) + SIGMA * CLIP * paper.noise(t)) / LOT
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9 ** (t + 1)), v / (1 - 0.999 ** (t + 1))
        paper.theta -= RATE * m_hat / (v_hat.sqrt() + 1e-3)


def adadp(reads_examples: bool, noise: bool = True, rate: bool = True) -> Callable[[Paper], None]:
    """papers/000, Algorithm 1, with g̃ of the lot; line 23 has the lot's mean or each example."""

    def run(paper: Paper) -> None:
        beta, gamma, memory, threshold, tiny = 1.2, 0.1, 0.9, 1e-6, 1e-8
        prior, noisy = paper.zeros(), paper.zeros()  # E′[g²], E[g̃²]
        for t in range(STEPS):
            g, z = paper.gradients(), paper.noise(t)
            if noise and prior.sqrt().var(unbiased=False) > threshold:  # line 7
                s = beta * prior.sqrt()
                kept = torch.minimum(torch.maximum(g, -s), s)  # line 10
                released = (kept.sum(0) + SIGMA * math.sqrt(paper.m) * s * z) / LOT  # line 12
            else:
                released = (clip(g).sum(0) + SIGMA * CLIP * z) / LOT
            noisy = (1 - gamma) * noisy + gamma * released**2
            squares = (g**2).mean(0) if reads_examples else g.mean(0) ** 2
            prior = memory * prior + (1 - memory) * squares
            paper.theta -= RATE * (released / (noisy + tiny).sqrt() if rate else released)

    return run


def pigdo(rule: str) -> Callable[[Paper], None]:
    """papers/001, Algorithm 1 and Table 1; the noise is on the sum, as in its Theorem 3."""

    def run(paper: Paper) -> None:
        first, second, f, s = 0.9, 0.999, paper.zeros(), paper.zeros()
        for t in range(1, STEPS + 1):
            g = paper.gradients()
            lot = g.mean(0)
            if rule == "adam":
                own = (first * f + (1 - first) * g) / (1 - first**t)
                squares = (second * s + (1 - second) * g**2) / (1 - second**t)
                f, s = first * f + (1 - first) * lot, second * s + (1 - second) * lot**2
            elif rule == "rmsprop":
                own, squares = g, second * s + (1 - second) * g**2
                s = second * s + (1 - second) * lot**2
            else:
                own, squares = g, s + g**2
                s = s + lot**2
            moved = clip(own / squares.sqrt()).sum(0) + SIGMA * CLIP * paper.noise(t - 1)
            paper.theta -= RATE * moved / LOT

    return run


def adadps(statistic: str, momentum: float = 0.0) -> Callable[[Paper], None]:
    """papers/004, Algorithm 1 with public data: ψ and φ first, then precondition, clip, noise."""

    def run(paper: Paper) -> None:
        decay, first, tiny = 0.9, 0.9 if statistic == "adam" else 0.0, 1e-3
        m, v, velocity = paper.zeros(), paper.zeros(), paper.zeros()
        for t in range(1, STEPS + 1):
            public = paper.gradients(PUBLIC).mean(0)
            v = v + public**2 if statistic == "adagrad" else decay * v + (1 - decay) * public**2
            m = first * m + (1 - first) * public
            a = (v / (1 - decay**t) if statistic == "adam" else v).sqrt() + tiny
            g = (first * m + (1 - first) * paper.gradients()) / (1 - first ** (t + 1)) / a
            released = (clip(g).sum(0) + SIGMA * CLIP * paper.noise(t - 1)) / LOT
            velocity = momentum * velocity + released
            paper.theta -= RATE * velocity

    return run


def public_after(first: float) -> Callable[[Paper], None]:
    """papers/004, §6.1.1 (DP-R-Pub) and Appendix C (DP-Adam-Pub): noise first, then divide."""

    def run(paper: Paper) -> None:
        decay, tiny, m, v = 0.9, 1e-3, paper.zeros(), paper.zeros()
        for t in range(1, STEPS + 1):
            v = decay * v + (1 - decay) * paper.gradients(PUBLIC).mean(0) ** 2
            g = (clip(paper.gradients()).sum(0) + SIGMA * CLIP * paper.noise(t - 1)) / LOT
            m = first * m + (1 - first) * g
            a = (v / (1 - decay**t) if first else v).sqrt() + tiny
            paper.theta -= RATE * m / (1 - first**t) / a

    return run


def pda_dpmd(paper: Paper) -> None:
    """Amid et al. 2021 by first order, as papers/004 runs it: cosine from private to public."""
    for t in range(STEPS):
        alpha = math.cos(math.pi * t / (2 * STEPS))
        g = (clip(paper.gradients()).sum(0) + SIGMA * CLIP * paper.noise(t)) / LOT
        paper.theta -= RATE * (alpha * g + (1 - alpha) * paper.gradients(PUBLIC).mean(0))


LITERAL: dict[str, tuple[Callable[[Paper], None], dict[str, Any]]] = {
    "dp_sgd": (dp_sgd, {}),
    "dp_adam": (dp_adam, {"eps": 1e-3}),
    "adadp": (adadp(False), {"state": "raw", "box": True, "beta": 1.2}),
    "adadp, examples": (
        adadp(True), {"state": "raw", "box": True, "beta": 1.2, "example_squares": True},
    ),
    "adal": (adadp(False, noise=False), {}),
    "adan": (adadp(False, rate=False), {"state": "raw", "box": True, "beta": 1.2}),
    **{
        f"pi_{rule}": (pigdo(rule), {"state": "raw", "own_squares": True, "epsilon": 0.0})
        for rule in ("adam", "rmsprop", "adagrad")
    },
    **{
        f"adadps, {rule}": (
            adadps(rule),
            {"statistic": rule, "current_statistic": True, "first": 0.9 * (rule == "adam")},
        )
        for rule in ("adam", "rmsprop", "adagrad")
    },
    "adadps, momentum": (
        adadps("rmsprop", 0.7), {"current_statistic": True, "momentum": 0.7},
    ),
    "dp_r_pub": (public_after(0.0), {}),
    "dp_adam_pub": (public_after(0.9), {}),
    "pda_dpmd": (pda_dpmd, {"horizon": STEPS}),
}  # fmt: skip


def trained(name: str, **options: Any) -> Vector:
    """Return the parameters after ten steps of an optimizer."""
    net = model()
    optimizer = make_optimizer(
        name.partition(",")[0], net, unbudgeted(PLAN), learning_rate=RATE, public=PUBLIC, **options
    )
    for _ in range(STEPS):
        optimizer.step(*batch(LOT), cross_entropy)
    return parameters_to_vector(net.parameters()).detach()


def as_in_the_paper(name: str) -> Vector:
    paper = Paper()
    LITERAL[name][0](paper)
    return paper.theta


def distance(one: Vector, other: Vector) -> float:
    """Return the distance of two ends, relative to the way from the beginning to the second."""
    return float((one - other).norm() / (other - Paper().theta).norm())


@pytest.mark.spread(first=3)
@pytest.mark.parametrize("name", LITERAL)
def test_ten_steps_are_those_of_the_pseudo_code(name: str) -> None:
    assert distance(trained(name, **LITERAL[name][1]), as_in_the_paper(name)) < 1e-4


def test_most_gradients_of_the_comparison_are_clipped() -> None:
    assert float(Paper().gradients().norm(dim=1).median()) > CLIP


class EachInTurn(PoissonSampler):
    """Draws one record a round, each in turn."""

    at = -1

    def draw(self) -> torch.Tensor:
        self.at += 1
        return torch.tensor([self.at % self.dataset_size])


def test_a_ddp_averages_one_clipped_and_noisy_record_of_each_user() -> None:
    """papers/003, Algorithm 1, lines 11 to 17: two users with records of their own, one a round."""
    plan = Plan(dataset_size=8, sample_rate=1 / 8, clip_norm=CLIP, noise_multiplier=SIGMA)
    examples, labels = batch(16)
    paper, net, users = Paper(), model(), []
    for user in range(2):
        own, sampler = slice(8 * user, 8 * user + 8), EachInTurn(8, 1 / 8)
        budget = NoBudget(plan, STEPS, "it is a test")
        users.append(
            Participant(str(user), net, examples[own], labels[own], budget, sampler=sampler)
        )
    train_federated(net, users, cross_entropy, learning_rate=RATE)
    raised = (1 + sum_share(1)) / (1 + sum_share(LOT))
    for t in range(STEPS):
        total = paper.zeros()
        for user in range(2):
            one = slice(8 * user + t % 8, 8 * user + t % 8 + 1)
            g = clip(paper.gradients((examples[one], labels[one])))[0]
            total += g + SIGMA * CLIP * raised * paper.noise(2 * t + user)
        paper.theta -= RATE * total / 2
    assert distance(parameters_to_vector(net.parameters()).detach(), paper.theta) < 1e-4


def test_algorithm_3_of_adadps_at_user_level() -> None:
    """papers/004, Algorithm 3, with the server's momentum: devices of their own records."""
    plan = Plan(dataset_size=4, sample_rate=1.0, clip_norm=CLIP, noise_multiplier=SIGMA)
    examples, labels = batch(32)
    devices = [(examples[at::4], labels[at::4]) for at in range(4)]
    net, paper = model(), Paper()
    scales = [each.detach().abs() + 0.1 for each in net.parameters()]
    done = train_devices(
        net, devices, cross_entropy, NoBudget(plan, STEPS, "it is a test"),
        learning_rate=RATE, side_information=scales, local_epochs=2, momentum=0.9,
    )  # fmt: skip
    raised = (1 + sum_share(4)) / (1 + sum_share(LOT))
    a, moving = parameters_to_vector(scales), paper.zeros()
    for t in range(STEPS):
        begin, moved = paper.theta.clone(), []
        for device in devices:
            paper.theta = begin.clone()
            for _ in range(2):
                paper.theta -= RATE * paper.gradients(device).mean(0) / a
            moved.append(paper.theta - begin)
        noise = SIGMA * CLIP * raised * paper.noise(t)
        moving = 0.9 * moving + 0.1 * (clip(torch.stack(moved)).sum(0) - noise) / 4
        paper.theta = begin + moving
    assert done == STEPS
    assert distance(parameters_to_vector(net.parameters()).detach(), paper.theta) < 1e-4


# --- what the defaults change, and where the page says so

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text().replace("\n", " ")
DIFFERENCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ellipsoid": ("adadp", {"box": False}, "`--box`"),
    "squares of the mean": ("adadp, examples", {"example_squares": False}, "`--example-squares`"),
    "noisy state": ("adadp", {"state": "privatised"}, "`--state raw --no-guarantee`"),
    "squares before the step": ("pi_adam", {"own_squares": False}, "`--own-squares`"),
    "constant": ("pi_rmsprop", {"epsilon": 1e-3}, "`--small-constant 1e-30`"),
    "lag": ("adadps, rmsprop", {"current_statistic": False}, "`--current-statistic`"),
    "no first moment": ("adadps, adam", {"first": 0.0}, "--first-moment 0.9`"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_default_that_differs_is_named_with_the_option_that_follows_the_paper(
    difference: str,
) -> None:
    name, changed, option = DIFFERENCES[difference]
    assert distance(trained(name, **LITERAL[name][1] | changed), as_in_the_paper(name)) > 1e-2
    section = PAGE[PAGE.index("## Differences from the papers") :]
    assert option in section[: section.index("## Side information")]


def test_noise_on_each_example_or_on_the_average_is_another_algorithm() -> None:
    """As papers/000 (line 13) and papers/001 (Algorithm 1) may be read; the page says so."""
    for spread in (math.sqrt(LOT), LOT):  # of the lot's sum, over σC
        paper = Paper()
        for t in range(STEPS):
            g = clip(paper.gradients()).sum(0) + spread * SIGMA * CLIP * paper.noise(t)
            paper.theta -= RATE * g / LOT
        assert distance(trained("dp_sgd"), paper.theta) > 0.5


def test_a_smaller_lot_is_divided_by_its_expected_size() -> None:
    net = model()
    before = parameters_to_vector(net.parameters()).detach().clone()
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(PLAN), learning_rate=RATE)
    optimizer.step(*batch(8), cross_entropy)
    paper = Paper()
    expected = clip(paper.gradients(batch(8))).sum(0) + SIGMA * CLIP * paper.noise(0)
    moved = before - parameters_to_vector(net.parameters()).detach()
    assert torch.allclose(moved, RATE * expected / LOT, atol=1e-8)
