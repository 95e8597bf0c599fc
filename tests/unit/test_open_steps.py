"""A step is released once, by one process and one thread; unfinished, it ends the run."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.support.small_models import unbudgeted
from tests.support.stub_service import linear_accountant, service
from training_client.budget import Budget, NoBudget
from training_client.errors import NoGuaranteeError, TrainingStoppedError
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer, private_batches
from training_client.optimizers.torch_optimizers import NoisyTorchOptimizer
from training_client.plan import Plan
from training_client.private_step import Loss, Transform
from training_client.private_step.clipped_sum import ClippedSum
from training_client.private_step.private_sum import PrivateSum
from training_client.private_step.sampling import BallsInBinsSampler

RECORDS, BINS = 40, 4
POISSON = Plan(RECORDS, 0.5, clip_norm=1.0, noise_multiplier=1.0)
BALLS_IN_BINS = Plan.balls_in_bins(RECORDS, BINS, clip_norm=1.0, noise_multiplier=1.0)
EXAMPLES = torch.arange(RECORDS).float()[:, None].repeat(1, 6)
LABELS = torch.arange(RECORDS) % 4


class Records(Dataset[Any]):
    """Records that show their own number."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return EXAMPLES[index], LABELS[index]


def budget(steps: int = 20, plan: Plan = POISSON) -> Budget:
    """Return a budget of a number of steps, without a ledger."""
    return Budget(service(linear_accountant), plan, epsilon=1e9, delta=1e-5, steps=steps)


def optimizer_of(allowance: Any, name: str = "dp_sgd") -> PrivateOptimizer:
    """Return an optimizer of a linear layer."""
    return make_optimizer(name, nn.Linear(6, 4), allowance)


def step_with(optimizer: PrivateOptimizer, rows: torch.Tensor) -> float:
    """Make a step with the records of these numbers."""
    return optimizer.step(EXAMPLES[rows], LABELS[rows], cross_entropy)


# --- processes and threads


def run_in_fork(function: Callable[[], object]) -> str:
    """Call a function in a forked process; return the error that it stopped with there."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            function()
            os.write(writer, b"nothing")
        except TrainingStoppedError as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return said.read()


@pytest.mark.parametrize("make", [budget, lambda: unbudgeted(POISSON)])
def test_a_fork_releases_no_step_that_was_taken_before_it(make: Callable[[], Any]) -> None:
    optimizer = optimizer_of(make())
    examples, labels = next(private_batches(optimizer, Records()))
    for _ in range(2):
        said = run_in_fork(lambda: optimizer.step(examples, labels, cross_entropy))
        assert "NoGuaranteeError: the optimizer belongs to this process's parent" in said
    optimizer.step(examples, labels, cross_entropy)
    assert optimizer.steps_made == 1


def test_a_fork_reads_no_sum_that_was_computed_before_it() -> None:
    private_sum = PrivateSum(nn.Linear(6, 4), budget())
    private_sum.expect_examples(len(EXAMPLES))
    released = private_sum.release(EXAMPLES, LABELS, cross_entropy, Transform(1.0))
    assert "belongs to this process's parent" in run_in_fork(released.to_tensors)
    released.to_tensors()


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def count_successes(function: Callable[[], object], threads: int = 6) -> int:
    """Call a function in several threads at once; return how many calls raised nothing."""
    barrier, done = threading.Barrier(threads), list[int]()

    def call() -> None:
        barrier.wait()
        try:
            function()
        except (TrainingStoppedError, RuntimeError, IndexError):
            return
        done.append(1)

    started = [threading.Thread(target=call) for _ in range(threads)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return len(done)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_release_a_step_once() -> None:
    """The examples are none, so that threads meet at the checks and not in the model."""
    for _ in range(100):
        private_sum = PrivateSum(nn.Linear(6, 4), budget(steps=1))
        private_sum.take()
        private_sum.expect_examples(0)
        of = EXAMPLES[:0], LABELS[:0], cross_entropy, Transform(1.0)
        assert count_successes(lambda: private_sum.release(*of)) == 1  # noqa: B023


@pytest.mark.slow
@pytest.mark.usefixtures("frequent_switches")
def test_threads_read_a_noisy_mean_once() -> None:
    """At most once, and in most rounds once."""
    read = list[int]()
    for _ in range(100):
        private_sum = PrivateSum(nn.Linear(6, 4), unbudgeted(POISSON))
        released = private_sum.release(EXAMPLES, LABELS, cross_entropy, Transform(1.0))
        read.append(count_successes(released.to_tensors))
    assert max(read) == 1
    assert sum(read) > 50


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_an_open_step_is_not_copied(copied: Callable[[Any], Any]) -> None:
    private_sum = PrivateSum(nn.Linear(6, 4), unbudgeted(POISSON))
    of = EXAMPLES, LABELS, cross_entropy, Transform(1.0)
    private_sum.take()
    with pytest.raises(NoGuaranteeError, match="a copy would release it again"):
        copied(private_sum)
    private_sum.release(*of).to_tensors()
    copied(private_sum).release(*of).to_tensors()


def test_a_copied_noisy_mean_is_read_once() -> None:
    private_sum = PrivateSum(nn.Linear(6, 4), unbudgeted(POISSON))
    released = private_sum.release(EXAMPLES, LABELS, cross_entropy, Transform(1.0))
    again = copy.copy(released)
    with pytest.raises(NoGuaranteeError, match="a copy would release it again"):
        copy.deepcopy(released)
    released.to_tensors()
    with pytest.raises(RuntimeError, match="can be read once"):
        again.to_tensors()


# --- steps that fail


def train_and_skip(optimizer: PrivateOptimizer, loss: Loss = cross_entropy) -> None:
    """Train, and leave out each batch for which memory does not suffice."""
    for examples, labels in private_batches(optimizer, Records()):
        with suppress(torch.OutOfMemoryError):
            optimizer.step(examples, labels, loss)


@pytest.mark.parametrize("name", ["dp_sgd", "pi_adam", "adadp"])
def test_a_sum_that_does_not_fit_into_memory_ends_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = ClippedSum.write_block

    def write_block(total: ClippedSum, *of: Any) -> None:
        if total.weights is not None and len(total.weights) > RECORDS / 2:
            raise torch.OutOfMemoryError
        genuine(total, *of)

    monkeypatch.setattr(ClippedSum, "write_block", write_block)
    optimizer = optimizer_of(NoBudget(POISSON, 50, "a test"), name)
    with pytest.raises(NoGuaranteeError, match="not finished"):
        train_and_skip(optimizer)
    assert optimizer.steps_made < 50


def test_an_update_that_does_not_fit_into_memory_ends_the_run() -> None:
    """The batch is in memory beside it."""
    batches: list[int] = []

    class LittleMemory(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if batches[-1] > RECORDS / 2:
                raise torch.OutOfMemoryError
            return super().step(closure)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        batches.append(len(targets))
        return cross_entropy(outputs, targets)

    optimizer = NoisyTorchOptimizer(
        nn.Linear(6, 4), NoBudget(POISSON, 50, "a test"), lambda each: LittleMemory(each, lr=0.1)
    )
    with pytest.raises(NoGuaranteeError, match="not finished"):
        train_and_skip(optimizer, loss)
    assert optimizer.steps_made < 50


def test_a_noisy_mean_that_is_not_read_ends_the_run() -> None:
    private_sum = PrivateSum(nn.Linear(6, 4), unbudgeted(POISSON))
    of = EXAMPLES, LABELS, cross_entropy, Transform(1.0)
    private_sum.release(*of)
    with pytest.raises(NoGuaranteeError, match="step 1 was taken from the budget but not finished"):
        private_sum.release(*of)


# --- checkpoints


@pytest.mark.parametrize("made", [1, 7])
@pytest.mark.parametrize("name", ["dp_sgd", "pi_adam"])
def test_a_checkpoint_is_not_loaded_into_an_open_step(name: str, made: int) -> None:
    """The step would get another number, and the one that was charged be released again."""
    earlier, optimizer = optimizer_of(budget(), name), optimizer_of(budget(), name)
    for _ in range(made):
        earlier.expect_examples(9)
        step_with(earlier, torch.arange(9))
    examples, labels = next(private_batches(optimizer, Records()))
    with pytest.raises(NoGuaranteeError, match="Load it into a new optimizer, before a batch"):
        optimizer.load_state_dict(earlier.state_dict())
    optimizer.step(examples, labels, cross_entropy)
    assert optimizer.steps_made == optimizer.allowance.taken == 1


def test_an_epoch_is_not_begun_while_a_step_is_open() -> None:
    optimizer = optimizer_of(budget(plan=BALLS_IN_BINS))
    optimizer.continue_epoch(BallsInBinsSampler(RECORDS, BINS))
    optimizer.take()
    with pytest.raises(NoGuaranteeError, match="step 1 was taken from the budget but not finished"):
        optimizer.continue_epoch(BallsInBinsSampler(RECORDS, BINS))


# --- epochs of balls-in-bins sampling


class Epochs:
    """The records of each step, in epochs as they are charged."""

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self.optimizer, self.steps = optimizer, dict[int, list[int]]()

    def step(self, rows: torch.Tensor) -> None:
        """Make a step with these records."""
        step_with(self.optimizer, rows)
        self.steps[self.optimizer.steps_made] = rows.tolist()

    def require_no_record_twice(self) -> None:
        """Raise if a record is in two batches of one charged epoch."""
        for epoch in {(step - 1) // BINS for step in self.steps}:
            used = [self.steps.get(BINS * epoch + place, []) for place in range(1, BINS + 1)]
            assert max(Counter(itertools.chain(*used)).values(), default=0) <= 1


@pytest.fixture
def epochs() -> Iterator[Epochs]:
    """Steps with balls-in-bins sampling; at the end no record may be in two of an epoch."""
    found = Epochs(optimizer_of(budget(40, BALLS_IN_BINS)))
    yield found
    found.require_no_record_twice()


@pytest.mark.parametrize(("workers", "made"), [(0, 10), (1, 1), (2, 1)])
def test_loops_with_one_sampler_stay_in_its_epoch(epochs: Epochs, workers: int, made: int) -> None:
    """Workers draw ahead: the sampler is then in another epoch than the steps made."""
    sampler, refused = BallsInBinsSampler(RECORDS, BINS), ""
    try:
        for _ in range(10):
            batches = private_batches(epochs.optimizer, Records(), sampler=sampler, workers=workers)
            for examples, _ in itertools.islice(batches, 1):
                epochs.step(examples[:, 0].long())
    except NoGuaranteeError as error:
        refused = str(error)
    assert epochs.optimizer.steps_made == made
    assert ("train in one loop, or with a new sampler" in refused) == bool(workers)


def test_a_sampler_that_drew_ahead_into_another_epoch_is_refused(epochs: Epochs) -> None:
    """It is at the same place, but of another epoch."""
    sampler = BallsInBinsSampler(RECORDS, BINS)
    epochs.optimizer.continue_epoch(sampler)
    epochs.step(sampler.draw())
    for _ in range(BINS):
        sampler.draw()
    with pytest.raises(NoGuaranteeError, match="drew 1 batches of another epoch, and 1 steps"):
        epochs.optimizer.continue_epoch(sampler)


def test_a_loop_without_a_known_sampler_makes_no_step(epochs: Epochs) -> None:
    """Neither is a step charged."""
    rows = BallsInBinsSampler(RECORDS, BINS).draw()
    with pytest.raises(NoGuaranteeError, match=r"call continue_epoch\(sampler\) before its first"):
        epochs.step(rows)
    with pytest.raises(NoGuaranteeError, match=r"call continue_epoch\(sampler\) before its first"):
        epochs.optimizer.take()
    with pytest.raises(NoGuaranteeError, match="expected the sampler that draws the batches"):
        epochs.optimizer.continue_epoch(0)  # type: ignore[arg-type]
    assert epochs.optimizer.allowance.taken == 0


@pytest.mark.parametrize("mistake", ["new sampler", "same batch", "batch left out", "ahead"])
def test_a_loop_of_ones_own_uses_each_batch_of_its_sampler_once(
    epochs: Epochs, mistake: str
) -> None:
    sampler = BallsInBinsSampler(RECORDS, BINS)
    epochs.optimizer.continue_epoch(sampler)
    for _ in range(6):
        rows = sampler.draw()
        epochs.step(rows)
    if mistake == "new sampler":
        rows = BallsInBinsSampler(RECORDS, BINS).draw()
    for _ in range({"batch left out": 2, "ahead": BINS + 1}.get(mistake, 0)):
        rows = sampler.draw()
    with pytest.raises(NoGuaranteeError, match="each step needs the next batch of one epoch"):
        epochs.step(rows)
    assert epochs.optimizer.allowance.taken == 6


def test_a_new_sampler_begins_an_epoch_that_is_charged_by_itself(epochs: Epochs) -> None:
    for _ in range(3):
        sampler = BallsInBinsSampler(RECORDS, BINS)
        epochs.optimizer.continue_epoch(sampler)
        for _ in range(3):
            epochs.optimizer.take()
            epochs.step(sampler.draw())
    assert list(epochs.steps) == [1, 2, 3, 5, 6, 7, 9, 10, 11]


@pytest.mark.parametrize("writer", ["this version", "an earlier version"])
def test_a_restored_epoch_goes_on_in_a_new_optimizer(epochs: Epochs, writer: str) -> None:
    first = Epochs(optimizer_of(budget(40, BALLS_IN_BINS)))
    sampler = BallsInBinsSampler(RECORDS, BINS)
    first.optimizer.continue_epoch(sampler)
    for _ in range(BINS + 2):
        first.step(sampler.draw())
    epochs.steps.update(first.steps)
    state = sampler.state_dict()
    if writer == "an earlier version":
        del state["epoch"]
    epochs.optimizer.load_state_dict(first.optimizer.state_dict())
    restored = BallsInBinsSampler(RECORDS, BINS)
    restored.load_state_dict(state)
    epochs.optimizer.continue_epoch(restored)
    for _ in range(BINS):
        epochs.step(restored.draw())
    assert list(epochs.steps) == list(range(1, 2 * BINS + 3))


def test_drawing_batches_without_steps_does_not_restore_an_epoch(epochs: Epochs) -> None:
    """A new sampler puts the records into other batches than the one before."""
    first, sampler = optimizer_of(budget(40, BALLS_IN_BINS)), BallsInBinsSampler(RECORDS, BINS)
    first.continue_epoch(sampler)
    step_with(first, sampler.draw())
    epochs.optimizer.load_state_dict(first.state_dict())
    other = BallsInBinsSampler(RECORDS, BINS)
    other.draw()
    with pytest.raises(NoGuaranteeError, match="drew 1 batches of another epoch, and 1 steps"):
        epochs.optimizer.continue_epoch(other)


def test_a_state_that_is_loaded_again_repeats_no_batch(epochs: Epochs) -> None:
    sampler = BallsInBinsSampler(RECORDS, BINS)
    epochs.optimizer.continue_epoch(sampler)
    epochs.step(sampler.draw())
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    epochs.optimizer.continue_epoch(sampler)  # the same epoch, at the same place
    epochs.step(sampler.draw())
    sampler.load_state_dict(state)
    with pytest.raises(NoGuaranteeError, match="drew 1 batches of its epoch, and 2 steps"):
        epochs.optimizer.continue_epoch(sampler)
    with pytest.raises(NoGuaranteeError, match="each step needs the next batch"):
        epochs.step(sampler.draw())
