"""What goes into a queue comes out whole, once and in order; everything else is refused."""

import hmac
import logging
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from stores import MemoryStore
from strategies import any_message
from syrupy.assertion import SnapshotAssertion
from torch.distributed import QueueEmptyError

from nbddp.errors import ReplayError, SignatureError, WireError
from nbddp.wire import payloads, queues
from nbddp.wire.envelope import CONTROLLER, Envelope, sign, verify
from nbddp.wire.messages import (
    InterruptAcknowledged,
    Message,
    MessageFromRank,
    Output,
    Shutdown,
    encode,
)
from nbddp.wire.queues import QueueReader, QueueWriter

SECRET = b"s" * 32
QUEUE = "up"
NAME = sign(b"", QUEUE, SECRET).hex()  # of the queue in the store
HEADER = struct.Struct("!iIIQ")


def writer(
    store: MemoryStore, *, sender: int = 0, attempt: int = 1, secret: bytes = SECRET
) -> QueueWriter:
    return QueueWriter(store, QUEUE, secret=secret, sender=sender, attempt=attempt)


class Queue:
    """A queue in memory with both its ends; ``writer`` is the writer of rank 0."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.reader = QueueReader(self.store, QUEUE, secret=SECRET)
        self.writer = writer(self.store)

    def push(self, data: bytes) -> None:
        self.store.queue_push(NAME, data)

    @property
    def pieces(self) -> dict[str, bytes]:
        """The pieces of large messages, by their keys."""
        return self.store.keys

    def is_refused(self) -> bool:
        """Whether all that was sent so far is refused, and takes no room."""
        self.writer.put(Shutdown())
        collected = self.reader.get().message
        return collected == Shutdown() and self.reader.refused > 0 and not self.writer.is_full()


@pytest.fixture
def queue() -> Queue:
    return Queue()


def envelope(sequence: int = 1, *, sender: int = 0, attempt: int = 1) -> Envelope:
    return Envelope(sender, attempt, sequence, InterruptAcknowledged(cell=sequence))


def signed(body: bytes, *, queue: str = QUEUE, secret: bytes = SECRET) -> bytes:
    """Any body with the signature that only an owner of the secret can make."""
    return hmac.digest(secret, queue.encode() + b"\0" + body, "sha256") + body


def as_sent(envelope: Envelope, *, queue: str = QUEUE, secret: bytes = SECRET) -> bytes:
    """A message as its writer puts it into a queue."""
    head = HEADER.pack(envelope.sender, envelope.attempt, envelope.incarnation, envelope.sequence)
    return signed(head + encode(envelope.message), queue=queue, secret=secret)


# ---- sign and verify


@given(
    any_message(),
    st.integers(-1, 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.text(max_size=20),
    st.binary(min_size=1, max_size=64),
)
def test_a_signed_message_is_read_unchanged(
    message: Message, sender: int, attempt: int, sequence: int, queue: str, secret: bytes
) -> None:
    sent = Envelope(sender, attempt, sequence, message)
    assert verify(as_sent(sent, queue=queue, secret=secret), queue=queue, secret=secret) == sent


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


AS_SENT = as_sent(envelope())
CHANCE = random.Random(20)
UNSIGNED: dict[str, list[bytes]] = {
    "nobody's": [b"\0" * size for size in (0, 1, 31, 32, 48)] + [b"{}" * 100],
    "random": [CHANCE.randbytes(CHANCE.randrange(200)) for _ in range(500)],
    "changed in one bit": [flipped(AS_SENT, bit) for bit in range(len(AS_SENT) * 8)],
    "cut": [AS_SENT[:length] for length in range(len(AS_SENT))],
    "longer": [AS_SENT + b"\0"],
    "of another queue": [as_sent(envelope(), queue=it) for it in ("", "u", "up\0", "up2", "down")],
    "with another secret": [
        as_sent(envelope(), secret=it) for it in (b"", b"s" * 31, b"s" * 33, b"t" * 32)
    ],
}


@pytest.mark.parametrize("kind", UNSIGNED)
def test_messages_without_a_valid_signature_are_refused_and_a_later_valid_one_is_read(
    queue: Queue, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    for data in UNSIGNED[kind]:
        with pytest.raises(SignatureError, match=repr(QUEUE)):
            verify(data, queue=QUEUE, secret=SECRET)
        queue.push(data)
    queue.push(AS_SENT)  # their number is not used up
    with caplog.at_level(logging.DEBUG):
        assert queue.reader.get() == envelope()
    assert queue.reader.refused == sum(map(bool, UNSIGNED[kind]))  # an empty one only wakes it
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert repr(QUEUE) in caplog.text


def test_signed_data_that_is_not_a_message_is_refused_and_the_next_message_is_read(
    queue: Queue,
) -> None:
    head = HEADER.pack(0, 1, 0, 1)
    bodies = [b"", head[:19], head, head + b"null"]
    for body in bodies:
        with pytest.raises(WireError) as caught:
            verify(signed(body), queue=QUEUE, secret=SECRET)
        assert not isinstance(caught.value, SignatureError), body
        queue.push(signed(body))
    queue.writer.put(Shutdown())
    assert queue.reader.get().message == Shutdown()
    assert queue.reader.refused == len(bodies)


# ---- writer and reader


def test_a_queue_is_full_while_too_many_messages_are_unread(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_BACKLOG", 1)
    queue.writer.put(Shutdown())
    assert not queue.writer.is_full()
    queue.writer.put(Shutdown())
    assert queue.writer.is_full()
    queue.reader.get()
    assert not queue.writer.is_full()


def test_a_message_with_an_old_sequence_number_is_refused(
    queue: Queue, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    queue.push(b"forged")
    queue.push(as_sent(envelope(7)))
    assert queue.reader.get() == envelope(7)
    reasons = [*caplog.messages]
    for number in (0, 1, 7):
        reasons.append(refusal(ReplayError, queue.reader.verify, as_sent(envelope(number))))
    assert reasons == snapshot
    assert queue.reader.verify(as_sent(envelope(8))) == envelope(8)


def test_messages_that_were_removed_are_counted(cut: Queue) -> None:
    """Also those of which a piece was removed."""
    missing = []
    for number in range(6):
        cut.writer.put_batch([large() if number == 4 else Shutdown(), Shutdown()][: number + 1])
        if number in (1, 2):
            cut.store.queues[NAME].clear()
        elif number == 4:
            cut.pieces.popitem()
        else:
            missing.append([part.missing for part in cut.reader.get().parts])
    assert missing == [[0], [2, 0], [1, 0]]


def test_a_reader_waits_again_if_another_client_was_faster(queue: Queue) -> None:
    """A store without the message: a client that pops from the queue is no lost connection."""
    pop, errors = queue.store.queue_pop, [QueueEmptyError("queue is empty")]

    def pop_late(key: str) -> bytes:
        if errors:
            raise errors.pop()
        return pop(key)

    queue.store.queue_pop = pop_late  # type: ignore[assignment, method-assign]
    queue.writer.put(Shutdown())
    assert queue.reader.get().message == Shutdown()


def test_queues_have_names_that_need_the_secret(queue: Queue) -> None:
    queue.writer.put(Shutdown())
    assert [*queue.store.queues] == [NAME]
    queue.reader.use_secret(b"t", queue.store)
    assert queue.store.queues[NAME].pop() == b""  # wakes the thread that waits for this queue
    other = writer(queue.store, secret=b"t")
    other.put(Shutdown())
    assert queue.reader.get().message == Shutdown()
    assert not queue.reader.refused


def test_each_sender_and_attempt_has_its_own_sequence_numbers(queue: Queue) -> None:
    for sender in (CONTROLLER, 0, 1):
        for attempt in (1, 2):
            one = envelope(1, sender=sender, attempt=attempt)
            assert queue.reader.verify(as_sent(one)) == one


def test_a_batch_of_messages_is_one_queue_entry(queue: Queue) -> None:
    reports: list[MessageFromRank] = [InterruptAcknowledged(cell=1), InterruptAcknowledged(cell=2)]
    queue.writer.put_batch(reports)
    assert len(queue.store.queues[NAME]) == 1
    found = queue.reader.get()
    assert [part.message for part in found.parts] == reports
    assert {(part.sender, part.attempt, part.sequence) for part in found.parts} == {(0, 1, 1)}
    writer(queue.store, sender=3, attempt=2).put_batch([InterruptAcknowledged(cell=1)])
    alone = queue.reader.get()
    assert alone == envelope(sender=3, attempt=2)
    assert alone.parts == [alone]


# ---- messages too large for the store

PIECE = 100


@pytest.fixture
def cut(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr(payloads, "PIECE_BYTES", PIECE)
    return queue


def large(size: int = 1000) -> Output:
    return Output(start=0, end=size, text="x" * size)


def test_a_large_message_is_sent_in_pieces_and_read_complete_and_in_order(cut: Queue) -> None:
    messages: list[Message] = [Shutdown(), large(), large(2000), Shutdown()]
    for message in messages:
        cut.writer.put(message)
    sizes = [len(piece) for piece in cut.pieces.values()]
    assert max(sizes) <= PIECE
    assert sum(sizes) > 3000
    assert max(map(len, cut.store.queues[NAME])) < 2 * PIECE + 150
    assert cut.writer.is_full()
    assert [cut.reader.get().message for _ in messages] == messages
    assert not cut.writer.is_full()
    assert cut.pieces == {}


@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_a_message_near_the_piece_size_is_read_complete(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, surplus: int
) -> None:
    monkeypatch.setattr(payloads, "PIECE_BYTES", len(encode(large())) + surplus)
    queue.writer.put(large())
    assert bool(queue.pieces) == (surplus < 0)
    assert queue.reader.get().message == large()


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_changed_or_missing_piece_is_refused(cut: Queue, is_changed: bool) -> None:
    cut.writer.put(large())
    third = [*cut.pieces][2]  # of the text alone: the message stays valid
    piece = cut.pieces.pop(third)
    if is_changed:
        cut.pieces[third] = b"y" + piece[1:]
    assert cut.is_refused()


def test_a_repeated_large_message_is_refused_and_its_pieces_are_removed(cut: Queue) -> None:
    cut.writer.put(large())
    data, pieces = cut.store.queues[NAME][0], dict(cut.pieces)
    cut.reader.get()
    cut.store.keys |= pieces
    cut.push(data)
    assert cut.is_refused()
    assert cut.pieces == {}


def test_pieces_of_unfinished_and_unread_messages_are_removed(cut: Queue) -> None:
    cut.writer.put(Shutdown())
    cut.reader.get()
    cut.writer.put(large())
    cut.store.queues[NAME].clear()  # it died before the message itself was sent
    cut.reader.discard_unfinished(cut.store, 7, 1)  # never heard of
    assert cut.pieces
    cut.reader.discard_unfinished(cut.store, 0, 1)
    assert cut.pieces == {}
    cut.writer.put(large())
    cut.writer.put(large(2000))
    cut.writer.discard_unread()
    assert cut.pieces == {}


def test_a_writer_reconnects_without_losing_or_repeating_a_message(
    cut: Queue,
) -> None:
    class LostStore(MemoryStore):
        set_keys = 0

        def set(self, key: str, value: bytes) -> None:
            self.set_keys += 1
            if self.set_keys > 3:
                raise RuntimeError("Broken pipe")
            cut.store.set(key, value)

        def delete_key(self, key: str) -> bool:  # noqa: ARG002 - as the real one
            raise RuntimeError("Broken pipe")

        def queue_push(self, key: str, value: bytes) -> None:
            cut.store.queue_push(key, value)

        def clone(self) -> MemoryStore:
            return cut.store

    failing = writer(LostStore())
    messages: list[Message] = [Shutdown(), large(), Shutdown()]
    for message in messages:
        failing.put(message)
    assert [cut.reader.get().message for _ in messages] == messages
    assert cut.reader.refused == 0
    assert cut.pieces == {}
