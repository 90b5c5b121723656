"""Signed queues over a TCPStore: what goes in comes out whole, once and in order, or is refused.

As Jupyter's own messages, every letter carries an HMAC-SHA256 made with a secret that both ends
were given beforehand. The signature covers the queue's name too, so a letter cannot be moved from
one queue to another, and a number that only grows, so it cannot be sent twice.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.errors import ReplayError, SignatureError, WireError
from nbddp.wire.messages import Message, decode, encode

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

_SIGNATURE_BYTES = hashlib.sha256().digest_size
_HEADER = struct.Struct("!iIQ")  # sender's rank (-1: the controller), attempt, sequence number

CONTROLLER = -1


@dataclass(frozen=True, slots=True)
class Letter:
    """A message with who sent it, in which attempt, and as which of its letters."""

    sender: int
    attempt: int
    sequence: int
    message: Message


def seal(letter: Letter, *, queue: str, secret: bytes) -> bytes:
    """Turn a letter into signed bytes for one queue."""
    body = _HEADER.pack(letter.sender, letter.attempt, letter.sequence) + encode(letter.message)
    return _sign(body, queue, secret) + body


def unseal(data: bytes, *, queue: str, secret: bytes) -> Letter:
    """Check the signature, then read.

    Raises:
        SignatureError: the bytes were not sealed for this queue with this secret.
        WireError: they were, and yet are no message.
    """
    signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(body, queue, secret)):
        raise SignatureError(f"a message in queue {queue!r} has no valid signature")
    if len(body) < _HEADER.size:
        raise WireError(f"a message in queue {queue!r} has no header")
    sender, attempt, sequence = _HEADER.unpack_from(body)
    return Letter(sender, attempt, sequence, decode(body[_HEADER.size :]))


def _sign(body: bytes, queue: str, secret: bytes) -> bytes:
    return hmac.digest(secret, queue.encode() + b"\0" + body, "sha256")


class Postbox:
    """The end of a queue that letters go into; may be used from several threads."""

    def __init__(
        self, store: Store, queue: str, *, secret: bytes, sender: int, attempt: int
    ) -> None:
        self._store = store
        self._queue = queue
        self._secret = secret
        self._sender = sender
        self._attempt = attempt
        self._sequence = itertools.count(1)
        self._lock = threading.Lock()

    def post(self, message: Message) -> None:
        """Put a message into the queue; letters of one postbox stay in order."""
        with self._lock:
            letter = Letter(self._sender, self._attempt, next(self._sequence), message)
            self._store.queue_push(
                self._queue, seal(letter, queue=self._queue, secret=self._secret)
            )

    def backlog(self) -> int:
        """How many letters nobody has collected yet."""
        with self._lock:
            return self._store.queue_len(self._queue)


class Mailbox:
    """The end that letters come out of; refuses and counts what is not ours."""

    def __init__(self, store: Store, queue: str, *, secret: bytes) -> None:
        self._store = store
        self._queue = queue
        self._secret = secret
        self._last: dict[tuple[int, int], int] = {}
        self.refused = 0

    def collect(self) -> Letter:
        """Wait for the next letter that is ours; the first refusal is logged, all are counted."""
        while True:
            data = self._store.queue_pop(self._queue)
            try:
                return self.open(data)
            except WireError as error:
                self.refused += 1
                if self.refused == 1:
                    logger.warning("refused a message: %s", error)

    def open(self, data: bytes) -> Letter:
        """Read one sealed letter, if it is newer than the last of its sender."""
        letter = unseal(data, queue=self._queue, secret=self._secret)
        stream = (letter.sender, letter.attempt)
        if letter.sequence <= self._last.get(stream, 0):
            raise ReplayError(f"message {letter.sequence} of rank {letter.sender} came twice")
        self._last[stream] = letter.sequence
        return letter
