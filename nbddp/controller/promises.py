"""The promises of a session to callers on other threads."""

from __future__ import annotations

from typing import Any

from nbddp.sigint import Future


class Promises:
    """The promises that are still open; used on the session's thread.

    A key says what is promised: a "start", "heal" or "stop", ("kill", rank), ("answer", rank,
    number). All that wait for the same are told.

    >>> promises = Promises()
    >>> killed = promises.new("kill", 3)
    >>> promises.keep("kill", 3)
    >>> killed.done()
    True
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str | int, ...], list[Future[Any]]] = {}

    def new(self, *key: str | int) -> Future[Any]:
        """Return a promise that is still open."""
        promise: Future[Any] = Future()
        self._open.setdefault(key, []).append(promise)
        return promise

    def keep(self, *key: str | int, value: object = None) -> None:
        """Resolve the promises of a key."""
        for promise in self._open.pop(key, ()):
            promise.set_result(value)

    def reject(self, error: Exception, *key: str | int) -> None:
        """Reject all promises whose key begins like this."""
        for each in [each for each in self._open if each[: len(key)] == key]:
            for promise in self._open.pop(each):
                promise.set_exception(error)
