"""Count how often waits with a timeout succeed: a loop of waits that all expire is no progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import connection, queues
from queue import Queue
from types import FrameType
from typing import Any

from nbddp.worker.wrapping import wrap

WAITS: tuple[tuple[Any, str], ...] = (
    *((owner, name) for owner in (Queue, queues.Queue) for name in ("get", "put")),
    (connection._ConnectionBase, "poll"),
    (threading.Event, "wait"),
)
_successes = 0  # of all threads; a lost count of two at once does not matter


def install_hooks() -> None:
    """Count the successful waits in queues and for events and connections."""
    for owner, name in WAITS:
        wrap(owner, name, _count)


def _count(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    global _successes
    result = original(*args, **options)  # a queue raises Empty or Full if the wait expires
    if result is not False:  # the others return False
        _successes += 1
    return result


def key_of_loop(call: FrameType, inner: FrameType | None) -> object:
    """Return a value that stays equal while a loop repeats this wait in vain; None for other calls.

    Args:
        call: the frame of the wait.
        inner: the frame that it has called.
    """
    if inner is None or inner.f_code is not _count.__code__:
        return None
    caller = call.f_back
    return None if caller is None else (caller.f_code, caller.f_lasti, _successes)
