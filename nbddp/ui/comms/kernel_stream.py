"""A kernel's incoming messages: how they are reached, and a filter that takes some of them out.

Most of what is used of the kernel here is undocumented, and so is asked for by name first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

logger = logging.getLogger(__name__)

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
    """How a kernel's messages can be reached."""

    THREAD = "thread"  # ipykernel 7: a thread of its own reads them, and passes them by our filter
    POLL = "poll"  # ipykernel 6: the main thread alone can read them, so it does while it waits
    NONE = "none"  # no kernel, or one that we do not know


def dispatch_mode_of(kernel: Any) -> DispatchMode:
    """How this kernel's messages can be reached; one that we do not know is logged."""
    if kernel is None:
        return DispatchMode.NONE
    thread = getattr(kernel, "shell_channel_thread", None)
    try:
        for name in _NEEDED_ATTRIBUTES:
            attrgetter(name)(kernel)
        if thread is not None:
            attrgetter("io_loop.asyncio_loop")(thread)
    except AttributeError as error:
        logger.warning("buttons answer only when the cell is over: unknown kernel (%s)", error)
        return DispatchMode.NONE
    return DispatchMode.POLL if thread is None else DispatchMode.THREAD


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message as it came, with its identities and its signature."""

    session: Any
    frames: list[Any]
    is_copy: bool  # bytes, or zmq's frames

    def peek(self) -> dict[str, Any]:
        """Read all but the content; its signature can still be used, once."""
        _, parts = self.session.feed_identities(self.frames, copy=self.is_copy)
        message: dict[str, Any] = self.session.deserialize(parts, content=False, copy=self.is_copy)
        return message

    def read(self) -> tuple[list[bytes], dict[str, Any]]:
        """The identities and the whole message; nobody can read it again."""
        identities, parts = self.session.feed_identities(self.frames, copy=self.is_copy)
        return identities, self.session.deserialize(parts, copy=self.is_copy)


class StreamInterceptor:
    """Stands before the callback that a kernel's stream has, and passes on what is not taken.

    To be made and taken out on the thread that reads the stream.
    """

    def __init__(self, kernel: Any, intercept: Callable[[RawMessage], bool]) -> None:
        self._session = kernel.session
        self._stream = kernel.shell_stream
        self._intercept = intercept
        self._is_active = True
        self._is_copy = self._stream._recv_copy
        self._next_callback = self._stream._recv_callback
        while (
            isinstance(self._next_callback, StreamInterceptor)
            and not self._next_callback._is_active
        ):
            self._next_callback = self._next_callback._next_callback
        self._stream.on_recv(self, copy=self._is_copy)

    def __call__(self, frames: list[Any]) -> Any:
        """Keep the message, or pass it on and return what there is to await."""
        if self._is_active and self._intercept(RawMessage(self._session, frames, self._is_copy)):
            return None
        return self._next_callback(frames)

    def pass_on(self, message: RawMessage) -> None:
        """Let the kernel have a message that was taken."""
        self._stream._run_callback(self._next_callback, message.frames)

    @property
    def is_on_top(self) -> bool:
        """Whether nobody has put a callback in its place."""
        return self._stream._recv_callback is self

    def remove(self) -> None:
        """Take nothing any more, and give the stream its callback back.

        Where somebody has put another callback before ours, that one stays: it may well hand
        its messages on to us, and from here they still go on to the kernel.
        """
        self._is_active = False
        if self.is_on_top:
            self._stream.on_recv(self._next_callback, copy=self._is_copy)
        else:
            logger.info("somebody else filters the kernel's messages; that is left as it is")
