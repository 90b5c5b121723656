"""What an executor works with: the link to the ranks, and the threads that act and bring news."""

from __future__ import annotations

import heapq
import itertools
import logging
import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nbddp.launch.local_launcher import RankHandle
from nbddp.sigint import Future, wait_for_result

if TYPE_CHECKING:
    from nbddp.controller.store_link import StoreLink  # imports torch: not before it is needed
    from nbddp.wire.envelope import Envelope

logger = logging.getLogger(__name__)

STALL = 1.0  # seconds that something is late when this process, or the machine, stood still
STALL_GRACE = 2.0  # seconds in which those come to word then who could not
CLOSE_TIMEOUT = 5.0  # seconds that a thread, or a rank that was killed last, gets to end at a close

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Any]


class ClosedError(RuntimeError):
    """What was asked of an actor is not done any more."""


class EventThread:
    """Owns a thread and all state that only this thread may touch.

    >>> thread = EventThread("demo")
    >>> thread.run(max, 2, 3)
    3
    >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        # the one queue that a signal handler may put into, whatever it has interrupted
        self._inbox: queue.SimpleQueue[tuple[bool, Work | None]] = queue.SimpleQueue()
        self._queue: deque[Work | None] = deque()
        self._timers: list[tuple[float, int, Work]] = []
        self._postponed: set[int] = set()  # what was put off once, by its order
        self._order = itertools.count()
        self._is_closed = False
        self._lock = threading.RLock()  # of a signal's handler too, which may come in between
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have the thread do something, wait for it, return its result or raise its error.

        Raises:
            ClosedError: nothing is done any more.
        """
        if threading.current_thread() is self._thread:
            return act(*args, **kwargs)  # it would wait for itself
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(act(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is raised where it belongs
                done.set_exception(error)

        if not self._put(work):
            raise ClosedError("this actor was closed")
        return wait_for_result(done)

    def submit(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Have the thread do something in its turn; do not wait. Whether it will be done."""
        return self._put(lambda: act(*args, **kwargs))

    def submit_urgent(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Have the thread do something before all that waits for its turn; do not wait."""
        return self._put(lambda: act(*args, **kwargs), comes_first=True)

    def _put(self, work: Work, *, comes_first: bool = False) -> bool:
        with self._lock:  # what came after the end would wait for ever
            if not self._is_closed:
                self._inbox.put((comes_first, work))
            return not self._is_closed

    def call_later(
        self, seconds: float, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do something on this very thread, some time from now.

        It may be a judgement on who has kept silent. If the time comes while this process stands
        still, nobody was heard: then it is done a little later, once.
        """
        due = time.monotonic() + seconds
        heapq.heappush(self._timers, (due, next(self._order), lambda: act(*args, **kwargs)))

    def close(self, *, timeout: float | None = None) -> None:
        """Do what was asked before, then end the thread; wait for that so long, or for ever."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put((False, None))
        self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            try:
                work()
            except BaseException:  # a thread that ended here would leave others waiting
                logger.exception("nbddp could not deal with an event")

    def _next_work(self) -> Work | None:
        while True:
            if (
                self._timers and self._timers[0][0] <= time.monotonic()
            ):  # before any mail: a flood of it
                work = self._pop_timer()  # would win
                if work is not None:
                    return work
            try:
                comes_first, work = self._receive()
            except queue.Empty:
                if self._queue:
                    return self._queue.popleft()
                continue
            if comes_first:
                return work
            self._queue.append(work)

    def _pop_timer(self) -> Work | None:
        due, order, work = heapq.heappop(self._timers)
        now = time.monotonic()
        if now - due > STALL and order not in self._postponed:
            self._postponed.add(order)
            heapq.heappush(self._timers, (now + STALL_GRACE, order, work))
            return None
        self._postponed.discard(order)
        return work

    def _receive(self) -> tuple[bool, Work | None]:
        """What has come; waits only while there is nothing else to do."""
        if self._queue:
            return self._inbox.get_nowait()
        if not self._timers:
            return self._inbox.get()
        return self._inbox.get(timeout=max(0.0, self._timers[0][0] - time.monotonic()))


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
        """End the thread, once those that were killed are gone."""
        self._writer.send("close")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        closes_at: float | None = None
        while closes_at is None or (self._watched and time.monotonic() < closes_at):
            left = None if closes_at is None else max(0.0, closes_at - time.monotonic())
            for ready in wait([self._reader, *list(self._watched)], left):
                if isinstance(ready, int):
                    handle, on_exit = self._watched.pop(ready)
                    try:
                        on_exit(handle)
                    except Exception:  # the others' ends must still be seen
                        pid = handle.pid
                        logger.exception("nbddp could not tell of the end of process %s", pid)
                elif self._reader.recv() == "close":
                    closes_at = time.monotonic() + CLOSE_TIMEOUT


@dataclass(frozen=True, slots=True)
class Runtime:
    """What there is while there are, or may be, processes.

    Attributes:
        link: to and from the ranks.
        event_thread: the session's thread, which does everything else.
        launch_thread: starts processes, and may have to wait for a helper that still imports.
        exit_watcher: tells when a process has ended.
        readers: bring what cells say, and what does not wait for that.
    """

    link: StoreLink
    event_thread: EventThread
    launch_thread: EventThread
    exit_watcher: ExitWatcher
    readers: list[threading.Thread] = field(default_factory=list)

    def start_readers(
        self, read: Callable[[Envelope], Any], on_lost: Callable[[Exception], Any]
    ) -> None:
        """Have the actor read what comes from the ranks, or be told that nothing can be read."""
        for name, get, submit in (
            ("mail", self.link.get, self.event_thread.submit),
            ("news", self.link.get_urgent, self.event_thread.submit_urgent),
        ):

            def read_on(get: Any = get, submit: Any = submit) -> None:
                try:
                    while (envelope := get()) is not None:
                        for part in envelope.parts:
                            submit(read, part)
                except Exception as error:
                    logger.exception("nbddp cannot read what the ranks say")
                    self.event_thread.submit_urgent(on_lost, error)

            self.readers.append(threading.Thread(target=read_on, name=f"nbddp-{name}", daemon=True))
            self.readers[-1].start()

    def close(self) -> None:
        """End the threads, those first that bring something to the others."""
        self.launch_thread.close(timeout=CLOSE_TIMEOUT)
        try:
            self.link.close()
        except Exception:
            logger.exception("nbddp could not close its end of the store")
        for reader in self.readers:
            reader.join(CLOSE_TIMEOUT)
        self.event_thread.run(lambda: None)  # what was launched late is watched by now
        self.exit_watcher.close()
        self.event_thread.close()


def open_runtime(make_link: Callable[[], StoreLink] | None = None) -> Runtime:
    """Return a link, by default one that serves a store on this machine, and the threads."""
    if make_link is None:
        from nbddp.controller.store_link import StoreLink

        make_link = StoreLink
    return Runtime(
        make_link(), EventThread("nbddp-session"), EventThread("nbddp-launch"), ExitWatcher()
    )
