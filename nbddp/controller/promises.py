"""The promises of a session to callers on other threads."""

from __future__ import annotations

from nbddp.errors import RequestError, StartError
from nbddp.lifecycle.reasons import NOT_HEALED
from nbddp.promise import Promise
from nbddp.record.healed import Healed
from nbddp.wire.messages import Answer


class Promises:
    """The promises that are still open; used on the session's thread."""

    def __init__(self) -> None:
        self._start: Promise[None] | None = None
        self._heal: Promise[Healed] | None = None
        self._stops: list[Promise[None]] = []
        self._kills: dict[int, list[Promise[None]]] = {}
        self._answers: dict[int, tuple[int, Promise[Answer]]] = {}

    def for_start(self) -> Promise[None]:
        """Return a promise for the start of all ranks; it replaces that of an earlier start."""
        self.start_failed(StartError("restarted before it was ready"))
        self._start = Promise()
        return self._start

    @property
    def pending_start(self) -> Promise[None] | None:
        """The start that was asked for last."""
        return self._start

    def for_heal(self) -> Promise[Healed]:
        """Return a promise for the end of a heal."""
        self.not_healed("it was asked for again")
        self._heal = Promise()
        return self._heal

    def healed(self, healed: Healed) -> None:
        """Resolve the promise of the heal with its report."""
        if self._heal is not None and not self._heal.done():
            self._heal.set_result(healed)

    def not_healed(self, why: str) -> None:
        """Reject the promise of the heal."""
        if self._heal is not None and not self._heal.done():
            self._heal.set_exception(RequestError(f"{NOT_HEALED}: {why}"))

    def for_stop(self) -> Promise[None]:
        """Return a promise for the end of all processes."""
        self._stops.append(Promise())
        return self._stops[-1]

    def for_kill(self, rank: int) -> Promise[None]:
        """Return a promise for the end of one process."""
        promise: Promise[None] = Promise()
        self._kills.setdefault(rank, []).append(promise)
        return promise

    def for_answer(self, request: int, rank: int) -> Promise[Answer]:
        """Return a promise for the answer of a rank to a request."""
        promise: Promise[Answer] = Promise()
        self._answers[request] = rank, promise
        return promise

    def started(self) -> None:
        """Resolve the promise of the start."""
        if self._start is not None and not self._start.done():
            self._start.set_result(None)

    def start_failed(self, error: StartError) -> None:
        """Reject the promise of the start."""
        if self._start is not None and not self._start.done():
            self._start.set_exception(error)

    def stopped(self) -> None:
        """Resolve the promises for the end of all processes."""
        waiting, self._stops = self._stops, []
        for promise in waiting:
            promise.set_result(None)

    def gone(self, rank: int, why: str) -> None:
        """Resolve the promises for a process that ended; reject with ``why`` its open answers."""
        for promise in self._kills.pop(rank, ()):
            promise.set_result(None)
        for request, (asked, answer) in list(self._answers.items()):
            if asked == rank:
                del self._answers[request]
                answer.set_exception(RequestError(why))

    def answered(self, answer: Answer) -> None:
        """Resolve the promise for an answer."""
        _, promise = self._answers.pop(answer.request, (0, None))
        if promise is not None:
            promise.set_result(answer)
