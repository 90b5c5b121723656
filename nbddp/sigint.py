"""What a stop may strike: work that is held back from it, waits for other threads, imports."""

from __future__ import annotations

import asyncio
import importlib
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SIGNAL_CHECK_INTERVAL = (
    0.25  # seconds: a signal that comes as a wait begins is seen when that wait ends
)


class DeferredInterrupts:
    """Counts the deferred interrupts, and says whether a second one is raised at once."""

    def __init__(self, *, raises_second: bool) -> None:
        self.count = 0
        self.raises_second = raises_second


@contextmanager
def sigint_deferred(*, raises_second: bool = True) -> Iterator[DeferredInterrupts]:
    """Defer an interrupt until the block ends; a second one is raised at once.

    Args:
        raises_second: False to defer all of them; the block reads ``times`` while it waits.
    """
    deferred = DeferredInterrupts(raises_second=raises_second)
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is None:
        yield deferred
        return

    def record(signum: int, frame: FrameType | None) -> None:
        deferred.count += 1
        if deferred.count > 1 and deferred.raises_second and callable(previous_handler):
            previous_handler(signum, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield deferred
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if deferred.count:
            signal.raise_signal(signal.SIGINT)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all.

    ``Thread.start`` waits for an event that the new thread sets. An interrupt there can leave the
    event's lock taken, and the thread waiting for it: one that is alive and never does anything.
    """
    with sigint_deferred():
        thread.start()


class Future(Generic[T]):
    """A result that is still to come, as of :class:`concurrent.futures.Future`; without a lock.

    A future's lock is Python code. An interrupt can strike the main thread when it has just taken
    that lock and before it would give it back (3 of the 69 places of such a wait in CPython 3.11
    where it can strike); then the thread that has the result waits for that lock for good.

    >>> future = Future()
    >>> future.set_result(5)
    >>> wait_for_result(future)
    5
    """

    def __init__(self) -> None:
        self._outcome: list[tuple[T, None] | tuple[None, BaseException]] = []
        self._callbacks: list[Callable[[Future[T]], object]] = []

    def set_result(self, value: T) -> None:
        """It is kept; only one thread may say so, and once."""
        self._complete((value, None))

    def set_exception(self, error: BaseException) -> None:
        """It is broken; only one thread may say so, and once."""
        self._complete((None, error))

    def _complete(self, outcome: tuple[T, None] | tuple[None, BaseException]) -> None:
        if self._outcome:
            raise RuntimeError("this promise was kept or broken before")
        self._outcome.append(outcome)
        self._run_callbacks()

    def done(self) -> bool:
        """Whether it is kept or broken."""
        return bool(self._outcome)

    def exception(self) -> BaseException | None:
        """Why it is broken; None if it is kept. Does not wait."""
        return self._outcome[0][1]

    def result(self) -> T:
        """What was promised, or the error for which it is broken. Does not wait."""
        value, error = self._outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value] # it is there where there is no error

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``act(self)`` once it is kept or broken, on the thread that says so; or now."""
        self._callbacks.append(callback)
        if self._outcome:
            self._run_callbacks()

    def remove_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Do not call it, unless that was done."""
        with suppress(ValueError):
            self._callbacks.remove(callback)

    def _run_callbacks(self) -> None:
        while True:
            try:  # whoever takes a call off the list makes it
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback(self)


def wait_for_result(future: Future[T]) -> T:
    """What was promised, once it is there; a signal is heard while it is waited for.

    One that comes after Python's last look and before the system's wait is seen when that wait
    ends: so none is long.
    """
    wait_for_all([future])
    return future.result()


def wait_for_all(
    futures: Iterable[Future[Any]],
    timeout: float = math.inf,
    *,
    until: Callable[[Future[Any]], bool] = lambda _future: False,
) -> None:
    """Wait until all are kept or broken; a signal is heard, as by :func:`wait_for_result`.

    Args:
        futures: those.
        timeout: seconds after which it returns all the same.
        until: with one of which this is true it returns at once.
    """
    done: SimpleQueue[Future[Any]] = SimpleQueue()
    pending = set(futures)
    waited_for = list(pending)
    deadline = time.monotonic() + timeout
    try:
        for each in waited_for:
            each.add_done_callback(done.put)
        while pending and (remaining := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                each = done.get(timeout=min(SIGNAL_CHECK_INTERVAL, remaining))
                pending.discard(each)
                if until(each):
                    return
    finally:
        for each in waited_for:
            each.remove_done_callback(done.put)


def run_in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> Future[T]:
    """What a coroutine will have done that another thread's loop runs from now on."""
    future: Future[T] = Future()

    async def run() -> None:
        try:
            future.set_result(await work)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
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
    """Import a module in a thread of its own, and wait for it.

    An interrupt ends the wait alone. One that strikes in CPython's own import code can leave its
    lock taken, and then every other thread that imports anything waits for good (seen in 3.11: a
    stop in a first cell's first milliseconds, while another thread imported torch). One that breaks
    matplotlib's off leaves a half of it in ``sys.modules``, which nobody can import any more.
    """
    imported: Future[None] = Future()

    def load() -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            imported.set_exception(error)
        else:
            imported.set_result(None)

    start_thread(threading.Thread(target=load, name="nbddp-import", daemon=True))
    wait_for_result(imported)
