"""The futures on which callers on other threads wait."""

from __future__ import annotations

from typing import Any

from nbddp.sigint import Future


class PendingFutures:
    """Futures that are not resolved yet; used on the session's thread.

    A key names the event to wait for: "start", "heal", "stop", ("kill", rank) or ("answer", rank,
    number). All futures with the same key are resolved together.

    >>> futures = PendingFutures()
    >>> killed = futures.new("kill", 3)
    >>> futures.resolve("kill", 3)
    >>> killed.done()
    True
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str | int, ...], list[Future[Any]]] = {}

    def new(self, *key: str | int) -> Future[Any]:
        """Return a new future."""
        future: Future[Any] = Future()
        self._open.setdefault(key, []).append(future)
        return future

    def is_pending(self, *key: str | int) -> bool:
        """Return whether a future with this key is not resolved."""
        return key in self._open

    def resolve(self, *key: str | int, value: object = None) -> None:
        """Resolve all futures with this key."""
        for future in self._open.pop(key, ()):
            future.set_result(value)

    def reject(self, error: Exception, *key: str | int) -> None:
        """Reject all futures whose key starts with these parts."""
        for open_key in [each for each in self._open if each[: len(key)] == key]:
            for future in self._open.pop(open_key):
                future.set_exception(error)
