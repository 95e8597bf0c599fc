"""Models, losses and layers whose per-example gradients cannot be clipped are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_models import Scaled, Uses, batch, model, sum_clipped, unbudgeted
from tests.support.torch_layers import (
    CLASSES,
    REFUSED_CLASSES,
    REFUSED_LAYERS,
    LayerModel,
    call,
    classes_with_parameters,
)
from training_client.errors import UnsupportedModelError
from training_client.lab.models import cross_entropy
from training_client.plan import Plan
from training_client.private_step import Clipper, Loss, Transform
from training_client.private_step.private_sum import PrivateSum

ONE_LINE = r"[^\n]*layer [\w.]+ \(\w+\)[^\n]*: [^\n]+"  # path and class, and advice
Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[], nn.Module]


@pytest.mark.slow
def test_each_class_of_torch_with_parameters_is_tested() -> None:
    """The accepted ones by `tests/conformance/test_clipped_sums.py`."""
    assert {*CLASSES, *REFUSED_CLASSES} == classes_with_parameters()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("name", [*REFUSED_CLASSES, *REFUSED_LAYERS])
def test_a_refused_layer_is_named_on_one_line_with_a_way_out(name: str) -> None:
    make, message = {**REFUSED_CLASSES, **REFUSED_LAYERS}[name]
    net = nn.Sequential(nn.Linear(4, 4), LayerModel(make(), call))
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        Clipper(net)
    assert re.fullmatch(ONE_LINE, str(refused.value))
    assert "layer 1.layer" in str(refused.value)
    assert "install" not in str(refused.value)  # Opacus is there


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.ReLU()), "no layer"),
        (
            lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4).double()),
            r"float32 in layer 0 .*float64 in layer 1 ",
        ),
        (lambda: torch.jit.script(nn.Linear(6, 4)), r"torch\.jit.*train the original"),
        (
            lambda: torch.jit.trace(nn.Linear(6, 4), torch.randn(2, 6)),
            r"torch\.jit.*train the original",
        ),
    ],
)
def test_a_refused_model_is_refused_when_the_clipper_is_made(make: Make, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Clipper(make())


def test_a_parameter_with_a_hook_is_refused() -> None:
    net = nn.Sequential(nn.Linear(6, 4))
    hook = net[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UnsupportedModelError, match="parameter weight with a hook"):
        Clipper(net)
    hook.remove()
    Clipper(net)


def of_tokens(words: int, size: int, length: int) -> Callable[[], Batch]:
    """Return a function that draws sequences of tokens and their labels."""
    return lambda: (torch.randint(0, words, (size, length)), batch(size)[1])


def two_or_more(examples: torch.Tensor) -> torch.Tensor:
    """Return a batch; raise for one example."""
    if len(examples) < 2:
        raise ValueError("too few")
    return examples


def keep_mean(net: Any, examples: torch.Tensor) -> torch.Tensor:
    """Apply a layer, and keep a running mean of its inputs in a buffer."""
    net.seen = 0.9 * net.seen + 0.1 * examples.mean(0)
    return net.layer(examples)  # type: ignore[no-any-return]


def running_mean() -> nn.Module:
    """Return a model that keeps a running mean of its inputs in a buffer."""
    found = Uses(keep_mean, layer=nn.Linear(6, 4).double())
    found.register_buffer("seen", torch.zeros(6).double())
    return found


def words_of_limited_norm() -> nn.Module:
    """Return a model whose embedding shortens its weights when they are used."""
    found = nn.Sequential(nn.Embedding(5, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 4))
    with torch.no_grad():
        found[0].weight *= 10
    return found


REFUSED_USES: dict[str, tuple[Make, Callable[[], Batch], str]] = {
    "fails on one example": (
        lambda: nn.Sequential(Scaled(lambda m, x: two_or_more(x) * m.scale), model()),
        batch,
        r"layer 0 \(Scaled\) fails on one example alone \(too few\): .*or freeze it",
    ),
    "an unused layer": (
        lambda: Uses(lambda m, x: m.used(x), used=model(), idle=nn.Linear(2, 2).double()),
        batch,
        r"weight .* of layer idle \(Linear\) takes no part",
    ),
    "changes a buffer": (running_mean, batch, r"buffer seen .*\(Uses\).*running statistics"),
    "changes a weight": (
        words_of_limited_norm,
        lambda: (torch.tensor([[0, 1]] * 3), torch.tensor([0, 1, 2])),
        r"weight .* layer 0 \(Embedding\).*max_norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_USES)
def test_a_layer_that_is_used_in_another_way_is_refused(name: str) -> None:
    make, draw, message = REFUSED_USES[name]
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(Clipper(make()), *draw(), cross_entropy, Transform(1.0))


def test_layers_that_are_run_again_have_the_gradients_of_their_own_way() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double()
    examples, labels = batch()
    given = examples[:, None], labels, cross_entropy, Transform(0.1)
    plain, _ = sum_clipped(Clipper(net), *given)
    for one, other in zip(plain, sum_clipped(Clipper(net, path="replay"), *given)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# --- models and losses that mix examples


def centred(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return one loss per example, each of which depends on all examples."""
    return cross_entropy(predictions - predictions.mean(0), labels)


def hinge(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses that mix examples, with a zero gradient for the first one."""
    centred = predictions - predictions.mean(0)
    margins = centred.gather(1, labels[:, None]).squeeze(1)
    return (margins[0].detach() - margins).clamp_min(0.0)


def rare(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses weighted by the class frequencies of the batch."""
    return cross_entropy(predictions, labels) / torch.bincount(labels, minlength=4)[labels]


def counting(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(predictions, labels) / len(labels)


def uses(use: Callable[[Any, torch.Tensor], torch.Tensor], inputs: int = 6) -> nn.Module:
    """Return a model of one linear layer that is used by a function."""
    return Uses(use, layer=nn.Linear(inputs, 4).double())


def batch_norm(examples: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(examples, None, None, training=True)


MIXED = "depend on other examples"


@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (model(), nn.functional.cross_entropy, "reduction='none'"),
        (model(), centred, MIXED),
        (model(), hinge, MIXED),
        (model(), rare, MIXED),
        (model(), counting, MIXED),
        (uses(lambda m, x: m.layer(x - x.mean(0))), cross_entropy, MIXED),
        (uses(lambda m, x: m.layer(x) - m.layer(x).mean(0)), cross_entropy, MIXED),
        (
            uses(lambda m, x: m.layer(batch_norm(x))),
            cross_entropy,
            rf"{MIXED}.*batch_norm in test_refused_models.py:.* statistics of the whole batch",
        ),
        (uses(lambda m, x: (y := m.layer(x)) / y.abs().amax().detach()), cross_entropy, MIXED),
    ],
)
def test_a_model_or_loss_that_mixes_examples_is_refused(
    net: nn.Module, loss: Loss, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(Clipper(net), *batch(6), loss, Transform(1.0))


def test_a_model_that_starts_to_mix_examples_later_is_refused() -> None:
    calls = []

    def late(net: Any, examples: torch.Tensor) -> torch.Tensor:
        """Mix from the seventh call on: proof and sums of the first batch make three."""
        calls.append(1)
        found = examples - examples.mean(0) if len(calls) > 6 else examples
        return net.layer(found)  # type: ignore[no-any-return]

    clipper = Clipper(uses(late))
    sum_clipped(clipper, *batch(6), cross_entropy, Transform(1.0))

    def further_steps() -> None:
        for _ in range(15):
            sum_clipped(clipper, *batch(6), cross_entropy, Transform(1.0))

    with pytest.raises(UnsupportedModelError, match=MIXED):
        further_steps()


def test_checks_accept_dropout_and_leave_its_draws_unchanged() -> None:
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(), nn.Linear(50, 4)).double()
    found = []
    for probed in (True, False):
        clipper = Clipper(net)
        if not probed:
            # private: no option leaves the checks out
            clipper._checked._run_proved = clipper._checked._pass  # type: ignore[method-assign]
        torch.manual_seed(8)
        for _ in range(3):
            sums, _ = sum_clipped(clipper, *batch(), cross_entropy, Transform(1.0))
        found.append(sums)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert net.training


def test_a_negative_physical_batch_size_is_refused() -> None:
    plan = Plan(dataset_size=100, sample_rate=0.04, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="physical_batch_size"):
        PrivateSum(model(), unbudgeted(plan), physical_batch_size=-1)
