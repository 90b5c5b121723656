"""A message with its sender and number, signed for one queue.

Like Jupyter's own messages, every envelope has an HMAC-SHA256, made with a secret that both ends
were given beforehand. The signature covers the queue's name, so an envelope cannot be moved from
one queue to another. It also covers a number that only grows, so an envelope cannot be sent twice.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, replace

from nbddp.errors import SignatureError, WireError
from nbddp.wire.messages import Message, MessageBatch, decode

CONTROLLER = -1
_SIGNATURE_BYTES = hashlib.sha256().digest_size
HEADER = struct.Struct("!iIIQ")  # sender's rank (-1: the controller), attempt, incarnation, number


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with who sent it, in which attempt, and as which of its envelopes.

    ``incarnation``: which process of this rank in this attempt, from 0: a healed one is the next.
    """

    sender: int
    attempt: int
    sequence: int
    message: Message
    incarnation: int = 0

    @property
    def parts(self) -> list[Envelope]:
        """An envelope for each of the reports that came in this one: most often just itself."""
        if not isinstance(self.message, MessageBatch):
            return [self]
        return [replace(self, message=each) for each in self.message.messages]


def verify(data: bytes, *, queue: str, secret: bytes) -> Envelope:
    """Check the signature, then read.

    Raises:
        SignatureError: the bytes were not sealed for this queue with this secret.
        WireError: they were, and yet are no message.
    """
    signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, sign(body, queue, secret)):
        raise SignatureError(f"a message in queue {queue!r} has no valid signature")
    if len(body) < HEADER.size:
        raise WireError(f"a message in queue {queue!r} has no header")
    sender, attempt, incarnation, sequence = HEADER.unpack_from(body)
    return Envelope(sender, attempt, sequence, decode(body[HEADER.size :]), incarnation)


def sign(body: bytes, queue: str, secret: bytes) -> bytes:
    """HMAC-SHA256 over the name of the queue and the body."""
    return hmac.digest(secret, queue.encode() + b"\0" + body, "sha256")
