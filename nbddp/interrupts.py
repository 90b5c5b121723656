"""Defer SIGINT while the main thread does something that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldBack:
    """Counts the deferred interrupts, and says whether a second one is raised at once."""

    def __init__(self, *, raises_second: bool) -> None:
        self.times = 0
        self.raises_second = raises_second


@contextmanager
def interrupt_held_back(*, raises_second: bool = True) -> Iterator[HeldBack]:
    """Defer an interrupt until the block ends; a second one is raised at once.

    Args:
        raises_second: False to defer all of them; the block reads ``times`` while it waits.
    """
    held = HeldBack(raises_second=raises_second)
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield held
        return

    def hold(signum: int, frame: FrameType | None) -> None:
        held.times += 1
        if held.times > 1 and held.raises_second and callable(before):
            before(signum, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        if held.times:
            signal.raise_signal(signal.SIGINT)


def begin(thread: threading.Thread) -> None:
    """Start a thread, whole or not at all.

    ``Thread.start`` waits for an event that the new thread sets. An interrupt there can leave the
    event's lock taken, and the thread waiting for it: one that is alive and never does anything.
    """
    with interrupt_held_back():
        thread.start()
