"""Who waits for what: futures of callers on other threads, settled by the session."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from nbddp.errors import RequestError, StartError
from nbddp.record.cell import HEARING
from nbddp.wire.messages import Answer

T = TypeVar("T")


def kept(promise: Future[T]) -> T:
    """What was promised, once it is there; a signal is heard while it is waited for.

    One that comes after Python's last look and before the system's wait is seen when that wait
    ends: so none is long.
    """
    await_all([promise])
    return promise.result()


def await_all(promises: Iterable[Future[Any]], patience: float = math.inf) -> None:
    """Wait until all are kept or broken; a signal is heard, as by :func:`kept`.

    Args:
        promises: those.
        patience: seconds after which it returns all the same.
    """
    left = set(promises)
    deadline = time.monotonic() + patience
    while left and time.monotonic() < deadline:
        left = wait(left, HEARING).not_done


def await_all_or_a_failure(promises: Iterable[Future[Answer]]) -> None:
    """Wait until all have answered, or one of them could not."""
    left = set(promises)
    while left:
        done, left = wait(left, HEARING, FIRST_COMPLETED)
        if any(each.exception() or each.result().error for each in done):
            return


class Promises:
    """The promises a session has made and not kept yet."""

    def __init__(self) -> None:
        self._start: Future[None] | None = None
        self._heal: Future[None] | None = None
        self._stops: list[Future[None]] = []
        self._kills: dict[int, list[Future[None]]] = {}
        self._answers: dict[int, tuple[int, Future[Answer]]] = {}

    def for_start(self) -> Future[None]:
        """Somebody waits for all ranks to be ready; an earlier start is overtaken by it."""
        self.start_failed(StartError("restarted before it was ready"))
        self._start = Future()
        return self._start

    @property
    def pending_start(self) -> Future[None] | None:
        """The start that was asked for last."""
        return self._start

    def for_heal(self) -> Future[None]:
        """Somebody waits for new processes in the places of dead ones."""
        self.not_healed("it was asked for again")
        self._heal = Future()
        return self._heal

    def revived(self) -> None:
        """They are there."""
        if self._heal is not None and not self._heal.done():
            self._heal.set_result(None)

    def not_healed(self, why: str) -> None:
        """They are not, or not any more."""
        if self._heal is not None and not self._heal.done():
            self._heal.set_exception(RequestError(f"the group was not healed: {why}"))

    def for_stop(self) -> Future[None]:
        """Somebody waits until all processes are gone."""
        self._stops.append(Future())
        return self._stops[-1]

    def for_kill(self, rank: int) -> Future[None]:
        """Somebody waits until one process is gone."""
        future: Future[None] = Future()
        self._kills.setdefault(rank, []).append(future)
        return future

    def for_answer(self, request: int, rank: int) -> Future[Answer]:
        """Somebody waits for what a rank says."""
        future: Future[Answer] = Future()
        self._answers[request] = rank, future
        return future

    def started(self) -> None:
        """All ranks are ready."""
        if self._start is not None and not self._start.done():
            self._start.set_result(None)

    def start_failed(self, error: StartError) -> None:
        """They will not be."""
        if self._start is not None and not self._start.done():
            self._start.set_exception(error)

    def stopped(self) -> None:
        """All processes are gone."""
        waiting, self._stops = self._stops, []
        for future in waiting:
            future.set_result(None)

    def gone(self, rank: int, why: str) -> None:
        """One process is gone, and with it what it would have answered: ``why`` is said then."""
        for future in self._kills.pop(rank, ()):
            future.set_result(None)
        for request, (asked, answer) in list(self._answers.items()):
            if asked == rank:
                del self._answers[request]
                answer.set_exception(RequestError(why))

    def answered(self, answer: Answer) -> None:
        """A rank said something that was asked."""
        _, future = self._answers.pop(answer.request, (0, None))
        if future is not None:
            future.set_result(answer)
