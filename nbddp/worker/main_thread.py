"""The thread that cells run in, seen from the others."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType


def main_thread_id() -> int:
    """The identity of the main thread."""
    identity = threading.main_thread().ident
    if identity is None:
        raise RuntimeError("the main thread has not started")
    return identity


def main_frame() -> FrameType:
    """Where the main thread is right now."""
    return sys._current_frames()[main_thread_id()]


def main_cpu_time() -> float:
    """Seconds of CPU that the main thread has used; always 0 where there is no clock (macOS)."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread_id()))
