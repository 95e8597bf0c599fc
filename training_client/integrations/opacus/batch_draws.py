"""The iteration of samplers that count their batches, each of which must have exactly one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from training_client.errors import NoGuaranteeError
from training_client.integrations.opacus.prefetching import count_prefetched_batches

DrawBatches = Callable[[Any], Iterator[Any]]
COUNTERS: Final[dict[str, int | bool]] = {  # the initial values of a counting sampler's attributes
    "unused": 0,  # batches drawn that had no step yet
    "prefetched": 0,  # batches that loaders draw before the loop uses them
    "is_drawing": False,  # a pass has begun and not ended
    "requires_steps": False,  # each batch must have its step
}


def count_draws(draw: DrawBatches) -> DrawBatches:
    """Wrap a sampler's `__iter__` to count its batches; raise if one got no step."""

    def draw_and_count(sampler: Any) -> Iterator[Any]:
        """Draw and count the batches of one pass over the data."""
        if sampler.is_drawing:  # the last pass was abandoned, with the batches prefetched in it
            sampler.unused -= min(sampler.unused, sampler.prefetched)
        sampler.is_drawing, sampler.prefetched = True, count_prefetched_batches()
        for batch in draw(sampler):
            require_steps(sampler)
            sampler.unused += 1
            yield batch
        sampler.is_drawing = False

    return draw_and_count


def require_steps(sampler: Any) -> None:
    """Raise if a batch drawn before got no optimizer step, apart from those prefetched."""
    missing = sampler.unused - sampler.prefetched
    if sampler.requires_steps and missing > 0:
        raise NoGuaranteeError(
            f"{missing} batch(es) were drawn and had no step. A record in them may be the reason, "
            "and no noise hides that. Make one step for each batch, even if it is empty; if a step "
            "fails or its loss is not finite, end the run instead of skipping the batch. Inspect "
            "examples in the dataset, not in the loader, and resume with ignore_data_skip=True"
        )
