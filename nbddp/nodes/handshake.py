"""Accept connections at the notebook's address, and admit those that prove the secret.

Anyone who reaches the port may try, so an attempt must cost little: a limited number may wait, from
one address and in total. One more is closed at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from traceback import clear_frames

from nbddp.errors import RequestError
from nbddp.nodes.node_connection import BROKEN, BUFFER, Frame, FrameConnection

logger = logging.getLogger(__name__)

GREETING = 20.0  # seconds for TLS and the first frame
MOST_OF_ADDRESS = 64  # connections of one address that are not admitted yet
MOST = 512  # of all addresses
BACKLOG = 512
PAUSE = 0.5  # seconds until the next attempt where no connection can be accepted


class Handshake:
    """Listens on one address, in an event loop.

    Args:
        context: for TLS, with a certificate on both sides.
        admit: takes a connection with its first frame; raises WireError to refuse it.
    """

    def __init__(
        self, context: ssl.SSLContext, admit: Callable[[FrameConnection, Frame], None]
    ) -> None:
        self._context = context
        self._admit = admit
        self._pending: dict[asyncio.Task[None], str] = {}  # the address of each
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.refused = 0  # connections that were not admitted

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Start to listen. Return the address and the port.

        Raises:
            RequestError: the address is not one of this machine's, or the port is taken.
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
            except OSError as error:  # the peer has gone, or a cell has taken all descriptors
                logger.debug("no connection accepted: %s", error)
                await asyncio.sleep(PAUSE if not isinstance(error, ConnectionError) else 0)
                continue
            address = str(name[0])
            waiting = list(self._pending.values())
            if len(waiting) >= MOST or waiting.count(address) >= MOST_OF_ADDRESS:
                self.refused += 1
                sock.close()
            else:
                task = loop.create_task(self._greet(sock))
                self._pending[task] = address
                task.add_done_callback(self._pending.pop)
            await asyncio.sleep(0)  # serve the nodes between two of many attempts

    async def _greet(self, sock: socket.socket) -> None:
        try:
            connection, frame = await asyncio.wait_for(self._first_frame(sock), GREETING)
        except (*BROKEN, asyncio.TimeoutError) as error:
            logger.debug("not admitted: %s", error)
            clear_frames(error.__traceback__)  # else a cycle keeps 256 KB of asyncio's buffers
            self.refused += 1
            return
        try:
            self._admit(connection, frame)
        except BROKEN as error:
            logger.debug("not admitted: %s", error)
            connection.close()
            self.refused += 1

    async def _first_frame(self, sock: socket.socket) -> tuple[FrameConnection, Frame]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(BUFFER)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=GREETING
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        connection = FrameConnection(reader, writer)
        try:
            return connection, await connection.read()
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        """Stop to listen, and end the connections that are not admitted."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
        for task in self._pending:
            task.cancel()
