"""A forkserver of our own, warm before it is needed, and warmer a little later.

The process-wide forkserver of :mod:`multiprocessing` may already run, cold, for somebody else, and
would run the user's ``__main__`` in every rank. Ours has imported torch and IPython, ignores
Jupyter's interrupt, and tells a rank nothing of the kernel's ``__main__``.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import (
    connection,
    forkserver,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    util,
)
from multiprocessing.context import set_spawning_popen
from typing import Any

FIRST = ["nbddp.worker.preload", __name__]  # what every rank needs
LATER = ["nbddp.worker.preload_ddp"]  # what the first DDP model would import in every rank
CAN_GROW = sys.version_info < (3, 14)  # from 3.14 on, a forkserver asks its clients for a key


class Forkserver:
    """The helper process that ranks are forked from.

    A child of it imports more and takes over. Loading what DDP needs takes 1.3 s and 100 MB in a
    rank (torch 2.13); forked from the grown helper it takes neither.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = _new_server()
        self._grown: _GrownServer | None = None

    def warm_up(self) -> None:
        """Start the helper if it does not run; returns before its imports are done."""
        with self._lock:
            self._ensure_running()

    def grow(self) -> None:
        """Have a child of the helper import what DDP needs and take over; waits for it."""
        with self._lock:
            if not CAN_GROW or self._grown is not None:
                return
            self._ensure_running()
            first = self._first
        try:
            grown = _GrownServer(first)
            RankProcess(grown, _do_nothing, None, "nbddp-ready").start()  # returns when it serves
        except (EOFError, OSError):
            if self._first is first:
                raise
            return  # closed meanwhile
        with self._lock:
            if self._first is first:
                self._grown = grown
            else:
                grown.end()  # closed meanwhile

    def start(self, target: Callable[[Any], None], argument: Any, name: str) -> RankProcess:
        """Fork a process from the helper that runs ``target(argument)``."""
        with self._lock:
            self._ensure_running()
            child = RankProcess(self._grown or self._first, target, argument, name)
        child.start()
        return child

    def close(self) -> None:
        """End the helper and wait until it is gone; no rank runs any more.

        It holds nothing, and would take half a second to say goodbye to torch.
        """
        with self._lock:
            if self._grown is not None:
                self._grown.end()
            pid = self._first._forkserver_pid  # type: ignore[attr-defined]
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self._first._stop()  # type: ignore[attr-defined]
            self._first, self._grown = _new_server(), None

    def _ensure_running(self) -> None:
        # until it has a session of its own, the interrupt button would reach it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            _start_resource_tracker_apart()
            self._first.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _new_server() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(FIRST)
    return server


class _GrownServer(forkserver.ForkServer):
    """A forkserver that was itself forked from one, and then imported more."""

    def __init__(self, first: forkserver.ForkServer) -> None:
        super().__init__()
        self._forkserver_address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        alive_reader, self._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._forkserver_address)
            if not util.is_abstract_socket_namespace(self._forkserver_address):
                os.chmod(self._forkserver_address, 0o600)  # noqa: PTH101 - may be no path
            listener.listen()
            descriptors = (listener.fileno(), alive_reader)
            self.process = RankProcess(first, _serve, LATER, "nbddp-forkserver", descriptors)
            self.process.start()
        os.close(alive_reader)
        self._forkserver_pid = self.process.pid

    def ensure_running(self) -> None:
        """It runs, or a start fails; it is not our child and cannot be started again."""

    def end(self) -> None:
        """End it, and wait until it is gone."""
        os.close(self._forkserver_alive_fd)
        self.process.kill()
        self.process.join()
        if not util.is_abstract_socket_namespace(self._forkserver_address):
            with suppress(FileNotFoundError):
                os.unlink(self._forkserver_address)  # noqa: PTH108 - may be no path


class RankProcess(process.BaseProcess):
    """A process forked from a helper; not daemonic, so that a DataLoader can have workers."""

    _start_method = "fork"  # for what the rank starts: a DataLoader's workers know its cells

    def __init__(
        self,
        server: forkserver.ForkServer,
        target: Callable[[Any], None],
        argument: Any,
        name: str,
        descriptors: Sequence[int] = (),
    ) -> None:
        super().__init__(target=target, args=(argument,), name=name, daemon=False)
        self.server: forkserver.ForkServer | None = server
        self.descriptors = list(descriptors)

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
        self.sentinel, writer = process_obj.server.connect_to_new_process(process_obj.descriptors)
        keep_alive = os.dup(writer)  # closes with the kernel, which tells the rank
        self.finalizer = util.Finalize(self, _close_all, (keep_alive, self.sentinel))
        with open(writer, "wb", closefd=True) as pipe:  # noqa: PTH123 - a descriptor, no path
            pipe.write(message)
        self.pid = forkserver.read_signed(self.sentinel)


# ---- in the child


def _serve(modules: list[str]) -> None:
    """Be a forkserver that has imported more than the one this process was forked from."""
    listener, alive_reader = forkserver.get_inherited_fds() or (-1, -1)
    forkserver.main(listener, alive_reader, modules)


def _do_nothing(_argument: None) -> None:
    """Started to learn that the helper serves."""


# ---- small things


def _start_resource_tracker_apart() -> None:
    """Start multiprocessing's resource tracker outside of the kernel's process group.

    It ignores SIGTERM, and ipykernel waits at shutdown until every child in its own group has
    obeyed: with the tracker among them a kernel took 2.6 s to end instead of 0.8 s.
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
