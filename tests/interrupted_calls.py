"""Interrupt a function at random moments, and count the frames that stay alive."""

import gc
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet


class _Local:
    """A local variable of a frame."""


def count_kept_frames(function: Callable[[], object], *, interrupts: int, most: int = 1) -> int:
    """Call a function again and again; an interrupt ends each such loop.

    Return how many loops stay alive. End before ``interrupts`` if that are ``most``.
    """
    kept, is_due, is_over = WeakSet[_Local](), threading.Event(), threading.Event()
    main = threading.main_thread().ident or 0

    def interrupt() -> None:
        while is_due.wait() and not is_over.is_set():
            is_due.clear()
            time.sleep(random.random() / 500)
            signal.pthread_kill(main, signal.SIGINT)

    def call_until_interrupt() -> None:
        local = _Local()
        kept.add(local)
        is_due.set()
        while True:
            function()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    for _ in range(interrupts):
        with suppress(KeyboardInterrupt):
            call_until_interrupt()
        if len(kept) >= most:
            gc.collect()
            if len(kept) >= most:
                break
    is_over.set()
    is_due.set()
    interrupter.join()
    return len(kept)
