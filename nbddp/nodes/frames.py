"""What goes between the door and a node: frames over one TLS connection, in order.

A frame has a kind, a number, which says what it is about (a rank's process, a carried connection),
and bytes. What tells of processes and nodes is JSON: nothing that comes in is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from nbddp.errors import WireError

_HEAD = struct.Struct("!BIQ")  # kind, number, bytes that follow
MAX_BYTES = 16 << 20


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # a node: who it is
    WELCOME = 2  # the door: come in
    REFUSED = 3  # the door: why not
    BEAT = 4  # either: a sign of life, with the sender's clock
    ECHO = 5  # the answer to it, with both clocks
    LEAVE = 6  # either: the node's work is over, and why
    START = 7  # the door: start a rank
    STARTED = 8  # a node: with this process id
    FAILED = 9  # a node: it could not be started
    EXITED = 10  # a node: it has ended, how, and what was left of its log came before
    TERMINATE = 11  # the door: SIGTERM
    KILL = 12  # the door: SIGKILL
    LOG = 13  # a node: what a rank wrote into a file
    OPEN = 14  # a node: a rank connects to the store
    DATA = 15  # either: what goes over such a connection
    CREDIT = 16  # either: so much of it was taken
    CLOSE = 17  # either: it has ended
    INTERRUPT = 18  # the door: SIGINT


class Wire(asyncio.Protocol):
    """One end of the connection, in an event loop.

    Args:
        on_frame: told of every frame; what it raises ends the connection.
        on_lost: told once when the connection has ended, and why, if it did not end well.
    """

    def __init__(
        self,
        on_frame: Callable[[Wire, Kind, int, bytes], None],
        on_lost: Callable[[Wire, Exception | None], None],
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.is_open = False
        self.heard_at = 0.0  # the loop's time

    def follow(
        self,
        on_frame: Callable[[Wire, Kind, int, bytes], None],
        on_lost: Callable[[Wire, Exception | None], None],
    ) -> None:
        """From the next frame on somebody else is told."""
        self._on_frame, self._on_lost = on_frame, on_lost

    @property
    def peer(self) -> str:
        """The other side's address."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return str(name[0]) if name else "?"

    @property
    def own_address(self) -> str:
        """This side's address, as the other one sees it, where nothing stands between."""
        name = self._transport.get_extra_info("sockname") if self._transport else None
        return str(name[0]) if name else ""

    def send(self, kind: Kind, number: int = 0, data: bytes = b"") -> None:
        """Send a frame; one for a connection that has ended is lost with it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEAD.pack(kind, number, len(data)) + data)

    def tell(self, kind: Kind, number: int = 0, **facts: Any) -> None:
        """Send a frame of JSON."""
        self.send(kind, number, json.dumps(facts).encode())

    def close(self) -> None:
        """End it when all was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now: the other side is not heard any more."""
        if self._transport is not None:
            self._transport.abort()

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands, and both sides have proved who they are."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self.heard_at = asyncio.get_running_loop().time()

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        self.heard_at = asyncio.get_running_loop().time()
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _HEAD.size:
                kind, number, size = _HEAD.unpack_from(self._buffer, at)
                if size > MAX_BYTES:
                    raise WireError(f"a frame of {size} bytes")
                begin, end = at + _HEAD.size, at + _HEAD.size + size
                if len(self._buffer) < end:
                    break
                at = end
                self._on_frame(self, Kind(kind), number, bytes(self._buffer[begin:end]))
        except (ValueError, KeyError, TypeError, WireError) as error:
            self._end(error)
        finally:
            del self._buffer[:at]

    def _end(self, error: Exception) -> None:
        on_lost, self._on_lost = self._on_lost, lambda *_: None
        self.abort()
        on_lost(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self.is_open = False
        on_lost, self._on_lost = self._on_lost, lambda *_: None
        on_lost(self, exc)


def facts_of(data: bytes) -> dict[str, Any]:
    """Read a frame of JSON.

    Raises:
        ValueError: it is none.
    """
    facts = json.loads(data)
    if not isinstance(facts, dict):
        raise ValueError("a frame that is no object")
    return facts
