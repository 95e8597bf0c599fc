"""Balls-in-bins sampling for the training loops of Opacus, Lightning and Hugging Face.

    from training_client.integrations.opacus.balls_in_bins import balls_in_bins_loader

    loader = balls_in_bins_loader(DataLoader(data, batch_size=50))
    model, optimizer, loader = PrivacyEngine().make_private(
        ..., data_loader=loader, poisson_sampling=False
    )

A pass over the loader is an epoch: each record is in one of its batches, drawn uniformly and anew
in each pass. An epoch is charged as a whole before its first step, even if the pass ends early.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader, Sampler

from training_client.errors import NoGuaranteeError
from training_client.integrations.opacus.batch_draws import count_draws
from training_client.plan import BALLS_IN_BINS
from training_client.private_step.noise import draw_key
from training_client.private_step.sampling import draw_epoch


class BallsInBinsBatches(Sampler[list[int]]):
    """A batch sampler that puts each record into one random batch of every epoch.

    Attributes:
        sampling: its name in a plan.
        num_samples: N, the number of records.
        bins: b, the number of batches in a pass.
        sample_rate: 1/b, the probability of each record to be in a batch.
        generator: a key of each pass is drawn from it; None for the operating system.
        epochs: the number of passes begun.
        unused, prefetched, is_drawing, requires_steps: see `batch_draws.COUNTERS`.

    Args:
        num_samples: see above.
        bins: see above.
        generator: see above.
    """

    sampling = BALLS_IN_BINS

    def __init__(
        self, num_samples: int, bins: int, generator: torch.Generator | None = None
    ) -> None:
        self.num_samples, self.bins, self.sample_rate = num_samples, bins, 1 / bins
        self.generator = generator
        self.epochs = self.unused = self.prefetched = 0
        self.is_drawing = self.requires_steps = False

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.bins

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the batches of an epoch, and count them.

        Raises:
            NoGuaranteeError: a batch had no step, or another pass has begun.
        """
        return _count_epoch(self)

    def draw_batches(self) -> Iterator[list[int]]:
        """Draw all batches of one epoch, as lists of record indices."""
        self.epochs += 1
        epoch = self.epochs
        for batch in draw_epoch(self.num_samples, self.bins, draw_key(self.generator)):
            if self.epochs != epoch:
                raise NoGuaranteeError(
                    "another pass over the loader has begun, and with it an epoch that is charged "
                    "by itself: iterate over one at a time"
                )
            yield batch.tolist()


_count_epoch = count_draws(BallsInBinsBatches.draw_batches)


def balls_in_bins_loader(loader: DataLoader[Any], bins: int | None = None) -> DataLoader[Any]:
    """Return a loader of the same dataset whose batches are drawn by balls-in-bins sampling.

    Its batches have any size, empty ones too. Give it to `make_private` with
    `poisson_sampling=False`; the optimizer divides by the constant N/b.

    Args:
        loader: the loader of an ordinary training loop, shuffled or not.
        bins: the number of batches in an epoch; by default as many as `loader` has.
    """
    collate = DPDataLoader.from_data_loader(loader).collate_fn
    collate([loader.dataset[0]])  # it learns the form of a batch, since the first may be empty
    records = len(loader.dataset)  # type: ignore[arg-type]
    return DataLoader(
        loader.dataset,
        batch_sampler=BallsInBinsBatches(records, bins or len(loader)),
        collate_fn=collate,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
