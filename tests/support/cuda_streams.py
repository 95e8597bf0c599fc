"""Stubs of CUDA's streams and copies, for machines without a device: what they do is listed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from training_client.optimizers import private_batches

DEVICE = torch.device("cuda", 0)
USERS = "the stream that uses batches"
COPIES = "the stream of copies"


class StubStream:
    """A stream whose events are listed when a program waits for them."""

    def __init__(self, events: list[tuple[Any, ...]], name: str) -> None:
        self.events, self.name, self.copied = events, name, 0

    def record_event(self) -> StubEvent:
        self.copied += 1
        return StubEvent(self.events, self.copied - 1)


class StubEvent:
    """An event after the copy of a batch with this number."""

    def __init__(self, events: list[tuple[Any, ...]], number: int) -> None:
        self.events, self.number = events, number

    def synchronize(self) -> None:
        self.events.append(("wait", self.number))


def stub_cuda(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace streams, copies to `DEVICE` and pinned memory; return the list of what they do.

    Copies stay on the CPU. Entries: ("pin", whether loaders pin), ("copy", stream, first value),
    ("wait", number of the batch), ("record", stream, first value).
    """
    events: list[tuple[Any, ...]] = []
    streams = [StubStream(events, USERS)]
    plain_copy = torch.Tensor.to

    def make_stream(device: torch.device) -> StubStream:
        assert device == DEVICE
        return StubStream(events, COPIES)

    @contextmanager
    def use_stream(stream: StubStream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def copy(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        if given[:1] != (DEVICE,):
            return plain_copy(tensor, *given, **options)
        assert options == {"non_blocking": True}
        events.append(("copy", streams[-1].name, _first(tensor)))
        return tensor.clone()

    def record(tensor: torch.Tensor, stream: StubStream) -> None:
        events.append(("record", stream.name, _first(tensor)))

    class PinningLoader(DataLoader[Any]):
        def __init__(self, *given: Any, pin_memory: bool, **options: Any) -> None:
            events.append(("pin", pin_memory))
            super().__init__(*given, **options)

    patch.setattr(torch.cuda, "Stream", make_stream)
    patch.setattr(torch.cuda, "stream", use_stream)
    patch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    patch.setattr(torch.Tensor, "to", copy)
    patch.setattr(torch.Tensor, "record_stream", record)
    patch.setitem(private_batches.__globals__, "DataLoader", PinningLoader)
    return events


def _first(tensor: torch.Tensor) -> float | None:
    """Return a tensor's first value; None if it has none."""
    return float(tensor.reshape(-1)[0]) if tensor.numel() else None
