"""Forward SIGINT to the ranks while the notebook waits for them."""

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
    """Forward SIGINT to the ranks; a KeyboardInterrupt here would leave their cell running.

    A SIGINT without a running cell counts for the next cell. A second one of this kind raises
    KeyboardInterrupt, because the event that the notebook waits for may never come.
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
