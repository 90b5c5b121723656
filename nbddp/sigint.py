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

HEARING = 0.25  # seconds: a signal that comes as a wait begins is seen when that wait ends


class HeldBack:
    """Counts the deferred interrupts, and says whether a second one is raised at once."""

    def __init__(self, *, raises_second: bool) -> None:
        self.times = 0
        self.raises_second = raises_second


@contextmanager
def sigint_deferred(*, raises_second: bool = True) -> Iterator[HeldBack]:
    """Defer an interrupt until the block ends; a second one is raised at once.

    Args:
        raises_second: False to defer all of them; the block reads ``times`` while it waits.
    """
    held = HeldBack(raises_second=raises_second)
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield held
        return

    def hold(signum: int, frame: FrameType | None) -> None:
        held.times += 1
        if held.times > 1 and held.raises_second and callable(before):
            before(signum, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        if held.times:
            signal.raise_signal(signal.SIGINT)


def begin(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all.

    ``Thread.start`` waits for an event that the new thread sets. An interrupt there can leave the
    event's lock taken, and the thread waiting for it: one that is alive and never does anything.
    """
    with sigint_deferred():
        thread.start()


class Promise(Generic[T]):
    """A result that is still to come, as of :class:`concurrent.futures.Future`; without a lock.

    A future's lock is Python code. An interrupt can strike the main thread when it has just taken
    that lock and before it would give it back (3 of the 69 places of such a wait in CPython 3.11
    where it can strike); then the thread that has the result waits for that lock for good.

    >>> promise = Promise()
    >>> promise.set_result(5)
    >>> kept(promise)
    5
    """

    def __init__(self) -> None:
        self._outcome: list[tuple[T, None] | tuple[None, BaseException]] = []
        self._calls: list[Callable[[Promise[T]], object]] = []

    def set_result(self, value: T) -> None:
        """It is kept; only one thread may say so, and once."""
        self._settle((value, None))

    def set_exception(self, error: BaseException) -> None:
        """It is broken; only one thread may say so, and once."""
        self._settle((None, error))

    def _settle(self, outcome: tuple[T, None] | tuple[None, BaseException]) -> None:
        if self._outcome:
            raise RuntimeError("this promise was kept or broken before")
        self._outcome.append(outcome)
        self._tell()

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

    def add_done_callback(self, act: Callable[[Promise[T]], object]) -> None:
        """Call ``act(self)`` once it is kept or broken, on the thread that says so; or now."""
        self._calls.append(act)
        if self._outcome:
            self._tell()

    def remove_done_callback(self, act: Callable[[Promise[T]], object]) -> None:
        """Do not call it, unless that was done."""
        with suppress(ValueError):
            self._calls.remove(act)

    def _tell(self) -> None:
        while True:
            try:  # whoever takes a call off the list makes it
                act = self._calls.pop()
            except IndexError:
                return
            act(self)


def kept(promise: Promise[T]) -> T:
    """What was promised, once it is there; a signal is heard while it is waited for.

    One that comes after Python's last look and before the system's wait is seen when that wait
    ends: so none is long.
    """
    wait_for_all([promise])
    return promise.result()


def wait_for_all(
    promises: Iterable[Promise[Any]],
    patience: float = math.inf,
    *,
    until: Callable[[Promise[Any]], bool] = lambda _promise: False,
) -> None:
    """Wait until all are kept or broken; a signal is heard, as by :func:`kept`.

    Args:
        promises: those.
        patience: seconds after which it returns all the same.
        until: with one of which this is true it returns at once.
    """
    settled: SimpleQueue[Promise[Any]] = SimpleQueue()
    left = set(promises)
    asked = list(left)
    deadline = time.monotonic() + patience
    try:
        for each in asked:
            each.add_done_callback(settled.put)
        while left and (rest := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                each = settled.get(timeout=min(HEARING, rest))
                left.discard(each)
                if until(each):
                    return
    finally:
        for each in asked:
            each.remove_done_callback(settled.put)


def promised_by(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> Promise[T]:
    """What a coroutine will have done that another thread's loop runs from now on."""
    promise: Promise[T] = Promise()

    async def keep() -> None:
        try:
            promise.set_result(await work)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            promise.set_exception(error)

    keeping = keep()
    try:
        asyncio.run_coroutine_threadsafe(keeping, loop)
    except RuntimeError:  # the loop is closed
        keeping.close()
        work.close()
        raise
    return promise


def import_interruptibly(name: str) -> None:
    """Import a module in a thread of its own, and wait for it.

    An interrupt ends the wait alone. One that strikes in CPython's own import code can leave its
    lock taken, and then every other thread that imports anything waits for good (seen in 3.11: a
    stop in a first cell's first milliseconds, while another thread imported torch). One that breaks
    matplotlib's off leaves a half of it in ``sys.modules``, which nobody can import any more.
    """
    imported: Promise[None] = Promise()

    def load() -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            imported.set_exception(error)
        else:
            imported.set_result(None)

    begin(threading.Thread(target=load, name="nbddp-import", daemon=True))
    kept(imported)
