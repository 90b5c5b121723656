"""The outbox: what sources hold goes before each report, in order, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from processes import in_child, wait_until
from stops import stopped_everywhere
from syrupy.assertion import SnapshotAssertion

from nbddp.wire import messages as msg
from nbddp.wire.request_messages import Answer
from nbddp.worker.output import outbox as room
from nbddp.worker.output.outbox import Outbox


class FakeWriter:
    """Keeps what is posted; its backlog, and its error for a picture, are what a test says."""

    def __init__(self) -> None:
        self.posted: list[msg.MessageFromRank] = []
        self.letters: list[list[msg.MessageFromRank]] = []
        self.waiting = 0
        self.asked = 0
        self.unread = 0
        self.error: Exception | None = None

    def put(self, message: msg.MessageFromRank) -> None:
        msg.encode(message)
        if self.error and isinstance(message, msg.Display) and "image/png" in message.data:
            raise self.error
        self.posted.append(message)

    def put_batch(self, reports: Sequence[msg.MessageFromRank]) -> None:
        for each in reports:
            msg.encode(each)
        self.letters.append(list(reports))
        self.posted += reports

    def is_full(self) -> bool:
        self.asked += 1
        return self.waiting > 0

    def is_read(self) -> bool:
        self.unread -= 1
        return self.unread < 0


class Pile:
    """A source that holds what a test puts on it."""

    def __init__(self, *pieces: msg.MessageFromRank) -> None:
        self.pieces = deque(pieces)
        self.taken = 0
        self.looks = 0

    def position(self) -> int:
        self.looks += 1
        return self.taken + len(self.pieces)

    def read(self, upto: int | None = None) -> msg.MessageFromRank | None:
        if not self.pieces or (upto is not None and self.taken >= upto):
            return None
        self.taken += 1
        return self.pieces.popleft()


class Flood(Pile):
    """A source that always has more."""

    def read(self, upto: int | None = None) -> msg.MessageFromRank | None:  # noqa: ARG002 - a source's
        return wrote("more")


class BrokenPile(Pile):
    """A source that cannot be read."""

    def read(self, upto: int | None = None) -> msg.MessageFromRank | None:  # noqa: ARG002 - a source's
        raise OSError("Input/output error")


class Mail:
    """Outboxes whose two writers keep what is posted."""

    def __init__(self) -> None:
        self.writer, self.urgent = FakeWriter(), FakeWriter()
        self.begun: list[Outbox] = []

    @property
    def posted(self) -> list[msg.MessageFromRank]:
        return self.writer.posted

    def make(self, *sources: Pile, **options: Any) -> Outbox:
        outbox = Outbox(self.writer, self.urgent, **options)  # type: ignore[arg-type]
        outbox._sources = sources
        return outbox

    def start(self, *sources: Pile) -> Outbox:
        outbox = self.make(*sources)
        self.begun.append(outbox)
        outbox.start(*sources)
        return outbox


@pytest.fixture
def mail() -> Iterator[Mail]:
    """The threads of its outboxes end with the test."""
    made = Mail()
    yield made
    made.writer.waiting = 0
    for outbox in made.begun:
        outbox.close()


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first batch, none goes by the clock."""
    monkeypatch.setattr(room, "BATCH_PERIOD", 1e9)
    monkeypatch.setattr(room, "CATCH_UP", 0.0)


def wrote(text: str) -> msg.Output:
    return msg.Output(start=0, end=0, text=text)


def report(number: int) -> msg.CellEnded:
    return msg.CellEnded(cell=number, seconds=0.0, in_group=True)


def picture(size: int) -> msg.Display:
    return msg.Display(cell=1, data={"image/png": "x" * size}, metadata={})


def happened(kind: str) -> msg.EventReported:
    return msg.EventReported(kind=kind)


NUMBERS, BARS = msg.Metrics(rows=[[0.0, 1, {"loss": 0.5}]]), msg.Progress(bars=[["", 1, 2, 0.1]])


@pytest.mark.parametrize(
    ("sources", "letters"),
    [
        ([[wrote("a"), wrote("b")]], [[wrote("a")], [wrote("b")]]),
        ([[wrote("a")], [], [NUMBERS, BARS]], [[wrote("a"), NUMBERS, BARS]]),
        (
            [[wrote("a"), wrote("b")], [happened("c"), happened("d")]],
            [[wrote("a")], [wrote("b"), happened("c")], [happened("d")]],
        ),
    ],
    ids=["one source", "one letter", "one of each kind in a letter"],
)
def test_what_the_sources_hold_goes_before_the_report_that_followed_it(
    mail: Mail, sources: list[list[msg.MessageFromRank]], letters: list[list[msg.MessageFromRank]]
) -> None:
    outbox = mail.make(*(Pile(*pieces) for pieces in sources))
    outbox.post(report(1))
    outbox.start(*outbox._sources)
    outbox.close()
    assert mail.writer.letters == letters
    assert mail.writer.asked == len(letters) - 1  # for room, before each letter but the first
    assert mail.posted == [*(each for letter in letters for each in letter), report(1)]


def test_what_a_source_got_after_a_report_comes_after_it(mail: Mail) -> None:
    pile = Pile(wrote("before"))
    outbox = mail.make(pile)
    outbox.post(picture(1))
    pile.pieces.extend([wrote("between"), wrote("and more")])
    outbox.post(report(1))
    pile.pieces.append(wrote("after"))
    outbox.start(*outbox._sources)
    outbox.close()
    assert mail.posted == [
        wrote("before"),
        picture(1),
        wrote("between"),
        wrote("and more"),
        report(1),
        wrote("after"),
    ]


def test_what_is_written_while_the_mail_is_busy_does_not_overtake_a_report(mail: Mail) -> None:
    class Busy(Pile):
        def read(self, upto: int | None = None) -> msg.MessageFromRank | None:
            piece = super().read(upto)
            if piece == wrote("first"):
                outbox.post(picture(1))
                self.pieces.append(wrote("after"))
            return piece

    pile = Busy(wrote("first"))
    outbox = mail.make(pile)
    outbox.start(pile)
    assert wait_until(lambda: len(mail.posted) == 3)
    outbox.close()
    assert mail.posted == [wrote("first"), picture(1), wrote("after")]


def test_order_is_kept_while_everything_comes_at_once(mail: Mail) -> None:
    log, numbers = Pile(), Pile()
    outbox = mail.start(log, numbers)
    for number in range(200):
        log.pieces.append(wrote(f"{number}"))
        numbers.pieces.append(happened(f"{number}"))
        outbox.notify()
        outbox.post(report(number))
    outbox.close()
    place = {each: at for at, each in enumerate(map(repr, mail.posted))}
    assert len(place) == 600
    outputs = [place[repr(wrote(f"{number}"))] for number in range(200)]
    events = [place[repr(happened(f"{number}"))] for number in range(200)]
    reports = [place[repr(report(number))] for number in range(200)]
    for places in (outputs, events, reports):
        assert all(one < other for one, other in pairwise(places))
    for places in (outputs, events):
        assert all(one < other for one, other in zip(places, reports, strict=True))


def test_a_poke_is_enough_for_a_source_to_be_mailed(
    mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "POLL_INTERVAL", 1000.0)
    pile = Pile()
    outbox = mail.start(pile)
    for count in range(1, 4):
        pile.pieces.append(wrote(f"{count}"))
        outbox.notify()
        assert wait_until(lambda count=count: len(mail.posted) == count)


def test_what_a_source_got_without_a_poke_is_found_soon_in_a_cell_and_later_between_cells(
    mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "IDLE_POLL_INTERVAL", 1000.0)
    pile = Pile()
    outbox = mail.start(pile)
    for cell in (1, 2):
        outbox.begin_cell()
        pile.pieces.append(wrote("from C"))
        assert wait_until(lambda: mail.posted[-1:] == [wrote("from C")])
        outbox.post(report(cell))
        assert wait_until(lambda cell=cell: mail.posted[-1:] == [report(cell)])
    looks = pile.looks
    assert not wait_until(lambda: pile.looks > looks + 1, timeout=4 * room.POLL_INTERVAL)


@pytest.mark.usefixtures("seldom")
def test_a_report_does_not_wait_for_the_next_batch(mail: Mail) -> None:
    pile = Pile()
    outbox = mail.start(pile)
    for number in range(3):
        pile.pieces.append(wrote(f"{number}"))
        outbox.post(report(number))
        assert wait_until(lambda number=number: mail.posted[-1:] == [report(number)])


@pytest.mark.usefixtures("seldom")
def test_neither_pokes_nor_news_make_a_batch_of_what_may_wait(mail: Mail) -> None:
    pile = Pile(wrote("first"))
    outbox = mail.start(pile)
    assert wait_until(lambda: mail.posted == [wrote("first")])
    pile.pieces.append(wrote("second"))
    outbox.notify()
    outbox.post(msg.InterruptAcknowledged(cell=1))
    assert wait_until(lambda: mail.urgent.posted == [msg.InterruptAcknowledged(cell=1)])
    assert not wait_until(lambda: len(mail.posted) == 2, timeout=0.1)
    outbox.close()
    assert mail.posted == [wrote("first"), wrote("second")]


def test_while_nobody_reads_the_rest_of_a_source_waits(mail: Mail) -> None:
    mail.writer.waiting = 1
    outbox = mail.make(Pile(wrote("a"), wrote("b"), wrote("c")))
    outbox.post(report(1))
    outbox.start(*outbox._sources)
    assert wait_until(lambda: mail.writer.asked > 3)
    assert mail.posted == [wrote("a")]
    mail.writer.waiting = 0
    outbox.close()
    assert mail.posted == [wrote("a"), wrote("b"), wrote("c"), report(1)]


def test_a_flush_waits_until_everything_was_mailed_and_read(mail: Mail) -> None:
    pile = Pile()
    outbox = mail.start(pile)
    for number in range(50):
        pile.pieces.append(wrote(str(number)))
        outbox.post(report(number))
        outbox.flush()
        assert len(mail.posted) == 2 * (number + 1)
    mail.writer.unread = 3
    outbox.flush()
    assert mail.writer.unread < 0


def test_a_flush_of_mail_that_is_stuck_gives_up_and_leaves_the_thread_at_rest(
    mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FLUSH_TIMEOUT", 0.1)
    mail.writer.waiting = 1
    pile = Pile(*(wrote(str(number)) for number in range(3)))
    mail.start(pile).flush()
    mail.writer.waiting = 0
    assert wait_until(lambda: len(mail.posted) == 3)
    before = pile.looks
    assert not wait_until(lambda: pile.looks > before + 20, timeout=0.3)


# ---- what cannot be sent


def test_what_cannot_be_sent_is_said_and_the_mail_goes_on(
    mail: Mail, snapshot: SnapshotAssertion
) -> None:
    failure = {"name": "ValueError", "text": "no", "traceback": object()}
    outbox = mail.make(
        Pile(wrote("a")), Pile(msg.EventReported(kind="mine", facts={"it": object()}))
    )
    outbox.post(replace(report(1), result={"data": object()}, payload={"key": "k"}))
    outbox.post(replace(report(2), failure=failure))
    outbox.post(Answer(request=3, content={"matches": [object()]}))
    outbox.start(*outbox._sources)
    outbox.close()
    [answer] = mail.urgent.posted
    said = [each.data["text/plain"] for each in mail.posted if isinstance(each, msg.Display)]
    first, bare, failed = (each for each in mail.posted if not isinstance(each, msg.Display))
    assert (first, bare) == (wrote("a"), replace(report(1), payload={"key": "k"}))
    assert (failed.cell, failed.failure["name"], answer.request) == (2, "ValueError", 3)
    assert [*said, failed.failure["text"], answer.error] == snapshot


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("too deep"), RuntimeError("Broken pipe"), KeyError(1)]
)
def test_no_error_of_one_message_ends_the_mail(mail: Mail, error: Exception) -> None:
    mail.writer.error = error
    outbox = mail.start(Pile(wrote("a")))
    outbox.post(picture(5))
    outbox.post(report(1))
    outbox.close()
    before, said, after = mail.posted
    assert (before, after) == (wrote("a"), report(1))
    assert "Display" in said.data["text/plain"]
    assert said.data["text/plain"].endswith(f": {error}")


def test_a_source_that_cannot_be_read_is_said_once_and_the_others_go_on(mail: Mail) -> None:
    pile = Pile()
    outbox = mail.start(BrokenPile(), pile)
    for number in range(3):
        pile.pieces.append(wrote(str(number)))
        outbox.post(report(number))
        outbox.flush()
    said, *others = mail.posted
    assert "OSError('Input/output error')" in said.data["text/plain"]
    assert others == [it for number in range(3) for it in (wrote(str(number)), report(number))]


# ---- what does not wait

NEWS = [
    msg.InterruptAcknowledged(cell=1),
    Answer(request=1),
    msg.Ready(pid=1, device="cpu", backend="gloo", host="h"),
    msg.StartFailed(reason="r", traceback="t"),
]


def test_news_go_a_way_of_their_own_while_output_floods_and_nobody_reads_it(mail: Mail) -> None:
    mail.writer.waiting = 1
    outbox = mail.start(Flood())
    assert wait_until(lambda: mail.writer.asked > 3)
    for count, news in enumerate(NEWS, 1):
        outbox.post(news)
        assert wait_until(lambda count=count: mail.urgent.posted == NEWS[:count])
    assert mail.posted == [wrote("more")]


def test_a_source_that_never_ends_does_not_hold_up_the_end_of_a_cell(mail: Mail) -> None:
    mail.start(Flood()).post(report(1))
    assert wait_until(lambda: report(1) in mail.posted)


def test_all_ranks_mail_on_one_beat_many_of_them_less_often_and_a_first_line_waits_for_none(
    mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many, crowd = (mail.make(ranks=ranks) for ranks in (1, room.RANKS_AT_FULL_RATE, 64))
    assert few._period == many._period == room.BATCH_PERIOD
    assert crowd._period == pytest.approx(64 / room.RANKS_AT_FULL_RATE * room.BATCH_PERIOD)
    assert crowd._next_due(0.0, 1) == crowd._next_due(0.0, 100)
    now = 1000.013
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    one, other = mail.make(ranks=4), mail.make(ranks=4)
    for mailed, period in ((1, 0.4 * room.BATCH_PERIOD), (room.SMALL_BATCH + 1, room.BATCH_PERIOD)):
        due = one._next_due(0.0, mailed)
        assert due <= now
        while due <= now:  # which is soon
            due = one._next_due(due, mailed)
        assert due <= now + period
    later = now + 0.017  # the other one began then
    for _ in range(100):
        now += 0.01
        due = one._next_due(due, 100) if now >= due else due
        later = other._next_due(later, 100) if now >= later else later
    assert due == pytest.approx(later, abs=1e-6)
    assert now < due <= now + room.BATCH_PERIOD


# ---- pictures


def test_who_displays_waits_while_too_many_pictures_wait(
    mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MAX_QUEUED_CHARACTERS", 100)
    mail.writer.waiting = 1
    outbox = mail.start()
    shown: list[int] = []

    def display() -> None:
        for number in range(10):
            outbox.post(picture(50))
            shown.append(number)

    thread = threading.Thread(target=display)
    thread.start()
    assert not wait_until(lambda: len(shown) > 4, timeout=0.3)
    mail.writer.waiting = 0
    thread.join(30)
    outbox.close()
    assert len(mail.posted) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_prints_and_displays_though_the_mail_was_busy_when_it_was_forked(
    mail: Mail,
) -> None:
    outbox = mail.start(Pile())

    def act() -> None:
        outbox.notify()
        outbox.post(picture(room.MAX_QUEUED_CHARACTERS + 1))
        outbox.post(picture(1))
        outbox.flush()

    taken, done = threading.Event(), threading.Event()

    def hold() -> None:  # as the mail's thread does for a moment
        with outbox._wake:
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(10)
    exit_code = in_child(act)
    done.set()
    holder.join()
    assert exit_code == 0
    assert not mail.posted


@pytest.mark.parametrize("way", ["poke", "post", "flush"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_anywhere_in_what_a_cell_does_leaves_the_mail_at_work(mail: Mail, way: str) -> None:
    """A stop that strikes within a lock's own code would leave it taken, and the mail waiting."""
    pile = Pile()
    outbox = mail.start(pile)

    def act() -> None:
        pile.pieces.append(msg.Output(start=0, end=1, text="a"))
        if way == "post":
            outbox.post(msg.EventReported(kind="a", facts={}))
        else:
            outbox.notify()
        if way == "flush":
            outbox.flush()

    places = 0
    for places in stopped_everywhere(act):
        outbox._has_output = False  # else it is poked once alone
        mail.posted.clear()
        outbox.post(msg.EventReported(kind="after", facts={"place": places}))
        assert wait_until(lambda: any(isinstance(each, msg.EventReported) for each in mail.posted))
    assert places > 5
