"""Envelopes: signed messages with sender and sequence number.

Like Jupyter's messages, each envelope has an HMAC-SHA256 signature. Both ends get the secret in
advance. The signature covers the name of the queue, so an envelope cannot be moved to another
queue. It also covers the sequence number, so the receiver can refuse a repeated envelope.
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
    """A message with its sender, attempt, incarnation and sequence number.

    ``incarnation`` counts the processes of this rank in this attempt, from 0. Each heal adds 1.
    ``missing`` counts the messages before this one that did not arrive.
    """

    sender: int
    attempt: int
    sequence: int
    message: Message
    incarnation: int = 0
    missing: int = 0

    @property
    def parts(self) -> list[Envelope]:
        """One envelope for each message of a batch; for any other message just this envelope."""
        if not isinstance(self.message, MessageBatch):
            return [self]
        return [
            replace(self, message=message, missing=0 if index else self.missing)
            for index, message in enumerate(self.message.messages)
        ]


def verify(data: bytes, *, queue: str, secret: bytes) -> Envelope:
    """Check the signature and decode the envelope.

    Raises:
        SignatureError: the bytes were not signed for this queue with this secret.
        WireError: the signature is valid, but the bytes are not a message.
    """
    signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, sign(body, queue, secret)):
        raise SignatureError(f"a message in queue {queue!r} has no valid signature")
    if len(body) < HEADER.size:
        raise WireError(f"a message in queue {queue!r} has no header")
    sender, attempt, incarnation, sequence = HEADER.unpack_from(body)
    return Envelope(sender, attempt, sequence, decode(body[HEADER.size :]), incarnation)


def sign(body: bytes, queue: str, secret: bytes) -> bytes:
    """Return the HMAC-SHA256 of the queue's name and the body."""
    return hmac.digest(secret, queue.encode() + b"\0" + body, "sha256")
