"""Noise and Poisson sampling: their distributions, and that no draw is ever repeated."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from tests.support.small_models import batch, model, unbudgeted
from tests.support.stub_service import PLAN, linear_accountant, service
from training_client.budget import Budget
from training_client.errors import DataError, NoGuaranteeError
from training_client.lab.models import cross_entropy
from training_client.optimizers import make_optimizer
from training_client.plan import Plan
from training_client.private_step import sampling
from training_client.private_step.noise import FreshGenerator, draw_key
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.sampling import PoissonSampler


def test_an_empty_batch_still_gets_noise() -> None:
    net = model()
    plan = Plan(dataset_size=10, sample_rate=0.5, clip_norm=1.0, noise_multiplier=2.0)
    before = [p.clone() for p in net.parameters()]
    optimizer = make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=1.0)
    optimizer.step(*batch(0), cross_entropy)
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.slow
def test_noise_has_the_stated_standard_deviation_and_never_repeats() -> None:
    plan = Plan(dataset_size=10, sample_rate=0.5, clip_norm=3.0, noise_multiplier=1.5)
    generator = FreshGenerator(torch.device("cpu"))
    grid = NoiseGrid.for_sum(plan.noise_multiplier, plan.clip_norm, 1_000_000, 5)

    def noise(of: torch.Generator) -> torch.Tensor:
        total = torch.zeros(1_000_000)
        grid.add_noise(total, 1.0, draw_key(of))
        return total

    draws = noise(generator)
    assert float(draws.std()) == pytest.approx(4.5, rel=0.01)
    assert float(draws.mean()) == pytest.approx(0.0, abs=0.02)
    assert not torch.equal(draws, noise(generator))
    assert not torch.equal(draws, noise(FreshGenerator(torch.device("cpu"))))


@pytest.mark.parametrize(
    "rate", [1.0, 0.5, 0.1, 600 / 60_000, 1 / 3, 1e-9, 2.0**-53, 3e-16, 2.0**-64, 1e-19, 1e-20]
)
def test_no_record_is_drawn_with_more_than_the_sample_rate(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is drawn by ⌊q·2⁶⁴⌋ of the 2⁶⁴ equally likely words."""
    room = math.floor(Fraction(rate) * 2**64)
    near = [k for k in range(room - 2, room + 3) if 0 <= k < 2**64]
    monkeypatch.setattr(sampling, "read_keystream", lambda *_: np.array(near, np.uint64))
    drawn = PoissonSampler(len(near), rate).draw()
    assert [near[at] for at in drawn] == [k for k in near if k < room]
    assert Fraction(room, 2**64) <= Fraction(rate) < Fraction(room + 1, 2**64)


def test_each_batch_has_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a key of the operating system; a record above the first block has its own word."""
    read, found = sampling.read_keystream, list[tuple[bytes, int, int]]()

    def observed(key: bytes, stream: int, size: int) -> np.ndarray:
        found.append((key, stream, size))
        return read(key, stream, size)

    monkeypatch.setattr(sampling, "read_keystream", observed)
    sampler = PoissonSampler(300_000, 0.5)
    one, other = sampler.draw(), sampler.draw()
    assert [each[1:] for each in found] == 2 * [(0, 131_072), (1, 131_072), (2, 37_856)]
    assert len({key for key, *_ in found}) == 2
    assert not torch.equal(one, other)
    assert bool((one[1:] > one[:-1]).all())
    assert abs(len(one) - 150_000) < 2000
    blocks = [set((one[one // 131_072 == number] % 131_072).tolist()) for number in (0, 1)]
    assert len(blocks[0] ^ blocks[1]) > 60_000
    repeated = [PoissonSampler(100, 0.5, torch.Generator().manual_seed(2)).draw() for _ in "12"]
    assert torch.equal(*repeated)


def test_poisson_batches_pass_a_chi_square_test() -> None:
    """Batch sizes are binomial, and every record is drawn equally often."""
    generator = torch.Generator().manual_seed(7)
    sampler = PoissonSampler(200, 0.05, generator)
    counts, sizes = torch.zeros(200), []
    rounds = 4000
    for _ in range(rounds):
        drawn = sampler.draw()
        counts[drawn] += 1
        sizes.append(len(drawn))
    expected = rounds * 0.05
    statistic = float(((counts - expected) ** 2 / (expected * 0.95)).sum())
    assert 1e-4 < special.chdtrc(200, statistic) < 1 - 1e-4
    assert np.mean(sizes) == pytest.approx(10, rel=0.03)
    assert np.var(sizes) == pytest.approx(9.5, rel=0.15)


def test_a_fresh_generator_seeds_its_whole_state() -> None:
    """A seed of a CPU generator has 32 bits: one of 4e9, which could be found by search."""
    one, other = (FreshGenerator(torch.device("cpu")).get_state() for _ in range(2))
    words = [state[24 : 24 + 8 * 624].view(torch.int64) for state in (one, other)]
    assert int((words[0] != words[1]).sum()) > 600
    assert int(words[0].max()) < 2**32
    generator = FreshGenerator(torch.device("cpu"))
    known = torch.Generator().manual_seed(generator.initial_seed())
    assert not torch.equal(torch.rand(9, generator=generator), torch.rand(9, generator=known))
    draws = torch.rand(200_000, generator=generator)
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_a_copied_generator_draws_other_noise(copied: Callable[[Any], Any]) -> None:
    """With the same noise twice, the difference of two sums would have none."""
    generator = FreshGenerator(torch.device("cpu"))
    other = copied(generator)
    assert isinstance(other, FreshGenerator)
    assert len({float(torch.rand(1, generator=each)) for each in (generator, other)}) == 2


def test_copies_of_an_optimizer_and_sampler_draw_independently() -> None:
    plan = Plan(dataset_size=100, sample_rate=0.5, clip_norm=1.0, noise_multiplier=1.0)
    net = model()
    whole = (
        net,
        make_optimizer("dp_sgd", net, unbudgeted(plan), learning_rate=1.0),
        PoissonSampler(100, 0.5),
    )
    copies = [copy.deepcopy(whole) for _ in range(2)]
    for _, optimizer, _ in copies:
        optimizer.step(*batch(), cross_entropy)
    one, other = (each.parameters() for each, _, _ in copies)
    for was, left, right in zip(net.parameters(), one, other, strict=True):
        assert not torch.equal(left, was)
        assert not torch.equal(left, right)
    first, second = (sampler.draw() for _, _, sampler in copies)
    assert not torch.equal(first, second)


def test_a_forked_process_draws_other_noise() -> None:
    generator = FreshGenerator(torch.device("cpu"))
    chosen = torch.Generator().manual_seed(1)  # a caller's own repeats, as a caller wants it
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        drawn = [float(torch.rand(1, generator=each)) for each in (generator, chosen)]
        os.write(writer, json.dumps(drawn).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = json.loads(os.read(reader, 1000))
    ours = [float(torch.rand(1, generator=each)) for each in (generator, chosen)]
    assert ours[0] != theirs[0]
    assert ours[1] == theirs[1]


def test_noise_that_may_underflow_is_refused() -> None:
    least = torch.finfo(torch.float64).tiny * 2**24  # of the noise on the mean of two examples
    for multiplier, refused in ((2.1e100 * least, False), (1.9e100 * least, True)):
        plan = Plan(4, sample_rate=0.5, clip_norm=1e-100, noise_multiplier=multiplier)
        optimizer = make_optimizer("dp_sgd", model(), unbudgeted(plan))
        with pytest.raises(DataError, match="may underflow") if refused else nullcontext():
            optimizer.step(*batch(0), cross_entropy)


def test_a_claim_needs_noise_that_cannot_be_drawn_again() -> None:
    """With a seed a run that is resumed would draw the noise of its first steps again."""
    allowance = Budget(service(linear_accountant), PLAN, epsilon=2.0, delta=1e-5)
    with pytest.raises(NoGuaranteeError, match=r"when the run is resumed.*NoBudget"):
        make_optimizer("dp_sgd", model(), allowance, generator=torch.Generator().manual_seed(3))
    fresh = FreshGenerator(torch.device("cpu"))
    assert make_optimizer("dp_sgd", model(), allowance, generator=fresh).steps_made == 0
    seeded = torch.Generator().manual_seed(3)
    assert make_optimizer("dp_sgd", model(), unbudgeted(PLAN), generator=seeded).steps_made == 0
