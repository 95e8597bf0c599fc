"""Models, losses and layers whose per-example gradients cannot be clipped are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.small_models import (
    batch,
    model,
    sum_clipped,
    unbudgeted,
)
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


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "BatchNorm1d"),
        (
            nn.TransformerEncoderLayer(6, 2),
            r"layer self_attn \(MultiheadAttention\).*batch_first=True",
        ),
        (
            nn.Sequential(nn.EmbeddingBag(5, 4, mode="max")),
            r"layer 0 \(EmbeddingBag\).*mode='sum' or 'mean'",
        ),
        (
            nn.Sequential(nn.EmbeddingBag(5, 4, mode="sum", sparse=True)),
            r"layer 0 \(EmbeddingBag\).*sparse=False",
        ),
        (nn.Sequential(nn.Embedding(5, 4, sparse=True)), r"layer 0 \(Embedding\).*sparse=False"),
        (nn.Embedding(5, 4, scale_grad_by_freq=True), r"\(Embedding\).*scale_grad_by_freq=False"),
        (nn.Sequential(nn.ReLU()), "no layer"),
        (
            nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, track_running_stats=True)),
            "keeps",
        ),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False)), "over the batch"),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), "inplace=False"),
        (nn.Sequential(nn.Linear(6, 4)).bfloat16(), "bfloat16"),
        (nn.Sequential(nn.Linear(6, 4)).half(), "float16"),
    ],
)
def test_unsupported_layers_are_named_and_refused(net: nn.Module, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name) as refused:
        Clipper(net)
    assert "install" not in str(refused.value)  # Opacus is there


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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_traced", [False, True])
def test_models_compiled_by_jit_are_refused(is_traced: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 4))
    found = torch.jit.trace(net, torch.randn(2, 6)) if is_traced else torch.jit.script(net)
    with pytest.raises(UnsupportedModelError, match=r"torch\.jit.*train the original"):
        Clipper(found)


class PositionClassifier(nn.Module):
    """A classifier whose position ids have no dimension for examples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(9, 5), nn.Embedding(6, 5), nn.Linear(5, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(tokens.shape[1]))
        found: torch.Tensor = self.last((self.words(tokens) + places).mean(1))
        return found


def test_position_ids_without_a_dimension_for_examples_are_refused() -> None:
    message = r"layer places \(Embedding.* applied to 6 rows, of 4 examples.*position ids"
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(
            Clipper(PositionClassifier()),
            torch.randint(0, 9, (32, 6)),
            batch()[1],
            cross_entropy,
            Transform(1.0),
        )


def test_without_opacus_its_layers_are_run_again_for_each_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double()
    examples, labels = batch()
    found = []
    for path in (None, "opacus.grad_sample"):
        if path is not None:
            monkeypatch.setitem(sys.modules, path, None)
        sums, _ = sum_clipped(
            Clipper(net), examples[:, None], labels, cross_entropy, Transform(0.1)
        )
        found.append(sums)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_layer_given_offsets_of_bags_is_refused() -> None:
    layer = nn.EmbeddingBag(5, 4, mode="sum")

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, examples: torch.Tensor) -> torch.Tensor:
            starts = torch.arange(len(examples)) * examples.shape[1]
            found: torch.Tensor = self.layer(examples.flatten(), starts)
            return found

    with pytest.raises(UnsupportedModelError, match=r"layer layer \(EmbeddingBag.*pad the bags"):
        sum_clipped(
            Clipper(Bags()), torch.randint(0, 5, (8, 3)), batch(8)[1], cross_entropy, Transform(1.0)
        )


class RandomScale(nn.Module):
    """A layer with a parameter of its own that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(examples * self.scale, 0.5, self.training)


def test_a_layer_that_draws_random_numbers_beside_its_own_parameters_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"layer 0 \(RandomScale\) draws random numbers.*dropout"
    ):
        sum_clipped(
            Clipper(nn.Sequential(RandomScale(), model())), *batch(), cross_entropy, Transform(1.0)
        )


class FixedBatch(nn.Module):
    """A layer with a parameter of its own, for batches of two examples or more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        if len(examples) < 2:
            raise ValueError("too few")
        return examples * self.scale


def test_a_layer_that_fails_on_one_example_is_refused() -> None:
    message = r"layer 0 \(FixedBatch\) fails on one example alone \(too few\): .*or freeze it"
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(
            Clipper(nn.Sequential(FixedBatch(), model())), *batch(), cross_entropy, Transform(1.0)
        )


class Groups(nn.Module):
    """A model that lets a layer sort examples by their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.AdaptiveLogSoftmaxWithLoss(6, 4, [2]).double()

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(examples, examples.argmax(1) % 4).output
        return found[:, None].expand(-1, 4)


def test_a_layer_that_sorts_examples_by_targets_is_refused() -> None:
    message = r"layer layer \(AdaptiveLogSoftmaxWithLoss\) .*: call its log_prob"
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(Clipper(Groups()), *batch(), cross_entropy, Transform(1.0))


def test_several_precisions_are_named_with_their_layers() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4).double())
    with pytest.raises(UnsupportedModelError, match=r"float32 in layer 0 .*float64 in layer 1 "):
        Clipper(net)


def test_an_unused_layer_is_refused() -> None:
    idle = model()
    idle.register_module("idle", nn.Linear(2, 2).double())
    idle.forward = lambda examples: idle[2](idle[1](idle[0](examples)))  # type: ignore[index]
    with pytest.raises(
        UnsupportedModelError, match=r"weight .* of layer idle \(Linear\) takes no part"
    ):
        sum_clipped(Clipper(idle), *batch(), cross_entropy, Transform(1.0))


def centred(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return one loss per example, each of which depends on all examples."""
    return cross_entropy(predictions - predictions.mean(0), labels)


class MixingModel(nn.Module):
    """A model that transforms the whole batch, before or after its layer."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor], *, first: bool) -> None:
        super().__init__()
        self.layer, self.mix, self.first = nn.Linear(6, 4).double(), mix, first

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        if self.first:
            examples = self.mix(examples)
        found: torch.Tensor = self.layer(examples)
        return found if self.first else self.mix(found)


def late(examples: torch.Tensor) -> torch.Tensor:
    """Mix examples from the seventh call on: checks of the first batch make five, its step one."""
    late.calls += 1  # type: ignore[attr-defined]
    return examples - examples.mean(0) if late.calls > 6 else examples  # type: ignore[attr-defined]


def batch_norm(examples: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(examples, None, None, training=True)


def hinge(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses that mix examples, with a zero gradient for the first one."""
    centred = predictions - predictions.mean(0)
    margins = centred.gather(1, labels[:, None]).squeeze(1)
    return (margins[0].detach() - margins).clamp_min(0.0)


def rare(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses weighted by the class frequencies of the batch."""
    counts = torch.bincount(labels, minlength=4)
    return cross_entropy(predictions, labels) / counts[labels]


def counting(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(predictions, labels) / len(labels)


class TransposedModel(nn.Module):
    """A model that sees examples in the second dimension, which is as long as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4).double()

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(examples.T[:, :, None])
        return found.sum(0)


@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (model(), nn.functional.cross_entropy, "reduction='none'"),
        (model(), centred, "depend on other examples"),
        (model(), hinge, "depend on other examples"),
        (model(), rare, "depend on other examples"),
        (model(), counting, "depend on other examples"),
        (
            MixingModel(lambda x: x - x.mean(0), first=True),
            cross_entropy,
            "depend on other examples",
        ),
        (
            MixingModel(lambda x: x - x.mean(0), first=False),
            cross_entropy,
            "depend on other examples",
        ),
        (
            MixingModel(batch_norm, first=True),
            cross_entropy,
            r"layer layer \(Linear\) gets for one example depend on other examples",
        ),
        (
            MixingModel(lambda x: x / x.abs().amax().detach(), first=False),
            cross_entropy,
            "depend on other examples",
        ),
        (TransposedModel(), cross_entropy, "depend on other examples|is applied to"),
    ],
)
def test_a_model_or_loss_that_mixes_examples_is_refused(
    net: nn.Module, loss: Loss, message: str
) -> None:
    examples, labels = batch(6)
    with pytest.raises(UnsupportedModelError, match=message):
        sum_clipped(Clipper(net), examples, labels, loss, Transform(1.0))


def test_a_model_that_starts_to_mix_examples_later_is_refused() -> None:
    late.calls = 0  # type: ignore[attr-defined]
    clipper = Clipper(MixingModel(late, first=True))

    def steps(count: int) -> None:
        for _ in range(count):
            sum_clipped(clipper, *batch(6), cross_entropy, Transform(1.0))

    steps(1)
    with pytest.raises(UnsupportedModelError, match="depend on other examples"):
        steps(15)


def test_checks_accept_dropout_and_leave_its_draws_unchanged() -> None:
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(), nn.Linear(50, 4)).double()
    found = []
    for probed in (True, False):
        clipper = Clipper(net)
        if not probed:
            clipper._check_model_periodically = lambda *_: None  # type: ignore[method-assign]
        torch.manual_seed(8)
        for _ in range(3):
            sums, _ = sum_clipped(clipper, *batch(), cross_entropy, Transform(1.0))
        found.append(sums)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert net.training


class RunningMeanModel(nn.Module):
    """A model that keeps a running mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).double()
        self.register_buffer("seen", torch.zeros(6).double())

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * examples.mean(0)
        found: torch.Tensor = self.layer(examples)
        return found


def test_a_forward_pass_that_changes_buffers_or_weights_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"buffer seen .*\(RunningMeanModel\).*running statistics"
    ):
        sum_clipped(Clipper(RunningMeanModel()), *batch(), cross_entropy, Transform(1.0))
    words = nn.Sequential(nn.Embedding(5, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 4))
    with torch.no_grad():
        words[0].weight *= 10
    with pytest.raises(UnsupportedModelError, match=r"weight .* layer 0 \(Embedding\).*max_norm"):
        sum_clipped(
            Clipper(words),
            torch.tensor([[0, 1]] * 3),
            torch.tensor([0, 1, 2]),
            cross_entropy,
            Transform(1.0),
        )


class TiedWeightModel(nn.Module):
    """A model that uses a parameter twice, once outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layer(examples), self.layer.weight)


def test_a_parameter_whose_gradient_is_only_partly_seen_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"parameter weight of shape \(6, 6\) of layer layer \(Linear\) do not add up",
    ):
        sum_clipped(Clipper(TiedWeightModel()), *batch(), cross_entropy, Transform(1.0))


def test_more_rows_than_examples_are_refused() -> None:
    """Otherwise each row of an example would count as an example."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, examples: torch.Tensor) -> torch.Tensor:
            return self.layer(examples.reshape(-1, 3)).reshape(len(examples), -1)

    examples, labels = batch()
    with pytest.raises(
        UnsupportedModelError, match=r"layer layer \(Linear.* is applied to 8 rows, of 4 examples"
    ):
        sum_clipped(Clipper(Patches()), examples.float(), labels, cross_entropy, Transform(1.0))


def test_a_negative_physical_batch_size_is_refused() -> None:
    plan = Plan(dataset_size=100, sample_rate=0.04, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="physical_batch_size"):
        PrivateSum(model(), unbudgeted(plan), physical_batch_size=-1)
