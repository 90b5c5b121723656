"""A forkserver of our own, warm before it is needed, and warmer a little later.

The process-wide forkserver of :mod:`multiprocessing` may already run, cold, for somebody else, and
would run the user's ``__main__`` in every rank. Ours has imported torch and IPython, ignores
Jupyter's interrupt, and tells a rank nothing of the kernel's ``__main__``.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import (
    forkserver,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    util,
)
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import psutil

from nbddp.child_processes import cpu_time, find_children, find_descendants
from nbddp.wire.rank_start import (
    CUDA_USED,
    PRELOAD_PARTS,
    PRELOAD_SIGNAL,
    SOCKET_FOLDER_VARIABLE,
    RankStart,
)

PRELOADED_MODULES = ["nbddp.launch.detach", "nbddp.worker.preload", __name__]
MAX_ADDRESS = 103  # bytes of a socket's address on macOS, 107 on Linux (unix(7))
FALLBACK_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_tempdir_lock = threading.Lock()  # for it is told to a helper by what the whole process shares


def run_rank_process(start: RankStart) -> None:
    """Run as a rank until told to leave; the target of every rank's process."""
    importlib.import_module("nbddp.worker.main").run_rank(start)


class CudaUsedError(RuntimeError):
    """The helper has used CUDA, so a process that is forked from it cannot."""


class Forkserver:
    """The helper process that ranks are forked from.

    It grows: what only DDP needs is imported when there is time for it, a part at a time. In a rank
    it would take 1.3 s and 100 MB (torch 2.13); forked from the grown helper it takes neither.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preload_lock = threading.Lock()
        self._server = _Server()
        self._is_preloaded = False

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while it does not run."""
        pid: int | None = self._server._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def start(self) -> None:
        """Start the helper if it does not run; returns before its imports are done."""
        with self._lock:
            self._ensure_running()

    def wait_until_ready(self) -> None:
        """Start the helper if it does not run, and wait until ranks can be forked from it.

        Raises:
            EOFError: it was closed meanwhile, or has ended.
        """
        with self._lock:
            self._ensure_running()
            self._wait_until_serving()

    def preload_more(self) -> None:
        """Have the helper import what DDP needs, and wait; ranks can be started in between."""
        with self._preload_lock:
            server = self._server
            for _ in range(0 if self._is_preloaded else PRELOAD_PARTS):
                with self._lock:
                    if self._server is not server:
                        return  # closed meanwhile
                    try:
                        self._ensure_running()
                        self._wait_until_serving()  # without its handler the signal would end it
                        if self.pid is not None:
                            os.kill(self.pid, PRELOAD_SIGNAL)
                        self._wait_until_serving()
                    except CudaUsedError:
                        return  # the first rank says so
                    except (EOFError, OSError):
                        if server.is_closing:
                            return
                        raise
            self._is_preloaded = True

    def fork(self, target: Callable[[Any], None], argument: Any, name: str) -> ForkedProcess:
        """Fork a process from the helper that runs ``target(argument)``.

        Raises:
            CudaUsedError: none can be forked that could use a GPU.
        """
        with self._lock:
            self._ensure_running()
            with self._own_socket_folder():  # inherited by the rank and its workers
                child = ForkedProcess(self._server, target, argument, name)
            child.start()
        # watched and ended here: a process that was forked shall not ask after it
        process._children.discard(child)  # type: ignore[attr-defined]
        return child

    def orphans(self) -> list[psutil.Process]:
        """What ranks that are gone left behind: the helper inherits it, on Linux."""
        helper, ranks = self.pid, self._server.rank_pids
        if helper is None:
            return []
        roots = [each for each in find_children(helper) if _has_own_session(each.pid, helper)]
        roots = [each for each in roots if each.pid not in ranks]  # as of now, not of before
        return [each for root in roots for each in (root, *find_descendants(root.pid))]

    def close(self) -> None:
        """End the helper and wait until it is gone; no rank runs any more.

        It holds nothing, and would take half a second to say goodbye to torch.
        """
        self._server.is_closing = True
        self._kill()  # frees whoever holds the lock and waits for it
        with self._lock:
            self._kill()  # it was just being started
            with suppress(FileNotFoundError):  # it has taken its folder away itself
                self._server._stop()  # type: ignore[attr-defined]
            self._server.remove_folder()
            self._server, self._is_preloaded = _Server(), False

    def _kill(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait_until_serving(self) -> None:
        child = ForkedProcess(self._server, _do_nothing, None, "nbddp-ready")
        child.start()  # returns when the helper has forked it
        child.join()

    @contextmanager
    def _own_socket_folder(self) -> Iterator[None]:
        """Have multiprocessing put its sockets where the helper takes them away when it ends.

        Its own folders are taken away by whoever made them, and stay if that one is killed.
        """
        folder = self._server.ensure_folder()
        config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
        with _tempdir_lock:
            before = config.get("tempdir")
            config["tempdir"] = os.environ[SOCKET_FOLDER_VARIABLE] = folder
            try:
                yield
            finally:
                config["tempdir"] = before
                del os.environ[SOCKET_FOLDER_VARIABLE]

    def _ensure_running(self) -> None:
        with sigint_blocked(), self._own_socket_folder():
            restore_main_spec()
            start_detached_resource_tracker()
            self._server.ensure_running()


class _Server(forkserver.ForkServer):
    """One helper process; while it is being closed nobody starts it again."""

    is_closing = False

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(PRELOADED_MODULES)
        self.rank_pids: set[int] = set()  # process ids, from before they do anything of their own
        self._folder = ""

    def has_used_cuda(self) -> bool:
        """Return whether its imports have used CUDA; it serves already."""
        return (Path(self._folder) / CUDA_USED).exists()

    def ensure_folder(self) -> str:
        """Make the folder of its sockets if it is not there, and return its path."""
        if not os.path.isdir(self._folder):  # noqa: PTH112 - a name, until there is one
            self._folder = tempfile.mkdtemp(prefix="nbddp_", dir=_short_folder())
        return self._folder

    def remove_folder(self) -> None:
        """Remove the folder, as far as it is still there."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def ensure_running(self) -> None:
        """Start it, unless it runs."""
        if not self.is_closing:
            super().ensure_running()
        if self.is_closing:  # before, or meanwhile: whoever closes it did not see it then
            raise EOFError("the forkserver is being closed")


class LocalRank(process.BaseProcess):
    """A rank's process on this machine; see :class:`nbddp.launch.local_launcher.RankHandle`."""

    exit_reason = ""  # its exit code tells

    def interrupt(self) -> None:
        """Send SIGINT, unless it has ended."""
        popen: Any = self._popen  # type: ignore[attr-defined]
        popen._send_signal(signal.SIGINT)

    def is_stopped(self) -> bool:
        """Return whether somebody sent it SIGSTOP."""
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def is_ending(self) -> bool:
        """Return whether it was killed and is not gone yet: freeing its memory takes 50 ms."""
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        return True

    def cpu_time(self) -> tuple[float, float]:
        """Return the time now, and the CPU seconds that it has used."""
        with suppress(psutil.Error):
            return time.monotonic(), cpu_time(self.pid or 0)
        return time.monotonic(), 0.0


class ForkedProcess(LocalRank):
    """A process forked from a helper; not daemonic, so that a DataLoader can have workers."""

    _start_method = "fork"  # for what the rank starts: a DataLoader's workers know its cells

    def __init__(
        self,
        server: _Server,
        target: Callable[[Any], None],
        argument: Any,
        name: str,
    ) -> None:
        super().__init__(target=target, args=(argument,), name=name, daemon=False)
        self.server: _Server | None = server

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}

    @staticmethod
    def _Popen(process_obj: ForkedProcess) -> _RankPopen:  # noqa: N802 - multiprocessing's name
        return _RankPopen(process_obj)


class _RankPopen(popen_forkserver.Popen):
    """As its base, but asks our helper and sends no word of the kernel's ``__main__``."""

    def __init__(self, process_obj: ForkedProcess) -> None:
        self._polling = threading.Lock()
        super().__init__(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """How it ended, None while it runs.

        The helper tells that once, to one reader; whoever starts another process asks as well.
        """
        with self._polling:
            exitcode: int | None = super().poll(flag)
        if exitcode is not None:
            self._ranks.discard(self.pid)
        return exitcode

    def _launch(self, process_obj: ForkedProcess) -> None:
        if process_obj.server is None:
            raise RuntimeError("a rank cannot be started from within a rank")
        self._ranks = process_obj.server.rank_pids
        message = _pickled(self, {"name": process_obj.name}, process_obj)
        self.sentinel, writer = process_obj.server.connect_to_new_process([])
        keep_alive = os.dup(writer)  # closes with the kernel, which tells the rank
        self.finalizer = util.Finalize(self, _close_all, (keep_alive, self.sentinel))
        with open(writer, "wb", closefd=True) as pipe:  # noqa: PTH123 - a descriptor, no path
            self.pid = forkserver.read_signed(self.sentinel)
            if process_obj.server.has_used_cuda():
                os.kill(self.pid, signal.SIGKILL)  # it waits for the message
                raise CudaUsedError
            self._ranks.add(self.pid)
            pipe.write(message)


def _short_folder() -> str:
    """Return a temporary folder whose sockets have an address that is not too long.

    multiprocessing takes the default as it is. A cluster's can be too long ("AF_UNIX path too
    long").
    """
    default = tempfile.gettempdir()
    longest = "/nbddp_12345678/listener-12345678"  # as tempfile and multiprocessing name them
    for folder in (default, *FALLBACK_FOLDERS):
        is_short = len(os.fsencode(folder)) + len(longest) <= MAX_ADDRESS
        if is_short and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return default


def _has_own_session(pid: int, helper: int) -> bool:
    """Whether a process has left the helper's session, as a rank does at once."""
    try:
        return os.getsid(pid) != helper
    except ProcessLookupError:
        return False


def _do_nothing(_argument: None) -> None:
    """Started to learn that the helper serves."""


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Within it a process is started that takes no SIGINT before it asks for one.

    Until it has a session of its own, Jupyter's interrupt would reach it, and end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_main_spec() -> None:
    """Give back what ``%reset -f`` takes away; without it multiprocessing starts nothing."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__spec__"):
        main.__spec__ = None


def start_detached_resource_tracker() -> None:
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
