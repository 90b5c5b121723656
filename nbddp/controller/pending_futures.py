"""The futures that a session has given to callers on other threads."""

from __future__ import annotations

from typing import Any

from nbddp.sigint import Future


class PendingFutures:
    """The futures that are still open; used on the session's thread.

    A key says what is awaited: a "start", "heal" or "stop", ("kill", rank), ("answer", rank,
    number). All that wait for the same are told.

    >>> futures = PendingFutures()
    >>> killed = futures.new("kill", 3)
    >>> futures.resolve("kill", 3)
    >>> killed.done()
    True
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str | int, ...], list[Future[Any]]] = {}

    def new(self, *key: str | int) -> Future[Any]:
        """Return a future that is still open."""
        future: Future[Any] = Future()
        self._open.setdefault(key, []).append(future)
        return future

    def resolve(self, *key: str | int, value: object = None) -> None:
        """Resolve the futures of a key."""
        for future in self._open.pop(key, ()):
            future.set_result(value)

    def reject(self, error: Exception, *key: str | int) -> None:
        """Reject all futures whose key begins like this."""
        for each in [each for each in self._open if each[: len(key)] == key]:
            for future in self._open.pop(each):
                future.set_exception(error)
