"""The thread that waits for processes to end, and nothing else."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from nbddp.launch.launcher import RankHandle

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that those which were killed last get to be gone when all is closed


class ExitWatcher:
    """Calls back, once, for every process that ends."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._watched: dict[int, tuple[RankHandle, Callable[[RankHandle], Any]]] = {}
        self._thread = threading.Thread(target=self._watch_all, name="nbddp-exits", daemon=True)
        self._thread.start()

    def watch(self, handle: RankHandle, on_exit: Callable[[RankHandle], Any]) -> None:
        """Call ``on_exit(handle)`` on the watcher's thread when the process ends."""
        self._watched[handle.sentinel] = (handle, on_exit)
        self._writer.send("watch")  # wakes the thread, which then sees the new entry

    def close(self) -> None:
        """End the thread, once those that were killed are gone."""
        self._writer.send("close")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _watch_all(self) -> None:
        closes_at: float | None = None
        while closes_at is None or (self._watched and time.monotonic() < closes_at):
            left = None if closes_at is None else max(0.0, closes_at - time.monotonic())
            for ready in wait([self._reader, *list(self._watched)], left):
                if isinstance(ready, int):
                    self._tell(*self._watched.pop(ready))
                elif self._reader.recv() == "close":
                    closes_at = time.monotonic() + PATIENCE

    def _tell(self, handle: RankHandle, on_exit: Callable[[RankHandle], Any]) -> None:
        try:
            on_exit(handle)
        except Exception:  # the others' ends must still be seen
            logger.exception("nbddp could not tell of the end of process %s", handle.pid)
