"""The outbox: what sources hold goes before each report, in order, and nothing is left behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from processes import wait_until

from nbddp.wire.messages import Display, Happened, Noticed, Output, Report, encode
from nbddp.worker import outbox as room
from nbddp.worker.outbox import Outbox


class FakePostbox:
    """Keeps what is posted; its backlog is whatever a test says."""

    def __init__(self) -> None:
        self.posted: list[Report] = []
        self.waiting = 0
        self.asked = 0

    def post(self, message: Report) -> None:
        self.posted.append(message)

    def backlog(self) -> int:
        self.asked += 1
        return self.waiting


class Pile:
    """A source that holds what a test puts on it."""

    def __init__(self, *pieces: Report) -> None:
        self.pieces = deque(pieces)

    def read(self) -> Report | None:
        return self.pieces.popleft() if self.pieces else None


Make = Callable[..., Outbox]


@pytest.fixture
def postbox() -> FakePostbox:
    return FakePostbox()


@pytest.fixture
def make(postbox: FakePostbox) -> Iterator[Make]:
    """Makes outboxes on the postbox; their threads end with the test."""
    made: list[Outbox] = []

    def build(*sources: Pile) -> Outbox:
        made.append(Outbox(postbox, *sources))  # type: ignore[arg-type]
        return made[-1]

    yield build
    postbox.waiting = 0
    for outbox in made:
        if outbox._thread.ident is not None:
            outbox.close()
    assert not any(each.name == "nbddp-outbox" for each in threading.enumerate())


def wrote(text: str) -> Output:
    return Output(start=0, end=0, text=text)


def report(number: int) -> Noticed:
    return Noticed(cell=number)


def happened(kind: str) -> Happened:
    return Happened(kind=kind)


def test_what_a_source_holds_goes_before_the_report_that_followed_it(
    make: Make, postbox: FakePostbox
) -> None:
    outbox = make(Pile(wrote("a"), wrote("b")))
    outbox.post(report(1))
    outbox.start()
    outbox.close()
    assert postbox.posted == [wrote("a"), wrote("b"), report(1)]


def test_sources_are_emptied_one_after_the_other(make: Make, postbox: FakePostbox) -> None:
    outbox = make(Pile(wrote("a"), wrote("b")), Pile(), Pile(happened("c"), happened("d")))
    outbox.post(report(1))
    outbox.start()
    outbox.close()
    assert postbox.posted == [wrote("a"), wrote("b"), happened("c"), happened("d"), report(1)]


def test_reports_keep_their_order(make: Make, postbox: FakePostbox) -> None:
    outbox = make(Pile())
    outbox.start()
    for number in range(100):
        outbox.post(report(number))
    outbox.close()
    assert postbox.posted == [report(number) for number in range(100)]


def test_order_is_kept_while_everything_comes_at_once(make: Make, postbox: FakePostbox) -> None:
    log, numbers = Pile(), Pile()
    outbox = make(log, numbers)
    outbox.start()
    for number in range(200):
        log.pieces.append(wrote(f"{number}"))
        numbers.pieces.append(happened(f"{number}"))
        outbox.poke()
        outbox.post(report(number))
    outbox.close()
    place = {each: at for at, each in enumerate(map(repr, postbox.posted))}
    assert len(place) == 600
    for number in range(200):
        at = place[repr(report(number))]
        assert place[repr(wrote(f"{number}"))] < at
        assert place[repr(happened(f"{number}"))] < at
    for make_one in (wrote, happened):
        places = [place[repr(make_one(f"{number}"))] for number in range(200)]
        assert all(one < other for one, other in pairwise(places))


def test_a_poke_is_enough_for_a_source_to_be_mailed(
    make: Make, postbox: FakePostbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "POLL", 1000.0)
    pile = Pile()
    outbox = make(pile)
    outbox.start()
    for count in range(1, 4):
        pile.pieces.append(wrote(f"{count}"))
        outbox.poke()
        assert wait_until(lambda count=count: len(postbox.posted) == count)


def test_what_a_source_got_without_a_poke_is_found_soon(make: Make, postbox: FakePostbox) -> None:
    pile = Pile()
    make(pile).start()
    pile.pieces.append(wrote("from C"))
    assert wait_until(lambda: postbox.posted == [wrote("from C")])


def test_a_report_does_not_wait_for_the_next_batch(
    make: Make, postbox: FakePostbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PERIOD", 1000.0)
    pile = Pile()
    outbox = make(pile)
    outbox.start()
    for number in range(3):
        pile.pieces.append(wrote(f"{number}"))
        outbox.post(report(number))
        assert wait_until(lambda number=number: postbox.posted[-1:] == [report(number)])
    assert [each for each in postbox.posted if isinstance(each, Output)] == [
        wrote(f"{number}") for number in range(3)
    ]


def test_pokes_in_quick_succession_are_one_batch(
    make: Make, postbox: FakePostbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PERIOD", 1000.0)
    monkeypatch.setattr(room, "SLACK", 0.0)
    pile = Pile()
    outbox = make(pile)
    outbox.start()
    pile.pieces.append(wrote("first"))
    outbox.poke()
    assert wait_until(lambda: len(postbox.posted) == 1)
    pile.pieces.append(wrote("second"))
    outbox.poke()
    assert not wait_until(lambda: len(postbox.posted) == 2, timeout=0.1)
    outbox.close()
    assert postbox.posted == [wrote("first"), wrote("second")]


def test_closing_mails_what_is_left_and_ends_the_thread(make: Make, postbox: FakePostbox) -> None:
    pile = Pile()
    outbox = make(pile)
    outbox.start()
    pile.pieces.extend([wrote("a"), wrote("b")])
    outbox.post(report(1))
    outbox.close()
    assert postbox.posted == [wrote("a"), wrote("b"), report(1)]
    assert not outbox._thread.is_alive()


def test_while_nobody_reads_the_rest_of_a_source_waits(make: Make, postbox: FakePostbox) -> None:
    postbox.waiting = room.MAX_BACKLOG + 1
    outbox = make(Pile(wrote("a"), wrote("b"), wrote("c")))
    outbox.post(report(1))
    outbox.start()
    assert wait_until(lambda: postbox.asked > 3)
    assert postbox.posted == [wrote("a")]
    postbox.waiting = room.MAX_BACKLOG
    outbox.close()
    assert postbox.posted == [wrote("a"), wrote("b"), wrote("c"), report(1)]


def test_a_single_piece_never_asks_for_the_backlog(make: Make, postbox: FakePostbox) -> None:
    postbox.waiting = room.MAX_BACKLOG + 1
    outbox = make(Pile(wrote("a")))
    outbox.post(report(1))
    outbox.start()
    outbox.close()
    assert postbox.posted == [wrote("a"), report(1)]
    assert postbox.asked == 0


def test_a_flush_waits_until_everything_was_mailed(make: Make, postbox: FakePostbox) -> None:
    pile = Pile()
    outbox = make(pile)
    outbox.start()
    for number in range(50):
        pile.pieces.append(wrote(str(number)))
        outbox.post(report(number))
        outbox.flush()
        assert len(postbox.posted) == 2 * (number + 1)


def test_a_flush_of_mail_that_is_stuck_gives_up_and_leaves_the_thread_at_rest(
    make: Make, postbox: FakePostbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FLUSH_PATIENCE", 0.1)
    postbox.waiting = room.MAX_BACKLOG + 1
    outbox = make(Pile(*(wrote(str(number)) for number in range(3))))
    outbox.start()
    outbox.flush()
    postbox.waiting = 0
    assert wait_until(lambda: len(postbox.posted) == 3)
    before = outbox._rounds
    assert not wait_until(lambda: outbox._rounds > before + 20, timeout=0.3)


def test_what_cannot_be_sent_is_said_and_the_mail_goes_on(
    make: Make, postbox: FakePostbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(message: Report) -> None:
        encode(message)
        postbox.posted.append(message)

    monkeypatch.setattr(postbox, "post", post)
    outbox = make()
    outbox.start()
    outbox.post(Happened(kind="mine", facts={"path": object()}))
    outbox.post(report(7))
    assert wait_until(lambda: len(postbox.posted) == 2)
    said, after = postbox.posted
    assert isinstance(said, Display)
    assert said.data["text/plain"].startswith("nbddp: a Happened could not be sent: Object of type")
    assert after == report(7)
