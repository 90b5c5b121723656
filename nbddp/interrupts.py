"""What an interrupt of the main thread must not strike in the middle of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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


def begin(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all.

    ``Thread.start`` waits for an event that the new thread sets. An interrupt there can leave the
    event's lock taken, and the thread waiting for it: one that is alive and never does anything.
    """
    with interrupt_held_back():
        thread.start()
