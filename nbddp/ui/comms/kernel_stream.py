"""Intercept some of the incoming messages of a kernel.

This module uses undocumented attributes of ipykernel. So it checks first that all of them exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import Any

logger = logging.getLogger(__name__)


BUTTONS_WAIT = "buttons act only after the cell has ended"
_NEEDED_ATTRIBUTES = (
    "session.deserialize",
    "session.feed_identities",
    "session.unpack",
    "comm_manager.comm_open",
    "comm_manager.comms",
    "get_parent",
    "_publish_status",
    "shell_stream.flush",
    "shell_stream.on_recv",
    "shell_stream._recv_callback",
    "shell_stream._recv_copy",
    "shell_stream._run_callback",
)


class DispatchMode(Enum):
    """How the messages of a kernel can be intercepted."""

    THREAD = "thread"  # ipykernel 7: a separate thread reads the messages
    POLL = "poll"  # ipykernel 6: only the main thread can read the messages, so it must poll
    NONE = "none"  # no kernel, or an unknown kernel


def dispatch_mode_of(kernel: Any) -> DispatchMode:
    """Return how to intercept messages of a kernel; log a warning for an unknown kernel."""
    if kernel is None:
        return DispatchMode.NONE
    thread = getattr(kernel, "shell_channel_thread", None)
    try:
        for name in _NEEDED_ATTRIBUTES:
            attrgetter(name)(kernel)
        if thread is not None:
            attrgetter("io_loop.asyncio_loop")(thread)
    except AttributeError as error:
        logger.warning("%s: unknown kernel (%s)", BUTTONS_WAIT, error)
        return DispatchMode.NONE
    return DispatchMode.POLL if thread is None else DispatchMode.THREAD


class StreamInterceptor:
    """Replaces the callback of a kernel's stream, and forwards messages that it does not take.

    Create and remove it on the thread that reads the stream.
    """

    def __init__(self, kernel: Any, intercept: Callable[[list[Any]], bool]) -> None:
        self._stream = kernel.shell_stream
        self._intercept = intercept
        self._is_active = True
        self._is_copy = self._stream._recv_copy
        callback = self._stream._recv_callback
        while isinstance(callback, StreamInterceptor) and not callback._is_active:
            callback = callback._next_callback
        self._next_callback: Any = callback
        self._stream.on_recv(self, copy=self._is_copy)

    def __call__(self, frames: list[Any]) -> Any:
        """Intercept the message, or forward it and return the result, which may be awaitable."""
        if self._is_active and self._intercept(frames):
            return None
        return self._next_callback(frames)

    def pass_on(self, frames: list[Any]) -> None:
        """Forward an intercepted message to the kernel."""
        self._stream._run_callback(self._next_callback, frames)

    @property
    def is_on_top(self) -> bool:
        """Whether this is still the callback of the stream."""
        return self._stream._recv_callback is self

    def remove(self) -> None:
        """Stop intercepting, and restore the callback of the stream.

        If other code has replaced this callback, its callback stays. It may forward messages to
        this one, which still forwards them to the kernel.
        """
        self._is_active = False
        if self.is_on_top:
            self._stream.on_recv(self._next_callback, copy=self._is_copy)
        else:
            logger.info("other code also filters the messages of the kernel; its filter stays")
