"""Models that cannot be vectorised: they are run on one example after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from tests.support.clipped_sums import clipped_rows
from tests.support.small_models import Uses, sum_clipped
from training_client.errors import UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.private_step import Clipper, Transform
from training_client.testing import clipped_sum

SIZE = 6
Use = Callable[[Any, torch.Tensor], torch.Tensor]


def rows() -> torch.Tensor:
    return torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels() -> torch.Tensor:
    return torch.arange(SIZE) % 4


def net(use: Use) -> nn.Module:
    """Return a model of which the first layer gets two rows of each example."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(use(m, m.first(x.reshape(-1, 3)).reshape(len(x), 6)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Uses(forward, first=nn.Linear(3, 3), last=nn.Linear(6, 4)).double()


def chosen(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Return values of which some are chosen by their sign, which vmap refuses."""
    found = x.clone()
    rows, positions = torch.nonzero(found > 0, as_tuple=True)
    found[rows, positions] *= 0.5
    return found


def by_autograd(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of what the last layer makes of values, beside them."""
    given = x.detach().clone().requires_grad_()
    outputs = m.last(given.tanh()).square().sum()
    return x + torch.autograd.grad(outputs, given, create_graph=True)[0]


def by_property(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Return values, with a shortcut where a property holds for all of them."""
    mask = x < 3
    scale = 1.0 if mask.all() or mask.sum() == mask.numel() else mask.double()
    return chosen(m, x * scale + one_hot(x[:, 0].abs().long().clamp(max=5), 6))


@pytest.mark.parametrize("use", [chosen, by_autograd, by_property])
def test_a_model_that_cannot_be_vectorised_is_clipped(use: Use) -> None:
    clipper = Clipper(net(use))
    with pytest.warns(UserWarning, match="run on each example alone"):
        found = [sum_clipped(clipper, rows(), labels(), cross_entropy, Transform(0.3))]
    found.append(sum_clipped(clipper, rows(), labels(), cross_entropy, Transform(0.3)))
    expected = clipped_rows(net(use), Transform(0.3), rows(), labels(), cross_entropy).sum(0)
    for sums, _ in found:
        vector = torch.cat([each.flatten() for each in sums])
        torch.testing.assert_close(vector, expected, rtol=1e-7, atol=1e-9)


def test_a_layer_that_sorts_examples_by_their_targets_is_clipped() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Uses(
            lambda m, x: m.layer(x, x.argmax(1) % 4).output[:, None] * torch.arange(4),
            layer=nn.AdaptiveLogSoftmaxWithLoss(6, 4, [2]),
        ).double()

    with pytest.warns(UserWarning, match=r"AdaptiveLogSoftmaxWithLoss.*call its log_prob.*alone"):
        found = clipped_sum(build(), rows(), labels(), cross_entropy, 0.3)
    expected = clipped_rows(build(), Transform(0.3), rows(), labels(), cross_entropy).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)


def test_each_example_draws_random_numbers_of_its_own() -> None:
    model = net(lambda m, x: chosen(m, x * torch.rand_like(x)))
    equal = rows()[:1].expand(SIZE, -1)
    with pytest.warns(UserWarning, match="alone"):
        found = clipped_sum(model, equal, labels() * 0, cross_entropy, 1e-3)
    total = float(torch.cat([each.flatten() for each in found]).norm())
    assert 1e-3 < total < 1e-3 * SIZE * 0.999


def keep_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * getattr(m, "mean", 0.0) + 0.1 * x.mean(0).detach()
    return chosen(m, x - m.mean)


def keep_largest(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.largest = max(getattr(m, "largest", 0.0), x.max().item())
    return chosen(m, x / m.largest)


def keep_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    vars(m).setdefault("seen", []).extend(x.flatten().tolist())
    return chosen(m, x * len(m.seen))


def keep_counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    vars(m).setdefault("counts", []).append(len(torch.nonzero(x > 0)))
    return chosen(m, x * sum(m.counts))


def keep_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.positive = len(torch.nonzero(x > 0))
    return chosen(m, x)


def write_outside(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = vars(m).setdefault("kept", torch.zeros(6, dtype=torch.float64))
    kept += x[0].detach()
    return chosen(m, x + kept)


LEAKS: dict[str, tuple[Use, str]] = {
    "a mean of all before": (keep_mean, "escaped from inside a function being vmapped"),
    "a number of Python": (keep_largest, "depends on values of examples"),
    "a list of Python": (keep_list, "tolist.*depends on values of examples"),
    "a number of sizes": (keep_number, "passes differently after others"),
    "a list of sizes": (keep_counts, "passes differently after others"),
    "a tensor outside of the model": (write_outside, "to a tensor that outlives the pass"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_one_example_leaves_for_the_next_is_refused(name: str) -> None:
    use, reason = LEAKS[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        clipped_sum(net(use), rows(), labels(), cross_entropy, 0.3)


class Kept(torch.autograd.Function):
    """The identity, whose gradients are multiplied by what a function returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor(), None


def alternating() -> Callable[[], float]:
    """Return a function that returns 1 and −1 in turn: 1 for the first of six, and after them."""
    signs = itertools.cycle([1.0, -1.0])
    return lambda: next(signs)


def hooked(x: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
    found = x * 1.0
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient * factor())
    return found


def of_two(sign: float) -> torch.Tensor:
    return torch.full((6,), sign, dtype=torch.float64)


SEEDS = itertools.count()


def drawn_anew(x: torch.Tensor, _: Callable[[], float]) -> torch.Tensor:
    """Multiply by numbers of a generator of the program's own: no operation shows its seed."""
    generator = torch.Generator().manual_seed(next(SEEDS))
    return x * torch.randn(6, generator=generator, dtype=torch.float64)


STATE: dict[str, tuple[Callable[[torch.Tensor, Callable[[], float]], torch.Tensor], str]] = {
    "a function": (lambda x, f: Kept.apply(x, f), r"Python code \(Kept\)"),  # type: ignore[no-untyped-call]
    "a hook": (hooked, r"Python code \(a hook of a tensor\)"),
    "a factor": (lambda x, f: x * f(), "passes differently after others"),
    "a flag": (lambda x, f: x * (f() > 0), "passes differently after others"),
    "a constant": (lambda x, f: x * of_two(f()), "passes differently after others"),
    "a generator": (drawn_anew, "passes differently after others"),
}


@pytest.mark.parametrize("name", STATE)
def test_state_that_python_keeps_between_examples_is_refused(name: str) -> None:
    use, reason = STATE[name]
    factor = alternating()
    with pytest.raises(UnsupportedModelError, match=reason):
        clipped_sum(net(lambda m, x: use(chosen(m, x), factor)), rows(), labels(), cross_entropy, 1)


def test_a_function_without_state_is_clipped() -> None:
    def use(m: Any, x: torch.Tensor) -> torch.Tensor:
        return Kept.apply(chosen(m, x), lambda: 2.0)  # type: ignore[no-any-return,no-untyped-call]

    with pytest.warns(UserWarning, match="alone"):
        found = clipped_sum(net(use), rows(), labels(), cross_entropy, 0.3)
    expected = clipped_rows(net(use), Transform(0.3), rows(), labels(), cross_entropy).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)


def test_python_code_in_a_backward_pass_that_is_only_tested_is_run_on_each_example_alone() -> None:
    """There it is proved, if all examples pass the same operations."""

    def use(m: Any, x: torch.Tensor) -> torch.Tensor:
        found = Kept.apply(chosen(m, m.first(x)), lambda: 2.0)  # type: ignore[no-untyped-call]
        return m.last(found)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Uses(use, first=nn.Linear(6, 6), last=nn.Linear(6, 4)).double()
    with pytest.warns(UserWarning, match=r"Python code \(Kept\), and nothing proves.* alone"):
        clipped_sum(model, rows(), labels(), cross_entropy, 0.3)


class OwnRule(torch.autograd.Function):
    """The identity, vectorised by a rule that subtracts the mean of all examples."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient

    @staticmethod
    def vmap(_: Any, dims: Any, x: torch.Tensor) -> Any:  # type: ignore[override]
        return x - x.mean(dims[0], keepdim=True), dims[0]


def test_a_function_is_not_vectorised_by_a_rule_of_its_own() -> None:
    def use(_: Any, x: torch.Tensor) -> torch.Tensor:
        return OwnRule.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    with pytest.warns(UserWarning, match="alone"):
        found = clipped_sum(net(use), rows(), labels(), cross_entropy, 0.3)
    expected = clipped_rows(net(use), Transform(0.3), rows(), labels(), cross_entropy).sum(0)
    torch.testing.assert_close(torch.cat([each.flatten() for each in found]), expected)


def test_a_module_counts_one_call_of_each_step() -> None:
    def count_calls(m: Any, x: torch.Tensor) -> torch.Tensor:
        vars(m)["calls"] += 1
        seen.append(m.calls)
        return chosen(m, x)

    seen: list[int] = []
    model = net(count_calls)
    vars(model)["calls"] = 0
    clipper = Clipper(model)
    with pytest.warns(UserWarning, match="alone"):
        clipper.clip(rows(), labels(), cross_entropy, Transform(0.3))
    before = model.calls
    seen.clear()
    clipper.clip(rows(), labels(), cross_entropy, Transform(0.3))
    assert set(seen) == {before + 1}
    assert model.calls == before + 1


def test_a_buffer_that_a_pass_writes_is_named() -> None:
    def write(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.mean.data.add_(x[0].detach())
        return chosen(m, x)

    model = net(write)
    model.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
    with pytest.raises(UnsupportedModelError, match="changes buffer mean"):
        clipped_sum(model, rows(), labels(), cross_entropy, 0.3)


def test_a_leak_that_begins_later_is_refused_then() -> None:
    steps = []

    def later(m: Any, x: torch.Tensor) -> torch.Tensor:
        return keep_mean(m, x) if len(steps) >= 2 else chosen(m, x)

    clipper, transform = Clipper(net(later)), Transform(0.3)
    with pytest.warns(UserWarning, match="alone"):
        clipper.clip(rows(), labels(), cross_entropy, transform)
    steps.append(1)
    clipper.clip(rows(), labels(), cross_entropy, transform)
    steps.append(1)
    with pytest.raises(UnsupportedModelError, match="from another example"):
        clipper.clip(rows(), labels(), cross_entropy, transform)
