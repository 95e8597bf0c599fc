"""The engine's way of a GPU, run on a CPU that says it is none.

`Tensor.is_cpu` decides about compiled loops, oneDNN, sparse products, and the sizes of blocks and
chunks. With it False, the engine takes the way of every other device. GPUs' own kernels and
generators are not tried by this.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.support.accelerator_counts import AcceleratorCounts
from tests.support.layer_models import LAYER_MODELS, build, clipped_sum_by_definition, select
from tests.support.optimizer_cases import SHAPES, build_transform
from tests.support.small_models import batch, model, sum_clipped, unbudgeted
from training_client.lab.models import cross_entropy, mlp
from training_client.optimizers import OPTIMIZERS, make_optimizer
from training_client.plan import AdaptiveClipping, Plan
from training_client.private_step import Clipper
from training_client.private_step.kernels import compiled
from training_client.private_step.sequence_products import SequenceProducts
from training_client.testing import clipped_sum

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
PLAN = Plan(dataset_size=64, sample_rate=0.5, clip_norm=0.5, noise_multiplier=1.0)


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Have tensors say that they are not on a CPU; return a list with an item per question."""
    asked: list[None] = []

    def is_cpu(_: torch.Tensor) -> bool:
        asked.append(None)
        return False

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(is_cpu), raising=False)
    assert not compiled.is_on_cpu(torch.zeros(1))
    asked.clear()
    return asked


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_clipped_sum_equals_its_definition(name: str, no_cpu: list[None]) -> None:
    net, examples, labels = build(name)
    for clip_norm in (0.05, math.inf):
        found = clipped_sum(net, examples, labels, cross_entropy, clip_norm)
        wanted = clipped_sum_by_definition(net, examples, labels, clip_norm)
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
    assert no_cpu


def infinite_for_label_3(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses whose gradient is not finite for the examples of one label."""
    return cross_entropy(outputs, labels) * torch.where(labels == 3, math.inf, 1.0)


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_an_example_without_a_finite_gradient_adds_nothing(name: str, no_cpu: list[None]) -> None:
    net, examples, labels = build(name)
    labels[2] = 3
    found = clipped_sum(net, examples, labels, infinite_for_label_3, 0.05)
    kept = select(examples, labels != 3)
    wanted = clipped_sum_by_definition(net, kept, labels[labels != 3], 0.05)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
    assert no_cpu


@pytest.mark.parametrize("shape", SHAPES)
def test_an_infinite_example_changes_no_sum_of_another_shape(
    shape: str, no_cpu: list[None]
) -> None:
    net, (examples, labels) = model(), batch(6)
    transform, kept = build_transform(shape, net), torch.arange(6) != 2
    examples[2] = math.inf
    found, _ = sum_clipped(Clipper(net), examples, labels, cross_entropy, transform)
    wanted, _ = sum_clipped(Clipper(net), examples[kept], labels[kept], cross_entropy, transform)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert no_cpu


@pytest.mark.parametrize("physical_batch_size", [None, 4])
@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_step_waits_once_for_the_accelerator(
    name: str, physical_batch_size: int | None, no_cpu: list[None]
) -> None:
    """It waits at its end, for the mean loss."""
    net, examples, labels = build(name)
    optimizer = make_optimizer(
        "dp_sgd", net, unbudgeted(PLAN), physical_batch_size=physical_batch_size
    )
    optimizer.step(examples, labels, cross_entropy)  # the first step checks the model
    with AcceleratorCounts() as counts:
        optimizer.step(examples, labels, cross_entropy)
    assert counts.waits == {"_local_scalar_dense": 1}
    assert no_cpu


def test_adaptive_clipping_waits_once_more_for_the_noisy_count(no_cpu: list[None]) -> None:
    adaptive = AdaptiveClipping(count_noise=2.0)
    (examples, labels), net = batch(), model()
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(replace(PLAN, adaptive_clipping=adaptive)))
    optimizer.step(examples, labels, cross_entropy)
    with AcceleratorCounts() as counts:
        optimizer.step(examples, labels, cross_entropy)
    assert counts.waits == {"_local_scalar_dense": 2}
    assert no_cpu


# reads of sums that scale the noise (AdaDP, Adan), of a public or raw loss, which must be finite,
# and of PyTorch's step counters in dp_adagrad; these are on the CPU, and no accelerator waits
MORE_WAITS = {"dp_adagrad": 4, "adadp": 1, "adan": 1, "adadps": 1, "dp_r_pub": 1, "dp_adam_pub": 1}
# sums of up to 64 squares, 10 to 20 for each example, and after a map some powers of two; the sums
# for damping, of 9,110 squares for each example, are more
PARTS_IN_DOUBLE_PRECISION, PARTS_AFTER_A_MAP, PARTS_OF_DAMPING = 640, 2000, 9300
# the parameters, in the mean squares that scale the noise (AdaDP, Adan), and where a shift is added
# to a sum (pi_adam)
PARAMETERS = {"adadp": 9110, "adan": 9110, "pi_adam": 9110}


CASES = [
    *((name, entry.states[0], {}) for name, entry in OPTIMIZERS.items()),
    ("adadp", "raw", {}),
    ("adadp", "public", {"box": True}),
    ("pi_adam", "public", {}),
    ("pi_adam", "public", {"own_squares": True}),
]


def train(name: str, state: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters after three steps, with fixed noise."""
    torch.manual_seed(0)
    net = mlp(80, 100, 10)
    examples, labels = torch.randn(64, 80), torch.arange(64) % 10
    optimizer = make_optimizer(
        name, net, unbudgeted(PLAN), state=state, public=(examples[:16] + 1, labels[:16]),
        public_batch_size=16, generator=torch.Generator().manual_seed(3), **options,
    )  # fmt: skip
    for _ in range(3):
        optimizer.step(examples, labels, cross_entropy)
    return [each.detach().clone() for each in net.parameters()]


@pytest.mark.parametrize(("name", "state", "options"), CASES)
def test_an_optimizer_trains_the_model_that_it_trains_on_a_cpu(
    name: str, state: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    before = train(name, state, options)
    asked = request.getfixturevalue("no_cpu")
    for one, other in zip(before, train(name, state, options), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    assert asked


@pytest.mark.parametrize(("name", "state", "options"), CASES)
def test_few_numbers_of_a_step_are_read_or_copied_in_double_precision(
    name: str, state: str, options: dict[str, Any], no_cpu: list[None]
) -> None:
    torch.manual_seed(0)
    net = mlp(80, 100, 10)
    examples, labels = torch.randn(64, 80), torch.arange(64) % 10
    optimizer = make_optimizer(
        name, net, unbudgeted(PLAN), state=state, public=(examples[:16] + 1, labels[:16]),
        public_batch_size=16, **options,
    )  # fmt: skip
    for _ in range(2):
        optimizer.step(examples, labels, cross_entropy)
    with AcceleratorCounts() as counts:
        optimizer.step(examples, labels, cross_entropy)
    more = MORE_WAITS.get(name, 0) + (state != OPTIMIZERS[name].states[0])  # for a finite loss
    assert counts.waits.total() <= 1 + more
    most = PARTS_IN_DOUBLE_PRECISION if name.startswith("dp_") else PARTS_AFTER_A_MAP
    is_damped = options.get("own_squares", False)
    most = PARTS_OF_DAMPING if is_damped else most + PARAMETERS.get(name, 0)
    assert counts.doubles <= most
    assert counts.largest_double <= PARAMETERS.get(name, 256)
    assert no_cpu


def in_single_precision(given: Any) -> Any:
    """Return a batch with its numbers in single precision."""
    return tree_map_only(
        torch.Tensor, lambda each: each.float() if each.is_floating_point() else each, given
    )


def train_layers(name: str) -> tuple[list[torch.Tensor], AcceleratorCounts]:
    """Return the parameters after two steps of pi_adam, and what the second counts."""
    torch.manual_seed(0)
    net, examples, labels = build(name)
    net, examples = net.float(), in_single_precision(examples)
    generator = torch.Generator().manual_seed(3)
    optimizer = make_optimizer("pi_adam", net, unbudgeted(PLAN), generator=generator)
    optimizer.step(examples, labels, cross_entropy)
    with AcceleratorCounts() as counts:
        optimizer.step(examples, labels, cross_entropy)
    return [each.detach().clone() for each in net.parameters()], counts


@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_map_of_layers_in_single_precision_copies_parameters_at_most(
    name: str, request: pytest.FixtureRequest
) -> None:
    """They are copied to double precision where a shift is added to the sum."""
    before, _ = train_layers(name)
    asked = request.getfixturevalue("no_cpu")
    after, counts = train_layers(name)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    size = sum(each.numel() for each in after)
    assert counts.largest_double <= size
    assert counts.doubles <= 4 * size  # with sums of parts, which are as many in so small models
    assert asked


@pytest.mark.parametrize(
    ("device", "positions", "by_gram"),
    [("cpu", 50, True), ("meta", 50, False), ("meta", 5, True), ("cpu", 60, False)],
)
def test_an_accelerator_takes_gram_matrices_of_short_sequences_only(
    device: str, positions: int, by_gram: bool
) -> None:
    """They are in double precision."""
    factor = torch.zeros(1, positions, 400, device=device)
    assert SequenceProducts(factor, factor).uses_gram_matrices == by_gram


def test_pytorchs_step_counter_of_adagrad_is_on_the_cpu() -> None:
    """So no accelerator waits when PyTorch reads it in a step of dp_adagrad."""
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    state = torch.optim.Adagrad([parameter]).state[parameter]
    assert (state["sum"].device.type, state["step"].device.type) == ("meta", "cpu")
