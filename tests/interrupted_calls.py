"""Interrupt a function at random moments, and find a frame that stays alive."""

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


def keeps_a_frame(function: Callable[[], object], *, interrupts: int) -> bool:
    """Call a function in loops, and end each loop by an interrupt.

    Return whether a loop's frame stays alive after its end; stop at the first.
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
        if kept:
            gc.collect()
        if kept:
            break
    is_over.set()
    is_due.set()
    interrupter.join()
    return bool(kept)
