"""The threads of a session, with its link to the ranks."""

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
    from nbddp.controller.store_link import StoreLink  # imports torch: only when needed
    from nbddp.wire.envelope import Envelope

logger = logging.getLogger(__name__)

STALL = 1.0  # a timer that is late by this many seconds shows that the process was stopped
STALL_GRACE = 2.0  # seconds to handle the messages that arrived meanwhile
CLOSE_TIMEOUT = 5.0  # seconds for each thread, and for killed ranks, to end at a close

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Any]


class ClosedError(RuntimeError):
    """The event thread was closed, so it runs nothing any more."""


class EventThread:
    """A thread that owns state: only this thread may use it.

    >>> thread = EventThread("demo")
    >>> thread.run(max, 2, 3)
    3
    >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        # the only queue that is safe to put into from a signal handler
        self._inbox: queue.SimpleQueue[tuple[bool, Work | None]] = queue.SimpleQueue()
        self._queue: deque[Work | None] = deque()
        self._timers: list[tuple[float, int, Work]] = []
        self._postponed: set[int] = set()  # timers that were postponed once, by order
        self._order = itertools.count()
        self._is_closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the thread. Return its result or raise its error.

        Raises:
            ClosedError: the thread was closed.
        """
        if threading.current_thread() is self._thread:
            return act(*args, **kwargs)  # waiting here would be a deadlock
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(act(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                done.set_exception(error)

        if not self._put(work):
            raise ClosedError("this thread was closed")
        return wait_for_result(done)

    def submit(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run a function on the thread later. Return whether it will run."""
        return self._put(lambda: act(*args, **kwargs))

    def submit_urgent(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Like :meth:`submit`, but before all functions that are queued."""
        return self._put(lambda: act(*args, **kwargs), comes_first=True)

    def _put(self, work: Work, *, comes_first: bool = False) -> bool:
        with self._lock:  # work after the end would never run
            if not self._is_closed:
                self._inbox.put((comes_first, work))
            return not self._is_closed

    def call_later(
        self, seconds: float, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run a function on this thread after some seconds; call this on the thread itself.

        The function may judge ranks that were silent. If the process was stopped when the function
        was due, no message could be read, so the function is postponed once.
        """
        due = time.monotonic() + seconds
        heapq.heappush(self._timers, (due, next(self._order), lambda: act(*args, **kwargs)))

    def close(self, *, timeout: float | None = None) -> None:
        """Run what was submitted before, then end the thread; wait at most ``timeout`` seconds."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put((False, None))
        self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            try:
                work()
            except BaseException:  # the thread must go on: others wait for it
                logger.exception("nbddp could not handle an event")

    def _next_work(self) -> Work | None:
        while True:
            # timers come first: many messages must not delay them
            if self._timers and self._timers[0][0] <= time.monotonic():
                work = self._pop_timer()
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
        """Return the next submitted work; block only if nothing else is queued."""
        if self._queue:
            return self._inbox.get_nowait()
        if not self._timers:
            return self._inbox.get()
        return self._inbox.get(timeout=max(0.0, self._timers[0][0] - time.monotonic()))


class ExitWatcher:
    """Calls a callback once for each process that exits."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._watched: dict[int, tuple[RankHandle, Callable[[RankHandle], Any]]] = {}
        self._thread = threading.Thread(target=self._run, name="nbddp-exits", daemon=True)
        self._thread.start()

    def watch(self, handle: RankHandle, on_exit: Callable[[RankHandle], Any]) -> None:
        """Call ``on_exit(handle)`` on the watcher's thread when the process exits."""
        self._watched[handle.sentinel] = (handle, on_exit)
        self._writer.send("watch")  # wakes the thread, so that it watches the new entry

    def close(self) -> None:
        """End the thread after the killed processes have exited."""
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
                    except Exception:  # the watcher must go on with the others
                        pid = handle.pid
                        logger.exception("nbddp could not report the exit of process %s", pid)
                elif self._reader.recv() == "close":
                    closes_at = time.monotonic() + CLOSE_TIMEOUT


@dataclass(frozen=True, slots=True)
class Runtime:
    """The link and the threads of a session, while it has or may have processes.

    Attributes:
        link: the connection to the ranks.
        event_thread: the session's thread, which owns all state.
        launch_thread: starts processes; it may have to wait for the forkserver.
        exit_watcher: reports processes that exit.
        readers: two threads that read ordinary and urgent messages.
    """

    link: StoreLink
    event_thread: EventThread
    launch_thread: EventThread
    exit_watcher: ExitWatcher
    readers: list[threading.Thread] = field(default_factory=list)

    def start_readers(
        self, read: Callable[[Envelope], Any], on_lost: Callable[[Exception], Any]
    ) -> None:
        """Start to read messages: call ``read`` with each one, and ``on_lost`` if reading fails."""
        for name, get, submit in (
            ("messages", self.link.get, self.event_thread.submit),
            ("urgent", self.link.get_urgent, self.event_thread.submit_urgent),
        ):

            def read_on(get: Any = get, submit: Any = submit) -> None:
                try:
                    while (envelope := get()) is not None:
                        for part in envelope.parts:
                            submit(read, part)
                except Exception as error:
                    logger.exception("nbddp cannot read the messages of the ranks")
                    self.event_thread.submit_urgent(on_lost, error)

            self.readers.append(threading.Thread(target=read_on, name=f"nbddp-{name}", daemon=True))
            self.readers[-1].start()

    def close(self) -> None:
        """End all threads; first those that submit work to others."""
        self.launch_thread.close(timeout=CLOSE_TIMEOUT)
        try:
            self.link.close()
        except Exception:
            logger.exception("nbddp could not close its link to the store")
        for reader in self.readers:
            reader.join(CLOSE_TIMEOUT)
        self.event_thread.run(lambda: None)  # now a late launch is watched, too
        self.exit_watcher.close()
        self.event_thread.close()


def open_runtime(make_link: Callable[[], StoreLink] | None = None) -> Runtime:
    """Return a runtime with a link; by default the link starts a store on this machine."""
    if make_link is None:
        from nbddp.controller.store_link import StoreLink

        make_link = StoreLink
    return Runtime(
        make_link(), EventThread("nbddp-session"), EventThread("nbddp-launch"), ExitWatcher()
    )
