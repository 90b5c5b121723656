"""Queues of signed letters over a TCPStore: what goes in comes out whole, once and in order.

The store's server ends the connection of whoever sends it more than 8 MiB at once. A larger message
lies in pieces in a queue of its own, and the letter says how many there are and what their digest
is: so nothing is read that was not signed for. Reading takes the pieces out of the store's memory.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nbddp.errors import ReplayError, SignatureError, WireError
from nbddp.wire.letters import HEADER, Letter, signed, unseal
from nbddp.wire.loopback import clone, names_from_files
from nbddp.wire.messages import Batch, InPieces, Message, Report, decode, encode

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


Lived = tuple[int, int]  # a process: its rank's attempt and incarnation
PIECE_BYTES = 4 << 20  # the store's libuv server refuses payloads above 8 MiB
MAX_BACKLOG = 128  # letters nobody has read: who has more to say should wait


class QueueWriter:
    """The end of a queue that letters go into; may be used from several threads."""

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
        self._life = attempt, incarnation
        self._sequence = itertools.count(1)
        self._lock = threading.Lock()
        self._cut: list[str] = []  # the queues of messages in pieces

    def post_together(self, reports: Sequence[Report]) -> None:
        """Put what is told at one moment into the queue, as one letter."""
        self.post(reports[0] if len(reports) == 1 else Batch(reports=list(reports)))

    def post(self, message: Message) -> None:
        """Put a message into the queue; those of one writer stay in order."""
        self.post_encoded(encode(message))

    def post_encoded(self, body: bytes) -> None:
        """Put a message into the queue that was encoded before, as for many queues."""
        with self._lock:
            sequence = next(self._sequence)
            try:
                self._put(sequence, body)
            except RuntimeError:  # torch's: the connection is gone, and the client for good
                self._connect_anew()
                self._put(sequence, body)

    def renew(self) -> None:
        """The store is another one: what is put into a connection that has ended is lost."""
        with self._lock:
            self._connect_anew()

    def _connect_anew(self) -> None:
        with names_from_files():
            self._store = clone(self._store)

    def _put(self, sequence: int, body: bytes) -> None:
        beside = _beside(self._queue, self._sender, self._life, sequence)
        try:
            if len(body) > PIECE_BYTES:
                body = encode(self._put_pieces(beside, body))
            head = HEADER.pack(self._sender, *self._life, sequence)
            self._store.queue_push(self._queue, signed(head + body, self._queue, self._secret))
        except BaseException:
            if beside in self._cut:  # nobody will know of them
                self._cut.remove(beside)
                _sweep(self._store, beside)
            raise

    def _put_pieces(self, beside: str, body: bytes) -> InPieces:
        self._cut = [queue for queue in self._cut if self._store.queue_len(queue)] + [beside]
        _sweep(self._store, beside)  # those of a first try
        begins = range(0, len(body), PIECE_BYTES)
        for begin in begins:
            self._store.queue_push(beside, body[begin : begin + PIECE_BYTES])
        return InPieces(pieces=len(begins), digest=hashlib.sha256(body).hexdigest())

    def is_full(self) -> bool:
        """Whether too much of it lies in the store unread, so that more should wait."""
        with self._lock:
            if any(self._store.queue_len(queue) for queue in self._cut):
                return True
            self._cut.clear()
            return self._store.queue_len(self._queue) > MAX_BACKLOG

    def is_read(self) -> bool:
        """Return whether the reader has taken all letters of all writers of this queue."""
        with self._lock:
            return self._store.queue_len(self._queue) == 0

    def sweep(self) -> None:
        """Nobody will read any more: free the memory that messages in pieces take."""
        with self._lock:
            for queue in self._cut:
                _sweep(self._store, queue)
            self._cut.clear()


class QueueReader:
    """The end that letters come out of; refuses and counts what is not ours.

    Args:
        store: where the queue is.
        queue: its name.
        secret: what letters are signed with.
        reopen: waits, when the store is gone, for another one in its place, whose writers count
            their letters anew; None where there will be none.
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
        self._last: dict[tuple[int, Lived], int] = {}
        self.refused = 0

    def collect(self) -> Letter:
        """Wait for the next letter that is ours; the first refusal is logged, all are counted."""
        while True:
            data = self._pop()
            try:
                return self.open(data)
            except WireError as error:
                self.refused += 1
                if self.refused == 1:
                    logger.warning("refused a message: %s", error)

    def use(self, secret: bytes) -> None:
        """From here on letters are signed with this."""
        self._secret = secret

    def _pop(self) -> bytes:
        while True:
            try:
                return self._store.queue_pop(self._queue)
            except RuntimeError:  # torch's: the connection is gone
                if self._reopen is None:
                    raise
                self._store = self._reopen()
                self._last.clear()

    def open(self, data: bytes) -> Letter:
        """Read one sealed letter, if it is newer than the last of its sender."""
        letter = unseal(data, queue=self._queue, secret=self._secret)
        stream = letter.sender, (letter.attempt, letter.incarnation)
        if letter.sequence <= self._last.get(stream, 0):
            self._forget_pieces(letter)
            raise ReplayError(f"message {letter.sequence} of rank {letter.sender} came twice")
        self._last[stream] = letter.sequence
        if isinstance(letter.message, InPieces):
            return replace(letter, message=decode(self._take_pieces(letter, letter.message)))
        return letter

    def _take_pieces(self, letter: Letter, said: InPieces) -> bytes:
        beside = _of(letter, self._queue)
        try:  # never waits: whoever can reach the store can take things out of it
            body = b"".join(self._store.queue_pop(beside, block=False) for _ in range(said.pieces))
        except RuntimeError as error:  # torch's QueueEmptyError
            self._forget_pieces(letter)
            raise WireError(f"a piece of a message in queue {self._queue!r} is gone") from error
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), said.digest):
            self._forget_pieces(letter)
            raise SignatureError(f"a message in queue {self._queue!r} was changed on its way")
        return body

    def _forget_pieces(self, letter: Letter) -> None:
        """Else their sender would wait until they are read."""
        if isinstance(letter.message, InPieces):
            _sweep(self._store, _of(letter, self._queue))

    def sweep(self, store: Store, sender: int, attempt: int, incarnation: int = 0) -> None:
        """Free the memory of a message that a sender was in the middle of when it ended.

        Args:
            store: another client than the one that waits for letters.
            sender: who has ended, and of whom every letter was read.
            attempt: in which it lived.
            incarnation: as which process of its rank.
        """
        lived = attempt, incarnation
        sequence = self._last.get((sender, lived), 0) + 1
        _sweep(store, _beside(self._queue, sender, lived, sequence))


def _beside(queue: str, sender: int, lived: Lived, sequence: int) -> str:
    """The queue that the pieces of one message lie in."""
    attempt, incarnation = lived
    return f"{queue}/pieces/{attempt}.{incarnation}/{sender}/{sequence}"


def _of(letter: Letter, queue: str) -> str:
    lived = letter.attempt, letter.incarnation
    return _beside(queue, letter.sender, lived, letter.sequence)


def _sweep(store: Store, queue: str) -> None:
    with suppress(RuntimeError):  # torch's QueueEmptyError: it was just read after all
        while store.queue_len(queue):
            store.queue_pop(queue, block=False)
