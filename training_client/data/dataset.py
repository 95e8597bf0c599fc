"""Examples and labels, split into what is trained on and what is tested on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

Images = tuple[int, int, int]


@dataclass(frozen=True)
class Dataset:
    """Examples as rows, with their labels.

    Attributes:
        train_examples, test_examples: float32, one row an example.
        train_labels, test_labels: int64 classes from 0.
        classes: how many there are; public.
        images: channels, height and width, if a row is an image in that order.
        frequencies: of each input, the share of training examples that have it; only where this
            counts as public, for it is computed from the training set.
    """

    train_examples: torch.Tensor
    train_labels: torch.Tensor
    test_examples: torch.Tensor
    test_labels: torch.Tensor
    classes: int
    images: Images | None = None
    frequencies: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        """Numbers in an example."""
        return self.train_examples.shape[1]

    def to(self, device: torch.device) -> Dataset:
        """The same data on another device."""
        known = self.frequencies
        return replace(
            self,
            train_examples=self.train_examples.to(device),
            train_labels=self.train_labels.to(device),
            test_examples=self.test_examples.to(device),
            test_labels=self.test_labels.to(device),
            frequencies=None if known is None else known.to(device),
        )

    def shuffled(self) -> Dataset:
        """The training set in an order that was drawn once for all and is no secret.

        Files are often sorted by class: then the first rows would not be a sample of the rest.
        """
        order = torch.randperm(len(self.train_labels), generator=torch.Generator().manual_seed(0))
        return self.rows(order)

    def rows(self, which: torch.Tensor | slice) -> Dataset:
        """The same with only these rows of the training set."""
        return replace(
            self,
            train_examples=self.train_examples[which],
            train_labels=self.train_labels[which],
        )

    def without_public(self, rows: int) -> tuple[Dataset, tuple[torch.Tensor, torch.Tensor]]:
        """The private rest, and the first rows of the training set, which count as public.

        Args:
            rows: how many are given up; none of them is trained on, or protected.
        """
        public = self.rows(slice(rows))
        return self.rows(slice(rows, None)), (public.train_examples, public.train_labels)
