"""Who waits for what: promises to callers on other threads, kept by the session's."""

from __future__ import annotations

from nbddp.errors import RequestError, StartError
from nbddp.lifecycle.reasons import NOT_HEALED
from nbddp.promise import Promise
from nbddp.record.healed import Healed
from nbddp.wire.messages import Answer


class Promises:
    """The promises a session has made and not kept yet."""

    def __init__(self) -> None:
        self._start: Promise[None] | None = None
        self._heal: Promise[Healed] | None = None
        self._stops: list[Promise[None]] = []
        self._kills: dict[int, list[Promise[None]]] = {}
        self._answers: dict[int, tuple[int, Promise[Answer]]] = {}

    def for_start(self) -> Promise[None]:
        """Somebody waits for all ranks to be ready; an earlier start is overtaken by it."""
        self.start_failed(StartError("restarted before it was ready"))
        self._start = Promise()
        return self._start

    @property
    def pending_start(self) -> Promise[None] | None:
        """The start that was asked for last."""
        return self._start

    def for_heal(self) -> Promise[Healed]:
        """Somebody waits until the new ranks have their names and all have met."""
        self.not_healed("it was asked for again")
        self._heal = Promise()
        return self._heal

    def healed(self, healed: Healed) -> None:
        """They have."""
        if self._heal is not None and not self._heal.done():
            self._heal.set_result(healed)

    def not_healed(self, why: str) -> None:
        """They will not."""
        if self._heal is not None and not self._heal.done():
            self._heal.set_exception(RequestError(f"{NOT_HEALED}: {why}"))

    def for_stop(self) -> Promise[None]:
        """Somebody waits until all processes are gone."""
        self._stops.append(Promise())
        return self._stops[-1]

    def for_kill(self, rank: int) -> Promise[None]:
        """Somebody waits until one process is gone."""
        promise: Promise[None] = Promise()
        self._kills.setdefault(rank, []).append(promise)
        return promise

    def for_answer(self, request: int, rank: int) -> Promise[Answer]:
        """Somebody waits for what a rank says."""
        promise: Promise[Answer] = Promise()
        self._answers[request] = rank, promise
        return promise

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
        for promise in waiting:
            promise.set_result(None)

    def gone(self, rank: int, why: str) -> None:
        """One process is gone, and with it what it would have answered: ``why`` is said then."""
        for promise in self._kills.pop(rank, ()):
            promise.set_result(None)
        for request, (asked, answer) in list(self._answers.items()):
            if asked == rank:
                del self._answers[request]
                answer.set_exception(RequestError(why))

    def answered(self, answer: Answer) -> None:
        """A rank said something that was asked."""
        _, promise = self._answers.pop(answer.request, (0, None))
        if promise is not None:
            promise.set_result(answer)
