"""A proxy between nodes and a listener that can delay, stall, cut and record connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

BUFFER = 8 << 20  # bytes that a connection holds while they are delayed


class Link:
    """A proxy to a local port, on a separate thread; ``delay`` is in seconds, each way."""

    def __init__(self, port: int, *, delay: float = 0.0) -> None:
        self.delay = delay
        self.received: list[bytearray] = []  # the bytes of each connected node
        self._listener = port
        self._left: int | None = None  # bytes still to forward to the listener
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._call(
            asyncio.start_server(self._take, "127.0.0.1", 0, limit=BUFFER)
        )
        self.port = int(self._server.sockets[0].getsockname()[1])

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def stall(self) -> None:
        """Stop forwarding in both directions, without closing connections."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def flow(self) -> None:
        """Forward again; deliver the stalled data at once."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def cut(self, after: int = 0) -> None:
        """Close all connections after this many more bytes to the listener."""
        self._loop.call_soon_threadsafe(self._cut, after)

    def _cut(self, after: int) -> None:
        self._left = after
        if not after:
            self._end_all()

    def _end_all(self, but: asyncio.StreamWriter | None = None) -> None:
        self._left = None
        for writer in self._writers - {but}:
            writer.transport.abort()

    async def _take(self, node: asyncio.StreamReader, to_node: asyncio.StreamWriter) -> None:
        try:
            listener, to_listener = await asyncio.open_connection(
                "127.0.0.1", self._listener, limit=BUFFER
            )
        except OSError:
            to_node.transport.abort()
            return
        both = {to_node, to_listener}
        self._writers |= both
        received = bytearray()
        self.received.append(received)
        await asyncio.gather(
            self._forward(node, to_listener, received), self._forward(listener, to_node)
        )
        self._writers -= both
        for writer in both:
            writer.transport.abort()

    async def _forward(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        received: bytearray | None = None,
    ) -> None:
        data = b"-"
        while data:
            try:
                data = await source.read(BUFFER)
            except OSError:  # reset: the other side reads the end
                data = b""
            if received is not None:
                received += data
            await asyncio.sleep(self.delay)  # meanwhile, the source buffers what comes next
            await self._flows.wait()
            if not target.is_closing():
                self._pass_on(target, data, is_to_listener=received is not None)
        if not target.is_closing():
            target.close()

    def _pass_on(self, target: asyncio.StreamWriter, data: bytes, *, is_to_listener: bool) -> None:
        left = self._left if is_to_listener else None
        target.write(data[:left])
        if left is not None:
            self._left = max(0, left - len(data))
            if not self._left:
                target.close()  # forwarded bytes arrive
                self._end_all(but=target)

    def close(self) -> None:
        """Close the proxy and all its connections."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        self._end_all()
        self._flows.set()
        mine = asyncio.current_task()
        ending = [each for each in asyncio.all_tasks() if each is not mine]
        await asyncio.gather(*ending, return_exceptions=True)
