"""Fake nodes that connect to a listener."""

import asyncio
import ssl
import threading
from contextlib import suppress
from typing import Any

from processes import wait_until

from nbddp.extensions.nodes.handshake import node_context
from nbddp.extensions.nodes.listener import NodeListener
from nbddp.extensions.nodes.node_agent import node_facts
from nbddp.extensions.nodes.node_connection import READ_ERRORS, FrameConnection, FrameType


class FakeNode:
    def __init__(self, listener: NodeListener, secret: bytes | None = None) -> None:
        self.frames: list[tuple[FrameType, bytes]] = []
        self.is_lost = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        context = node_context(listener.join.secret if secret is None else secret)
        try:
            self._connection: FrameConnection = self._call(self._dial(listener.join.port, context))
        except ssl.SSLError:
            self.close()
            raise
        self._reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)

    async def _dial(self, port: int, context: ssl.SSLContext) -> FrameConnection:
        return FrameConnection(*await asyncio.open_connection("127.0.0.1", port, ssl=context))

    async def _read(self) -> None:
        with suppress(*READ_ERRORS):
            while True:
                kind, _, data = await self._connection.read()
                self.frames.append((kind, data))
        self.is_lost.set()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def tell(self, kind: FrameType, number: int = 0, **facts: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self._connection.send_json(kind, number, **facts))

    def send(self, kind: FrameType, number: int, data: bytes) -> None:
        self._loop.call_soon_threadsafe(self._connection.send, kind, number, data)

    def leave(self) -> None:
        self._loop.call_soon_threadsafe(self._connection.abort)

    def close(self) -> None:
        if hasattr(self, "_connection"):
            self.leave()
            self._reading.result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class FakeNodes:
    def __init__(self, listener: NodeListener) -> None:
        self.listener = listener
        self._all: list[FakeNode] = []

    def connect(self, secret: bytes | None = None) -> FakeNode:
        self._all.append(FakeNode(self.listener, secret))
        return self._all[-1]

    def bring(self, nproc: int = 4, **facts: Any) -> FakeNode:
        """Connect a node; the listener accepts or refuses it."""
        seen, fake_node = self._seen, self.connect()
        fake_node.tell(FrameType.HELLO, **node_facts(nproc) | facts)
        assert wait_until(lambda: self._seen > seen)
        return fake_node

    @property
    def _seen(self) -> int:
        return len(self.listener.nodes) + self.listener.refused

    def close(self) -> None:
        for fake_node in self._all:
            fake_node.close()
