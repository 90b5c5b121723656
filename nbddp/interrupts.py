"""What an interrupt of the main thread must not strike in the middle of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


@contextmanager
def interrupt_held_back() -> Iterator[None]:
    """Let an interrupt wait until this is done; a second one is raised at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    held: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        is_first = not held
        held.append(signum)
        if not is_first and callable(before):
            before(signum, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)


class OneInterrupt:
    """Interrupts wait while this is entered; where they are let in, one of them strikes.

    For what is begun, goes on for long, and has to be ended: no stop, nor the third of a row, comes
    between a begin and what sees to its end, or strikes in the middle of that. All that come after
    the one that has struck are dropped.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], object] | None = None
        self._is_let_in = self._is_held = self._has_struck = False

    def __enter__(self) -> OneInterrupt:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self._is_held and not self._has_struck:
            signal.raise_signal(signal.SIGINT)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_let_in or self._before is None:
            self._is_held = True
            return
        self._is_let_in, self._has_struck = False, True
        self._before(signum, frame)
        self._is_let_in, self._has_struck = True, False  # it was heard, and nothing was raised

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """An interrupt strikes in here, also one that has waited; but no second one."""
        self._is_let_in = not self._has_struck
        try:
            if self._is_held and self._is_let_in:
                self._is_held = False
                signal.raise_signal(signal.SIGINT)
            yield
        finally:
            self._is_let_in = False


def begin(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all.

    ``Thread.start`` waits for an event that the new thread sets. An interrupt there can leave the
    event's lock taken, and the thread waiting for it: one that is alive and never does anything.
    """
    with interrupt_held_back():
        thread.start()
