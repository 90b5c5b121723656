"""The end of a script in a process that lives on: what Python does when a program is over.

In this order (Python's ``Py_FinalizeEx``): threads that are no daemons are waited for, then what
was registered with ``atexit`` is called, last first, and child processes are waited for.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread as pools
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil

from nbddp.descendants import children
from nbddp.worker.folding import library_of
from nbddp.worker.streams import flush_python_streams

PATIENCE = 0.2  # seconds for a thread that ends by itself when what it served is gone
_STDLIB = Path(os.__file__).parent


class Leftovers:
    """Knows which threads and processes there were before a script, and what it left behind."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._pids = {each.pid for each in children(os.getpid())}

    @property
    def new_threads(self) -> list[threading.Thread]:
        """Those that it started and that have not ended."""
        return [each for each in threading.enumerate() if each not in self._threads]

    def tell(self, name: str, say: Callable[[str], None]) -> None:
        """Say in a line what goes on running, but for a library's threads, such as tqdm's."""
        left = [f"thread {each.name!r}" for each in self._living_threads()]
        left += [f"process {each.pid}" for each in self._living_processes()]
        if left:
            say(f"{name} is over and left running: {', '.join(left)}")

    def _living_threads(self) -> list[threading.Thread]:
        own = [each for each in self.new_threads if not library_of(_file_of(each))]
        deadline = time.monotonic() + PATIENCE
        for thread in own:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [each for each in own if each.is_alive()]

    def _living_processes(self) -> list[psutil.Process]:
        new = [each for each in children(os.getpid()) if each.pid not in self._pids]
        return [each for each in new if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def ending_as_a_program(leftovers: Leftovers) -> Iterator[None]:
    """Within it a script runs; at its end it is ended as a program is."""
    registered = _Registered()
    registered.listen()
    try:
        yield
    except SystemExit as error:
        if _says(error):
            print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
        raise
    finally:
        try:
            _join_threads(leftovers.new_threads)
            registered.call()
            _join_children()
        finally:
            registered.listen_no_more()


def _says(error: SystemExit) -> bool:
    """Whether what is to be said at the end is said, and the exit code is 1."""
    return error.code is not None and not isinstance(error.code, int)


def exit_code(error: BaseException | None) -> int:
    """What Python makes of what ended a program.

    >>> [exit_code(each) for each in (None, SystemExit(), SystemExit(3), SystemExit(256))]
    [0, 0, 3, 0]
    >>> [exit_code(each) for each in (SystemExit("no data"), SystemExit(0.0), ValueError())]
    [1, 1, 1]
    """
    if error is None:
        return 0
    if isinstance(error, SystemExit) and not _says(error):
        return int(error.code or 0) & 0xFF
    return 1


def leave_as_forked(error: BaseException | None) -> NoReturn:
    """End a process that was forked by what ran here, and has come to the end of it."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, _without_ours(error))
    flush_python_streams()
    os._exit(exit_code(error))


def _without_ours(error: BaseException) -> TracebackType | None:
    ours = Path(__file__).parent
    step = error.__traceback__
    while step is not None and ours in Path(step.tb_frame.f_code.co_filename).parents:
        step = step.tb_next
    return step


class _Registered:
    """What a script registers with ``atexit``; what a library does when imported is its own."""

    def __init__(self) -> None:
        self._functions: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._register, self._unregister = atexit.register, atexit.unregister

    def listen(self) -> None:
        """Be in atexit's place."""
        atexit.register, atexit.unregister = self._note, self._forget  # type: ignore[assignment]

    def listen_no_more(self) -> None:
        """Give it back."""
        atexit.register, atexit.unregister = self._register, self._unregister

    def _note(self, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        if _lasts(sys._getframe(1)):
            return self._register(function, *args, **options)
        self._functions.append((function, args, options))
        return function

    def _forget(self, function: Callable[..., Any]) -> None:
        self._functions = [each for each in self._functions if each[0] != function]
        self._unregister(function)

    def call(self) -> None:
        """Call them, last first; an error is printed and the others are called, as atexit does."""
        while self._functions:
            function, args, options = self._functions.pop()
            try:
                function(*args, **options)
            except Exception:  # noqa: BLE001 - whatever they raise
                traceback.print_exc()


def _lasts(caller: FrameType) -> bool:
    """Whether it registers for the process: Python's own modules, and a library's when imported."""
    filename = caller.f_code.co_filename
    is_stdlibs = Path(filename).parent == _STDLIB or filename.startswith("<frozen ")
    return is_stdlibs or (caller.f_code.co_name == "<module>" and bool(library_of(filename)))


def _join_threads(threads: list[threading.Thread]) -> None:
    with _ending_pools(threads):
        for thread in threads:
            if not thread.daemon:
                thread.join()


@contextmanager
def _ending_pools(threads: list[threading.Thread]) -> Iterator[None]:
    """Have executors that were not shut down end, as ``concurrent.futures`` does at exit."""
    known: Any = getattr(pools, "_threads_queues", {})
    queues = [known[each] for each in threads if each in known]
    if not queues:
        yield
        return
    module: Any = pools
    module._shutdown = True
    try:
        for queue in queues:
            queue.put(None)
        yield
    finally:
        module._shutdown = False


def _join_children() -> None:
    """End daemons and wait for the others, as ``multiprocessing`` does at exit."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    for child in multiprocessing.active_children():
        child.join()


def _file_of(thread: threading.Thread) -> str:
    """Where what it runs is defined: its target, or its own class."""
    target: Any = getattr(thread, "_target", None)
    run: Any = type(thread).run if target is None else target
    code = getattr(getattr(run, "__func__", run), "__code__", None)
    return code.co_filename if code is not None else ""


def is_ending(filename: str) -> bool:
    """Whether code of this file waits for what a script began: an interrupt there ends the wait."""
    return filename == __file__
