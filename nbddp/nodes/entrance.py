"""Where strangers are: they connect, prove that they have the secret, and say who they are.

Anybody who reaches the port may try, so a try must cost little. Only so many have a place here at
once; where one too many comes, the oldest of the address that has most of them goes. A thousand
connections from somewhere then neither fill the notebook's file descriptors nor keep a node out
that comes from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from traceback import clear_frames

from nbddp.errors import RequestError
from nbddp.nodes.frames import Kind, Wire

logger = logging.getLogger(__name__)

GREETING = 20.0  # seconds that one has to prove itself and to say who it is
MOST_GUESTS = 128  # connections of those that have not
BACKLOG = 128
PAUSE = 0.5  # seconds until the next try where no connection can be taken
PATIENCE = 2.0  # seconds that those get to go who are here when it is closed


@dataclass(frozen=True, slots=True, eq=False)
class _Guest:
    """Who has come, and not yet said who it is."""

    socket: socket.socket
    address: str
    timer: asyncio.TimerHandle


class Entrance:
    """Listens on one address, in an event loop.

    Args:
        context: what both sides prove themselves with.
        on_hello: told of each that has, with what it says of itself; returns whether it is let in.
            Its frames after that are for whoever follows its wire.
    """

    def __init__(self, context: ssl.SSLContext, on_hello: Callable[[Wire, bytes], bool]) -> None:
        self._context = context
        self._on_hello = on_hello
        self._guests: dict[Wire, _Guest] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.refused = 0  # connections that were not let in

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begin; the address and the port.

        Raises:
            RequestError: the address is not this machine's, or the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            [(family, *_, address), *_] = await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
            self._listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            where = f"{host}:{port}" if port else host
            raise RequestError(f"cannot listen on {where}: {error.strerror or error}") from error
        self._listener.settimeout(0)
        self._accepting = loop.create_task(self._accept(self._listener))
        name = self._listener.getsockname()
        return str(name[0]), int(name[1])

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, name = await loop.sock_accept(listener)
            except OSError as error:  # it has gone again, or a cell has taken all descriptors
                logger.debug("no connection taken: %s", error)
                await asyncio.sleep(PAUSE if not isinstance(error, ConnectionError) else 0)
                continue
            self._make_room()
            self._greet(loop, sock, str(name[0]))
            await asyncio.sleep(0)  # however many come, the nodes are heard in between

    def _make_room(self) -> None:
        if len(self._guests) < MOST_GUESTS:
            return
        counts = Counter(guest.address for guest in self._guests.values())
        [(crowd, _)] = counts.most_common(1)
        self._dismiss(next(wire for wire, each in self._guests.items() if each.address == crowd))

    def _greet(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, address: str) -> None:
        wire = Wire(self._on_frame, lambda wire, _: self._refuse(wire))
        timer = loop.call_later(GREETING, self._dismiss, wire)
        self._guests[wire] = _Guest(sock, address, timer)
        task = loop.create_task(self._prove(loop, wire, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prove(
        self, loop: asyncio.AbstractEventLoop, wire: Wire, sock: socket.socket
    ) -> None:
        try:
            await loop.connect_accepted_socket(
                lambda: wire, sock, ssl=self._context, ssl_handshake_timeout=GREETING
            )
        except OSError as error:  # ssl.SSLError is one
            logger.debug("not let in: %s", error)
            clear_frames(error.__traceback__)  # else a cycle keeps 256 KB of asyncio's buffers
            self._refuse(wire)

    def _on_frame(self, wire: Wire, kind: Kind, _number: int, data: bytes) -> None:
        if kind is not Kind.HELLO:
            raise ValueError("who comes in says first who it is")
        if self._on_hello(wire, data):
            self._forget(wire)
        else:
            self._refuse(wire)

    def _forget(self, wire: Wire) -> bool:
        """It is nobody that one waits for any more; whether it was."""
        guest = self._guests.pop(wire, None)
        if guest is not None:
            guest.timer.cancel()
        return guest is not None

    def _refuse(self, wire: Wire) -> None:
        if self._forget(wire):
            self.refused += 1

    def _dismiss(self, wire: Wire) -> None:
        """End the connection of one that has not said who it is, wherever it stands."""
        if wire not in self._guests:
            return
        sock = self._guests[wire].socket
        self._refuse(wire)
        with suppress(OSError):  # it has ended
            sock.shutdown(socket.SHUT_RDWR)
        wire.abort()

    async def close(self) -> None:
        """Listen no more, and end the connections of all who have not said who they are."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
        for wire in list(self._guests):
            self._dismiss(wire)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE)
