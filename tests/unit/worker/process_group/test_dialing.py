"""What listens for the ranks of a group that forms gets every connection that may still come."""

import socket
import struct

import pytest

from nbddp.worker.process_group.gloo import GlooUnblocker


def numbers_at(listener: socket.socket) -> list[int]:
    """Which pairs the connections that came here are for; each of them has ended."""
    listener.settimeout(0.2)
    numbers = []
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return numbers
        with connection:
            numbers += struct.unpack("@n", connection.recv(100))
            assert connection.recv(1) == b""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_unblocking_gloo_connects_once_and_only_to_listeners_of_a_forming_group(
    address: str,
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dialing = GlooUnblocker()
    with socket.create_server((address, 0), family=family) as users:
        with dialing.forming(), socket.create_server((address, 0), family=family) as groups:
            dialing.connect_to_self(3)
            assert numbers_at(groups) == [0, 1, 2]
            dialing.connect_to_self(3)
            assert numbers_at(groups) == []
        with socket.create_server((address, 0), family=family) as later:
            dialing.connect_to_self(3)
            assert numbers_at(later) == []
        assert numbers_at(users) == []
