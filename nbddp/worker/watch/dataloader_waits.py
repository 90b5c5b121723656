"""What nbddp adds to torch's ``DataLoader``: how long it is waited for, and a mend.

A ``DataLoader`` that keeps its workers works again when it was interrupted as an epoch began.

It asks each worker to begin anew and counts their answers. Where an interrupt ends that, the
answers that are left are taken for those of the next epoch, or for batches of it: that one fails
with a ``KeyError``, or waits for ever, or gets wrong batches (seen with torch 2.13).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, dataloader

# of each sampler that shuffles, the epochs that this cell went through to the end
_completed: WeakKeyDictionary[Sampler[Any], list[int]] = WeakKeyDictionary()


def reset_interrupted_loaders() -> None:
    """From here on a loader that could not begin an epoch has new workers for the next one."""
    kind: Any = dataloader._MultiProcessingDataLoaderIter
    original = kind._reset

    @functools.wraps(original)
    def reset(self: Any, loader: Any, *args: Any, **options: Any) -> None:
        try:
            original(self, loader, *args, **options)
        except BaseException:
            if getattr(loader, "_iterator", None) is self:
                loader._iterator = None
            raise

    kind._reset = reset


def record_epochs() -> None:
    """From here on, note each epoch that goes through all that a sampler of torch's gives."""
    _record_epochs_of(DistributedSampler)
    _record_epochs_of(RandomSampler)


def _record_epochs_of(kind: Any) -> None:
    original = kind.__iter__

    @functools.wraps(original)
    def iterate(self: Any) -> Iterator[Any]:
        epoch, indices = getattr(self, "epoch", 0), original(self)

        def recorded() -> Iterator[Any]:
            yield from indices
            _completed.setdefault(self, []).append(epoch)

        return recorded()

    kind.__iter__ = iterate


def clear_epochs() -> None:
    """A cell begins."""
    _completed.clear()


def completed_epochs(sampler: Sampler[Any]) -> list[int]:
    """Return the epochs that this cell went through to the end."""
    return _completed.get(sampler, [])


class DataLoaderWaits:
    """How long the main thread waits for each batch of a ``DataLoader``, and so of a loader's.

    What a loader without workers takes to make a batch is such a wait, too.
    """

    SHORTEST = 0.0001  # seconds: less is not worth telling

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=20_000)
        self._pid = os.getpid()

    def install_hook(self) -> None:
        """From here on each wait is noted."""
        kind: Any = dataloader._BaseDataLoaderIter
        original = kind.__next__
        add = self._add

        @functools.wraps(original)
        def timed_next(self: Any) -> Any:
            started_at = time.time()
            try:
                return original(self)
            finally:
                add(started_at)

        kind.__next__ = timed_next

    def _add(self, started_at: float) -> None:
        now = time.time()
        is_main = threading.current_thread() is threading.main_thread()
        if now - started_at >= self.SHORTEST and is_main and os.getpid() == self._pid:
            self._spans.append((started_at, now))

    def clear(self) -> None:
        """What was waited for before is forgotten."""
        self._spans.clear()

    def pop_longest(self, base: int, limit: int) -> list[int]:
        """Begin and end of those that are new, in microseconds since ``base``; only the longest."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        if len(spans) > limit:
            spans = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:limit])
        return [int(at * 1e6) - base for span in spans for at in span]
