"""Ends the wait of Gloo for a rank that is to dial it and does not live to do so.

While a group forms, every two ranks connect. The one with the greater address dials, and says with
a number which pair the connection is for; for a dead peer it gives up after three tries. The other
one listens, and has no way out but its timeout, five times over (torch 2.13, gloo's ``Listener``).
So a rank that is to be freed dials itself, with every number: its pairs get connections that end.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from nbddp.worker.sockets import listening

PATIENCE = 1.0  # seconds for a connection to this very process


@dataclass(eq=False, slots=True)
class _Forming:
    """A group that forms: where others listened before it began, and where we have dialled."""

    before: list[Any]
    dialled: list[Any] = field(default_factory=list)


class Dialing:
    """Knows which groups of this process form right now, and can end that."""

    def __init__(self) -> None:
        self._forming: list[_Forming] = []

    @contextmanager
    def forming(self) -> Iterator[None]:
        """What begins to listen in here is a group's, and waits for others."""
        group = _Forming(listening())
        self._forming.append(group)
        try:
            yield
        finally:
            self._forming.remove(group)

    def answer_for_absent(self, world_size: int) -> None:
        """Let every pair of a group that forms have a connection, which ends at once.

        Args:
            world_size: how many pairs a rank may have: Gloo numbers them from 0.
        """
        for group in list(self._forming):
            for address in listening():
                if address not in group.before and address not in group.dialled:
                    group.dialled.append(address)
                    for number in range(world_size):
                        _dial(address, number)


def _dial(address: Any, number: int) -> None:
    with suppress(OSError), socket.create_connection(address[:2], PATIENCE) as connection:
        connection.sendall(struct.pack("@n", number))  # a ssize_t, of this very machine
