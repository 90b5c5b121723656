"""The mailer: what sources hold goes before each report, in order, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from processes import in_child, wait_until
from stops import stopped_everywhere

from nbddp.wire.messages import (
    Answer,
    CellEnded,
    Display,
    Happened,
    Metrics,
    Noticed,
    Output,
    Progress,
    Ready,
    Report,
    StartFailed,
    encode,
)
from nbddp.worker import mailing as room
from nbddp.worker.mailing import Mailer


class FakeWriter:
    """Keeps what is posted; its backlog is whatever a test says."""

    def __init__(self) -> None:
        self.posted: list[Report] = []
        self.letters: list[list[Report]] = []
        self.waiting = 0
        self.asked = 0
        self.unread = 0

    def post(self, message: Report) -> None:
        self.posted.append(message)

    def post_together(self, reports: Sequence[Report]) -> None:
        self.letters.append(list(reports))
        for each in reports:
            self.post(each)

    def is_full(self) -> bool:
        self.asked += 1
        return self.waiting > 0

    def is_read(self) -> bool:
        self.unread -= 1
        return self.unread < 0


class Pile:
    """A source that holds what a test puts on it."""

    def __init__(self, *pieces: Report) -> None:
        self.pieces = deque(pieces)
        self.taken = 0

    def mark(self) -> int:
        return self.taken + len(self.pieces)

    def read(self, upto: int | None = None) -> Report | None:
        if not self.pieces or (upto is not None and self.taken >= upto):
            return None
        self.taken += 1
        return self.pieces.popleft()


class BrokenPile:
    """A source that cannot be read."""

    def mark(self) -> int:
        return 0

    def read(self, upto: int | None = None) -> Report | None:  # noqa: ARG002 - a source's
        raise OSError("Input/output error")


Make = Callable[..., Mailer]


@pytest.fixture
def writer() -> FakeWriter:
    return FakeWriter()


@pytest.fixture
def urgent() -> FakeWriter:
    return FakeWriter()


@pytest.fixture
def make(writer: FakeWriter, urgent: FakeWriter) -> Iterator[Make]:
    """Makes mailers on the writer; their threads end with the test."""
    made: list[Mailer] = []

    def build(*sources: Pile) -> Mailer:
        made.append(Mailer(writer, urgent, *sources))  # type: ignore[arg-type]
        return made[-1]

    yield build
    writer.waiting = 0
    for mailer in made:
        if mailer._thread.ident is not None:
            mailer.close()
    assert not any(each.name == "nbddp-mailer" for each in threading.enumerate())


def wrote(text: str) -> Output:
    return Output(start=0, end=0, text=text)


def report(number: int) -> CellEnded:
    return CellEnded(cell=number, seconds=0.0, in_group=True)


def picture(size: int) -> Display:
    return Display(cell=1, data={"image/png": "x" * size}, metadata={})


def happened(kind: str) -> Happened:
    return Happened(kind=kind)


def test_what_a_source_holds_goes_before_the_report_that_followed_it(
    make: Make, writer: FakeWriter
) -> None:
    mailer = make(Pile(wrote("a"), wrote("b")))
    mailer.post(report(1))
    mailer.start()
    mailer.close()
    assert writer.posted == [wrote("a"), wrote("b"), report(1)]


def test_what_a_source_got_after_a_report_comes_after_it(make: Make, writer: FakeWriter) -> None:
    pile = Pile(wrote("before"))
    mailer = make(pile)
    mailer.post(picture(1))
    pile.pieces.extend([wrote("between"), wrote("and more")])
    mailer.post(report(1))
    pile.pieces.append(wrote("after"))
    mailer.start()
    mailer.close()
    assert writer.posted == [
        wrote("before"),
        picture(1),
        wrote("between"),
        wrote("and more"),
        report(1),
        wrote("after"),
    ]


def test_what_is_written_while_the_mail_is_busy_does_not_overtake_a_report(
    make: Make, writer: FakeWriter
) -> None:
    pile = Pile(wrote("first"))
    mailer = make(pile)

    def post(message: Report) -> None:
        writer.posted.append(message)
        if message == wrote("first"):
            mailer.post(picture(1))
            pile.pieces.append(wrote("after"))

    writer.post = post  # type: ignore[method-assign]
    mailer.start()
    assert wait_until(lambda: len(writer.posted) == 3)
    assert writer.posted == [wrote("first"), picture(1), wrote("after")]


def test_sources_are_emptied_one_after_the_other(make: Make, writer: FakeWriter) -> None:
    mailer = make(Pile(wrote("a"), wrote("b")), Pile(), Pile(happened("c"), happened("d")))
    mailer.post(report(1))
    mailer.start()
    mailer.close()
    assert writer.posted == [wrote("a"), wrote("b"), happened("c"), happened("d"), report(1)]


def test_what_all_sources_hold_at_one_moment_is_one_letter(make: Make, writer: FakeWriter) -> None:
    numbers, bars = Metrics(rows=[[0.0, 1, {"loss": 0.5}]]), Progress(bars=[["", 1, 2, 0.1]])
    mailer = make(Pile(wrote("a")), Pile(numbers, bars))
    mailer.post(report(1))
    mailer.start()
    mailer.close()
    assert writer.letters == [[wrote("a"), numbers, bars]]
    assert writer.posted[-1] == report(1)


def test_a_letter_has_no_more_than_one_piece_of_each_kind(make: Make, writer: FakeWriter) -> None:
    mailer = make(Pile(wrote("a"), wrote("b")), Pile(happened("c"), happened("d")))
    mailer.start()
    mailer.close()
    assert writer.letters == [[wrote("a")], [wrote("b"), happened("c")], [happened("d")]]


def test_of_a_letter_that_cannot_be_sent_the_rest_is_sent_and_nothing_twice(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "post_together", lambda reports: [*map(encode, reports)] and 1 / 0)
    have_it_encode(writer, monkeypatch)
    mailer = make(Pile(wrote("a")), Pile(Happened(kind="mine", facts={"it": object()})))
    mailer.start()
    mailer.close()
    first, said = writer.posted
    assert first == wrote("a")
    assert said.data["text/plain"].startswith("nbddp: a Happened could not be sent: Object of type")


def test_reports_keep_their_order(make: Make, writer: FakeWriter) -> None:
    mailer = make(Pile())
    mailer.start()
    for number in range(100):
        mailer.post(report(number))
    mailer.close()
    assert writer.posted == [report(number) for number in range(100)]


def test_order_is_kept_while_everything_comes_at_once(make: Make, writer: FakeWriter) -> None:
    log, numbers = Pile(), Pile()
    mailer = make(log, numbers)
    mailer.start()
    for number in range(200):
        log.pieces.append(wrote(f"{number}"))
        numbers.pieces.append(happened(f"{number}"))
        mailer.poke()
        mailer.post(report(number))
    mailer.close()
    place = {each: at for at, each in enumerate(map(repr, writer.posted))}
    assert len(place) == 600
    for number in range(200):
        at = place[repr(report(number))]
        assert place[repr(wrote(f"{number}"))] < at
        assert place[repr(happened(f"{number}"))] < at
    for make_one in (wrote, happened):
        places = [place[repr(make_one(f"{number}"))] for number in range(200)]
        assert all(one < other for one, other in pairwise(places))


def test_a_poke_is_enough_for_a_source_to_be_mailed(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "POLL", 1000.0)
    pile = Pile()
    mailer = make(pile)
    mailer.start()
    for count in range(1, 4):
        pile.pieces.append(wrote(f"{count}"))
        mailer.poke()
        assert wait_until(lambda count=count: len(writer.posted) == count)


def test_what_a_source_got_without_a_poke_is_found_soon(make: Make, writer: FakeWriter) -> None:
    pile = Pile()
    make(pile).start()
    pile.pieces.append(wrote("from C"))
    assert wait_until(lambda: writer.posted == [wrote("from C")])


def test_a_report_does_not_wait_for_the_next_batch(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PERIOD", 1e9)
    pile = Pile()
    mailer = make(pile)
    mailer.start()
    for number in range(3):
        pile.pieces.append(wrote(f"{number}"))
        mailer.post(report(number))
        assert wait_until(lambda number=number: writer.posted[-1:] == [report(number)])
    assert [each for each in writer.posted if isinstance(each, Output)] == [
        wrote(f"{number}") for number in range(3)
    ]


def test_pokes_in_quick_succession_are_one_batch(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PERIOD", 1e9)
    monkeypatch.setattr(room, "SLACK", 0.0)
    pile = Pile()
    mailer = make(pile)
    mailer.start()
    pile.pieces.append(wrote("first"))
    mailer.poke()
    assert wait_until(lambda: len(writer.posted) == 1)
    pile.pieces.append(wrote("second"))
    mailer.poke()
    assert not wait_until(lambda: len(writer.posted) == 2, timeout=0.1)
    mailer.close()
    assert writer.posted == [wrote("first"), wrote("second")]


def test_closing_mails_what_is_left_and_ends_the_thread(make: Make, writer: FakeWriter) -> None:
    pile = Pile()
    mailer = make(pile)
    mailer.start()
    pile.pieces.extend([wrote("a"), wrote("b")])
    mailer.post(report(1))
    mailer.close()
    assert writer.posted == [wrote("a"), wrote("b"), report(1)]
    assert not mailer._thread.is_alive()


def test_while_nobody_reads_the_rest_of_a_source_waits(make: Make, writer: FakeWriter) -> None:
    writer.waiting = 1
    mailer = make(Pile(wrote("a"), wrote("b"), wrote("c")))
    mailer.post(report(1))
    mailer.start()
    assert wait_until(lambda: writer.asked > 3)
    assert writer.posted == [wrote("a")]
    writer.waiting = 0
    mailer.close()
    assert writer.posted == [wrote("a"), wrote("b"), wrote("c"), report(1)]


def test_a_single_piece_never_asks_for_room(make: Make, writer: FakeWriter) -> None:
    writer.waiting = 1
    mailer = make(Pile(wrote("a")))
    mailer.post(report(1))
    mailer.start()
    mailer.close()
    assert writer.posted == [wrote("a"), report(1)]
    assert writer.asked == 0


def test_a_flush_waits_until_everything_was_mailed(make: Make, writer: FakeWriter) -> None:
    pile = Pile()
    mailer = make(pile)
    mailer.start()
    for number in range(50):
        pile.pieces.append(wrote(str(number)))
        mailer.post(report(number))
        mailer.flush()
        assert len(writer.posted) == 2 * (number + 1)


def test_a_flush_waits_until_what_was_mailed_is_read(make: Make, writer: FakeWriter) -> None:
    writer.unread = 3
    mailer = make(Pile())
    mailer.start()
    mailer.flush()
    assert writer.unread < 0


def test_a_flush_of_mail_that_is_stuck_gives_up_and_leaves_the_thread_at_rest(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FLUSH_PATIENCE", 0.1)
    writer.waiting = 1
    mailer = make(Pile(*(wrote(str(number)) for number in range(3))))
    mailer.start()
    mailer.flush()
    writer.waiting = 0
    assert wait_until(lambda: len(writer.posted) == 3)
    before = mailer._rounds
    assert not wait_until(lambda: mailer._rounds > before + 20, timeout=0.3)


def have_it_encode(writer: FakeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the real one does, which then refuses what has no form as a message."""

    def post(message: Report) -> None:
        encode(message)
        writer.posted.append(message)

    monkeypatch.setattr(writer, "post", post)


def test_what_cannot_be_sent_is_said_and_the_mail_goes_on(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_it_encode(writer, monkeypatch)
    mailer = make()
    mailer.start()
    mailer.post(Happened(kind="mine", facts={"path": object()}))
    mailer.post(report(7))
    assert wait_until(lambda: len(writer.posted) == 2)
    said, after = writer.posted
    assert isinstance(said, Display)
    assert said.data["text/plain"].startswith("nbddp: a Happened could not be sent: Object of type")
    assert after == report(7)


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("too deep"), RuntimeError("Broken pipe"), KeyError(1)]
)
def test_no_error_of_one_message_ends_the_mail(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def post(message: Report) -> None:
        if isinstance(message, Display) and "image/png" in message.data:
            raise error
        writer.posted.append(message)

    monkeypatch.setattr(writer, "post", post)
    mailer = make(Pile(wrote("a")))
    mailer.start()
    mailer.post(picture(5))
    mailer.post(report(1))
    mailer.close()
    said = f"nbddp: a Display could not be sent: {error}"
    assert writer.posted == [
        wrote("a"),
        Display(cell=0, data={"text/plain": said}, metadata={}),
        report(1),
    ]


def test_the_end_of_a_cell_is_mailed_whatever_its_value_is(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_it_encode(writer, monkeypatch)
    failure = {"name": "ValueError", "text": "no", "traceback": object()}
    mailer = make()
    mailer.start()
    mailer.post(replace(report(1), result={"data": object()}, parcel={"key": "k"}))
    mailer.post(replace(report(2), failure=failure))
    mailer.close()
    first, bare, second, failed = writer.posted
    assert "a CellEnded could not be sent" in first.data["text/plain"]
    assert "a CellEnded could not be sent" in second.data["text/plain"]
    assert bare == replace(report(1), parcel={"key": "k"})
    assert (failed.cell, failed.failure["name"]) == (2, "ValueError")
    assert failed.failure["text"].startswith("it could not be sent: Object of type object")


def test_an_answer_is_mailed_whatever_is_in_it(
    make: Make, urgent: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_it_encode(urgent, monkeypatch)
    mailer = make()
    mailer.start()
    mailer.post(Answer(request=3, payload={"matches": [object()]}))
    mailer.close()
    [answer] = urgent.posted
    assert answer.request == 3
    assert answer.error.startswith("it could not be sent: Object of type object")


def test_a_source_that_cannot_be_read_is_said_once_and_the_others_go_on(
    make: Make, writer: FakeWriter
) -> None:
    pile = Pile()
    mailer = make(BrokenPile(), pile)
    mailer.start()
    for number in range(3):
        pile.pieces.append(wrote(str(number)))
        mailer.post(report(number))
        mailer.flush()
    said, *others = writer.posted
    assert said.data["text/plain"] == (
        "nbddp: what this rank writes cannot be read back to be shown: "
        "OSError('Input/output error')"
    )
    assert others == [it for number in range(3) for it in (wrote(str(number)), report(number))]


# ---- what does not wait


class Flood:
    """A source that always has more."""

    def mark(self) -> int:
        return 0

    def read(self, upto: int | None = None) -> Report | None:  # noqa: ARG002 - a source's
        return wrote("more")


NEWS = [
    Noticed(cell=1),
    Answer(request=1),
    Ready(pid=1, device="cpu", backend="gloo", host="h"),
    StartFailed(reason="r", traceback="t"),
]


@pytest.mark.parametrize("news", NEWS, ids=lambda it: type(it).__name__)
def test_news_go_a_way_of_their_own_while_output_floods_and_nobody_reads_it(
    make: Make, writer: FakeWriter, urgent: FakeWriter, news: Report
) -> None:
    writer.waiting = 1
    mailer = make(Flood())
    mailer.start()
    assert wait_until(lambda: writer.asked > 3)
    mailer.post(news)
    assert wait_until(lambda: urgent.posted == [news])
    assert writer.posted == [wrote("more")]


def test_a_source_that_never_ends_does_not_hold_up_the_end_of_a_cell(
    make: Make, writer: FakeWriter
) -> None:
    mailer = make(Flood())
    mailer.start()
    mailer.post(report(1))
    assert wait_until(lambda: report(1) in writer.posted)


def test_each_of_many_ranks_sends_fewer_batches(writer: FakeWriter, urgent: FakeWriter) -> None:
    few, many, crowd = (Mailer(writer, urgent, ranks=ranks) for ranks in (1, room.CROWD, 64))
    assert few._period == many._period == room.PERIOD
    assert crowd._period == pytest.approx(64 / room.CROWD * room.PERIOD)


def test_all_ranks_mail_on_one_beat_whenever_they_began(
    writer: FakeWriter, urgent: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is, as soon as both have as much to say as they may."""
    now = 1000.013
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    mailers = [Mailer(writer, urgent), Mailer(writer, urgent)]
    due = [0.0, now + 0.017]
    for _ in range(100):
        now += 0.01
        due = [
            mailer._due_after(at) if now >= at else at
            for mailer, at in zip(mailers, due, strict=True)
        ]
    assert due[0] == pytest.approx(due[1], abs=1e-6)
    assert now < due[0] <= now + room.PERIOD


def test_a_line_after_a_pause_waits_for_no_beat(
    writer: FakeWriter, urgent: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailer, now = Mailer(writer, urgent), 1000.013
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    due = mailer._due_after(0.0)
    assert due <= now
    while due <= now:  # which is soon
        due = mailer._due_after(due)
    assert due <= now + room.PERIOD


def test_news_make_no_batch_of_what_may_wait(
    make: Make, writer: FakeWriter, urgent: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PERIOD", 1e9)
    monkeypatch.setattr(room, "SLACK", 0.0)
    pile = Pile(wrote("first"))
    mailer = make(pile)
    mailer.start()
    assert wait_until(lambda: writer.posted == [wrote("first")])
    pile.pieces.append(wrote("second"))
    mailer.poke()
    mailer.post(Noticed(cell=1))
    assert wait_until(lambda: urgent.posted == [Noticed(cell=1)])
    assert writer.posted == [wrote("first")]


# ---- pictures


def test_who_displays_waits_while_too_many_pictures_wait(
    make: Make, writer: FakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MAX_HELD", 100)
    writer.waiting = 1
    mailer = make()
    mailer.start()
    shown: list[int] = []

    def display() -> None:
        for number in range(10):
            mailer.post(picture(50))
            shown.append(number)

    thread = threading.Thread(target=display)
    thread.start()
    assert not wait_until(lambda: len(shown) > 4, timeout=0.3)
    writer.waiting = 0
    thread.join(30)
    mailer.close()
    assert len(writer.posted) == 10
    assert mailer._held == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_prints_and_displays_though_the_mail_was_busy_when_it_was_forked(
    make: Make, writer: FakeWriter
) -> None:
    mailer = make(Pile())
    mailer.start()

    def act() -> None:
        mailer.poke()
        mailer.post(picture(room.MAX_HELD + 1))
        mailer.post(picture(1))
        mailer.flush()

    taken, done = threading.Event(), threading.Event()

    def hold() -> None:  # as the mail's thread does for a moment
        with mailer._wake:
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(10)
    exit_code = in_child(act)
    done.set()
    holder.join()
    assert exit_code == 0
    assert not writer.posted


@pytest.mark.parametrize("way", ["poke", "post", "flush"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_anywhere_in_what_a_cell_does_leaves_the_mail_at_work(
    make: Make, writer: FakeWriter, way: str
) -> None:
    """A stop that strikes within a lock's own code would leave it taken, and the mail waiting."""
    pile = Pile()
    mailer = make(pile)
    mailer.start()

    def act() -> None:
        pile.pieces.append(Output(start=0, end=1, text="a"))
        if way == "post":
            mailer.post(Happened(kind="a", facts={}))
        else:
            mailer.poke()
        if way == "flush":
            mailer.flush()

    places = 0
    for places in stopped_everywhere(act):
        mailer._has_output = False  # else it is poked once alone
        writer.posted.clear()
        mailer.post(Happened(kind="after", facts={"place": places}))
        assert wait_until(lambda: any(isinstance(each, Happened) for each in writer.posted))
        assert not mailer._is_asked
    assert places > 5
