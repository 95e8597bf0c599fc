"""The number of batches that data loaders draw before the training loop uses them."""

from __future__ import annotations

import sys
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_ACCELERATE_LOADERS: Final = "accelerate.data_loader"  # draw one batch more, to detect the last


def count_prefetched_batches() -> int:
    """Return how many batches ahead the loaders on the call stack fetch.

    The loaders are found among the callers on the stack, since a framework may make its own loader
    of the same sampler.
    """
    frame, prefetched = sys._getframe(), dict[int, int]()
    while (above := frame.f_back) is not None:
        frame = above
        caller = frame.f_locals.get("self")
        prefetched[id(caller)] = _prefetch_size(caller, frame.f_globals.get("__name__"))
    return sum(prefetched.values())


def _prefetch_size(caller: Any, module: Any) -> int:
    """Return how many batches ahead a loader on the call stack fetches; 0 for other callers."""
    if isinstance(caller, _MultiProcessingDataLoaderIter):
        return int(caller._num_workers * caller._prefetch_factor)
    return int(isinstance(caller, DataLoader) and module == _ACCELERATE_LOADERS)
