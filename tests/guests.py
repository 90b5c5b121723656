"""Who comes to a door, and is no real node."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Any

from processes import wait_until

from nbddp.nodes.door import Door
from nbddp.nodes.frames import Kind, Wire
from nbddp.nodes.keeper import about_this_node
from nbddp.nodes.keys import at_a_node


class Guest:
    """Who comes to a door, on a thread of its own."""

    def __init__(self, door: Door, secret: bytes | None = None) -> None:
        self.frames: list[tuple[Kind, bytes]] = []
        self.is_lost = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        context = at_a_node(door.join.secret if secret is None else secret)
        try:
            self.wire: Wire = self._call(self._dial(door.join.port, context))
        except ssl.SSLError:
            self.close()
            raise

    async def _dial(self, port: int, context: ssl.SSLContext) -> Wire:
        def note(_wire: Wire, kind: Kind, _number: int, data: bytes) -> None:
            self.frames.append((kind, data))

        _, wire = await self._loop.create_connection(
            lambda: Wire(note, lambda *_: self.is_lost.set()), "127.0.0.1", port, ssl=context
        )
        return wire

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def tell(self, kind: Kind, number: int = 0, **facts: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self.wire.tell(kind, number, **facts))

    def send(self, kind: Kind, number: int, data: bytes) -> None:
        self._loop.call_soon_threadsafe(self.wire.send, kind, number, data)

    def leave(self) -> None:
        self._loop.call_soon_threadsafe(self.wire.abort)

    def close(self) -> None:
        if hasattr(self, "wire"):
            self.leave()
            wait_until(lambda: not self.wire.is_open)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class Guests:
    """All who come to a door until a test is over."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self._all: list[Guest] = []

    def come(self, secret: bytes | None = None) -> Guest:
        self._all.append(Guest(self.door, secret))
        return self._all[-1]

    def bring(self, nproc: int = 4, **facts: Any) -> Guest:
        """Have a node come in, or be refused."""
        seen, guest = self._seen, self.come()
        guest.tell(Kind.HELLO, **about_this_node(nproc) | facts)
        assert wait_until(lambda: self._seen > seen)
        return guest

    @property
    def _seen(self) -> int:
        return len(self.door.nodes) + self.door.refused

    def close(self) -> None:
        for guest in self._all:
            guest.close()
