"""Extend torch's ``DataLoader``: measure the waits for batches, and make it work after interrupts.

A ``DataLoader`` with persistent workers asks each worker at the start of an epoch to reset, and
counts the replies. After an interrupt, it takes the remaining replies for those of the next epoch,
or for its batches. Then that epoch fails with a ``KeyError``, waits forever, or gets wrong batches
(seen with torch 2.13).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, dataloader

from nbddp.worker.wrapping import wrap

SHORTEST_WAIT = 0.0001  # seconds; shorter waits are not recorded

# by sampler that shuffles: the epochs that this cell has completed
_completed: WeakKeyDictionary[Sampler[Any], list[int]] = WeakKeyDictionary()
# start and end of the main thread's waits for batches of a DataLoader, and so of an nbddp.loader.
# For a loader without workers, the time to make a batch counts as a wait.
_waits: deque[tuple[float, float]] = deque(maxlen=20_000)


def install_hooks() -> None:
    """Patch torch's loaders and samplers.

    If an epoch of a DataLoader cannot start, the next one starts with new workers. A sampler
    records each epoch that uses all its indices, and a DataLoader records each wait for a batch.
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

    def timed_next(original: Any, self: Any) -> Any:
        started_at = time.time()
        try:
            return original(self)
        finally:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and time.time() - started_at >= SHORTEST_WAIT:
                _waits.append((started_at, time.time()))

    wrap(dataloader._MultiProcessingDataLoaderIter, "_reset", reset)
    wrap(dataloader._BaseDataLoaderIter, "__next__", timed_next)
    wrap(DistributedSampler, "__iter__", iterate)
    wrap(RandomSampler, "__iter__", iterate)


def begin_cell() -> None:
    """Forget the epochs and the waits of the last cell."""
    _completed.clear()
    _waits.clear()


def completed_epochs(sampler: Sampler[Any]) -> list[int]:
    """Return the epochs of a sampler that this cell has completed."""
    return _completed.get(sampler, [])


def pop_longest_waits(base: int, limit: int) -> list[int]:
    """Remove and return the waits for batches, at most the ``limit`` longest.

    The list holds the start and end of each, in microseconds since ``base``.
    """
    spans = [_waits.popleft() for _ in range(len(_waits))]
    if len(spans) > limit:
        spans = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:limit])
    return [int(at * 1e6) - base for span in spans for at in span]
