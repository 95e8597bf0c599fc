"""How many batches a Poisson sampler has drawn that no step was made of yet.

A step is charged as one of a batch drawn for it alone. Several of one batch see the same records,
and are charged far too little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from training_client.errors import NoGuaranteeError
from training_client.integrations.checks import held_to_rate, poisson_sampler


class Draws:
    """The batches of a loader, counted where they are drawn, from now on.

    What is counted is an upper bound on what the program was given: workers have batches drawn
    ahead, and a batch may be left unused. So many further steps of one batch are not noticed.

    The sampler itself counts: loaders that split its batches, or prefetch them, share it, and so
    do several optimizers.

    Args:
        loader: that samples by Poisson.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler = poisson_sampler(loader)
        held_to_rate(self._sampler)  # before it draws
        if not hasattr(self._sampler, "unused"):
            self._sampler.__class__ = _counting(type(self._sampler))

    def require_unused(self) -> None:
        """Refuse a step if each batch drawn so far has had its own.

        Raises:
            NoGuaranteeError: it has.
        """
        if self._sampler.unused < 1:
            raise NoGuaranteeError(
                "each batch that was drawn has had its step, and a step is charged as one of a "
                "batch drawn for it alone: make one step of a batch, and take batches from the "
                "loader that make_private returns, or that BatchMemoryManager makes of it"
            )

    def use(self) -> None:
        """A step is made of a batch."""
        self._sampler.unused -= 1


def _counting(kind: Any) -> type:
    """A sampler's own class, and `unused`: batches drawn, empty ones too, less steps made.

    A loader does not let its sampler be replaced, and Python asks an object for its `__iter__` at
    its class.
    """

    def draw(sampler: Any) -> Iterator[Any]:
        for batch in kind.__iter__(sampler):
            sampler.unused += 1
            yield batch

    return type(kind.__name__, (kind,), {"__iter__": draw, "unused": 0})
