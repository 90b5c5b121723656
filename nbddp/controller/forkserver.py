"""A forkserver of our own, warm before it is needed.

The process-wide forkserver of :mod:`multiprocessing` may already run, cold, for somebody else, and
would run the user's ``__main__`` in every rank. Ours has imported torch and IPython, ignores
Jupyter's interrupt, and tells a rank nothing of the kernel's ``__main__``.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import (
    forkserver,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    util,
)
from multiprocessing.context import set_spawning_popen
from typing import Any

PRELOAD = ["nbddp.worker.preload", __name__]


class Forkserver:
    """One helper process that ranks are forked from."""

    def __init__(self) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(PRELOAD)
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None when it was not started."""
        pid: int | None = self._server._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def warm_up(self) -> None:
        """Start the helper if it does not run; returns before its imports are done."""
        with self._lock:
            # until it has a session of its own, the interrupt button would reach it
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                _start_resource_tracker_apart()
                self._server.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def process(self, target: Callable[[Any], None], argument: Any, name: str) -> RankProcess:
        """A process, not yet started, that will be forked from the helper."""
        return RankProcess(self, target, argument, name)

    def connect(self) -> tuple[int, int]:
        """Fork a child that waits for its work: a sentinel of its end, and a pipe to it."""
        self.warm_up()
        sentinel, writer = self._server.connect_to_new_process([])
        return sentinel, writer

    def close(self) -> None:
        """End the helper and wait until it is gone.

        It holds nothing, and would take half a second to say goodbye to torch.
        """
        with self._lock:
            if self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
            self._server._stop()  # type: ignore[attr-defined]


class RankProcess(process.BaseProcess):
    """A process forked from our helper; not daemonic, so that a DataLoader can have workers."""

    _start_method = "forkserver"

    def __init__(
        self, server: Forkserver, target: Callable[[Any], None], argument: Any, name: str
    ) -> None:
        super().__init__(target=target, args=(argument,), name=name, daemon=False)
        self.server: Forkserver | None = server

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}

    @staticmethod
    def _Popen(process_obj: RankProcess) -> _RankPopen:  # noqa: N802 - multiprocessing's name
        return _RankPopen(process_obj)


class _RankPopen(popen_forkserver.Popen):
    """As its base, but asks our helper and sends no word of the kernel's ``__main__``."""

    def _launch(self, process_obj: RankProcess) -> None:
        if process_obj.server is None:
            raise RuntimeError("a rank cannot be started from within a rank")
        message = _pickled(self, {"name": process_obj.name}, process_obj)
        self.sentinel, writer = process_obj.server.connect()
        keep_alive = os.dup(writer)  # closes with the kernel, which tells the rank
        self.finalizer = util.Finalize(self, _close_all, (keep_alive, self.sentinel))
        with open(writer, "wb", closefd=True) as pipe:  # noqa: PTH123 - a descriptor, no path
            pipe.write(message)
        self.pid = forkserver.read_signed(self.sentinel)


def _start_resource_tracker_apart() -> None:
    """Start multiprocessing's resource tracker outside of the kernel's process group.

    It ignores SIGTERM, and ipykernel waits at shutdown until every child in its own group has
    obeyed: with the tracker among them a kernel took 2.6 s to end instead of 0.1 s.
    """
    tracker = resource_tracker._resource_tracker
    with tracker._lock:  # type: ignore[attr-defined]
        if tracker._fd is not None:  # type: ignore[attr-defined]
            return  # somebody started it before us
        reader, writer = os.pipe()
        code = "from multiprocessing.resource_tracker import main; main(3)"
        tracker._pid = os.posix_spawn(  # type: ignore[attr-defined]
            sys.executable,
            [sys.executable, "-c", code],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, reader, 3)],
            setpgroup=0,
        )
        tracker._fd = writer  # type: ignore[attr-defined]
        os.close(reader)


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _pickled(popen: _RankPopen, *items: Any) -> memoryview:
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        for item in items:
            reduction.dump(item, buffer)
    finally:
        set_spawning_popen(None)
    return buffer.getbuffer()
