"""A rank's log as it is read back to be sent."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from nbddp.wire.messages import Output
from nbddp.worker.output.log_writer import CHUNK_BYTES, MAX_UNREAD, LogWriter

CHATTER = (
    "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
)
TRACE = (
    "[rank0]:[W1121 21:44:42.5 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on it\n"
    "Exception raised from recvBytes at Utils.hpp:787 (most recent call first):\n"
    "frame #0: c10::Error::Error(std::string) + 0x9d (0x7f in libc10.so)\n"
    "<omitting python frames>\nframe #29: __libc_start_main + 0x85\n\n"
)

Write = Callable[[str], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank1.log"


@pytest.fixture
def write(path: Path) -> Write:
    def append(text: str) -> None:
        with path.open("ab") as file:
            file.write(text.encode(errors="surrogateescape"))

    return append


@pytest.fixture
def log(path: Path, write: Write) -> LogWriter:
    write("first\n")
    return LogWriter(path, Mock())


BEGIN = len("first\n")


def pieces_of(log: LogWriter, upto: int | None = None) -> list[Output]:
    """All that can be read: nothing is left out in between, and nothing comes twice."""
    pieces = list(iter(lambda: log.read(upto), None))
    assert [each.start for each in pieces[1:]] == [each.end for each in pieces[:-1]]
    return pieces


def test_log_pieces_have_whole_characters_in_order_and_start_after_the_earlier_attempt(
    path: Path, write: Write, log: LogWriter
) -> None:
    text = "grüße\n" * (CHUNK_BYTES // 4)  # some pieces end within a character
    write(text)
    pieces = pieces_of(log)
    assert "".join(each.text for each in pieces) == text
    assert (pieces[0].start, pieces[-1].end) == (BEGIN, path.stat().st_size)
    assert len(pieces) > 1


@pytest.mark.parametrize(
    ("written", "mailed"),
    [
        (f"before\n{CHATTER}{CHATTER}after\n", "before\nafter\n"),
        (f"before\n{TRACE}frame #1 of the film\n", "before\nframe #1 of the film\n"),
        *(
            (line, line)
            for line in (
                f"mine: {CHATTER}",
                CHATTER.rstrip("\n"),
                "[Gloo] Rank 1 is connected to no peer ranks.\n",
                CHATTER.replace(": 3\n", ": 3, and that is mine\n"),
            )
        ),
    ],
    ids=["Gloo", "store", "within a line", "no line", "other words", "more words"],
)
def test_torch_warnings_are_logged_but_not_sent_and_similar_lines_are_sent(
    path: Path, write: Write, log: LogWriter, written: str, mailed: str
) -> None:
    write(written)
    [piece] = pieces_of(log)
    assert piece.text == mailed
    assert piece.end == path.stat().st_size == BEGIN + len(written)


@pytest.mark.parametrize("line", range(4))
def test_a_trace_that_is_read_while_torch_writes_it_is_not_sent(
    write: Write, log: LogWriter, line: int
) -> None:
    cut = sum(map(len, TRACE.splitlines(keepends=True)[:line])) + 60
    write(f"before\n{TRACE[:cut]}")
    [before] = pieces_of(log)
    write(f"{TRACE[cut:]}after")
    assert (before.text, [each.text for each in pieces_of(log)]) == ("before\n", ["after"])


def test_a_flood_is_sent_as_a_log_position_and_later_output_as_text(
    path: Path, write: Write, log: LogWriter
) -> None:
    write("before\n")
    assert log.read() is not None
    write("grüße\n" * MAX_UNREAD)
    write("after")
    flood, rest = pieces_of(log)
    assert (flood.end, flood.text, flood.is_omitted) == (path.stat().st_size - 5, "", True)
    assert (rest.text, rest.is_omitted) == ("after", False)


def test_a_flood_without_newlines_ends_with_a_whole_character(write: Write, log: LogWriter) -> None:
    write("€" * MAX_UNREAD + "\udce2\udc82")  # the first two bytes of another one
    flood = log.read()
    assert (flood.end, flood.is_omitted) == (BEGIN + 3 * MAX_UNREAD, True)
    write("\udcac!")
    assert [each.text for each in pieces_of(log)] == ["€!"]


@pytest.mark.parametrize("is_flood", [False, True])
def test_output_after_a_log_position_is_read_separately(
    write: Write, log: LogWriter, is_flood: bool
) -> None:
    before = "x" * 99 + "\n" * MAX_UNREAD if is_flood else "before\n"
    write(before)
    mark = log.position()
    write("after\n" * (MAX_UNREAD if is_flood else 1))
    [first] = pieces_of(log, mark)
    assert (first.end, first.is_omitted) == (mark, is_flood)
    assert first.text == ("" if is_flood else before)
    second = log.read()
    assert (second.start, second.text) == (mark, "" if is_flood else "after\n")
    assert log.read(mark) is None  # before the read position


# ---- text for the file only


def test_hidden_text_is_written_to_the_log_file_but_not_sent(
    path: Path, write: Write, log: LogWriter
) -> None:
    write("before\n")
    mark = log.position()
    log.write_hidden("a whole traceback\nof 2 lines")
    assert [each.text for each in pieces_of(log, mark)] == ["before\n"]
    write("between\n")
    log.write_hidden("grüße")
    write("after\n")
    pieces = pieces_of(log)
    assert [piece.text for piece in pieces] == ["", "between\n", "", "after\n"]
    assert (pieces[0].start, pieces[-1].end) == (mark, path.stat().st_size)
    assert "before\na whole traceback\nof 2 lines\nbetween\ngrüße\n" in path.read_text()


def test_a_loss_of_output_is_reported_once_in_each_cell(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, full = LogWriter(path, outbox := Mock()), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "write", Mock(side_effect=full))
    for has_failed in (True, False, True):
        log.begin_cell()
        log.report_loss(full)
        if has_failed:
            log.write_hidden("a traceback")
        [notice] = [call.args[0] for call in outbox.post.call_args_list]
        assert "No space left on device" in str(notice)
        outbox.post.reset_mock()
    log.report_loss(full, "grüße\n".encode())
    outbox.notify.assert_called_once_with()
    assert [(each.start, each.end, each.text) for each in pieces_of(log)] == [(0, 0, "grüße\n")]


def test_hidden_text_is_skipped_only_once_it_is_complete(
    path: Path, log: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    seen: list[object] = []

    def write_and_look(fd: int, data: bytes) -> int:
        written = write(fd, data)
        seen.append(log.read())  # as the outbox may at any moment
        return written

    monkeypatch.setattr("os.write", write_and_look)
    log.write_hidden("whole")
    monkeypatch.undo()
    assert seen == [None]
    [piece] = pieces_of(log)
    assert (piece.text, piece.end) == ("", path.stat().st_size)
