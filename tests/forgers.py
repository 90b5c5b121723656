"""Many clients that connect to a listener at once, without its secret.

    python tests/forgers.py PORT COUNT RECORDED

They run in a separate process, so that their sockets and CPU time are not the notebook's.
``RECORDED`` holds the recorded bytes of a real node.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from nbddp.nodes.handshake import node_context
from nbddp.nodes.node_connection import READ_ERRORS, FrameConnection, FrameType

AT_ONCE = 200
ANSWER = 60.0  # seconds until the door has ended the connection
HELLO = b'{"host": "forged", "nproc": 1}'


class Forgers:
    """Each attack is a method; it returns when the listener has closed the connection."""

    def __init__(self, port: int, recorded: bytes) -> None:
        self._port = port
        self._recorded = recorded
        self._chance = random.Random(7)
        self._wrong = node_context(b"w" * 32)
        self._bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._bare.check_hostname, self._bare.verify_mode = False, ssl.CERT_NONE
        self.heard = 0  # attacks that got an answer other than TLS messages

    async def say(self, data: bytes, *, and_end: bool = False) -> None:
        """Send invalid bytes, and wait until the listener closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(OSError):  # it has ended already
            writer.write(data)
            if and_end:
                writer.write_eof()
            await asyncio.wait_for(reader.read(-1), ANSWER)
        writer.close()

    async def prove(self, context: ssl.SSLContext) -> None:
        """Connect as a node does, with an invalid proof."""
        with suppress(*READ_ERRORS):
            streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=context)
            connection = FrameConnection(*streams)
            # TLS 1.3: the refusal arrives after the client has finished
            connection.send(FrameType.HELLO, 0, HELLO)
            await asyncio.wait_for(connection.read(), ANSWER)
            self.heard += 1

    async def another_key(self) -> None:
        await self.prove(self._wrong)

    async def no_certificate(self) -> None:
        await self.prove(self._bare)

    async def garbage(self) -> None:
        await self.say(self._chance.randbytes(self._chance.randrange(1, 3000)), and_end=True)

    async def replayed(self) -> None:
        await self.say(self._recorded)

    async def truncated(self) -> None:
        end = self._chance.randrange(1, len(self._recorded))
        await self.say(self._recorded[:end], and_end=True)

    async def huge(self) -> None:
        """A record, and in it a message, that claim to be as long as they can."""
        await self.say(b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(70_000))

    async def bare_frame(self) -> None:
        """A frame that claims to be long, without any proof before it."""
        head = bytes([FrameType.HELLO]) + bytes(4) + b"\xff" * 8
        await self.say(head + HELLO, and_end=True)

    async def silent(self) -> None:
        """Send nothing until the listener times out or needs the connection slot."""
        await self.say(b"")

    def ways(self) -> list[Callable[[], Awaitable[None]]]:
        """Return the attacks in turn."""
        cheap = [self.garbage, self.replayed, self.truncated, self.huge, self.bare_frame]
        return [self.another_key, *cheap, self.no_certificate, *cheap, self.silent, *cheap]

    async def come(self, count: int) -> None:
        """Run this many attacks, some hundred at once."""
        ways = self.ways()
        numbers = iter(range(count))

        async def one_after_the_other() -> None:
            for number in numbers:
                await ways[number % len(ways)]()

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


def main() -> None:
    """Run the attacks; print how many got an answer."""
    port, count, recorded = sys.argv[1:]
    os.nice(5)  # there may be many of them; here they take turns with the notebook on one machine
    forgers = Forgers(int(port), Path(recorded).read_bytes())
    asyncio.run(forgers.come(int(count)))
    sys.stdout.write(f"{forgers.heard}\n")


if __name__ == "__main__":
    main()
