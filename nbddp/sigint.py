"""Handle SIGINT safely: defer it, let it end the wait for a future or for an import."""

from __future__ import annotations

import asyncio
import importlib
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# seconds: a signal that arrives just before a wait is handled when the wait ends
SIGNAL_CHECK_INTERVAL = 0.25


class InterruptCount:
    """Counts interrupts; ``raises_second`` says whether a second one is raised at once."""

    def __init__(self, *, raises_second: bool) -> None:
        self.count = 0
        self.raises_second = raises_second


@contextmanager
def sigint_handler(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle SIGINT with this function until the block ends.

    Nothing changes on other threads, which get no signals, and if Python did not install the
    current handler, because it could not be restored.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is None:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextmanager
def sigint_deferred(*, raises_second: bool = True) -> Iterator[InterruptCount]:
    """Defer an interrupt until the block ends; a second one is raised at once.

    Args:
        raises_second: False to defer all interrupts; the block can read their ``count``.
    """
    deferred = InterruptCount(raises_second=raises_second)
    previous_handler = signal.getsignal(signal.SIGINT)

    def record(signum: int, frame: FrameType | None) -> None:
        deferred.count += 1
        if deferred.count > 1 and deferred.raises_second and callable(previous_handler):
            previous_handler(signum, frame)

    try:
        with sigint_handler(record):
            yield deferred
    finally:
        if deferred.count:
            signal.raise_signal(signal.SIGINT)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread completely or not at all.

    ``Thread.start`` waits for an event that the new thread sets. An interrupt during this wait can
    leave the lock of the event locked. The new thread then waits for the lock forever.
    """
    with sigint_deferred():
        thread.start()


class Future(Generic[T]):
    """A result that is not known yet, like :class:`concurrent.futures.Future`, but without a lock.

    The lock of that class is Python code. An interrupt can hit the main thread when it has just
    acquired the lock and not yet entered the block that releases it (in CPython 3.11, at 3 of the
    69 places in a wait at which an interrupt can arrive). The thread with the result then waits for
    the lock forever.

    >>> future = Future()
    >>> future.set_result(5)
    >>> wait_for_result(future)
    5
    """

    def __init__(self) -> None:
        self._outcome: list[tuple[T, None] | tuple[None, BaseException]] = []
        self._callbacks: list[Callable[[Future[T]], object]] = []

    def set_result(self, value: T) -> None:
        """Set the result. Only one thread may do this, and only once."""
        self._complete((value, None))

    def set_exception(self, error: BaseException) -> None:
        """Set an exception instead of a result. Only one thread may do this, and only once."""
        self._complete((None, error))

    def complete_with(self, act: Callable[[], T]) -> None:
        """Set the result of ``act()``, or the exception that it raises."""
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self.set_exception(error)
        else:
            self.set_result(result)

    def _complete(self, outcome: tuple[T, None] | tuple[None, BaseException]) -> None:
        if self._outcome:
            raise RuntimeError("this future already has a result or an exception")
        self._outcome.append(outcome)
        self._run_callbacks()

    def done(self) -> bool:
        """Whether the future has a result or an exception."""
        return bool(self._outcome)

    def exception(self) -> BaseException | None:
        """Return the exception; None if there is a result. Does not wait."""
        return self._outcome[0][1]

    def result(self) -> T:
        """Return the result, or raise the exception. Does not wait."""
        value, error = self._outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value] # set if there is no error

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` on the thread that completes the future, or now if it is done."""
        self._callbacks.append(callback)
        if self._outcome:
            self._run_callbacks()

    def remove_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Remove a callback that has not been called."""
        with suppress(ValueError):
            self._callbacks.remove(callback)

    def _run_callbacks(self) -> None:
        while True:
            try:  # the thread that removes a callback from the list calls it
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback(self)


def wait_for_result(future: Future[T]) -> T:
    """Return the result of a future once it is there; a signal interrupts the wait.

    A signal between Python's last check and the system's wait is handled when that wait ends.
    Therefore every wait is short.
    """
    wait_for_all([future])
    return future.result()


def wait_for_all(futures: Iterable[Future[Any]], timeout: float = math.inf) -> None:
    """Wait until all futures are done; a signal interrupts the wait, as in :func:`wait_for_result`.

    After ``timeout`` seconds, return anyway.
    """
    waited_for = [*futures]
    done: SimpleQueue[Future[Any]] = SimpleQueue()
    deadline = time.monotonic() + timeout
    try:
        for future in waited_for:
            future.add_done_callback(done.put)
        while not all(each.done() for each in waited_for):
            if (remaining := deadline - time.monotonic()) <= 0:
                return
            with suppress(Empty):
                done.get(timeout=min(SIGNAL_CHECK_INTERVAL, remaining))
    finally:
        for future in waited_for:
            future.remove_done_callback(done.put)


def run_in_thread(name: str, act: Callable[[], T]) -> Future[T]:
    """Run a function on a daemon thread of this name, and return its future."""
    future: Future[T] = Future()
    work = partial(future.complete_with, act)
    start_thread(threading.Thread(target=work, name=name, daemon=True))
    return future


def run_in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the loop of another thread, and return its future."""
    future: Future[T] = Future()

    async def run() -> None:
        try:
            future.set_result(await work)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            future.set_exception(error)

    running = run()
    try:
        asyncio.run_coroutine_threadsafe(running, loop)
    except RuntimeError:  # the loop is closed
        running.close()
        work.close()
        raise
    return future


def import_interruptibly(name: str) -> None:
    """Import a module in a separate thread, and wait for it.

    An interrupt ends only the wait. An interrupt in CPython's own import code can leave its lock
    locked, and every other thread that imports a module then waits forever (seen in 3.11: an
    interrupt in the first milliseconds of a first cell, while another thread imported torch). An
    interrupted import of matplotlib leaves a broken module in ``sys.modules``, and no later import
    works.
    """
    wait_for_result(run_in_thread("nbddp-import", partial(importlib.import_module, name)))
