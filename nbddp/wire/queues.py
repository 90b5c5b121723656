"""Queues of signed envelopes over a TCPStore: what goes in comes out whole, once and in order.

The store's server ends a connection that sends it more than 8 MiB at once. A larger message travels
as values do, in pieces; the envelope holds its digest, so nothing is read that was not signed for.
Reading takes the pieces out of the store's memory.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nbddp.errors import ReplayError, RequestError, WireError
from nbddp.wire import payloads
from nbddp.wire.envelope import HEADER, Envelope, sign, verify
from nbddp.wire.loopback_store import clone
from nbddp.wire.messages import (
    JsonDict,
    LargeMessage,
    Message,
    MessageBatch,
    MessageFromRank,
    decode,
    encode,
)

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


IncarnationKey = tuple[int, int]  # a process: its rank's attempt and incarnation
MAX_BACKLOG = 128  # envelopes nobody has read: who has more to say should wait


class QueueWriter:
    """The end of a queue that envelopes go into; may be used from several threads."""

    def __init__(
        self,
        store: Store,
        queue: str,
        *,
        secret: bytes,
        sender: int,
        attempt: int,
        incarnation: int = 0,
    ) -> None:
        self._store = store
        self._queue = queue
        self._secret = secret
        self._sender = sender
        self._incarnation_key = attempt, incarnation
        self._sequence = itertools.count(1)
        self._lock = threading.Lock()
        self._unread_large: list[JsonDict] = []  # messages in pieces that nobody has read yet

    def put_batch(self, reports: Sequence[MessageFromRank]) -> None:
        """Put what is told at one moment into the queue, as one envelope."""
        self.put(reports[0] if len(reports) == 1 else MessageBatch(messages=list(reports)))

    def put(self, message: Message) -> None:
        """Put a message into the queue; those of one writer stay in order."""
        self.put_encoded(encode(message))

    def put_encoded(self, body: bytes) -> None:
        """Put a message into the queue that was encoded before, as for many queues."""
        with self._lock:
            sequence = next(self._sequence)
            try:
                self._push(sequence, body)
            except RuntimeError:  # torch's: the connection is gone, and the client for good
                self._store = clone(self._store)
                self._push(sequence, body)

    def reconnect(self) -> None:
        """The store is another one: what is put into a connection that has ended is lost."""
        with self._lock:
            self._store = clone(self._store)

    def _push(self, sequence: int, body: bytes) -> None:
        if len(body) > payloads.PIECE_BYTES:
            key = _key(self._queue, self._sender, self._incarnation_key, sequence)
            payload = payloads.put(self._store, key, body)
            self._drop_read()
            self._unread_large.append(payload)
            body = encode(LargeMessage(payload=payload))
        body = HEADER.pack(self._sender, *self._incarnation_key, sequence) + body
        self._store.queue_push(self._queue, sign(body, self._queue, self._secret) + body)

    def is_full(self) -> bool:
        """Whether too much of it lies in the store unread, so that more should wait."""
        with self._lock:
            self._drop_read()
            return bool(self._unread_large) or self._store.queue_len(self._queue) > MAX_BACKLOG

    def _drop_read(self) -> None:
        self._unread_large = [
            each for each in self._unread_large if payloads.exists(self._store, each)
        ]

    def is_read(self) -> bool:
        """Return whether the reader has taken all envelopes of all writers of this queue."""
        with self._lock:
            return self._store.queue_len(self._queue) == 0

    def discard_unread(self) -> None:
        """Nobody will read any more: free the memory that messages in pieces take."""
        with self._lock:
            for payload in self._unread_large:
                payloads.discard(self._store, payload)
            self._unread_large.clear()


class QueueReader:
    """The end that envelopes come out of; refuses and counts what is not ours.

    Args:
        store: where the queue is.
        queue: its name.
        secret: what envelopes are signed with.
        reopen: waits, when the store is gone, for another one in its place, whose writers count
            their envelopes anew; None where there will be none.
    """

    def __init__(
        self,
        store: Store,
        queue: str,
        *,
        secret: bytes,
        reopen: Callable[[], Store] | None = None,
    ) -> None:
        self._store = store
        self._reopen = reopen
        self._queue = queue
        self._secret = secret
        self._last_sequence: dict[tuple[int, IncarnationKey], int] = {}
        self.refused = 0

    def get(self) -> Envelope:
        """Wait for the next envelope that is ours; the first refusal is logged, all are counted."""
        while True:
            data = self._pop()
            try:
                return self.verify(data)
            except WireError as error:
                self.refused += 1
                if self.refused == 1:
                    logger.warning("refused a message: %s", error)

    def set_secret(self, secret: bytes) -> None:
        """From here on envelopes are signed with this."""
        self._secret = secret

    def _pop(self) -> bytes:
        while True:
            try:
                return self._store.queue_pop(self._queue)
            except RuntimeError:  # torch's: the connection is gone
                if self._reopen is None:
                    raise
                self._store = self._reopen()
                self._last_sequence.clear()

    def verify(self, data: bytes) -> Envelope:
        """Read one sealed envelope, if it is newer than the last of its sender."""
        envelope = verify(data, queue=self._queue, secret=self._secret)
        stream = envelope.sender, (envelope.attempt, envelope.incarnation)
        if envelope.sequence <= self._last_sequence.get(stream, 0):
            if isinstance(envelope.message, LargeMessage):  # sent anew after a lost connection
                payloads.discard(self._store, envelope.message.payload)
            raise ReplayError(f"message {envelope.sequence} of rank {envelope.sender} came twice")
        self._last_sequence[stream] = envelope.sequence
        if isinstance(envelope.message, LargeMessage):
            return replace(envelope, message=self._load(envelope.message.payload))
        return envelope

    def _load(self, payload: JsonDict) -> Message:
        try:
            try:
                body = payloads.get(self._store, payload)
            finally:  # else its sender would wait until it is read
                payloads.discard(self._store, payload)
        except (RequestError, RuntimeError) as error:  # torch's: the connection is gone
            raise WireError(f"a piece of a message in queue {self._queue!r} is gone") from error
        return decode(body)

    def discard_unfinished(
        self, store: Store, sender: int, attempt: int, incarnation: int = 0
    ) -> None:
        """Free the memory of a message that a sender was in the middle of when it ended.

        Args:
            store: another client than the one that waits for envelopes.
            sender: who has ended, and of whom every envelope was read.
            attempt: in which it lived.
            incarnation: as which process of its rank.
        """
        incarnation_key = attempt, incarnation
        sequence = self._last_sequence.get((sender, incarnation_key), 0) + 1
        payloads.discard_unannounced(store, _key(self._queue, sender, incarnation_key, sequence))


def _key(queue: str, sender: int, incarnation_key: IncarnationKey, sequence: int) -> str:
    """Where the pieces of one message are."""
    attempt, incarnation = incarnation_key
    return f"{queue}/pieces/{attempt}.{incarnation}/{sender}/{sequence}"
