"""A proxy between nodes and a listener that can delay, stall, cut and record connections."""

import socket
import threading
import time
from contextlib import suppress

PIECE = 8 << 20  # the most bytes that are forwarded after a delay


class Link:
    """A proxy to a local port; ``delay`` is in seconds, each way."""

    def __init__(self, port: int, *, delay: float = 0.0) -> None:
        self.received: list[bytearray] = []  # the bytes of each connected node
        self._delay, self._listener = delay, port
        self._until_cut: int | None = None  # bytes still to forward to the listener
        self._sockets: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def cut(self, after: int) -> None:
        """Close all connections after this many more bytes to the listener."""
        self._until_cut = after

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # it also ends the wait for a connection
        self._server.close()
        self._end_all()
        self._flows.set()

    def _end_all(self) -> None:
        self._until_cut = None
        ending, self._sockets = self._sockets, set()  # nodes may connect again meanwhile
        for connection in ending:
            with suppress(OSError):  # already closed
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):  # the proxy is closed
            while True:
                node, _ = self._server.accept()
                try:
                    listener = socket.create_connection(("127.0.0.1", self._listener))
                except OSError:
                    node.close()
                    continue
                self.received.append(bytearray())
                self._sockets |= {node, listener}
                for ways in ((node, listener, self.received[-1]), (listener, node)):
                    threading.Thread(target=self._forward, args=ways, daemon=True).start()

    def _forward(
        self, source: socket.socket, target: socket.socket, received: bytearray | None = None
    ) -> None:
        with source, suppress(OSError):  # the other side has closed the connection
            while data := source.recv(PIECE):
                until_cut = None
                if received is not None:
                    received += data
                    until_cut = self._until_cut
                time.sleep(self._delay)  # meanwhile, the sockets buffer what comes next
                self._flows.wait()
                target.sendall(data[:until_cut])
                if until_cut is not None:
                    self._until_cut = max(0, until_cut - len(data))
                    if not self._until_cut:
                        self._end_all()
            target.shutdown(socket.SHUT_WR)
