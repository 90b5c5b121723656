"""Notices of a cell reach their reader complete and in order, in bounded memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_use import keeps_less_than
from syrupy.assertion import SnapshotAssertion

from nbddp.record import log_reader
from nbddp.record import notices as notices_module
from nbddp.record.log_reader import LogSpan
from nbddp.record.notices import ControllerMessage, Notice, NoticeQueue, OutputText, RichOutput
from nbddp.wire.messages import Display


def all_of(notices: NoticeQueue) -> list[Notice]:
    notices.close()
    return list(iter(lambda: notices.get(0), None))


def text_of(notices: list[Notice], rank: int = 0) -> str:
    return "".join(
        notice.text for notice in notices if isinstance(notice, OutputText) and notice.rank == rank
    )


def picture(size: int, rank: int = 0) -> RichOutput:
    return RichOutput(rank, Display(data={"image/png": "x" * size}, metadata={}))


class Log:
    """A rank's log, and the parts of it that are sent."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.rank = rank
        self.path = folder / f"rank{rank}.log"
        self.path.touch()

    def write(self, text: str) -> OutputText:
        with self.path.open("a") as file:
            start = file.tell()
            file.write(text)
            end = file.tell()
        return OutputText(self.rank, text, LogSpan(self.rank, self.path, start, end))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_queued_text_does_not_wake_a_batching_reader() -> None:
    """One wait for all that comes in it: that is why a talkative group costs so little."""
    notices, texts = NoticeQueue(), [OutputText(0, str(number)) for number in range(9)]
    notices.put(picture(3))
    assert notices.get(30.0, batch_text=True) == picture(3)
    is_woken = []

    def wait(_timeout: float | None = None) -> bool:
        for text in texts:
            notices.put(text)
        is_woken.append(notices._urgent.is_set())
        return False

    notices._urgent.wait = wait  # type: ignore[assignment, method-assign]
    assert [notices.get(0.1, batch_text=True) for _ in texts] == texts
    assert is_woken == [False]


@pytest.mark.parametrize("batch_text", [False, True])
@pytest.mark.parametrize("is_end", [False, True])
def test_a_picture_and_the_end_wake_any_reader(is_end: bool, batch_text: bool) -> None:
    notices = NoticeQueue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(notices.get, 30.0, batch_text=batch_text)
        notices.put(OutputText(0, "a"))
        if is_end:
            notices.close()
        else:
            notices.put(picture(3))
        assert waiting.result(20) == OutputText(0, "a")
    assert notices.get(30.0, batch_text=batch_text) == (None if is_end else picture(3))
    assert notices.is_drained == is_end


def test_unread_notices_use_bounded_memory_and_block_no_writer(tmp_path: Path) -> None:
    notices, logs = NoticeQueue(max_text=1000), [Log(tmp_path, rank) for rank in (0, 1)]
    with keeps_less_than(50_000):
        for number in range(2000):
            for rank_log in logs:
                notices.put(rank_log.write(f"{number:100}"))
    found = all_of(notices)
    assert [len(text_of(found, rank)) for rank in (0, 1)] == [200_000, 200_000]


def test_a_reader_that_caught_up_gets_text_from_memory_again(log: Log) -> None:
    notices = NoticeQueue(max_text=3)
    for text in ("one", "two", "three"):
        notices.put(log.write(text))
    assert text_of([notices.get(0), notices.get(0)]) == "onetwothree"
    log.path.unlink()
    notices.put(OutputText(0, "four", LogSpan(0, log.path, 0, 4)))
    assert notices.get(0) == OutputText(0, "four")


ACTS = st.tuples(
    st.sampled_from(["0", "1", "said", "take"]), st.text("aé\n", min_size=1, max_size=9)
)


@given(st.lists(ACTS, max_size=40), st.integers(0, 30))
def test_each_rank_keeps_all_its_text_and_messages_keep_their_position(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, str]], max_text: int
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    logs, notices = [Log(folder, rank) for rank in (0, 1)], NoticeQueue(max_text=max_text)
    fed: list[Notice] = []
    found: list[Notice] = []
    for what, text in acts:
        if what == "take":
            found += filter(None, [notices.get(0)])
            continue
        fed.append(ControllerMessage(text) if what == "said" else logs[int(what)].write(text))
        notices.put(fed[-1])
    found += all_of(notices)
    assert sections(found) == sections(fed)


def sections(notices: list[Notice]) -> list[tuple[str, str, list[Notice]]]:
    """What each rank wrote before each message of the controller."""
    found, part = [], list[Notice]()
    for notice in [*notices, ControllerMessage("")]:
        part.append(notice)
        if isinstance(notice, ControllerMessage):
            found.append((text_of(part, 0), text_of(part, 1), part[-1:]))
            part = []
    return found


def test_an_urgent_close_shows_the_ends_of_logs(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "SHOWN_END", 100)
    notices = NoticeQueue(max_text=0)
    for number in range(100):
        notices.put(log.write(f"line {number}\n"))
    notices.close(is_urgent=True)
    remark, *lines = text_of(list(iter(lambda: notices.get(0), None))).splitlines()
    assert "rank0.log" in remark
    assert lines == [f"line {number}" for number in range(88, 100)]


def test_only_adjacent_spans_of_the_same_log_are_merged(log: Log, tmp_path: Path) -> None:
    notices, places = NoticeQueue(), [(log.path, 0, 5), (log.path, 5, 9), (log.path, 10, 12)]
    for path, start, end in [*places, (tmp_path / "other.log", 12, 15)]:
        notices.put(LogSpan(0, path, start, end))
    assert [each.size for each in notices._waiting if isinstance(each, LogSpan)] == [9, 2, 3]


def test_unread_pictures_beyond_the_limit_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(notices_module, "MAX_RICH", 10)
    alone, notices = NoticeQueue(), NoticeQueue()
    alone.put(picture(1000))
    assert all_of(alone) == [picture(1000)]
    for _ in range(12):
        notices.put(picture(1))
    notices.put(picture(1, rank=1))
    found = all_of(notices)
    assert found[:-2] == [picture(1)] * 10
    assert [each.text for each in found[-2:] if isinstance(each, ControllerMessage)] == snapshot


def test_notices_between_cells_are_shown_in_the_next(log: Log, snapshot: SnapshotAssertion) -> None:
    between, cell = NoticeQueue(max_text=10), NoticeQueue()
    between.put(ControllerMessage("rank 2 was killed"))
    assert between.take_messages() == ["rank 2 was killed"]
    between.put(ControllerMessage("rank 1 was killed"))
    for text in ("short\n", "too long\n", "for memory\n"):
        between.put(log.write(text))
    between.move_to(cell)
    assert cell.get(0) == ControllerMessage("rank 1 was killed")
    assert cell.get(0) == OutputText(0, "short\n")
    assert cell.get(0) == OutputText(0, "too long\n")
    notice = cell.get(0)
    assert isinstance(notice, ControllerMessage)
    assert notice.text == snapshot
    assert between.get(0) is None
