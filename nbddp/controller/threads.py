"""The threads of a session, with its link to the ranks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nbddp.errors import RequestError
from nbddp.launch.local_launcher import RankHandle
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.sigint import Future, wait_for_result
from nbddp.wire.envelope import Envelope

if TYPE_CHECKING:
    from nbddp.controller.store_link import StoreLink  # imports torch: only when needed

logger = logging.getLogger(__name__)

STALL = 1.0  # a timer that is late by this many seconds shows that the process was stopped
STALL_GRACE = 2.0  # seconds to handle the messages that arrived meanwhile
CLOSE_TIMEOUT = 5.0  # seconds for each thread, and for killed ranks, to end at a close

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Any]


class EventThread:
    """A thread that owns state: only this thread may use it.

    It has an event loop of asyncio for timers and exits of processes, and two queues of calls.
    Between two queued calls the loop runs what is due, so that many messages delay no timer.

    >>> thread = EventThread("demo")
    >>> thread.run(max, 2, 3)
    3
    >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self._urgent: deque[Work] = deque()
        self._queue: deque[Work] = deque()
        self._watched: dict[int, Work] = {}
        self._is_scheduled = self._is_closing = self._is_closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the thread. Return its result or raise its error.

        Raises:
            RequestError: the thread was closed with its group.
        """
        if threading.current_thread() is self._thread:
            return act(*args, **kwargs)  # waiting here would be a deadlock
        done: Future[T] = Future()
        if not self.submit(done.complete_with, lambda: act(*args, **kwargs)):
            raise RequestError(NO_GROUP)
        return wait_for_result(done)

    def submit(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run a function on the thread later. Return whether it will run."""
        return self._put(self._queue, lambda: act(*args, **kwargs))

    def submit_urgent(self, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Like :meth:`submit`, but before all functions that are queued."""
        return self._put(self._urgent, lambda: act(*args, **kwargs))

    def _put(self, queue: deque[Work], work: Work) -> bool:
        with self._lock:
            if self._is_closed:
                return False  # it would never run
            queue.append(work)
            if not self._is_scheduled:
                self._loop.call_soon_threadsafe(self._run_next)
                # last: after an interrupt before this line, the next call schedules both
                self._is_scheduled = True
            return True

    def call_later(
        self, seconds: float, act: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run a function on this thread after some seconds; call this on the thread itself.

        The function may judge ranks that were silent. If the process was stopped when the function
        was due, no message could be read, so the function is postponed once.
        """
        due, work = self._loop.time() + seconds, partial(_run, partial(act, *args, **kwargs))

        def run_or_postpone() -> None:
            if self._loop.time() - due > STALL:
                self._loop.call_later(STALL_GRACE, work)
            else:
                work()

        self._loop.call_later(seconds, run_or_postpone)

    def watch(self, handle: RankHandle, on_exit: Callable[[], Any]) -> None:
        """Run a function once when a process has exited; call this on the thread itself.

        It runs after the functions that are queued at that moment.
        """
        self._loop.add_reader(handle.sentinel, self._on_exit, handle.sentinel)
        self._watched[handle.sentinel] = on_exit

    def _on_exit(self, sentinel: int) -> None:
        self._loop.remove_reader(sentinel)
        self._put(self._queue, self._watched.pop(sentinel))

    def close(self, *, timeout: float | None = None) -> None:
        """Run what was submitted before, report the exits of killed processes, end the thread.

        Wait at most ``timeout`` seconds for that.
        """
        with self._lock:
            if not self._is_closing:
                end_wait = partial(self._loop.call_later, CLOSE_TIMEOUT, self._stop_watching)
                self._put(self._queue, end_wait)
                self._is_closing = True
        self._thread.join(timeout)

    def _stop_watching(self) -> None:
        self._watched.clear()
        self._run_next()

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _run_next(self) -> None:
        with self._lock:
            queue = self._urgent or self._queue
            work = queue.popleft() if queue else None
            self._is_scheduled = bool(self._urgent or self._queue)
            if self._is_scheduled:
                self._loop.call_soon(self._run_next)
        if work is not None:
            _run(work)
        with self._lock:
            if self._is_closing and not (self._watched or self._is_scheduled):
                self._is_closed = True
                self._loop.stop()


def _run(work: Work) -> None:
    try:
        work()
    except BaseException:  # the thread must go on: others wait for it
        logger.exception("nbddp could not handle an event")


@dataclass(frozen=True, slots=True)
class Runtime:
    """The link and the threads of a session, while it has or may have processes.

    Attributes:
        link: the connection to the ranks.
        event_thread: the session's thread, which owns all state and sees processes exit.
        launch_thread: starts processes; it may have to wait for the forkserver.
        readers: two threads that read ordinary and urgent messages.
    """

    link: StoreLink
    event_thread: EventThread
    launch_thread: EventThread
    readers: list[threading.Thread] = field(default_factory=list)

    def start_readers(
        self, read: Callable[[Envelope], Any], on_lost: Callable[[Exception], Any]
    ) -> None:
        """Start to read messages: call ``read`` with each one, and ``on_lost`` if reading fails."""

        def read_on(*, is_urgent: bool) -> None:
            # On a reader thread, nbddp-messages or nbddp-urgent: hand each message on at once.
            thread = self.event_thread
            submit: Callable[..., Any] = thread.submit_urgent if is_urgent else thread.submit
            try:
                while (envelope := self.link.get(is_urgent=is_urgent)) is not None:
                    for part in envelope.parts:
                        submit(read, part)
            except Exception as error:
                logger.exception("nbddp cannot read the messages of the ranks")
                thread.submit_urgent(on_lost, error)

        for name in ("messages", "urgent"):
            target = partial(read_on, is_urgent=name == "urgent")
            self.readers.append(threading.Thread(target=target, name=f"nbddp-{name}", daemon=True))
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
        self.event_thread.close()


def open_runtime(make_link: Callable[[], StoreLink] | None = None) -> Runtime:
    """Return a runtime with a link; by default the link starts a store on this machine."""
    if make_link is None:
        from nbddp.controller.store_link import StoreLink

        make_link = StoreLink
    return Runtime(make_link(), EventThread("nbddp-session"), EventThread("nbddp-launch"))
