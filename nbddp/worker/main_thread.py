"""The thread that cells run in, seen from the others."""

from __future__ import annotations

import sys
import threading
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
