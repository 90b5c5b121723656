"""Queues of signed envelopes over a TCPStore: each envelope arrives whole, once and in order.

The store's server closes a connection that sends more than 8 MiB at once. A larger message is sent
as a payload, in pieces, and the envelope holds its digest. So only signed data is read. The reader
deletes the pieces from the store.

In the store a queue has a name that only the holders of the secret know, and the store lists no
queues. So other users of the machine cannot read a queue, remove its messages or fill it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

from nbddp.errors import ReplayError, RequestError, WireError
from nbddp.wire import messages as msg
from nbddp.wire import payloads
from nbddp.wire.dns import without_dns
from nbddp.wire.envelope import HEADER, Envelope, sign, verify

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


IncarnationKey = tuple[int, int]  # attempt and incarnation of a rank's process
MAX_BACKLOG = 128  # unread envelopes; above it, writers should wait


@dataclass(eq=False, repr=False)
class QueueWriter:
    """The sending end of a queue; may be used by several threads.

    Attributes:
        can_rejoin: whether a new store belongs to another notebook, which knows no earlier message.
        connection: the number of stores of other notebooks.
        is_cut_off: whether a thread waits for a new store.
    """

    store: Store
    queue: str
    _: KW_ONLY
    secret: bytes
    sender: int
    attempt: int
    incarnation: int = 0
    can_rejoin: bool = False

    def __post_init__(self) -> None:
        self.connection = 0
        self.is_cut_off = False
        self._name = _name_in_store(self.queue, self.secret)
        self._sequence = itertools.count(1)
        self._lock = threading.Lock()
        self._unread_large: list[msg.JsonDict] = []  # references of unread large messages

    def put_batch(self, reports: Sequence[msg.MessageFromRank], connection: int = 0) -> bool:
        """Put messages of the same moment into the queue, as one envelope.

        Return False, and send nothing to a new store, if this is not the current connection.

        Raises:
            WireError: a message cannot be encoded; nothing was sent.
            RuntimeError: from torch: the new store is gone, too.
        """
        message = reports[0] if len(reports) == 1 else msg.MessageBatch(messages=list(reports))
        try:
            body = msg.encode(message)
        except Exception as error:
            raise WireError("a message cannot be encoded") from error
        return self._put(body, connection)

    def put(self, message: msg.Message) -> None:
        """Put a message into the queue. The messages of one writer stay in order."""
        self.put_encoded(msg.encode(message))

    def put_encoded(self, body: bytes) -> None:
        """Put an encoded message into the queue; used to send one message to many queues."""
        self._put(body)

    def _put(self, body: bytes, connection: int | None = None) -> bool:
        with self._lock:
            if connection not in (None, self.connection):
                return False
            sequence = next(self._sequence)
            try:
                self._push(sequence, body)
            except RuntimeError:  # torch: the connection is closed, and the client is unusable
                self._connect_again()
                if connection not in (None, self.connection):
                    return False
                self._push(sequence, body)
            return True

    def reconnect(self) -> None:
        """Connect again if the store was replaced. Messages on a closed connection are lost."""
        with self._lock:
            try:
                self.store.queue_len(self._name)
            except RuntimeError:  # else ``put`` has done it
                self._connect_again()

    def _connect_again(self) -> None:
        self.is_cut_off = True
        with without_dns():
            self.store = self.store.clone()  # type: ignore[attr-defined]
        self.is_cut_off = False
        if self.can_rejoin:
            self.connection += 1

    def _push(self, sequence: int, body: bytes) -> None:
        if len(body) > payloads.PIECE_BYTES:
            key = _key(self.queue, self.sender, (self.attempt, self.incarnation), sequence)
            payload = payloads.put(self.store, key, body)
            self._drop_read()
            self._unread_large.append(payload)
            body = msg.encode(msg.LargeMessage(payload=payload))
        body = HEADER.pack(self.sender, self.attempt, self.incarnation, sequence) + body
        self.store.queue_push(self._name, sign(body, self.queue, self.secret) + body)

    def is_full(self) -> bool:
        """Return whether so much is unread that the writer should wait."""
        with self._lock:
            self._drop_read()
            return bool(self._unread_large) or self.store.queue_len(self._name) > MAX_BACKLOG

    def _drop_read(self) -> None:
        self._unread_large = [key for key in self._unread_large if payloads.exists(self.store, key)]

    def is_read(self) -> bool:
        """Return whether the reader has read all envelopes of all writers of this queue.

        It takes no lock: a signal handler may call it while the main thread holds the lock.
        """
        return self.store.queue_len(self._name) == 0

    def discard_unread(self) -> None:
        """Delete the pieces of unread large messages; there is no reader any more."""
        with self._lock:
            for payload in self._unread_large:
                payloads.discard(self.store, payload)
            self._unread_large.clear()


@dataclass(eq=False, repr=False)
class QueueReader:
    """The receiving end of a queue; drops and counts invalid envelopes.

    Attributes:
        store: store with the queue.
        queue: name of the queue.
        secret: key that signs envelopes.
        reopen: called when the store is gone. Waits for a new store and returns it; its writers
            number their envelopes from the start. None if there will be no new store.
        refused: the number of invalid envelopes.
    """

    store: Store
    queue: str
    _: KW_ONLY
    secret: bytes
    reopen: Callable[[], Store] | None = None
    refused: int = 0

    def __post_init__(self) -> None:
        self._name = _name_in_store(self.queue, self.secret)
        self._last_sequence: dict[tuple[int, IncarnationKey], int] = {}

    def get(self) -> Envelope:
        """Wait for the next valid envelope. Count invalid ones, and log the first."""
        while True:
            data = self._pop()
            if not data:  # see use_secret
                continue
            try:
                return self.verify(data)
            except WireError as error:
                self.refused += 1
                if self.refused == 1:
                    logger.warning("refused a message: %s", error)

    def use_secret(self, secret: bytes, store: Store) -> None:
        """Read the queue of another secret. ``store`` wakes the thread that waits in ``get``."""
        before, self._name = self._name, _name_in_store(self.queue, secret)
        self.secret = secret
        store.queue_push(before, b"")

    def _pop(self) -> bytes:
        while True:
            try:
                return self.store.queue_pop(self._name)
            except RuntimeError as error:  # torch: the connection is closed
                if type(error).__name__ == "QueueEmptyError":  # a client has removed the message
                    continue
                if self.reopen is None:
                    raise
                self.store = self.reopen()
                self._last_sequence.clear()

    def verify(self, data: bytes) -> Envelope:
        """Verify an envelope, and that it is newer than the last one of its sender.

        Count the messages between them, which did not arrive.
        """
        envelope = verify(data, queue=self.queue, secret=self.secret)
        stream = envelope.sender, (envelope.attempt, envelope.incarnation)
        last = self._last_sequence.get(stream, 0)
        if envelope.sequence <= last:
            if isinstance(envelope.message, msg.LargeMessage):  # sent again after a lost connection
                payloads.discard(self.store, envelope.message.payload)
            raise ReplayError(
                f"message {envelope.sequence} of rank {envelope.sender} was received twice"
            )
        if isinstance(envelope.message, msg.LargeMessage):
            envelope = replace(envelope, message=self._load(envelope.message.payload))
        self._last_sequence[stream] = envelope.sequence
        # a writer that had another reader before does not begin with 1
        return replace(envelope, missing=envelope.sequence - last - 1 if last else 0)

    def _load(self, payload: msg.JsonDict) -> msg.Message:
        try:
            try:
                body = payloads.get(self.store, payload)
            finally:  # else its sender would keep waiting
                payloads.discard(self.store, payload)
        except (RequestError, RuntimeError) as error:  # torch: the connection is closed
            raise WireError(f"a piece of a message in queue {self.queue!r} is gone") from error
        return msg.decode(body)

    def discard_unfinished(
        self, store: Store, sender: int, attempt: int, incarnation: int = 0
    ) -> None:
        """Delete the pieces of a message that its sender was writing when it ended.

        Args:
            store: not the client that waits for envelopes.
            sender: a rank that has ended; all of its envelopes were read.
            attempt: the attempt of its process.
            incarnation: the incarnation of its process.
        """
        incarnation_key = attempt, incarnation
        sequence = self._last_sequence.get((sender, incarnation_key), 0) + 1
        payloads.discard_unannounced(store, _key(self.queue, sender, incarnation_key, sequence))


def _name_in_store(queue: str, secret: bytes) -> str:
    return sign(b"", queue, secret).hex()


def _key(queue: str, sender: int, incarnation_key: IncarnationKey, sequence: int) -> str:
    """Return the key prefix for the pieces of one message."""
    attempt, incarnation = incarnation_key
    return f"{queue}/pieces/{attempt}.{incarnation}/{sender}/{sequence}"
