"""Waits and copies in double precision of an accelerator's step, on a CPU that says it is none.

That sums and steps are those of the CPU is shown by `test_clipped_sums` and `test_optimizers`, in
double precision; here models in single precision are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.accelerator_counts import AcceleratorCounts, no_cpu
from tests.support.layer_models import LAYER_MODELS, SIZE, build, to_single_precision
from tests.support.small_models import batch, model, unbudgeted
from training_client.lab.models import cross_entropy, mlp
from training_client.optimizers import OPTIMIZERS, make_optimizer
from training_client.plan import AdaptiveClipping, Plan
from training_client.private_step.gradients.sequence_products import SequenceProducts

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
PLAN = Plan(dataset_size=64, sample_rate=0.5, clip_norm=0.5, noise_multiplier=1.0)

# reads of sums that scale the noise (AdaDP, Adan), of a public or raw loss, which must be finite,
# and of PyTorch's step counters in dp_adagrad; these are on the CPU, and no accelerator waits
MORE_WAITS = {"dp_adagrad": 4, "adadp": 1, "adan": 1, "adadps": 1, "dp_opt": 1}
MORE_WAITS |= dict.fromkeys(("dp_r_pub", "dp_adam_pub", "pda_dpmd"), 1)
# sums of up to 64 squares, 10 to 20 for each example, and after a map some powers of two; the sums
# for damping, of 9,110 squares for each example, are more
PARTS_IN_DOUBLE_PRECISION, PARTS_AFTER_A_MAP, PARTS_OF_DAMPING = 640, 2000, 9300
# the parameters, in the moments that scale the noise (AdaDP and Adan have one, DpOpt two), and
# where a shift is added to a sum (pi_adam): there also inputs, output gradients and biases'
# gradients of two layers
BATCH = 64
PARAMETERS = {
    "adadp": 9110,
    "adan": 9110,
    "dp_opt": 2 * 9110,
    "pi_adam": 9110 + BATCH * (180 + 110 + 110 + 4),
}
SUM = 9110  # the clipped sum, which is in double precision
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, entry.states[0], {}) for name, entry in OPTIMIZERS.items()),
    ("adadp", "raw", {}),
    ("adadp", "public", {"box": True}),
    ("pi_adam", "public", {}),
    ("pi_adam", "public", {"own_squares": True}),
]


def wide() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model of 9,110 parameters, and a batch."""
    torch.manual_seed(0)
    return mlp(80, 100, 10), torch.randn(BATCH, 80), torch.arange(BATCH) % 10


def of_layers(name: str) -> Callable[[], Any]:
    """Return a function that builds a model of layers in single precision, and a batch."""

    def make() -> Any:
        net, examples, labels = build(name)
        return *to_single_precision(net, examples), labels

    return make


def counts_of_last_step(
    name: str, make: Callable[[], Any], *, steps: int = 3, **options: Any
) -> AcceleratorCounts:
    """Return what the last step counts; raise unless a CPU trains the same model."""
    found = []
    for is_cpu in (True, False):
        net, examples, labels = make()
        if isinstance(examples, torch.Tensor) and examples.is_floating_point():
            options["public"] = (examples[:16] + 1, labels[:16])
        with no_cpu(pretend=not is_cpu):
            optimizer = make_optimizer(
                name, net, unbudgeted(PLAN), public_batch_size=16,
                generator=torch.Generator().manual_seed(3), **options,
            )  # fmt: skip
            for _ in range(steps - 1):
                optimizer.step(examples, labels, cross_entropy)
            with AcceleratorCounts() as counts:
                optimizer.step(examples, labels, cross_entropy)
        found.append([each.detach().clone() for each in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    return counts


@pytest.mark.slow
@pytest.mark.spread(second=5)
@pytest.mark.parametrize("case", CASES)
def test_few_numbers_of_a_step_are_read_or_copied_in_double_precision(
    case: tuple[str, str, dict[str, Any]],
) -> None:
    name, state, options = case
    counts = counts_of_last_step(name, wide, state=state, **options)
    more = MORE_WAITS.get(name, 0) + (state != OPTIMIZERS[name].states[0])  # for a finite loss
    assert counts.waits.total() <= 1 + more
    is_mapped = name == "dp_opt" or not name.startswith("dp_")
    most = PARTS_AFTER_A_MAP if is_mapped else PARTS_IN_DOUBLE_PRECISION
    is_damped = options.get("own_squares", False)
    most = PARTS_OF_DAMPING if is_damped else most + PARAMETERS.get(name, 0)
    assert counts.doubles <= most
    assert counts.largest_double == SUM


@pytest.mark.spread(first=0, second=3)
@pytest.mark.parametrize("name", LAYER_MODELS)
def test_a_step_on_layers_waits_once_for_the_accelerator(name: str) -> None:
    """It waits at its end, for the mean loss.

    Parameters are copied to double precision where a shift is added to the sum, and each example's
    gradient, because it may cancel with the shift; nothing larger.
    """
    physical_batch_size = (None, 4)[list(LAYER_MODELS).index(name) % 2]
    plain = counts_of_last_step(
        "dp_sgd", of_layers(name), steps=2, physical_batch_size=physical_batch_size
    )
    assert plain.waits == {"_local_scalar_dense": 1}
    counts, net = counts_of_last_step("pi_adam", of_layers(name), steps=2), build(name)[0]
    size = sum(each.numel() for each in net.parameters())
    assert counts.largest_double <= SIZE * size
    # and sums of parts, which are as many in so small models
    assert counts.doubles <= (5 + SIZE) * size


@pytest.mark.slow
def test_adaptive_clipping_waits_once_more_for_the_noisy_count() -> None:
    plan = replace(PLAN, adaptive_clipping=AdaptiveClipping(count_noise=2.0))
    (examples, labels), net = batch(), model()
    with no_cpu():
        optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan))
        optimizer.step(examples, labels, cross_entropy)
        with AcceleratorCounts() as counts:
            optimizer.step(examples, labels, cross_entropy)
    assert counts.waits == {"_local_scalar_dense": 2}


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
