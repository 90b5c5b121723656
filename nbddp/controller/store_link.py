"""The controller's side of the wire: the TCPStore server on loopback, and the message queues."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from nbddp.wire import messages as msg
from nbddp.wire import payloads
from nbddp.wire.envelope import CONTROLLER, Envelope
from nbddp.wire.queues import QueueReader, QueueWriter
from nbddp.wire.rank_start import (
    RANKS_QUEUE,
    URGENT_QUEUE,
    command_queue,
    control_queue,
    last_step_key,
)
from nbddp.wire.store_connections import connect, hide_torch_warnings

PAYLOAD_TIMEOUT = timedelta(seconds=30)  # for a chunk of a payload that is complete


class _RankQueues(NamedTuple):
    """The queues to one rank."""

    command: QueueWriter
    control: QueueWriter


class StoreLink:
    """A store that only this machine can reach, with signed queues to and from the ranks.

    Each thread that may block has its own client: a blocking call holds all other calls on its
    client.

    Args:
        server: the store; None to start one.
        prefix: the prefix of all keys of these ranks, if other ranks use the store too.
    """

    def __init__(self, server: dist.TCPStore | None = None, prefix: str = "") -> None:
        self.secret = secrets.token_bytes(32)
        self.prefix = prefix
        self._siblings = itertools.count(1)
        self._reserved = _reserve_port()
        if server is None:
            hide_torch_warnings()
            server = _serve_on_loopback()
        self._server = server
        opened = [connect(server.port) for _ in range(4)]
        clients = [dist.PrefixStore(prefix, each) if prefix else each for each in opened]
        self._sender, self._payload_store, inbox, urgent = clients
        self._payload_store.set_timeout(PAYLOAD_TIMEOUT)
        self._payload_lock = threading.Lock()
        self._numbers = itertools.count()
        self._reader = QueueReader(inbox, RANKS_QUEUE, secret=self.secret)
        self._urgent = QueueReader(urgent, URGENT_QUEUE, secret=self.secret)
        self._last_command: msg.MessageToRank | None = None
        self._encoded = b""
        self._queues: dict[int, _RankQueues] = {}
        # rank, attempt and incarnation of the processes of this attempt and of the one before
        self._processes: list[tuple[int, int, int]] = []
        self._earlier_processes: list[tuple[int, int, int]] = []

    def create_sibling(self) -> StoreLink:
        """Return a link to other ranks over the same store, with its own secret."""
        return StoreLink(self._server, f"s{next(self._siblings)}")

    @property
    def port(self) -> int:
        """Return the port of the store on 127.0.0.1."""
        return int(self._server.port)

    @property
    def reserved_port(self) -> int:
        """Return a reserved port of this machine: the ``MASTER_PORT`` of the ranks."""
        return int(self._reserved.getsockname()[1])

    @property
    def refused(self) -> int:
        """Return the number of messages that were refused because their signature is wrong."""
        return self._reader.refused + self._urgent.refused

    def use_secret(self, secret: bytes) -> None:
        """Sign with the secret of ranks that an earlier notebook started."""
        self.secret = secret
        for reader in (self._reader, self._urgent):
            reader.use_secret(secret, self._sender)

    def open_attempt(self, attempt: int, world_size: int) -> None:
        """Open the queues to the ranks of an attempt, and delete those of the previous one.

        Also delete messages that ranks of the attempt before that one left incomplete.
        """
        for rank in self._queues:
            self._discard_unread(rank)
        for process in self._earlier_processes:
            for reader in (self._reader, self._urgent):
                reader.discard_unfinished(self._sender, *process)
        self._earlier_processes, self._processes = self._processes, []
        self._queues.clear()
        for rank in range(world_size):
            self._open_queues(attempt, rank, 0)

    def open_incarnation(self, attempt: int, rank: int, incarnation: int) -> None:
        """Open the queues to a rank's new process; discard unread messages to the old one."""
        self._discard_unread(rank)
        self._open_queues(attempt, rank, incarnation)

    def _open_queues(self, attempt: int, rank: int, incarnation: int) -> None:
        self._processes.append((rank, attempt, incarnation))
        self._queues[rank] = _RankQueues(
            command=self._writer(command_queue(attempt, rank, incarnation), attempt),
            control=self._writer(control_queue(attempt, rank, incarnation), attempt),
        )

    def _discard_unread(self, rank: int) -> None:
        for queue in self._queues[rank]:
            queue.discard_unread()

    def _writer(self, queue: str, attempt: int) -> QueueWriter:
        return QueueWriter(
            self._sender, queue, secret=self.secret, sender=CONTROLLER, attempt=attempt
        )

    def send(self, rank: int, command: msg.MessageToRank) -> None:
        """Send a message to a rank. Interrupts, cancellations and input replies skip the queue."""
        is_urgent = isinstance(command, msg.Interrupt | msg.CancelRequest | msg.InputReply)
        queue = self._queues[rank].control if is_urgent else self._queues[rank].command
        if command is not self._last_command:  # the same message goes to many ranks
            self._last_command, self._encoded = command, msg.encode(command)
        queue.put_encoded(self._encoded)

    def end_step_wait(self, attempt: int, cell: int) -> None:
        """Interrupt a cell at once, although its ranks wait for the end of a step."""
        self._sender.set(last_step_key(attempt, cell, "end"), "you interrupted again")

    def get(self, *, is_urgent: bool = False) -> Envelope | None:
        """Return the next ordinary or urgent message; wait for it. None if the link was closed."""
        envelope = (self._urgent if is_urgent else self._reader).get()
        return None if envelope.sender == CONTROLLER else envelope

    def store_payload(self, data: bytes) -> msg.JsonDict:
        """Store a pickled value for the ranks."""
        with self._payload_lock:
            return payloads.put(self._payload_store, f"push/{next(self._numbers)}", data)

    def load_payload(self, payload: msg.JsonDict) -> Any:
        """Load a rank's value from the store, and delete it there.

        Raises:
            RequestError: the value is gone, or this process cannot unpickle it.
        """
        with self._payload_lock:
            try:
                data = payloads.get(self._payload_store, payload)
            finally:
                payloads.discard(self._payload_store, payload)
        return payloads.unpickle(data)  # safe to unpickle: the rank signed the message

    def discard_payload(self, payload: msg.JsonDict) -> None:
        """Delete a value that is not needed any more."""
        with self._payload_lock:
            payloads.discard(self._payload_store, payload)

    def close(self) -> None:
        """Wake the threads that wait for messages, and release the reserved port."""
        for queue in (RANKS_QUEUE, URGENT_QUEUE):
            self._writer(queue, attempt=0).put(msg.Shutdown())
        self._reserved.close()


def _reserve_port() -> socket.socket:
    """Reserve a port: bind it without listening, so that the system assigns it to no other process.

    A process that names the port can still listen on it: both sides set SO_REUSEADDR.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _serve_on_loopback() -> dist.TCPStore:
    """Start the store on a socket that is bound to 127.0.0.1 only.

    By default, TCPStore listens on all interfaces.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return connect(listener.getsockname()[1], listener)
