"""Carries the ranks' connections to the store over a node's one connection to the door.

A rank dials its keeper on its own machine as if the store were there. So ranks need no way to the
notebook's machine but the keeper's, the store listens on the notebook's loopback alone, and what a
rank says is sealed on its way. Each side sends no more of a connection than the other has taken:
a rank that sends a gigabyte fills no memory and holds up nobody for long.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from nbddp.nodes.frames import Kind, Wire

WINDOW = 1 << 20  # bytes of one connection that the other side has not taken yet
_COUNT = struct.Struct("!Q")
_PIECE = 256 << 10


class Carried(asyncio.Protocol):
    """One TCP connection on this machine, whose other half is on the other one."""

    def __init__(
        self,
        wire: Wire,
        number: int,
        forget: Callable[[int], None],
        before: Callable[[], None],
    ) -> None:
        self._wire = wire
        self._number = number
        self._forget = forget
        self._before = before
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # what came before it was connected
        self._untaken = 0  # bytes sent
        self._owed = 0  # bytes that came and were not yet said to be taken
        self._is_full = False
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The half on this machine stands."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        for data in self._early:
            self.take(data)
        self._early.clear()
        if self._has_ended:  # before this one stood
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Something is to be carried."""
        self._before()
        self._untaken += len(data)
        for begin in range(0, len(data), _PIECE):
            self._wire.send(Kind.DATA, self._number, data[begin : begin + _PIECE])
        if self._untaken >= WINDOW and self._transport is not None:
            self._transport.pause_reading()

    def credit(self, data: bytes) -> None:
        """The other side has taken so many bytes."""
        was_full = self._untaken >= WINDOW
        self._untaken -= _COUNT.unpack(data)[0]
        is_open = self._transport is not None and not self._transport.is_closing()
        if was_full and self._untaken < WINDOW and is_open and self._transport is not None:
            self._transport.resume_reading()

    def take(self, data: bytes) -> None:
        """Something was carried here."""
        if self._transport is None:
            self._early.append(data)
            return
        self._transport.write(data)
        self._owed += len(data)
        self._repay()

    def pause_writing(self) -> None:
        """Whoever listens on this machine does not keep up."""
        self._is_full = True

    def resume_writing(self) -> None:
        """It does again."""
        self._is_full = False
        self._repay()

    def _repay(self) -> None:
        if not self._is_full and self._owed >= WINDOW // 4:
            self._wire.send(Kind.CREDIT, self._number, _COUNT.pack(self._owed))
            self._owed = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """The half on this machine has ended: so does the other one."""
        del exc
        self._wire.send(Kind.CLOSE, self._number)
        self._forget(self._number)

    def end(self) -> None:
        """The other half has ended; what came from there is delivered first."""
        self._has_ended = True
        if self._transport is not None:
            self._transport.close()


class Tunnel:
    """All connections that one wire carries.

    Args:
        wire: what carries them.
        before: done before anything is carried.
    """

    def __init__(self, wire: Wire, before: Callable[[], None] = lambda: None) -> None:
        self._wire = wire
        self._before = before
        self._carried: dict[int, Carried] = {}
        self._count = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._carried)

    def new(self) -> Carried:
        """A rank has connected on this side; for :meth:`asyncio.loop.create_server`."""
        self._count += 1
        self._wire.send(Kind.OPEN, self._count)
        return self.add(self._count)

    def add(self, number: int) -> Carried:
        """A connection that the other side has opened."""
        carried = Carried(self._wire, number, self._drop, self._before)
        if self._is_closed:
            carried.end()  # nobody would ever answer
        else:
            self._carried[number] = carried
        return carried

    def _drop(self, number: int) -> None:
        self._carried.pop(number, None)

    def take(self, kind: Kind, number: int, data: bytes) -> None:
        """A frame for one of them; what comes after its end is for nobody."""
        carried = self._carried.get(number)
        if carried is None:
            return
        match kind:
            case Kind.DATA:
                carried.take(data)
            case Kind.CREDIT:
                carried.credit(data)
            case Kind.CLOSE:
                self._drop(number)
                carried.end()

    def refuse(self, number: int) -> None:
        """What the other side has opened leads nowhere."""
        self._drop(number)
        self._wire.send(Kind.CLOSE, number)

    def close(self) -> None:
        """The wire is gone, and all connections with it, and those that were just being taken."""
        self._is_closed = True
        carried, self._carried = self._carried, {}
        for each in carried.values():
            each.end()
