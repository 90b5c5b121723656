"""What goes into a queue comes out whole, once and in order; everything else is refused."""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
import struct
from collections import defaultdict, deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_message

from nbddp.errors import ReplayError, SignatureError, WireError
from nbddp.wire import queues as room
from nbddp.wire.letters import CONTROLLER, Letter, seal, unseal
from nbddp.wire.messages import Leave, Message, Noticed, Output, Report, encode
from nbddp.wire.queues import QueueReader, QueueWriter

SECRET = b"s" * 32
QUEUE = "up"


class MemoryStore:
    """The three calls of a TCPStore that queues need, in memory."""

    def __init__(self) -> None:
        self.queues: defaultdict[str, deque[bytes]] = defaultdict(deque)

    def queue_push(self, key: str, value: bytes) -> None:
        self.queues[key].append(value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not self.queues[key]:
            assert not block, "this would wait for ever"
            raise RuntimeError("queue is empty")  # torch's QueueEmptyError is one
        return self.queues[key].popleft()

    def queue_len(self, key: str) -> int:
        return len(self.queues[key])


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def reader(store: MemoryStore) -> QueueReader:
    return QueueReader(store, QUEUE, secret=SECRET)


def writer(store: MemoryStore, *, sender: int = 0, attempt: int = 1) -> QueueWriter:
    return QueueWriter(store, QUEUE, secret=SECRET, sender=sender, attempt=attempt)


def letter(sequence: int = 1, *, sender: int = 0, attempt: int = 1) -> Letter:
    return Letter(sender, attempt, sequence, Noticed(cell=sequence))


def sealed(sequence: int = 1, *, queue: str = QUEUE, secret: bytes = SECRET) -> bytes:
    return seal(letter(sequence), queue=queue, secret=secret)


def signed(body: bytes) -> bytes:
    """Any body with the signature that only an owner of the secret can make."""
    return hmac.digest(SECRET, QUEUE.encode() + b"\0" + body, "sha256") + body


# ---- seal and unseal


@given(
    any_message(),
    st.integers(-1, 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.text(max_size=20),
    st.binary(min_size=1, max_size=64),
)
def test_a_sealed_letter_comes_out_whole(
    message: Message, sender: int, attempt: int, sequence: int, queue: str, secret: bytes
) -> None:
    sent = Letter(sender, attempt, sequence, message)
    assert unseal(seal(sent, queue=queue, secret=secret), queue=queue, secret=secret) == sent


def test_the_signature_is_hmac_sha256_over_queue_and_body() -> None:
    data = sealed()
    assert data == signed(data[32:])
    assert data[32:] == struct.pack("!iIIQ", 0, 1, 0, 1) + encode(Noticed(cell=1))


def test_the_secret_is_not_in_the_letter() -> None:
    assert SECRET not in sealed()


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 31, b"\0" * 32, b"\0" * 48, b"{}" * 100])
def test_bytes_that_nobody_signed_are_refused(data: bytes) -> None:
    with pytest.raises(SignatureError) as caught:
        unseal(data, queue=QUEUE, secret=SECRET)
    assert str(caught.value) == "a message in queue 'up' has no valid signature"


def test_a_letter_for_another_queue_is_refused() -> None:
    with pytest.raises(SignatureError):
        unseal(sealed(queue="a1/command/0"), queue="a1/command/1", secret=SECRET)


def test_a_letter_with_another_secret_is_refused() -> None:
    with pytest.raises(SignatureError):
        unseal(sealed(secret=b"t" * 32), queue=QUEUE, secret=SECRET)


def test_a_letter_changed_in_any_one_bit_is_refused() -> None:
    data = sealed()
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SignatureError):
            unseal(bytes(changed), queue=QUEUE, secret=SECRET)


def test_a_letter_cut_anywhere_or_made_longer_is_refused() -> None:
    data = sealed()
    for length in range(len(data)):
        with pytest.raises(SignatureError):
            unseal(data[:length], queue=QUEUE, secret=SECRET)
    with pytest.raises(SignatureError):
        unseal(data + b"\0", queue=QUEUE, secret=SECRET)


HEADER = struct.pack("!iIIQ", 0, 1, 0, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        HEADER[:19],
        HEADER,
        HEADER + b"null",
        HEADER + b'["Nonsense", {}]',
        HEADER + b'["Noticed", {}]',
        HEADER + b'["Noticed", {"cell": 1, "more": 2}]',
        HEADER + b"\xff",
        HEADER + b"[" * 100_000,
    ],
    ids=["empty", "half a header", "header only", "null", "kind", "few", "many", "utf8", "deep"],
)
def test_what_is_signed_and_yet_no_message_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        unseal(signed(body), queue=QUEUE, secret=SECRET)
    assert not isinstance(caught.value, SignatureError)


# ---- writer and reader


def test_letters_come_out_in_the_order_they_went_in(
    store: MemoryStore, reader: QueueReader
) -> None:
    box = writer(store, sender=3, attempt=2)
    for number in range(5):
        box.post(Noticed(cell=number))
    found = [reader.collect() for _ in range(5)]
    assert [each.message for each in found] == [Noticed(cell=number) for number in range(5)]
    assert [each.sequence for each in found] == [1, 2, 3, 4, 5]
    assert {(each.sender, each.attempt) for each in found} == {(3, 2)}
    assert reader.refused == 0


def test_a_queue_is_full_when_too_much_of_it_was_not_collected(
    store: MemoryStore, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MAX_BACKLOG", 1)
    box = writer(store)
    box.post(Leave())
    assert not box.is_full()
    box.post(Leave())
    assert box.is_full()
    reader.collect()
    assert not box.is_full()


def test_a_letter_that_comes_twice_is_refused_the_second_time(reader: QueueReader) -> None:
    data = sealed(7)
    assert reader.open(data) == letter(7)
    with pytest.raises(ReplayError) as caught:
        reader.open(data)
    assert str(caught.value) == "message 7 of rank 0 came twice"


def test_a_letter_older_than_the_last_one_is_refused(reader: QueueReader) -> None:
    reader.open(sealed(2))
    with pytest.raises(ReplayError):
        reader.open(sealed(1))
    assert reader.open(sealed(3)) == letter(3)


def test_a_letter_numbered_nought_is_refused(reader: QueueReader) -> None:
    with pytest.raises(ReplayError):
        reader.open(sealed(0))


def test_every_sender_and_every_attempt_counts_for_itself(reader: QueueReader) -> None:
    for sender in (CONTROLLER, 0, 1):
        for attempt in (1, 2):
            one = letter(1, sender=sender, attempt=attempt)
            assert reader.open(seal(one, queue=QUEUE, secret=SECRET)) == one


def test_a_refused_letter_does_not_use_up_its_number(reader: QueueReader) -> None:
    with pytest.raises(SignatureError):
        reader.open(sealed(1, secret=b"wrong"))
    assert reader.open(sealed(1)) == letter(1)


def test_a_signed_body_that_is_no_message_is_refused_and_the_next_letter_comes(
    store: MemoryStore, reader: QueueReader
) -> None:
    for body in (b"", HEADER[:19], HEADER, HEADER + b"[]", HEADER + b"[" * 100_000):
        store.queue_push(QUEUE, signed(body))
    writer(store).post(Leave())
    assert reader.collect().message == Leave()
    assert reader.refused == 5


# ---- messages too large for the store


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(room, "PIECE_BYTES", 100)
    return 100


def large(size: int = 1000) -> Output:
    return Output(start=0, end=size, text="x" * size)


def beside(store: MemoryStore) -> dict[str, list[bytes]]:
    """All that lies in queues of pieces."""
    return {key: list(found) for key, found in store.queues.items() if "/pieces/" in key and found}


def test_a_piece_is_smaller_than_what_the_stores_server_refuses() -> None:
    assert room.PIECE_BYTES < 8 << 20


def test_what_is_told_at_one_moment_takes_one_place_in_the_queue(
    store: MemoryStore, reader: QueueReader
) -> None:
    reports: list[Report] = [Noticed(cell=1), Noticed(cell=2)]
    writer(store).post_together(reports)
    assert len(store.queues[QUEUE]) == 1
    found = reader.collect()
    assert [part.message for part in found.parts] == reports
    assert {(part.sender, part.attempt, part.sequence) for part in found.parts} == {(0, 1, 1)}


def test_one_report_alone_is_a_letter_like_any_other(
    store: MemoryStore, reader: QueueReader
) -> None:
    writer(store).post_together([Noticed(cell=1)])
    found = reader.collect()
    assert found.message == Noticed(cell=1)
    assert found.parts == [found]


def test_a_large_message_travels_in_pieces_and_comes_out_whole_and_in_order(
    store: MemoryStore, reader: QueueReader, small_pieces: int
) -> None:
    box = writer(store)
    messages: list[Message] = [Leave(), large(), large(2000), Leave()]
    for message in messages:
        box.post(message)
    sizes = [len(piece) for found in beside(store).values() for piece in found]
    assert max(sizes) <= small_pieces
    assert sum(sizes) > 3000
    assert max(map(len, store.queues[QUEUE])) < 2 * small_pieces + 150
    assert [reader.collect().message for _ in messages] == messages
    assert beside(store) == {}


@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_a_message_that_just_fits_comes_out_whole(
    store: MemoryStore, reader: QueueReader, monkeypatch: pytest.MonkeyPatch, surplus: int
) -> None:
    monkeypatch.setattr(room, "PIECE_BYTES", len(encode(large())) + surplus)
    writer(store).post(large())
    assert bool(beside(store)) == (surplus < 0)
    assert reader.collect().message == large()


def test_a_queue_is_full_while_a_large_message_lies_in_it(
    store: MemoryStore, reader: QueueReader, small_pieces: int
) -> None:
    del small_pieces
    box = writer(store)
    box.post(large())
    assert box.is_full()
    reader.collect()
    assert not box.is_full()


@pytest.mark.parametrize("change", ["changed", "gone", "swapped", "another's"])
def test_pieces_that_are_not_those_that_were_signed_for_are_refused(
    store: MemoryStore, reader: QueueReader, small_pieces: int, change: str
) -> None:
    del small_pieces
    box = writer(store)
    box.post(large())
    [pieces] = [store.queues[key] for key in beside(store)]
    match change:
        case "changed":
            pieces[3] = b"y" + pieces[3][1:]
        case "gone":
            pieces.pop()
        case "swapped":
            pieces[0], pieces[1] = pieces[1], pieces[0]
        case _:
            pieces.clear()
            pieces.extend(encode(Leave()) for _ in range(50))
    box.post(Leave())
    assert reader.collect().message == Leave()
    assert reader.refused == 1
    assert not box.is_full()


def test_a_message_that_could_not_be_sent_to_its_end_fills_no_queue(
    store: MemoryStore, reader: QueueReader, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    del small_pieces
    box = writer(store)
    with monkeypatch.context() as patch:
        patch.setattr(room, "InPieces", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            box.post(large())
    assert beside(store) == {}
    assert not box.is_full()
    box.post(large())
    assert reader.collect().message == large()


def test_a_large_message_that_comes_twice_fills_no_queue(
    store: MemoryStore, reader: QueueReader, small_pieces: int
) -> None:
    del small_pieces
    box = writer(store)
    box.post(large())
    letter_of_it = store.queues[QUEUE][0]
    reader.collect()
    store.queue_push(next(key for key in store.queues if "/pieces/" in key), b"again")
    store.queue_push(QUEUE, letter_of_it)
    box.post(Leave())
    assert reader.collect().message == Leave()
    assert reader.refused == 1
    assert not box.is_full()


def test_what_a_sender_left_unfinished_is_swept_away(
    store: MemoryStore, reader: QueueReader, small_pieces: int
) -> None:
    del small_pieces
    box = writer(store, sender=2)
    box.post(Leave())
    reader.collect()
    box.post(large())
    store.queues[QUEUE].clear()  # it died before the letter itself was in
    assert beside(store)
    reader.sweep(store, 2, 1)
    assert beside(store) == {}
    reader.sweep(store, 7, 1)  # never heard of


def test_what_nobody_will_read_is_swept_away(store: MemoryStore, small_pieces: int) -> None:
    del small_pieces
    box = writer(store)
    box.post(large())
    box.post(large(2000))
    box.sweep()
    assert beside(store) == {}


def test_a_connection_that_is_lost_is_made_anew_and_nothing_is_lost_or_comes_twice(
    store: MemoryStore, reader: QueueReader, small_pieces: int
) -> None:
    del small_pieces

    class LostStore(MemoryStore):
        pushed = 0

        def queue_push(self, key: str, value: bytes) -> None:
            self.pushed += 1
            if self.pushed > 3:
                raise RuntimeError("Broken pipe")
            store.queue_push(key, value)

        def queue_len(self, key: str) -> int:
            return store.queue_len(key)

        def clone(self) -> MemoryStore:
            return store

    box = QueueWriter(LostStore(), QUEUE, secret=SECRET, sender=0, attempt=1)
    for message in (Leave(), large(), Leave()):
        box.post(message)
    assert [reader.collect().message for _ in range(3)] == [Leave(), large(), Leave()]
    assert reader.refused == 0
    assert beside(store) == {}


# ---- the fuzz

EACH = 2_000


def forgeries(chance: random.Random) -> Iterator[bytes]:
    """Random bytes, and real messages with random signatures."""
    for number in range(EACH):
        body = sealed(1000 + number)[32:]
        yield chance.choice([b"", body]) + chance.randbytes(chance.randrange(200))
        yield chance.randbytes(32) + body
        yield hashlib.sha256(body).digest() + body


def mutations(chance: random.Random) -> Iterator[bytes]:
    """Letters that were never sent, cut, with bits flipped, or with another header."""
    for number in range(EACH):
        data = sealed(1000 + number)
        yield data[: chance.randrange(len(data))]
        flipped = bytearray(data)
        for bit in chance.sample(range(len(data) * 8), chance.randrange(1, 5)):
            flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
        yield data[:32] + struct.pack("!iIQ", number, 1, 1) + data[48:]


def strangers(chance: random.Random) -> Iterator[bytes]:
    """Letters in good order, for another queue or with another secret."""
    for number in range(EACH):
        yield sealed(1000 + number, queue=chance.choice(["", "u", "up\0", "up2", "a1/command/0"]))
        yield sealed(1000 + number, secret=chance.choice([b"", b"s" * 31, b"s" * 33, b"t" * 32]))


def test_of_thousands_of_bad_letters_none_is_returned_and_a_good_one_still_comes(
    store: MemoryStore, reader: QueueReader, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(20)
    good = [sealed(number) for number in range(1, 101)]
    bad = [*forgeries(chance), *mutations(chance), *strangers(chance)]
    bad += [chance.choice(good) for _ in range(EACH)]  # replayed: all of them came before
    chance.shuffle(bad)
    assert len(bad) >= 10_000
    for data in [*good, *bad, seal(letter(101), queue=QUEUE, secret=SECRET)]:
        store.queue_push(QUEUE, data)

    with caplog.at_level(logging.DEBUG):
        found = [reader.collect() for _ in range(101)]

    assert found == [letter(number) for number in range(1, 102)]
    assert reader.refused == len(bad)
    assert store.queue_len(QUEUE) == 0
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"


def test_the_first_refusal_is_logged_with_its_reason(
    store: MemoryStore, reader: QueueReader, caplog: pytest.LogCaptureFixture
) -> None:
    store.queue_push(QUEUE, b"forged")
    store.queue_push(QUEUE, b"forged again")
    writer(store).post(Output(start=0, end=1, text="x"))
    reader.collect()
    assert caplog.messages == [
        "refused a message: a message in queue 'up' has no valid signature",
    ]
