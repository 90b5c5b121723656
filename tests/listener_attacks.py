"""Many clients that connect to a listener at once, without its secret.

    python tests/listener_attacks.py PORT COUNT RECORDED

They run in a separate process, so that their sockets and CPU time are not the notebook's.
``RECORDED`` holds the recorded bytes of a real node.
"""

import os
import random
import socket
import ssl
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nbddp.extensions.nodes.handshake import node_context
from nbddp.extensions.nodes.node_connection import FrameType

AT_ONCE = 200
CLOSE_TIMEOUT = 60.0  # seconds in which the listener must close a connection
HELLO = b'{"host": "forged", "nproc": 1}'
HEAD = bytes([FrameType.HELLO]) + bytes(4)


def send(port: int, data: bytes, *, and_end: bool = False) -> bool:
    """Send invalid bytes, and wait until the listener closes the connection."""
    address = "127.0.0.1", port
    # the listener may have closed the connection already
    with suppress(ConnectionError), socket.create_connection(address, CLOSE_TIMEOUT) as connection:
        connection.sendall(data)
        if and_end:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    return False  # what it answers are TLS messages


def present(port: int, context: ssl.SSLContext) -> bool:
    """Connect as a node does, with an invalid certificate. Return whether there is an answer."""
    with (
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(("127.0.0.1", port), CLOSE_TIMEOUT) as connection,
        context.wrap_socket(connection) as tls,
    ):
        # TLS 1.3: the refusal arrives after the client has finished
        tls.sendall(HEAD + len(HELLO).to_bytes(8, "big") + HELLO)
        return bool(tls.recv(1))
    return False


def attacks(port: int, recorded: bytes) -> list[Callable[[], bool]]:
    chance, bare = random.Random(7), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    wrong = node_context(b"w" * 32)

    def garbage() -> bool:
        return send(port, chance.randbytes(chance.randrange(1, 3000)), and_end=True)

    def truncated() -> bool:
        return send(port, recorded[: chance.randrange(1, len(recorded))], and_end=True)

    cheap = [
        garbage,
        lambda: send(port, recorded),  # replayed
        truncated,
        # a TLS record, and a message in it, with the largest length fields
        lambda: send(port, b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(70_000)),
        lambda: send(port, HEAD + b"\xff" * 8 + HELLO, and_end=True),  # without TLS
    ]
    return [
        *(lambda: present(port, wrong), *cheap, lambda: present(port, bare), *cheap),
        *(lambda: send(port, b""), *cheap),  # until the listener times out or needs the slot
    ]


def main() -> None:
    """Run the attacks. Print how many got an answer other than TLS messages."""
    port, count, recorded = sys.argv[1:]
    os.nice(5)  # the attackers share the machine with the notebook
    kinds = attacks(int(port), Path(recorded).read_bytes())
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answered = threads.map(lambda number: kinds[number % len(kinds)](), range(int(count)))
    sys.stdout.write(f"{sum(answered)}\n")


if __name__ == "__main__":
    main()
