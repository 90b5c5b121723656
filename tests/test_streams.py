"""A rank's log as it is read back to be mailed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbddp.worker.streams import CHUNK_BYTES, MAX_UNREAD, RankLog

CHATTER = (
    "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
)

Write = Callable[[str], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank1.log"


@pytest.fixture
def write(path: Path) -> Write:
    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    return append


def test_pieces_are_whole_in_order_and_come_once(path: Path, write: Write) -> None:
    log = RankLog(path)
    text = "grüße\n" * (CHUNK_BYTES // 4)  # some pieces end within a letter
    write(text)
    pieces = iter(log.read, None)
    read = [(piece.start, piece.end, piece.text) for piece in pieces]
    assert "".join(text for _, _, text in read) == text
    assert [start for start, _, _ in read] == [0, *(end for _, end, _ in read[:-1])]
    assert read[-1][1] == path.stat().st_size


def test_what_an_earlier_attempt_wrote_is_not_read(path: Path, write: Write) -> None:
    write("before\n")
    log = RankLog(path)
    write("after\n")
    piece = log.read()
    assert piece is not None
    assert (piece.start, piece.text) == (7, "after\n")
    assert log.read() is None


def test_gloos_chatter_is_in_the_file_and_not_mailed(path: Path, write: Write) -> None:
    log = RankLog(path)
    write(f"before\n{CHATTER}{CHATTER}after\n")
    piece = log.read()
    assert piece is not None
    assert piece.text == "before\nafter\n"
    assert piece.end == path.stat().st_size == len("before\nafter\n") + 2 * len(CHATTER)


@pytest.mark.parametrize(
    "line",
    [
        f"mine: {CHATTER}",
        CHATTER.rstrip("\n"),
        "[Gloo] Rank 1 is connected to no peer ranks.\n",
        CHATTER.replace(": 3\n", ": 3, and that is mine\n"),
    ],
)
def test_a_line_that_only_looks_like_it_is_the_users(path: Path, write: Write, line: str) -> None:
    log = RankLog(path)
    write(line)
    piece = log.read()
    assert piece is not None
    assert piece.text == line


def test_of_a_flood_it_is_said_where_it_stands_and_what_follows_is_mailed_again(
    path: Path, write: Write
) -> None:
    log = RankLog(path)
    write("before\n")
    assert log.read() is not None
    write("grüße\n" * MAX_UNREAD)
    write("after")
    flood = log.read()
    assert flood is not None
    assert (flood.start, flood.end, flood.text) == (7, path.stat().st_size - 5, "")
    assert flood.is_left
    rest = log.read()
    assert rest is not None
    assert (rest.start, rest.end, rest.text) == (flood.end, flood.end + 5, "after")
    assert not rest.is_left
    assert log.read() is None


def test_a_flood_without_any_line_ends_with_a_whole_letter(path: Path) -> None:
    log = RankLog(path)
    with path.open("ab") as file:
        file.write("€".encode() * MAX_UNREAD + b"\xe2\x82")
    flood = log.read()
    assert flood is not None
    assert (flood.end, flood.is_left) == (3 * MAX_UNREAD, True)
    with path.open("ab") as file:
        file.write(b"\xac!")
    rest = log.read()
    assert rest is not None
    assert rest.text == "€!"


def test_what_was_written_after_a_mark_is_read_later(path: Path, write: Write) -> None:
    log = RankLog(path)
    write("before\n")
    mark = log.mark()
    write("after\n")
    first = log.read(mark)
    assert first is not None
    assert (first.start, first.end, first.text) == (0, 7, "before\n")
    assert log.read(mark) is None
    second = log.read()
    assert second is not None
    assert (second.start, second.text) == (7, "after\n")
    assert log.read(mark) is None  # behind what was read


def test_a_flood_before_a_mark_ends_there(path: Path, write: Write) -> None:
    log = RankLog(path)
    write("x" * 99 + "\n" * MAX_UNREAD)
    mark = log.mark()
    write("after\n" * MAX_UNREAD)
    flood = log.read(mark)
    assert flood is not None
    assert (flood.end, flood.is_left) == (mark, True)


def test_torchs_own_trace_of_a_lost_connection_is_in_the_file_and_in_no_piece(
    tmp_path: Path,
) -> None:
    trace = (
        "[rank0]:[W1121 21:44:42.5 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on it\n"
        "Exception raised from recvBytes at Utils.hpp:787 (most recent call first):\n"
        "frame #0: c10::Error::Error(std::string) + 0x9d (0x7f in libc10.so)\n"
        "<omitting python frames>\nframe #29: __libc_start_main + 0x85\n\n"
    )
    path = tmp_path / "rank0.log"
    log = RankLog(path)
    path.write_text(f"before\n{trace}frame #1 of the film\n")
    piece = log.read()
    assert piece is not None
    assert piece.text == "before\nframe #1 of the film\n"
    assert (piece.start, piece.end) == (0, path.stat().st_size)


# ---- what is for the file alone


def test_what_is_kept_is_in_the_file_and_in_no_piece(path: Path, write: Write) -> None:
    log = RankLog(path)
    write("before\n")
    log.keep("a whole traceback\nof 2 lines")
    write("between\n")
    log.keep("grüße")
    write("after\n")
    pieces = list(iter(log.read, None))
    assert [piece.text for piece in pieces] == ["before\n", "", "between\n", "", "after\n"]
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == path.stat().st_size
    assert "before\na whole traceback\nof 2 lines\nbetween\ngrüße\n" in path.read_text()


def test_what_is_kept_is_passed_over_once_it_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = RankLog(path), os.write
    seen: list[object] = []

    def write_and_look(fd: int, data: bytes) -> int:
        written = write(fd, data)
        seen.append(log.read())  # as the mailer may at any moment
        return written

    monkeypatch.setattr("os.write", write_and_look)
    log.keep("whole")
    monkeypatch.undo()
    assert seen == [None]
    piece = log.read()
    assert piece is not None
    assert (piece.text, piece.end) == ("", path.stat().st_size)


def test_a_mark_before_what_is_kept_is_read_up_to(path: Path, write: Write) -> None:
    log = RankLog(path)
    write("before\n")
    mark = log.mark()
    log.keep("whole")
    first = log.read(mark)
    assert first is not None
    assert first.text == "before\n"
    assert log.read(mark) is None
