"""TLS connections between a node and the notebook.

A node has one control connection. Each store connection of its ranks is forwarded over its own TLS
connection. So ranks need no route to the notebook's machine, and the store listens only on the
notebook's loopback address.

All of them carry frames: a type, a number and bytes. Control frames are JSON, and received data is
never unpickled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nbddp.errors import WireError

logger = logging.getLogger(__name__)

BUFFER = 1 << 20  # bytes that a stream reads ahead
MAX_FRAME_BYTES = 16 << 20  # of one frame
CHUNK_SIZE = 64 << 10  # bytes read at once
RETRY_DELAY = 0.2  # seconds between two attempts to accept a connection, or to connect
# connections that one node opens at the same time; see handshake.MAX_PENDING_PER_ADDRESS
MAX_DIALS = 8
READ_ERRORS = (OSError, EOFError, ValueError, WireError)  # what FrameConnection.read raises
# also errors from invalid frames
FRAME_ERRORS = (*READ_ERRORS, KeyError, TypeError)

_HEADER = struct.Struct("!BIQ")  # type, number, bytes that follow


class FrameType(IntEnum):
    """The types of frames, with their sender."""

    HELLO = 1  # a node: describes itself, on its control connection
    WELCOME = 2  # the notebook: the node is accepted
    REFUSED = 3  # the notebook: the node is not accepted, and why
    BEAT = 4  # both: a heartbeat, with the sender's clock
    ECHO = 5  # both: the reply to a heartbeat, with both clocks
    LEAVE = 6  # both: the node is done, and why
    START = 7  # the notebook: start a rank; the number is that of its process
    STARTED = 8  # a node: the rank has this process id
    FAILED = 9  # a node: the rank could not be started
    EXITED = 10  # a node: the rank has ended; its last output was sent before
    TERMINATE = 11  # the notebook: send SIGTERM
    KILL = 12  # the notebook: send SIGKILL
    LOG = 13  # a node: new data of a rank's file
    STORE = 14  # a node: this is a store connection, of the node with this number
    DATA = 15  # both: forwarded data; handle it after this many control frames
    INTERRUPT = 16  # the notebook: send SIGINT


Frame = tuple[FrameType, int, bytes]


class FrameConnection:
    """One end of a connection, in an event loop.

    Attributes:
        frames_sent: the number of frames sent.
        last_received_at: loop time at which data last arrived.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._received = 0
        self._handled = 0
        self._progress = asyncio.Condition()
        self.frames_sent = 0
        self.last_received_at = asyncio.get_running_loop().time()

    @property
    def peer(self) -> str:
        """The other side's address."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def own_address(self) -> str:
        """This side's address."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, kind: FrameType, number: int = 0, data: bytes = b"") -> None:
        """Send a frame. It is dropped if the connection has ended."""
        self.frames_sent += 1
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(kind, number, len(data)) + data)

    def send_json(self, kind: FrameType, number: int = 0, **facts: Any) -> None:
        """Send a frame of JSON."""
        self.send(kind, number, json.dumps(facts).encode())

    async def drain(self) -> None:
        """Wait until the other side has received enough."""
        await self._writer.drain()

    async def read(self) -> Frame:
        """Return the next frame. The frame before it counts as handled.

        Raises:
            OSError, EOFError: the connection has ended.
            ValueError, WireError: the data is not a frame.
        """
        async with self._progress:
            self._handled = self._received
            self._progress.notify_all()
        kind, number, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        self.last_received_at = asyncio.get_running_loop().time()
        if size > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {size} bytes")
        data = bytearray()
        while len(data) < size:  # each piece counts as a heartbeat: a network can be slow
            data += await self._reader.readexactly(min(CHUNK_SIZE, size - len(data)))
            self.last_received_at = asyncio.get_running_loop().time()
        self._received += 1
        return FrameType(kind), number, bytes(data)

    async def wait_handled(self, count: int) -> None:
        """Wait until this side has handled ``count`` frames."""
        async with self._progress:
            await self._progress.wait_for(lambda: self._handled >= count)

    def close(self) -> None:
        """Close the connection after all sent frames."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection now."""
        self._writer.transport.abort()


def decode_json(data: bytes) -> dict[str, Any]:
    """Decode a frame of JSON.

    Raises:
        ValueError: it is not a JSON object.
    """
    facts = json.loads(data)
    if not isinstance(facts, dict):
        raise ValueError("the frame is not a JSON object")
    return facts


async def forward(
    local: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    remote: FrameConnection,
    control: FrameConnection,
    before_send: Callable[[], None] = lambda: None,
) -> None:
    """Copy both ways between a connection on this machine and ``remote`` until either ends.

    Each piece arrives after the control frames that were sent before it: a log before the message
    that names a position in it, a signal before the command that follows it.

    Args:
        local: the connection on this machine.
        remote: the connection to the other machine.
        control: the control connection to the other machine.
        before_send: called before a piece is sent.
    """
    reader, writer = local

    async def send() -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_SIZE):
                before_send()
                remote.send(FrameType.DATA, control.frames_sent, data)
                await remote.drain()

    async def receive() -> None:
        with suppress(*READ_ERRORS):
            while True:
                _, count, data = await remote.read()
                control.last_received_at = remote.last_received_at
                await control.wait_handled(count)
                writer.write(data)
                await writer.drain()

    copying = [asyncio.ensure_future(send()), asyncio.ensure_future(receive())]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        remote.abort()
        raise
    finally:
        for future in copying:
            future.cancel()
        writer.close()
        remote.close()


async def accept_all(
    listener: socket.socket, on_accepted: Callable[[socket.socket, str], object]
) -> None:
    """Accept connections one by one, for ever; the callback gets each with the peer's address.

    ``asyncio.start_server`` is not used: its ``close`` forgets a connection that is being accepted
    (Python 3.11), and then the peer would wait for ever.
    """
    listener.settimeout(0)
    while True:
        try:
            sock, name = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:  # the peer left, or there are no file descriptors left
            logger.debug("no connection accepted: %s", error)
            await asyncio.sleep(0 if isinstance(error, ConnectionError) else RETRY_DELAY)
        else:
            on_accepted(sock, str(name[0]))
            await asyncio.sleep(0)  # serve the other connections between two of them


def start_task(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Start a task, and keep it in a set until it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


@dataclass(eq=False, repr=False)
class StoreForwarder:
    """Forwards the store connections of a node's ranks, as long as its control connection lasts.

    Args:
        control: the control connection.
        number: the notebook's number of this node.
        dial: opens another connection to the notebook; returns None if that failed.
        before_send: called before data of a rank is forwarded.
    """

    _control: FrameConnection
    _number: int
    _dial: Callable[[], Awaitable[FrameConnection | None]]
    _before_send: Callable[[], None]
    _dials: asyncio.Semaphore = field(
        init=False, default_factory=lambda: asyncio.Semaphore(MAX_DIALS)
    )
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def serve(self, listener: socket.socket) -> None:
        """Accept connections of ranks on this socket, which stays open."""
        start_task(
            self._tasks,
            accept_all(listener, lambda sock, _: start_task(self._tasks, self._forward(sock))),
        )

    async def _forward(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            async with self._dials:
                while (remote := await self._dial()) is None:
                    await asyncio.sleep(RETRY_DELAY)
            remote.send(FrameType.STORE, self._number)
            await forward((reader, writer), remote, self._control, self._before_send)
        finally:
            writer.close()

    def close(self) -> None:
        """Close all connections, also pending ones."""
        for task in self._tasks:
            task.cancel()
