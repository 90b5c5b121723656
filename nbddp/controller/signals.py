"""SIGINT while somebody waits for ranks: it is theirs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbddp.lifecycle.group_state import GroupState


@contextmanager
def forward_sigint(
    interrupt: Callable[[], None], state: Callable[[], GroupState]
) -> Iterator[None]:
    """Pass SIGINT on to the ranks: raised here, it would leave their cell running.

    One that finds no cell is for the cell that begins next, and a second one of that kind is
    raised after all: whatever is waited for here may never come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = 0

    def on_sigint(*_: object) -> None:
        nonlocal ignored
        ignored += state() in (GroupState.OFF, GroupState.IDLE, GroupState.BROKEN)
        interrupt()
        if ignored > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
