"""The thread that waits for processes to end, and nothing else."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from nbddp.controller.launcher import RankHandle


class ExitWatcher:
    """Calls back, once, for every process that ends."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._watched: dict[int, tuple[RankHandle, Callable[[RankHandle], Any]]] = {}
        self._thread = threading.Thread(target=self._run, name="nbddp-exits", daemon=True)
        self._thread.start()

    def watch(self, handle: RankHandle, on_exit: Callable[[RankHandle], Any]) -> None:
        """Call ``on_exit(handle)`` on the watcher's thread when the process ends."""
        self._watched[handle.sentinel] = (handle, on_exit)
        self._writer.send("watch")  # wakes the thread, which then sees the new entry

    def close(self) -> None:
        """End the thread."""
        self._writer.send("close")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        while True:
            for ready in wait([self._reader, *list(self._watched)]):
                if isinstance(ready, int):
                    handle, on_exit = self._watched.pop(ready)
                    on_exit(handle)
                elif self._reader.recv() == "close":
                    return
