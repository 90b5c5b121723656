"""The outbox: what sources hold goes before each report, in order, and nothing is left behind."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from interrupt_places import interrupted_everywhere
from processes import in_child, wait_until
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import WireError
from nbddp.wire import messages as msg
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.request_messages import Answer
from nbddp.worker.output import outbox as outbox_module
from nbddp.worker.output.outbox import Outbox


class FakeWriter:
    """Records posted messages; a test sets its backlog, and its error for a picture."""

    def __init__(self) -> None:
        self.posted: list[msg.MessageFromRank] = []
        self.batches: list[list[msg.MessageFromRank]] = []
        self.waiting = 0
        self.asked = 0
        self.unread = 0
        self.error: Exception | None = None
        self.is_lost = False  # whether the next batch loses the connection
        self.is_cut_off = False
        self.connection = 0

    def put(self, message: msg.MessageFromRank) -> None:
        msg.encode(message)
        if self.error and isinstance(message, msg.Display) and "image/png" in message.data:
            raise self.error
        self.posted.append(message)

    def put_batch(self, reports: Sequence[msg.MessageFromRank], connection: int) -> bool:
        if connection != self.connection:
            return False
        if self.is_lost:
            self.is_lost = False
            raise RuntimeError("Broken pipe")
        try:
            msg.encode(msg.MessageBatch(messages=list(reports)))
        except Exception as error:
            raise WireError from error
        self.batches.append(list(reports))
        self.posted += reports
        return True

    def reconnect(self) -> None:
        self.connection += 1

    def is_full(self) -> bool:
        self.asked += 1
        return self.waiting > 0

    def is_read(self) -> bool:
        self.unread -= 1
        return self.unread < 0


class FakeSource:
    """A source with the pieces that a test gives it."""

    def __init__(self, *pieces: msg.MessageFromRank) -> None:
        self.pieces = deque(pieces)
        self.sent: list[msg.MessageFromRank] = []
        self.taken = 0
        self.checks = 0

    def position(self) -> int:
        self.checks += 1
        return self.taken + len(self.pieces)

    def rewind(self) -> None:
        self.taken -= len(self.sent)
        self.pieces.extendleft(reversed(self.sent))
        self.sent.clear()

    def read(self, upto: int | None = None) -> msg.MessageFromRank | None:
        if not self.pieces or (upto is not None and self.taken >= upto):
            return None
        self.taken += 1
        self.sent.append(self.pieces.popleft())
        return self.sent[-1]


class Outboxes:
    """Outboxes whose two writers record the posted messages."""

    def __init__(self) -> None:
        self.writer, self.urgent = FakeWriter(), FakeWriter()
        self.started: list[Outbox] = []

    @property
    def posted(self) -> list[msg.MessageFromRank]:
        return self.writer.posted

    def make(self, *sources: Any, **options: Any) -> Outbox:
        outbox = Outbox(self.writer, self.urgent, **options)
        outbox._sources = sources
        return outbox

    def start(self, *sources: Any) -> Outbox:
        outbox = self.make(*sources)
        self.started.append(outbox)
        outbox.start(*sources)
        return outbox

    def send(self, outbox: Outbox, *messages: msg.MessageFromRank) -> None:
        """Post messages, and start the thread only then, so that it sends all in one batch."""
        for message in messages:
            outbox.post(message)
        outbox.start(*outbox._sources)
        outbox.close()


@pytest.fixture
def outboxes() -> Iterator[Outboxes]:
    """The threads of its outboxes end with the test."""
    made = Outboxes()
    yield made
    made.writer.waiting = 0
    for outbox in made.started:
        outbox.close()


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first batch, none goes by the clock."""
    monkeypatch.setattr(outbox_module, "BATCH_PERIOD", 1e9)
    monkeypatch.setattr(outbox_module, "CATCH_UP", 0.0)


def wrote(text: str) -> msg.Output:
    return msg.Output(start=0, end=0, text=text)


def report(number: int) -> msg.CellEnded:
    return msg.CellEnded(cell=number, in_group=True)


def picture(size: int) -> msg.Display:
    return msg.Display(data={"image/png": "x" * size}, metadata={})


ENDLESS = Mock(position=lambda: 0, read=lambda _upto: wrote("more"))
C, D = msg.EventReported(kind="c"), msg.EventReported(kind="d")
NUMBERS, BARS = msg.Metrics(rows=[[0.0, 1, {"loss": 0.5}]]), msg.Progress(bars=[["", 1, 2, 0.1]])


@pytest.mark.parametrize(
    ("sources", "batches"),
    [
        ([[wrote("a"), wrote("b")]], [[wrote("a")], [wrote("b")]]),
        ([[wrote("a")], [], [NUMBERS, BARS]], [[wrote("a"), NUMBERS, BARS]]),
        ([[wrote("a"), wrote("b")], [C, D]], [[wrote("a")], [wrote("b"), C], [D]]),
    ],
    ids=["one source", "one message", "one of each kind in a message"],
)
def test_data_of_the_sources_is_sent_before_a_later_report(
    outboxes: Outboxes,
    sources: list[list[msg.MessageFromRank]],
    batches: list[list[msg.MessageFromRank]],
) -> None:
    outboxes.send(outboxes.make(*(FakeSource(*pieces) for pieces in sources)), report(1))
    assert outboxes.writer.batches == batches
    assert outboxes.writer.asked == len(batches) - 1  # for room, before each message but the first
    assert outboxes.posted == [*(each for batch in batches for each in batch), report(1)]


def test_data_that_a_source_gets_after_a_report_is_sent_after_it(outboxes: Outboxes) -> None:
    source = FakeSource(wrote("before"))
    outbox = outboxes.make(source)
    outbox.post(picture(1))
    source.pieces.extend([wrote("between"), wrote("and more")])
    outbox.post(report(1))
    source.pieces.append(wrote("after"))
    outboxes.send(outbox)
    between = [wrote("between"), wrote("and more")]
    assert outboxes.posted == [wrote("before"), picture(1), *between, report(1), wrote("after")]


def test_another_notebook_gets_all_output_of_the_cell_in_order(outboxes: Outboxes) -> None:
    class Replaced(FakeSource):
        def read(self, upto: int | None = None) -> msg.MessageFromRank | None:
            if self.taken == 2:
                outboxes.writer.connection = 1
            return super().read(upto)

    outboxes.send(outboxes.make(Replaced(*map(wrote, "abc"))), report(1))
    assert outboxes.posted == [wrote("a"), *map(wrote, "abc"), report(1)]


def test_without_a_notebook_arrivals_and_too_many_pictures_are_dropped(
    outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbddp.worker.output.outbox.MAX_QUEUED_CHARACTERS", 1)
    outbox = outboxes.make()
    outboxes.writer.is_cut_off = True
    for _ in range(4):
        outbox.post(picture(2))
        outbox.post(CollectiveArrivals(cell=1, base=0.0))
    outboxes.writer.is_cut_off = False
    outbox.reconnect()
    outboxes.send(outbox, report(1))
    assert outboxes.posted[:1] == [picture(2)]
    assert "3 pictures left out" in str(outboxes.posted[1])
    assert outboxes.posted[2:] == [report(1)]


def test_output_written_during_a_send_does_not_overtake_a_report(outboxes: Outboxes) -> None:
    class Busy(FakeSource):
        def read(self, upto: int | None = None) -> msg.MessageFromRank | None:
            piece = super().read(upto)
            if piece == wrote("first"):
                outbox.post(picture(1))
                self.pieces.append(wrote("after"))
            return piece

    source = Busy(wrote("first"))
    outbox = outboxes.make(source)
    outbox.start(source)
    assert wait_until(lambda: len(outboxes.posted) == 3)
    outbox.close()
    assert outboxes.posted == [wrote("first"), picture(1), wrote("after")]


def test_a_notification_is_enough_to_send_the_data_of_a_source(
    outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "POLL_INTERVAL", 1000.0)
    source = FakeSource()
    outbox = outboxes.start(source)
    for count in range(1, 4):
        source.pieces.append(wrote(f"{count}"))
        outbox.notify()
        assert wait_until(lambda count=count: len(outboxes.posted) == count)


def test_data_without_a_notification_is_found_sooner_in_a_cell_than_between_cells(
    outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "IDLE_POLL_INTERVAL", 1000.0)
    source = FakeSource()
    outbox = outboxes.start(source)
    for cell in (1, 2):
        outbox.begin_cell()
        source.pieces.append(wrote("from C"))
        assert wait_until(lambda: outboxes.posted[-1:] == [wrote("from C")])
        outbox.post(report(cell))
        assert wait_until(lambda cell=cell: outboxes.posted[-1:] == [report(cell)])
    checks = source.checks
    period = outbox_module.POLL_INTERVAL
    assert not wait_until(lambda: source.checks > checks + 1, timeout=4 * period)


@pytest.mark.usefixtures("seldom")
def test_a_report_does_not_wait_for_the_next_batch(outboxes: Outboxes) -> None:
    source = FakeSource()
    outbox = outboxes.start(source)
    for number in range(3):
        source.pieces.append(wrote(f"{number}"))
        outbox.post(report(number))
        assert wait_until(lambda number=number: outboxes.posted[-1:] == [report(number)])


@pytest.mark.usefixtures("seldom")
def test_notifications_and_urgent_messages_do_not_flush_waiting_output(outboxes: Outboxes) -> None:
    source = FakeSource(wrote("first"))
    outbox = outboxes.start(source)
    assert wait_until(lambda: outboxes.posted == [wrote("first")])
    source.pieces.append(wrote("second"))
    outbox.notify()
    outbox.post(msg.InterruptAcknowledged(cell=1))
    assert wait_until(lambda: outboxes.urgent.posted == [msg.InterruptAcknowledged(cell=1)])
    assert not wait_until(lambda: len(outboxes.posted) == 2, timeout=0.1)
    outbox.close()
    assert outboxes.posted == [wrote("first"), wrote("second")]


def test_a_source_waits_while_the_queue_is_unread(outboxes: Outboxes) -> None:
    outboxes.writer.waiting = 1
    outbox = outboxes.make(FakeSource(wrote("a"), wrote("b"), wrote("c")))
    outbox.post(report(1))
    outbox.start(*outbox._sources)
    assert wait_until(lambda: outboxes.writer.asked > 3)
    assert outboxes.posted == [wrote("a")]
    outboxes.writer.waiting = 0
    outbox.close()
    assert outboxes.posted == [wrote("a"), wrote("b"), wrote("c"), report(1)]


def test_flush_waits_until_all_messages_are_sent_and_read(outboxes: Outboxes) -> None:
    source = FakeSource()
    outbox = outboxes.start(source)
    for number in range(50):
        source.pieces.append(wrote(str(number)))
        outbox.post(report(number))
        outbox.flush()
        assert len(outboxes.posted) == 2 * (number + 1)
    outboxes.writer.unread = 3
    outbox.flush()
    assert outboxes.writer.unread < 0


def test_flush_of_a_stuck_outbox_times_out_and_leaves_the_thread_idle(
    outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "FLUSH_TIMEOUT", 0.1)
    outboxes.writer.waiting = 1
    source = FakeSource(*(wrote(str(number)) for number in range(3)))
    outboxes.start(source).flush()
    outboxes.writer.waiting = 0
    assert wait_until(lambda: len(outboxes.posted) == 3)
    before = source.checks
    assert not wait_until(lambda: source.checks > before + 20, timeout=0.3)


# ---- what cannot be sent


def test_messages_that_cannot_be_encoded_are_reported_and_sending_continues(
    outboxes: Outboxes, snapshot: SnapshotAssertion
) -> None:
    failure = {"name": "ValueError", "text": "no", "traceback": object()}
    event = msg.EventReported(kind="mine", facts={"it": object()})
    outbox = outboxes.make(FakeSource(wrote("a")), FakeSource(event))
    outboxes.send(
        outbox,
        replace(report(1), result={"data": object()}, facts={"a": {1}}, payload={"key": "k"}),
        replace(report(2), failure=failure),
        Answer(request=3, content={"matches": [object()]}),
    )
    [answer] = outboxes.urgent.posted
    texts = [each.data["text/plain"] for each in outboxes.posted if isinstance(each, msg.Display)]
    first, bare, failed = (each for each in outboxes.posted if not isinstance(each, msg.Display))
    assert (first, bare) == (wrote("a"), replace(report(1), payload={"key": "k"}))
    assert (failed.cell, failed.failure["name"], answer.request) == (2, "ValueError", 3)
    assert [*texts, failed.failure["text"], answer.error] == snapshot


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("too deep"), RuntimeError("Broken pipe"), KeyError(1)]
)
def test_an_error_in_one_message_does_not_stop_the_outbox(
    outboxes: Outboxes, error: Exception
) -> None:
    outboxes.writer.error = error
    outbox = outboxes.start(FakeSource(wrote("a")))
    outbox.post(picture(5))
    outbox.post(report(1))
    outbox.close()
    before, remark, after = outboxes.posted
    assert (before, after) == (wrote("a"), report(1))
    assert "Display" in remark.data["text/plain"]
    assert remark.data["text/plain"].endswith(f": {error}")


def test_a_batch_that_may_have_arrived_is_not_sent_again(outboxes: Outboxes) -> None:
    outboxes.writer.is_lost = True
    outboxes.send(outboxes.make(FakeSource(NUMBERS)), report(1))
    remark, end = outboxes.posted
    assert remark.data["text/plain"] == "nbddp: output could not be sent: Broken pipe"
    assert end == report(1)


def test_an_unreadable_source_is_reported_once_and_the_others_continue(outboxes: Outboxes) -> None:
    source = FakeSource()
    broken = Mock(position=lambda: 0, read=Mock(side_effect=OSError("Input/output error")))
    outbox = outboxes.start(broken, source)
    for number in range(3):
        source.pieces.append(wrote(str(number)))
        outbox.post(report(number))
        outbox.flush()
    remark, *others = outboxes.posted
    assert "OSError('Input/output error')" in remark.data["text/plain"]
    assert others == [it for number in range(3) for it in (wrote(str(number)), report(number))]


# ---- what does not wait

NEWS = [
    msg.InterruptAcknowledged(cell=1),
    Answer(request=1),
    msg.Ready(pid=1, device="cpu", backend="gloo", host="h", cores=2, threads=1),
    msg.StartFailed(reason="r", traceback="t"),
]


def test_urgent_messages_use_their_own_queue_while_output_is_unread(outboxes: Outboxes) -> None:
    outboxes.writer.waiting = 1
    outbox = outboxes.start(ENDLESS)
    assert wait_until(lambda: outboxes.writer.asked > 3)
    for count, news in enumerate(NEWS, 1):
        outbox.post(news)
        assert wait_until(lambda count=count: outboxes.urgent.posted == NEWS[:count])
    assert outboxes.posted == [wrote("more")]


def test_a_source_that_never_ends_does_not_hold_up_the_end_of_a_cell(outboxes: Outboxes) -> None:
    outboxes.start(ENDLESS).post(report(1))
    assert wait_until(lambda: report(1) in outboxes.posted)


@pytest.mark.parametrize(
    ("ranks", "lines", "period"),
    [(1, 2, 0.01), (4, 2, 0.04), (4, 3, 0.1), (10, 2, 0.1), (64, 2, 0.64), (64, 3, 0.64)],
)
def test_ranks_send_at_common_times_less_often_if_many_and_a_first_line_at_once(
    outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch, ranks: int, lines: int, period: float
) -> None:
    now = 1000.013
    monkeypatch.setattr(time, "monotonic", lambda: now)
    outbox = outboxes.make(ranks=ranks)
    after_pause = outbox._next_due(0.0, lines)
    assert after_pause <= now + period - outbox_module.CATCH_UP
    for batch in (after_pause, now, now + 0.003):
        due = outbox._next_due(batch, lines)
        assert 0.0 < due - batch <= period + 1e-6
        assert due == pytest.approx(round(due / period) * period, abs=1e-6)  # for any start


# ---- pictures


def test_display_blocks_while_too_many_pictures_are_queued(
    outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_QUEUED_CHARACTERS", 100)
    outboxes.writer.waiting = 1
    outbox = outboxes.start()
    shown: list[int] = []

    def display() -> None:
        for number in range(10):
            outbox.post(picture(50))
            shown.append(number)

    thread = threading.Thread(target=display)
    thread.start()
    assert not wait_until(lambda: len(shown) > 4, timeout=0.3)
    outboxes.writer.waiting = 0
    thread.join(30)
    outbox.close()
    assert len(outboxes.posted) == 10


def test_a_forked_child_can_print_and_display(outboxes: Outboxes) -> None:
    outbox = outboxes.start(FakeSource())

    def act() -> None:
        outbox.notify()
        outbox.post(picture(outbox_module.MAX_QUEUED_CHARACTERS + 1))
        outbox.post(picture(1))
        outbox.flush()

    assert in_child(act) == 0
    assert not outboxes.posted


@pytest.mark.parametrize("way", ["poke", "post", "flush"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_in_a_cell_leaves_the_outbox_working(
    outboxes: Outboxes, way: str
) -> None:
    """An interrupt within a lock's own code would leave it locked, and the outbox waiting."""
    source = FakeSource()
    outbox = outboxes.start(source)

    def act() -> None:
        source.pieces.append(msg.Output(start=0, end=1, text="a"))
        if way == "post":
            outbox.post(msg.EventReported(kind="a", facts={}))
        else:
            outbox.notify()
        if way == "flush":
            outbox.flush()

    places = 0
    for places in interrupted_everywhere(act):
        outbox._has_output = False  # else it is poked once alone
        outboxes.posted.clear()
        outbox.post(msg.EventReported(kind="after", facts={"place": places}))
        assert wait_until(lambda: msg.EventReported in map(type, outboxes.posted))
    assert places > 5
