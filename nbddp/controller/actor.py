"""One thread that does one thing after the other: what is due, what others ask, what they tell."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from nbddp.promise import Promise, kept

logger = logging.getLogger(__name__)

STILL = 1.0  # seconds that something is late when this process, or the machine, stood still
RESPITE = 2.0  # seconds in which those come to word then who could not

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Any]


class ClosedError(RuntimeError):
    """What was asked of an actor is not done any more."""


class Actor:
    """Owns a thread and all state that only this thread may touch.

    >>> actor = Actor("demo")
    >>> actor.call(max, 2, 3)
    3
    >>> actor.close()
    """

    def __init__(self, name: str) -> None:
        # the one queue that a signal handler may put into, whatever it has interrupted
        self._inbox: queue.SimpleQueue[tuple[bool, Work | None]] = queue.SimpleQueue()
        self._in_turn: deque[Work | None] = deque()
        self._due: list[tuple[float, int, Work]] = []
        self._was_late: set[int] = set()  # what was put off once, by its order
        self._order = itertools.count()
        self._is_closed = False
        self._closing = threading.RLock()  # of a signal's handler too, which may come in between
        self._thread = threading.Thread(target=self._do_in_turn, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have the thread do something, wait for it, return its result or raise its error.

        Raises:
            ClosedError: nothing is done any more.
        """
        if threading.current_thread() is self._thread:
            return act(*args, **kwargs)  # it would wait for itself
        done: Promise[T] = Promise()

        def work() -> None:
            try:
                done.set_result(act(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is raised where it belongs
                done.set_exception(error)

        if not self._put(work):
            raise ClosedError("this actor was closed")
        return kept(done)

    def tell(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Have the thread do something in its turn; do not wait. Whether it will be done."""
        return self._put(lambda: act(*args, **kwargs))

    def tell_first(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Have the thread do something before all that waits for its turn; do not wait."""
        return self._put(lambda: act(*args, **kwargs), comes_first=True)

    def _put(self, work: Work, *, comes_first: bool = False) -> bool:
        with self._closing:  # what came after the end would wait for ever
            if not self._is_closed:
                self._inbox.put((comes_first, work))
            return not self._is_closed

    def later(
        self, seconds: float, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do something on this very thread, some time from now.

        It may be a judgement on who has kept silent. If the time comes while this process stands
        still, nobody was heard: then it is done a little later, once.
        """
        due = time.monotonic() + seconds
        heapq.heappush(self._due, (due, next(self._order), lambda: act(*args, **kwargs)))

    def close(self, *, patience: float | None = None) -> None:
        """Do what was asked before, then end the thread; wait for that so long, or for ever."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put((False, None))
        self._thread.join(patience)

    def _do_in_turn(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:  # a thread that ended here would leave others waiting
                logger.exception("nbddp could not deal with an event")

    def _next(self) -> Work | None:
        while True:
            if self._due and self._due[0][0] <= time.monotonic():  # before any mail: a flood of it
                work = self._take_due()  # would win
                if work is not None:
                    return work
            try:
                comes_first, work = self._receive()
            except queue.Empty:
                if self._in_turn:
                    return self._in_turn.popleft()
                continue
            if comes_first:
                return work
            self._in_turn.append(work)

    def _take_due(self) -> Work | None:
        due, order, work = heapq.heappop(self._due)
        now = time.monotonic()
        if now - due > STILL and order not in self._was_late:
            self._was_late.add(order)
            heapq.heappush(self._due, (now + RESPITE, order, work))
            return None
        self._was_late.discard(order)
        return work

    def _receive(self) -> tuple[bool, Work | None]:
        """What has come; waits only while there is nothing else to do."""
        if self._in_turn:
            return self._inbox.get_nowait()
        if not self._due:
            return self._inbox.get()
        return self._inbox.get(timeout=max(0.0, self._due[0][0] - time.monotonic()))
