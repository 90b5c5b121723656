"""The end of a log: the last lines, folded, with a word on what comes before."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbddp.ui.logs import tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


def test_a_short_log_is_shown_whole(log: Path) -> None:
    log.write_text("one\ntwo\nthree\n")
    assert tail(log, 3) == "one\ntwo\nthree"


def test_a_longer_log_shows_its_last_lines_and_where_the_others_are(log: Path) -> None:
    log.write_text("one\ntwo\nthree\n")
    assert tail(log, 2) == f"... earlier lines in {log}\ntwo\nthree"


def test_an_empty_log_shows_nothing(log: Path) -> None:
    log.touch()
    assert tail(log, 5) == ""


def test_a_last_line_without_an_end_is_a_line_too(log: Path) -> None:
    log.write_text("one\ntwo")
    assert tail(log, 1) == f"... earlier lines in {log}\ntwo"


def test_a_progress_bar_is_one_line(log: Path) -> None:
    log.write_text("begin\n" + "".join(f"\r{number}%" for number in range(101)) + "\nend\n")
    assert tail(log, 3) == "begin\n100%\nend"


def test_bytes_that_are_no_text_are_shown_as_such(log: Path) -> None:
    log.write_bytes(b"one \xff\xfe\ntwo\n")
    assert tail(log, 2) == "one \ufffd\ufffd\ntwo"


def test_of_a_large_log_only_the_end_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(50_000)))
    monkeypatch.setattr(Path, "read_bytes", None)
    monkeypatch.setattr(Path, "read_text", None)
    assert tail(log, 2) == f"... earlier lines in {log}\nline 49998\nline 49999"


def test_a_log_whose_last_line_is_huge_is_bounded(log: Path) -> None:
    log.write_text("first\n" + "x" * 1_000_000 + "\nlast\n")
    shown = tail(log, 3).split("\n")
    assert shown[0] == f"... earlier lines in {log}"
    assert shown[-1] == "last"
    assert len(shown) == 3  # of a huge line, what fits a few lines of usual length
    assert max(len(line) for line in shown[1:]) <= 3 * 4096


def test_where_a_bar_fills_all_that_is_read_the_lines_before_it_are_spoken_of(log: Path) -> None:
    log.write_text("first\n" + "".join(f"\r{number:06}%" for number in range(20_000)) + "\n")
    assert tail(log, 4) == f"... earlier lines in {log}\n019999%"
