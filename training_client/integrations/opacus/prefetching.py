"""The number of batches that data loaders draw before the training loop uses them."""

from __future__ import annotations

import sys
from typing import Final

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_ACCELERATE_LOADERS: Final = "accelerate.data_loader"  # draw one batch more, to detect the last


def count_prefetched_batches() -> int:
    """Return how many batches the data loaders now in use (on the call stack) fetch ahead.

    The loaders are found among the callers on the stack, since a framework may make its own loader
    of the same sampler.
    """
    frame, prefetched = sys._getframe(), dict[int, int]()
    while (above := frame.f_back) is not None:
        frame = above
        method_owner, module_name = frame.f_locals.get("self"), frame.f_globals.get("__name__")
        prefetched[id(method_owner)] = _prefetch_size(method_owner, module_name)
    return sum(prefetched.values())


def _prefetch_size(method_owner: object, module_name: object) -> int:
    """Return how many batches ahead a stack frame's data loader fetches; 0 without a loader."""
    if isinstance(method_owner, _MultiProcessingDataLoaderIter):
        return int(method_owner._num_workers * method_owner._prefetch_factor)
    return int(isinstance(method_owner, DataLoader) and module_name == _ACCELERATE_LOADERS)
