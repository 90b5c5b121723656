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

STILL = 1.0  # seconds that something is late when this process, or the machine, stood still
RESPITE = 2.0  # seconds in which those come to word then who could not
PATIENCE = 5.0  # seconds that a thread, or a rank that was killed last, gets to end at a close

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Any]


class ClosedError(RuntimeError):
    """What was asked of an actor is not done any more."""


class EventThread:
    """Owns a thread and all state that only this thread may touch.

    >>> actor = EventThread("demo")
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
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(act(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is raised where it belongs
                done.set_exception(error)

        if not self._put(work):
            raise ClosedError("this actor was closed")
        return wait_for_result(done)

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


class ExitWatcher:
    """Calls back, once, for every process that ends."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._watched: dict[int, tuple[RankHandle, Callable[[RankHandle], Any]]] = {}
        self._thread = threading.Thread(target=self._watch_all, name="nbddp-exits", daemon=True)
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

    def _watch_all(self) -> None:
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
                    closes_at = time.monotonic() + PATIENCE


@dataclass(frozen=True, slots=True)
class Runtime:
    """What there is while there are, or may be, processes.

    Attributes:
        link: to and from the ranks.
        actor: the session's thread, which does everything else.
        launching: starts processes, and may have to wait for a helper that still imports.
        watcher: tells when a process has ended.
        collectors: bring what cells say, and what does not wait for that.
    """

    link: StoreLink
    actor: EventThread
    launching: EventThread
    watcher: ExitWatcher
    collectors: list[threading.Thread] = field(default_factory=list)

    def listen(self, read: Callable[[Envelope], Any], lose: Callable[[Exception], Any]) -> None:
        """Have the actor read what comes from the ranks, or be told that nothing can be read."""
        for name, collect, tell in (
            ("mail", self.link.collect, self.actor.tell),
            ("news", self.link.collect_urgent, self.actor.tell_first),
        ):

            def read_on(collect: Any = collect, tell: Any = tell) -> None:
                try:
                    while (envelope := collect()) is not None:
                        for part in envelope.parts:
                            tell(read, part)
                except Exception as error:
                    logger.exception("nbddp cannot read what the ranks say")
                    self.actor.tell_first(lose, error)

            self.collectors.append(
                threading.Thread(target=read_on, name=f"nbddp-{name}", daemon=True)
            )
            self.collectors[-1].start()

    def close(self) -> None:
        """End the threads, those first that bring something to the others."""
        self.launching.close(patience=PATIENCE)
        try:
            self.link.close()
        except Exception:
            logger.exception("nbddp could not close its end of the store")
        for collector in self.collectors:
            collector.join(PATIENCE)
        self.actor.call(lambda: None)  # what was launched late is watched by now
        self.watcher.close()
        self.actor.close()


def open_runtime(make_link: Callable[[], StoreLink] | None = None) -> Runtime:
    """Return a link, by default one that serves a store on this machine, and the threads."""
    if make_link is None:
        from nbddp.controller.store_link import StoreLink

        make_link = StoreLink
    return Runtime(
        make_link(), EventThread("nbddp-session"), EventThread("nbddp-launch"), ExitWatcher()
    )
