"""A data set: examples and labels, split into a training set and a test set."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

ImageShape = tuple[int, int, int]


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set as tensors, with one example per row.

    Attributes:
        train_examples, test_examples: float32, one example per row.
        train_labels, test_labels: int64 class numbers, starting at 0.
        classes: the number of classes; public.
        images: (channels, height, width) if each row is an image in that layout.
        frequencies: for each input, the share of training examples in which it is not 0. It is
            computed from the training set, so it is set only where it counts as public.
    """

    train_examples: torch.Tensor
    train_labels: torch.Tensor
    test_examples: torch.Tensor
    test_labels: torch.Tensor
    classes: int
    images: ImageShape | None = None
    frequencies: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        """The number of features of an example."""
        return self.train_examples.shape[1]

    def to(self, device: torch.device) -> Dataset:
        """Return the data set moved to another device."""
        frequencies = self.frequencies
        return replace(
            self,
            train_examples=self.train_examples.to(device),
            train_labels=self.train_labels.to(device),
            test_examples=self.test_examples.to(device),
            test_labels=self.test_labels.to(device),
            frequencies=None if frequencies is None else frequencies.to(device),
        )

    def shuffled(self) -> Dataset:
        """Return the data set with its training examples in a fixed, public random order.

        Files are often sorted by class; without shuffling, the first rows, which may be given up as
        public examples, would not be a sample of the rest.
        """
        order = torch.randperm(len(self.train_labels), generator=torch.Generator().manual_seed(0))
        return self.select(order)

    def select(self, rows: torch.Tensor | slice) -> Dataset:
        """Return the data set with only these rows of the training set."""
        return replace(
            self,
            train_examples=self.train_examples[rows],
            train_labels=self.train_labels[rows],
        )

    def split_public(self, rows: int) -> tuple[Dataset, tuple[torch.Tensor, torch.Tensor]]:
        """Split off the first `rows` training examples as public; return private and public data.

        Args:
            rows: the number of public examples. They are not protected, and no private step sees
                them.

        Returns:
            The private data set, and the public examples with their labels.
        """
        public = self.select(slice(rows))
        return self.select(slice(rows, None)), (public.train_examples, public.train_labels)
