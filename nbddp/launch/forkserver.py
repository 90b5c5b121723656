"""The forkserver: the helper process that ranks are forked from, with torch already imported.

The process-wide forkserver of :mod:`multiprocessing` may already run without torch, started by
other code. It would also run the user's ``__main__`` in every rank. This one has imported torch and
IPython, ignores Jupyter's interrupt, and does not pass the kernel's ``__main__`` to ranks.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, process, reduction, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from nbddp.child_processes import (
    busy_time,
    find_children,
    find_descendants,
    is_alive,
    is_stopped,
)
from nbddp.errors import StartError
from nbddp.launch.start_variables import (
    POOL_VARIABLES,
    describe_end,
    read_at_start,
    start_variables,
)
from nbddp.wire.rank_start import (
    CUDA_USED,
    PRELOAD_PARTS,
    PRELOAD_SIGNAL,
    SOCKET_FOLDER_VARIABLE,
    STDERR_VARIABLE,
    RankStart,
)

PRELOADED_MODULES = ["nbddp.launch.detach", "nbddp.worker.preload", __name__]
MAX_ADDRESS = 103  # bytes of a socket address on macOS; 107 on Linux (unix(7))
ANSWER_TIMEOUT = 300.0  # seconds; its imports of torch can take minutes from a network file system
RESUME_INTERVAL = 1.0  # seconds
UNKNOWN_EXIT = 255  # multiprocessing's value if the forkserver has ended
FORKSERVER_ENDED = (
    "the forkserver, from which ranks are forked, has ended; a restart starts another"
)
FALLBACK_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
logger = logging.getLogger(__name__)

_tempdir_lock = threading.Lock()  # the folder is passed in global state of the process


def run_rank_process(start: RankStart) -> None:
    """Run as a rank until the controller shuts it down; target of each rank's process."""
    if stderr := os.environ.pop(STDERR_VARIABLE, ""):  # for errors before the log is open
        os.dup2(int(stderr), 2)
        os.close(int(stderr))
    importlib.import_module("nbddp.worker.main").run_rank(start)


class CudaUsedError(RuntimeError):
    """The forkserver has used CUDA, so processes forked from it cannot."""


class Forkserver(forkserver.ForkServer):
    """The helper process that ranks are forked from; it cannot be used again after ``close``.

    After the start it imports modules that only DDP needs, one part at a time. In a rank they would
    take 1.3 s and 100 MB (torch 2.13); a rank that is forked afterwards needs neither.

    Attributes:
        rank_pids: the process ids of its ranks, each added before the rank runs any code.
        variables: its variables of :mod:`nbddp.launch.start_variables`; None until its first start,
            which takes those of this process.
        changed: the variables that the first forkserver does not have; an error names them.
        has_served: whether a process was forked from it.
        is_replacement: whether it has replaced one that ended.
    """

    def __init__(
        self, variables: Mapping[str, str] | None = None, changed: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.variables, self.changed, self.has_served = variables, changed or {}, False
        self.set_forkserver_preload(PRELOADED_MODULES)
        self.rank_pids: set[int] = set()
        self._folder = ""
        self._use_lock = threading.Lock()
        self._preload_lock = threading.Lock()
        self._is_preloaded = self._is_closing = self.is_replacement = False

    @property
    def pid(self) -> int | None:
        """The forkserver's process id; None if it is not running."""
        pid: int | None = self._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def start(self) -> None:
        """Start the forkserver if it is not running; return before its imports are done."""
        with self._use_lock:
            self.ensure_running()

    def wait_until_ready(self) -> None:
        """Start the forkserver if it is not running. Wait until ranks can be forked from it.

        Raises:
            EOFError: the forkserver was closed during the wait.
            StartError: it has ended.
        """
        with self._use_lock:
            self._wait_until_serving()

    def preload_more(self) -> None:
        """Make the forkserver import what DDP needs, and wait until it has done so.

        Between two parts it can start ranks. If it has ended, the next start says so.
        """
        with self._preload_lock:
            for _ in range(0 if self._is_preloaded else PRELOAD_PARTS):
                with self._use_lock:
                    try:
                        self._wait_until_serving()  # else the signal may kill it
                        if self.pid is not None:
                            os.kill(self.pid, PRELOAD_SIGNAL)
                        self._wait_until_serving()
                    except (CudaUsedError, StartError, EOFError, OSError):
                        return  # the first rank reports it
            self._is_preloaded = True

    def fork(self, target: Callable[[Any], None], argument: Any, name: str) -> ForkedProcess:
        """Fork a process from the forkserver that runs ``target(argument)``.

        Raises:
            CudaUsedError: a forked process could not use a GPU.
            StartError: the forkserver has ended.
        """
        with self._use_lock:
            child = self._start_process(target, argument, name)
        # nbddp watches and ends ranks itself: no other forked process may poll this one
        process._children.discard(child)  # type: ignore[attr-defined]
        return child

    def has_used_cuda(self) -> bool:
        """Return whether the forkserver's imports have used CUDA. Valid as soon as it serves."""
        return (Path(self._folder) / CUDA_USED).exists()

    def orphans(self) -> list[psutil.Process]:
        """Return the orphans of ranks that have ended. On Linux the forkserver inherits them."""
        helper = self.pid
        if helper is None:
            return []
        roots = [each for each in find_children(helper) if _has_own_session(each.pid, helper)]
        # compare with the current set: ranks may have started since the processes were listed
        roots = [each for each in roots if each.pid not in self.rank_pids]
        return [each for root in roots for each in (root, *find_descendants(root.pid))]

    def close(self) -> None:
        """Kill the forkserver and wait until it has ended. Called when no rank runs any more.

        The forkserver holds no state, and an orderly exit would take half a second, for torch.
        """
        self._is_closing = True
        self._kill()  # a thread that waits for the forkserver then releases the lock
        with self._use_lock:
            self._kill()  # it may have been starting
            with suppress(FileNotFoundError):  # the forkserver has deleted its folder
                self._stop()  # type: ignore[attr-defined]
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait_until_serving(self) -> None:
        child = self._start_process(_do_nothing, None, "nbddp-ready")
        self.wait_for_answer(child.sentinel)
        child.join()

    def _start_process(
        self, target: Callable[[Any], None], argument: Any, name: str
    ) -> ForkedProcess:
        """Start a process, and return after the forkserver has forked it."""
        self._ensure_folder()
        child = ForkedProcess(self, target, argument, name)
        config: dict[str, Any] = child._config  # type: ignore[attr-defined]
        config["tempdir"] = self._folder  # the rank and its workers inherit it
        try:
            child.start()
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # it has ended
            self._check_open()
            raise StartError(describe_end(self._read_output(), self.changed)) from error
        if not self.has_served:
            self.has_served = True
            sys.stderr.write(self._read_output())  # such as warnings of sitecustomize
        return child

    def _read_output(self) -> str:
        """Return what the forkserver has written to standard error."""
        with suppress(FileNotFoundError):  # the forkserver has deleted its folder
            return Path(self._folder, "stderr").read_text(errors="replace")
        return ""

    def _spawn(self, path: bytes, arguments: list[bytes], passed: Sequence[int]) -> int:
        """Start a process for multiprocessing. Its standard error is a file, for error messages."""
        stderr = os.dup(2)
        env = {**os.environ, STDERR_VARIABLE: str(stderr)}
        options: dict[str, Any] = {"executable": path, "env": env, "restore_signals": False}
        with Path(self._folder, "stderr").open("wb") as file:
            child = subprocess.Popen(arguments, stderr=file, pass_fds=[*passed, stderr], **options)
        os.close(stderr)
        child.returncode = 0  # multiprocessing waits for it
        return child.pid

    def wait_for_answer(self, sentinel: int) -> None:
        """Wait until the forkserver answers or ends. Resume it if it is stopped.

        Raises:
            TimeoutError: it did neither for a long time.
        """
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while not wait([sentinel], RESUME_INTERVAL):
            self.resume()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {self.pid}, from which ranks are forked, did not answer for "
                    f"{ANSWER_TIMEOUT:.0f} s; restart the kernel"
                )

    def resume(self) -> None:
        """Resume the forkserver if SIGSTOP has stopped it: nothing else reports exits of ranks."""
        if self.pid is None:
            return
        if is_stopped(self.pid):
            logger.warning("resumed process %d, which forks ranks: it was stopped", self.pid)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # always: a SIGSTOP may be pending

    def has_ended(self) -> bool:
        """Return whether the forkserver has ended, although nbddp did not close it."""
        return not (self._is_closing or (self.pid is not None and is_alive(self.pid)))

    def ensure_running(self) -> None:
        """Start the forkserver if it is not running; also called before each fork.

        Raises:
            EOFError: the forkserver is being closed.
        """
        with sigint_blocked():
            restore_main_spec()
            start_detached_resource_tracker()
            if self.has_ended():  # once: other threads could see the folder and the variables
                if self.variables is None:
                    self.variables = read_at_start(os.environ)
                self.is_replacement = self.pid is not None
                self.has_served = self._is_preloaded = False
                variables = {**self.variables, **dict.fromkeys(POOL_VARIABLES, "1")}
                with self._own_socket_folder(), start_variables(variables):
                    super().ensure_running()
        self._check_open()  # close() may not have seen the process that was just started

    def _ensure_folder(self) -> None:
        self._check_open()
        if not os.path.isdir(self._folder):  # noqa: PTH112 - the path may be empty
            self._folder = tempfile.mkdtemp(prefix="nbddp_", dir=_short_folder())

    def _check_open(self) -> None:
        if self._is_closing:
            raise EOFError("the forkserver is being closed")

    @contextmanager
    def _own_socket_folder(self) -> Iterator[None]:
        """Make multiprocessing create its sockets in a folder that the forkserver deletes at exit.

        The default folders are deleted by the process that made them; if it is killed, they stay.
        """
        self._ensure_folder()
        config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
        with _tempdir_lock:
            before = config.get("tempdir")
            config["tempdir"] = os.environ[SOCKET_FOLDER_VARIABLE] = self._folder
            # for this module only: other threads may start processes of their own
            own_util: Any = SimpleNamespace(**{**vars(util), "spawnv_passfds": self._spawn})
            forkserver.util = own_util  # type: ignore[attr-defined]
            try:
                yield
            finally:
                forkserver.util = util  # type: ignore[attr-defined]
                config["tempdir"] = before
                del os.environ[SOCKET_FOLDER_VARIABLE]


class LocalRank(process.BaseProcess):
    """A rank's process on this machine; see :class:`nbddp.launch.local_launcher.RankHandle`."""

    exit_reason = ""  # the exit code is enough

    def interrupt(self) -> None:
        """Send SIGINT if the process is running."""
        popen: Any = self._popen  # type: ignore[attr-defined]
        popen._send_signal(signal.SIGINT)

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP."""
        return is_stopped(self.pid or 0)

    def is_ending(self) -> bool:
        """Return whether the process was killed but still frees its memory, for about 50 ms."""
        return not is_alive(self.pid or 0)

    def busy_time(self) -> tuple[float, float]:
        """Return the current time and the seconds for which the process was busy."""
        with suppress(psutil.Error):
            return time.monotonic(), busy_time(self.pid or 0)
        return time.monotonic(), 0.0


class ForkedProcess(LocalRank):
    """A process forked from the forkserver; not daemonic, so that a DataLoader can have workers."""

    _start_method = "fork"  # for children of the rank: DataLoader workers see its cells

    def __init__(
        self,
        server: Forkserver,
        target: Callable[[Any], None],
        argument: Any,
        name: str,
    ) -> None:
        super().__init__(target=target, args=(argument,), name=name, daemon=False)
        self.server: Forkserver | None = server

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}

    @property
    def exit_reason(self) -> str:  # type: ignore[override]
        """Why the exit code is unknown: the forkserver has ended; "" if the code is known."""
        popen: Any = self._popen  # type: ignore[attr-defined]
        return FORKSERVER_ENDED if self.exitcode is not None and popen.has_lost_server else ""

    def terminate(self) -> None:
        """Send SIGTERM. Resume the forkserver, which reports the exit."""
        super().terminate()
        self._resume_server()

    def kill(self) -> None:
        """Send SIGKILL. Resume the forkserver, which reports the exit."""
        super().kill()
        self._resume_server()

    def _resume_server(self) -> None:
        if self.server is not None:
            self.server.resume()

    @staticmethod
    def _Popen(process_obj: ForkedProcess) -> _RankPopen:  # noqa: N802 - multiprocessing's name
        return _RankPopen(process_obj)


class _RankPopen(popen_forkserver.Popen):
    """Starts the process from our forkserver, and does not send the kernel's ``__main__``."""

    def __init__(self, process_obj: ForkedProcess) -> None:
        self._polling = threading.Lock()
        self.has_lost_server = False
        super().__init__(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None while the process runs.

        The forkserver reports the exit code once, to one reader. Other threads poll too, whenever
        they start a process.
        """
        with self._polling:
            if self.returncode is None and wait([self.sentinel], None if not flag else 0):
                try:
                    self.returncode = forkserver.read_signed(self.sentinel)
                except (OSError, EOFError):
                    self.returncode, self.has_lost_server = UNKNOWN_EXIT, True
        exitcode: int | None = self.returncode
        if exitcode is not None:
            self._ranks.discard(self.pid)
        return exitcode

    def _launch(self, process_obj: ForkedProcess) -> None:
        if process_obj.server is None:
            raise RuntimeError("a rank cannot be started from within a rank")
        self._ranks = process_obj.server.rank_pids
        message = _pickled(self, {"name": process_obj.name}, process_obj)
        self.sentinel, writer = process_obj.server.connect_to_new_process([])
        keep_alive = os.dup(writer)  # closed when the kernel ends; the rank watches this pipe
        close_all = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, close_all, (keep_alive, self.sentinel))
        with open(writer, "wb", closefd=True) as pipe:  # noqa: PTH123 - a file descriptor
            process_obj.server.wait_for_answer(self.sentinel)
            self.pid = forkserver.read_signed(self.sentinel)
            if process_obj.server.has_used_cuda():
                os.kill(self.pid, signal.SIGKILL)  # it still waits for the message
                raise CudaUsedError
            self._ranks.add(self.pid)
            pipe.write(message)


def _short_folder() -> str:
    """Return a temporary folder with a path that is short enough for socket addresses.

    multiprocessing uses the default folder without a check. On clusters it can be too long
    ("AF_UNIX path too long").
    """
    default = tempfile.gettempdir()
    longest = "/nbddp_12345678/listener-12345678"  # as named by tempfile and multiprocessing
    for folder in (default, *FALLBACK_FOLDERS):
        is_short = len(os.fsencode(folder)) + len(longest) <= MAX_ADDRESS
        if is_short and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return default


def _has_own_session(pid: int, helper: int) -> bool:
    """Return whether a process has left the forkserver's session; ranks do so at once."""
    try:
        return os.getsid(pid) != helper
    except ProcessLookupError:
        return False


def _do_nothing(_argument: None) -> None:
    """Target of a process that is started only to see whether the forkserver serves."""


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT, so that a process started in this context inherits the block.

    Until the process has its own session, Jupyter's interrupt would reach it and end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_main_spec() -> None:
    """Restore ``__main__.__spec__``, which ``%reset -f`` deletes and multiprocessing needs."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__spec__"):
        main.__spec__ = None


def start_detached_resource_tracker() -> None:
    """Start multiprocessing's resource tracker outside the kernel's process group.

    The tracker ignores SIGTERM. At shutdown ipykernel waits until all children in its process group
    have ended. With the tracker among them, a kernel took 2.6 s to end instead of 0.8 s.
    """
    tracker = resource_tracker._resource_tracker
    with tracker._lock:  # type: ignore[attr-defined]
        if tracker._fd is not None:  # type: ignore[attr-defined]
            return  # already running
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


def _pickled(popen: _RankPopen, *items: Any) -> memoryview:
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        for item in items:
            reduction.dump(item, buffer)
    finally:
        set_spawning_popen(None)
    return buffer.getbuffer()
