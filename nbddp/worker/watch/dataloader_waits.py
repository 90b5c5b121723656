"""Extend torch's ``DataLoader``: measure the waits for batches, and make it work after interrupts.

A ``DataLoader`` with persistent workers asks each worker at the start of an epoch to reset, and
counts the replies. After an interrupt, it takes the remaining replies for those of the next epoch,
or for its batches. Then that epoch fails with a ``KeyError``, waits forever, or gets wrong batches
(seen with torch 2.13).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, dataloader

from nbddp.worker.wrapping import wrap

# by sampler that shuffles: the epochs that this cell has completed
_completed: WeakKeyDictionary[Sampler[Any], list[int]] = WeakKeyDictionary()


def install_hooks() -> None:
    """Patch torch's loaders and samplers.

    If an epoch of a DataLoader cannot start, the next one starts with new workers. A sampler
    records each epoch that uses all its indices.
    """

    def reset(original: Any, self: Any, loader: Any, *args: Any, **options: Any) -> None:
        try:
            original(self, loader, *args, **options)
        except BaseException:
            if getattr(loader, "_iterator", None) is self:
                loader._iterator = None
            raise

    def iterate(original: Any, self: Any) -> Iterator[Any]:
        epoch, indices = getattr(self, "epoch", 0), original(self)

        def recorded() -> Iterator[Any]:
            yield from indices
            _completed.setdefault(self, []).append(epoch)

        return recorded()

    wrap(dataloader._MultiProcessingDataLoaderIter, "_reset", reset)
    wrap(DistributedSampler, "__iter__", iterate)
    wrap(RandomSampler, "__iter__", iterate)


def clear_epochs() -> None:
    """Forget the epochs of the last cell."""
    _completed.clear()


def completed_epochs(sampler: Sampler[Any]) -> list[int]:
    """Return the epochs of a sampler that this cell has completed."""
    return _completed.get(sampler, [])


class DataLoaderWaits:
    """The waits of the main thread for batches of a ``DataLoader``, and so of an ``nbddp.loader``.

    For a loader without workers, the time to make a batch counts as a wait.
    """

    SHORTEST = 0.0001  # seconds; shorter waits are not recorded

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=20_000)
        self._pid = os.getpid()

    def install_hook(self) -> None:
        """Patch DataLoader to record each wait."""
        wrap(dataloader._BaseDataLoaderIter, "__next__", self._timed_next)

    def _timed_next(self, original: Any, batches: Any) -> Any:
        started_at = time.time()
        try:
            return original(batches)
        finally:
            self._add(started_at)

    def _add(self, started_at: float) -> None:
        now = time.time()
        is_main = threading.current_thread() is threading.main_thread()
        if now - started_at >= self.SHORTEST and is_main and os.getpid() == self._pid:
            self._spans.append((started_at, now))

    def clear(self) -> None:
        """Remove the recorded waits."""
        self._spans.clear()

    def pop_longest(self, base: int, limit: int) -> list[int]:
        """Remove and return new waits, at most the ``limit`` longest.

        The list holds the start and end of each, in microseconds since ``base``.
        """
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        if len(spans) > limit:
            spans = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:limit])
        return [int(at * 1e6) - base for span in spans for at in span]
