"""The kernel's end of the wire: the store's server on loopback, and the queues' ends."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nbddp.wire import payloads
from nbddp.wire.envelope import CONTROLLER, Envelope
from nbddp.wire.loopback_store import clone, without_dns
from nbddp.wire.messages import (
    CancelRequest,
    InputReply,
    Interrupt,
    JsonDict,
    MessageToRank,
    Shutdown,
    encode,
)
from nbddp.wire.queues import QueueReader, QueueWriter
from nbddp.wire.rank_start import RANKS_QUEUE, URGENT_QUEUE, command_queue, control_queue

FOREVER = timedelta(days=365)
PAYLOAD_TIMEOUT = timedelta(seconds=30)  # for a piece of a value that was there a moment ago


class StoreLink:
    """A store that only this machine reaches, and signed queues to and from the ranks.

    Each thread that may wait has a client of its own: a blocking call on a client holds every
    other call on it.

    Args:
        server: the store; None to serve one.
        prefix: what the keys of these ranks begin with in a store that serves others too.
    """

    def __init__(self, server: dist.TCPStore | None = None, prefix: str = "") -> None:
        self.secret = secrets.token_bytes(32)
        self.prefix = prefix
        self._siblings = itertools.count(1)
        with without_dns():
            self._server = server or _serve_on_loopback()
            self._reserved = _reserve_port()
            clients = [clone(self._server) for _ in range(4)]
        if prefix:
            clients = [dist.PrefixStore(prefix, each) for each in clients]
        self._sender, self._payload_store, inbox, urgent = clients
        self._payload_store.set_timeout(PAYLOAD_TIMEOUT)
        self._payload_lock = threading.Lock()
        self._numbers = itertools.count()
        self._reader = QueueReader(inbox, RANKS_QUEUE, secret=self.secret)
        self._urgent = QueueReader(urgent, URGENT_QUEUE, secret=self.secret)
        self._last_command: MessageToRank | None = None
        self._encoded = b""
        self._command_queues: dict[int, QueueWriter] = {}
        self._control_queues: dict[int, QueueWriter] = {}
        self._incarnations: dict[
            tuple[int, int], int
        ] = {}  # incarnations of ranks that were healed
        self._attempts: deque[tuple[int, int]] = deque()  # attempts, the last of which may live

    def create_sibling(self) -> StoreLink:
        """Return a link to other ranks over the same store, with a secret of its own."""
        return StoreLink(self._server, f"s{next(self._siblings)}")

    @property
    def port(self) -> int:
        """The port of the store, on 127.0.0.1."""
        return int(self._server.port)

    @property
    def reserved_port(self) -> int:
        """A port of this machine where a script's own processes may meet; nobody else gets it."""
        return int(self._reserved.getsockname()[1])

    @property
    def refused(self) -> int:
        """How many messages came that were not ours."""
        return self._reader.refused + self._urgent.refused

    def use_secret(self, secret: bytes) -> None:
        """Sign with that of ranks which another notebook has started; there are no others."""
        self.secret = secret
        for reader in (self._reader, self._urgent):
            reader.set_secret(secret)

    def open_attempt(self, attempt: int, world_size: int) -> None:
        """Make the writers for the ranks of an attempt; those of another are gone."""
        for queue in (*self._command_queues.values(), *self._control_queues.values()):
            queue.discard_unread()
        self._delete_old_messages()
        self._attempts.append((attempt, world_size))
        self._command_queues.clear()
        self._control_queues.clear()
        for rank in range(world_size):
            self._open_queues(attempt, rank, 0)

    def open_incarnation(self, attempt: int, rank: int, incarnation: int) -> None:
        """Make the writers for a rank's new process; what the old one left unread is gone."""
        for queues in (self._command_queues, self._control_queues):
            queues[rank].discard_unread()
        self._incarnations[attempt, rank] = incarnation
        self._open_queues(attempt, rank, incarnation)

    def _open_queues(self, attempt: int, rank: int, incarnation: int) -> None:
        self._command_queues[rank] = self._writer(
            command_queue(attempt, rank, incarnation), attempt
        )
        self._control_queues[rank] = self._writer(
            control_queue(attempt, rank, incarnation), attempt
        )

    def _delete_old_messages(self) -> None:
        """What ranks left unfinished when they ended; by now all else of them was read."""
        while len(self._attempts) > 1:
            attempt, world_size = self._attempts.popleft()
            for rank in range(world_size):
                for incarnation in range(self._incarnations.pop((attempt, rank), 0) + 1):
                    for reader in (self._reader, self._urgent):
                        reader.discard_unfinished(self._sender, rank, attempt, incarnation)

    def _writer(self, queue: str, attempt: int) -> QueueWriter:
        return QueueWriter(
            self._sender, queue, secret=self.secret, sender=CONTROLLER, attempt=attempt
        )

    def send(self, rank: int, command: MessageToRank) -> None:
        """Hand a command to a rank: at once if it ends something, else in its turn."""
        queues = (
            self._control_queues
            if isinstance(command, Interrupt | CancelRequest | InputReply)
            else self._command_queues
        )
        if command is not self._last_command:  # one is told to many ranks
            self._last_command, self._encoded = command, encode(command)
        queues[rank].put_encoded(self._encoded)

    def get(self) -> Envelope | None:
        """Wait for what a cell says next, in its order; None when the link is closed."""
        return _from_rank(self._reader.get())

    def get_urgent(self) -> Envelope | None:
        """Wait for the next news that do not wait for output; None when the link is closed."""
        return _from_rank(self._urgent.get())

    def store_payload(self, data: bytes) -> JsonDict:
        """Put a pickled value into the store for the ranks."""
        with self._payload_lock:
            return payloads.put(self._payload_store, f"push/{next(self._numbers)}", data)

    def load_payload(self, payload: JsonDict) -> Any:
        """Take a Python value of a rank out of the store.

        Raises:
            RequestError: it is no longer there, or cannot be opened in this process.
        """
        with self._payload_lock:
            try:
                data = payloads.get(self._payload_store, payload)
            finally:
                payloads.discard(self._payload_store, payload)
        return payloads.unpickle(data)  # what the rank signed for

    def discard_payload(self, payload: JsonDict) -> None:
        """Forget a value that nobody will collect any more."""
        with self._payload_lock:
            payloads.discard(self._payload_store, payload)

    def close(self) -> None:
        """Wake whoever collects, for the last time."""
        for queue in (RANKS_QUEUE, URGENT_QUEUE):
            self._writer(queue, attempt=0).put(Shutdown())
        self._reserved.close()


def _from_rank(envelope: Envelope) -> Envelope | None:
    return None if envelope.sender == CONTROLLER else envelope


def _reserve_port() -> socket.socket:
    """A port that is given to nobody who asks for any, and that who names it may serve.

    It is bound and does not listen, and both ends say that they share the address.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _serve_on_loopback() -> dist.TCPStore:
    """Start the store on a socket that is bound to 127.0.0.1 alone.

    Left to itself, TCPStore listens on every interface.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=FOREVER,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
