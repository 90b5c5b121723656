"""Many clients that connect to a listener at once, without its secret.

    python tests/listener_attacks.py PORT COUNT RECORDED

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
CLOSE_TIMEOUT = 60.0  # seconds in which the listener must close a connection
HELLO = b'{"host": "forged", "nproc": 1}'


class Attackers:
    """Each attack is a method; it returns when the listener has closed the connection."""

    def __init__(self, port: int, recorded: bytes) -> None:
        self._port = port
        self._recorded = recorded
        self._random = random.Random(7)
        self._wrong = node_context(b"w" * 32)
        self._bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._bare.check_hostname, self._bare.verify_mode = False, ssl.CERT_NONE
        self.answered = 0  # attacks that got an answer other than TLS messages

    async def send(self, data: bytes, *, and_end: bool = False) -> None:
        """Send invalid bytes, and wait until the listener closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(OSError):  # the listener has closed the connection already
            writer.write(data)
            if and_end:
                writer.write_eof()
            await asyncio.wait_for(reader.read(-1), CLOSE_TIMEOUT)
        writer.close()

    async def present(self, context: ssl.SSLContext) -> None:
        """Connect as a node does, with an invalid certificate."""
        with suppress(*READ_ERRORS):
            streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=context)
            connection = FrameConnection(*streams)
            # TLS 1.3: the refusal arrives after the client has finished
            connection.send(FrameType.HELLO, 0, HELLO)
            await asyncio.wait_for(connection.read(), CLOSE_TIMEOUT)
            self.answered += 1

    async def another_key(self) -> None:
        await self.present(self._wrong)

    async def no_certificate(self) -> None:
        await self.present(self._bare)

    async def garbage(self) -> None:
        await self.send(self._random.randbytes(self._random.randrange(1, 3000)), and_end=True)

    async def replayed(self) -> None:
        await self.send(self._recorded)

    async def truncated(self) -> None:
        end = self._random.randrange(1, len(self._recorded))
        await self.send(self._recorded[:end], and_end=True)

    async def huge(self) -> None:
        """Send a TLS record and a message in it with the largest length fields."""
        await self.send(b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(70_000))

    async def bare_frame(self) -> None:
        """Send a frame with a large length field and without TLS."""
        head = bytes([FrameType.HELLO]) + bytes(4) + b"\xff" * 8
        await self.send(head + HELLO, and_end=True)

    async def silent(self) -> None:
        """Send nothing until the listener times out or needs the connection slot."""
        await self.send(b"")

    def attacks(self) -> list[Callable[[], Awaitable[None]]]:
        cheap = [self.garbage, self.replayed, self.truncated, self.huge, self.bare_frame]
        return [self.another_key, *cheap, self.no_certificate, *cheap, self.silent, *cheap]

    async def run(self, count: int) -> None:
        """Run this many attacks, ``AT_ONCE`` at the same time."""
        attacks = self.attacks()
        numbers = iter(range(count))

        async def run_one_after_another() -> None:
            for number in numbers:
                await attacks[number % len(attacks)]()

        await asyncio.gather(*(run_one_after_another() for _ in range(AT_ONCE)))


def main() -> None:
    """Run the attacks; print how many got an answer."""
    port, count, recorded = sys.argv[1:]
    os.nice(5)  # the attackers share the machine with the notebook
    attackers = Attackers(int(port), Path(recorded).read_bytes())
    asyncio.run(attackers.run(int(count)))
    sys.stdout.write(f"{attackers.answered}\n")


if __name__ == "__main__":
    main()
