"""Every byte of a rank's log reaches the cell once: by mail while it lives, from the file after."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.record import logs as room
from nbddp.record.logs import Logged, LogReader, tail
from nbddp.wire.messages import Output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


def mail(text: str, start: int = 0) -> Output:
    return Output(start=start, end=start + len(text.encode()), text=text)


def read(part: Logged | None) -> str:
    return "".join(part.texts()) if part else ""


def rest(reader: LogReader) -> str:
    return read(reader.rest())


def test_mailed_pieces_are_shown_in_their_order(log: Path) -> None:
    reader = LogReader(log, rank=3)
    assert reader.accept(mail("one ")) == Logged(3, log, 0, 4)
    assert reader.accept(mail("two", 4)) == Logged(3, log, 4, 7)


def test_what_was_not_mailed_is_read_from_the_file(log: Path) -> None:
    reader = LogReader(log)
    log.write_text("mailed, not mailed")
    reader.accept(mail("mailed, "))
    assert rest(reader) == "not mailed"


FATAL = "Fatal Python error: Aborted\n"
MAIN = """(most recent call first):
  File "c10d.py", line 2 in recv
  File "cell", line 1 in <module>
  File "/lib/IPython/core/interactiveshell.py", line 9 in run_code

"""
OTHER = '\nThread 0x7f2 (most recent call first):\n  File "pulse.py", line 3 in look\n'


@pytest.mark.parametrize("name", ["Thread 0x7f1 ", "Current thread 0x7f1 "])
def test_the_last_words_have_the_stack_of_one_thread(log: Path, name: str) -> None:
    reader = LogReader(log)
    log.write_text(f"wörds\n{FATAL}{OTHER}\n{name}{MAIN}Extension modules: torch\n")
    assert reader.last_words().splitlines() == [
        "wörds",
        FATAL.strip(),
        f"{name}(most recent call first):",
        *MAIN.splitlines()[1:3],
    ]
    assert rest(reader) == f"wörds\n{FATAL}"


def test_when_nothing_was_mailed_the_whole_file_is_read(log: Path) -> None:
    reader = LogReader(log)
    log.write_text("last words")
    assert rest(reader) == "last words"


def test_when_all_was_mailed_nothing_is_left(log: Path) -> None:
    reader = LogReader(log)
    log.write_text("all")
    reader.accept(mail("all"))
    assert rest(reader) == ""


def test_mail_that_arrives_after_the_file_was_read_is_not_shown_again(log: Path) -> None:
    reader = LogReader(log)
    log.write_text("one two three")
    assert reader.accept(mail("one ")) is not None
    assert rest(reader) == "two three"
    assert reader.accept(mail("two ", 4)) is None
    assert reader.accept(mail("three", 8)) is None


def test_a_file_that_was_read_to_its_end_is_not_read_again(log: Path) -> None:
    reader = LogReader(log)
    log.write_text("once")
    assert rest(reader) == "once"
    assert rest(reader) == ""


def test_what_an_earlier_attempt_wrote_is_not_shown(log: Path) -> None:
    log.write_text("earlier ")
    reader = LogReader(log)
    with log.open("a") as file:
        file.write("now")
    assert read(reader.accept(mail("no", 8))) == "no"
    assert rest(reader) == "w"


def test_mail_of_an_earlier_attempt_is_not_shown(log: Path) -> None:
    log.write_text("earlier ")
    assert LogReader(log).accept(mail("earlier ")) is None


def test_the_log_is_made_for_its_owner_only(log: Path) -> None:
    LogReader(log)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_characters_cut_by_the_end_of_a_chunk_come_out_whole(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "CHUNK_BYTES", 3)
    reader = LogReader(log)
    log.write_text("aé€\U0001f600" * 5)
    assert rest(reader) == "aé€\U0001f600" * 5


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_character_that_the_rank_could_not_finish_is_shown_as_such(
    log: Path, length: int
) -> None:
    reader = LogReader(log)
    log.write_bytes(b"end" + "\U0001f600".encode()[:length])
    assert rest(reader) == "end\ufffd"


def test_bytes_that_are_no_text_lose_nothing_around_them(log: Path) -> None:
    reader = LogReader(log)
    log.write_bytes(b"one\xff\xfetwo")
    assert rest(reader) == "one\ufffd\ufffdtwo"


def test_a_log_that_was_deleted_has_no_rest_and_stops_nobody(log: Path) -> None:
    reader = LogReader(log)
    log.unlink()
    assert rest(reader) == ""


@given(
    pieces=st.lists(st.text(alphabet="aé€\U0001f600\n", min_size=1, max_size=5), max_size=8),
    seen=st.integers(0, 8),
    chunk=st.integers(1, 10),
)
def test_wherever_the_rank_died_every_character_is_shown_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], seen: int, chunk: int
) -> None:
    log = tmp_path_factory.mktemp("logs") / "rank0.log"
    reader = LogReader(log)
    log.write_text("".join(pieces))
    letters: list[Output] = []
    for piece in pieces:
        letters.append(mail(piece, letters[-1].end if letters else 0))
    shown = [read(reader.accept(letter)) for letter in letters[:seen]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "CHUNK_BYTES", chunk)
        shown.append(rest(reader))
    shown += [read(reader.accept(letter)) for letter in letters[seen:]]
    assert "".join(shown) == "".join(pieces)


# ---- what is read when it is shown


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_SHOWN", 1000)
    monkeypatch.setattr(room, "SHOWN_END", 100)


@pytest.mark.usefixtures("short")
def test_of_a_flood_the_end_is_shown_from_a_line_on_and_the_rest_is_named(log: Path) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    shown = read(Logged(0, log, 0, log.stat().st_size))
    said, *lines = shown.splitlines()
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) == 11
    assert said == "… 8.8 kB not shown, all in rank0.log"


@pytest.mark.usefixtures("short")
def test_a_flood_without_any_line_is_cut_all_the_same(log: Path) -> None:
    log.write_text("x" * 5000)
    assert read(Logged(0, log, 0, 5000)) == "… 5.0 kB not shown, all in rank0.log\n"


@pytest.mark.usefixtures("short")
def test_what_is_said_of_a_flood_stands_on_a_line_of_its_own(log: Path) -> None:
    log.write_text("begun\n" + "x" * 2000 + "\nend\n")
    shown = [read(Logged(0, log, start, log.stat().st_size)).split("\n") for start in (6, 9)]
    assert [lines[:-2] for lines in shown] == [
        ["… 2.0 kB not shown, all in rank0.log"],
        ["", "… 2.0 kB not shown, all in rank0.log"],
    ]
    assert {tuple(lines[-2:]) for lines in shown} == {("end", "")}


@pytest.mark.usefixtures("short")
def test_what_just_fits_is_shown_whole_and_nothing_beyond_it(log: Path) -> None:
    log.write_text("x" * 5000)
    assert read(Logged(0, log, 7, 1007)) == "x" * 1000


def test_a_log_that_is_gone_by_the_time_it_is_shown_is_named(log: Path) -> None:
    assert read(Logged(0, log, 0, 123_456_789)) == (
        "… 123.5 MB not shown, rank0.log: No such file or directory\n"
    )


def test_only_the_next_part_of_the_same_log_goes_on_with_it(log: Path, tmp_path: Path) -> None:
    part = Logged(0, log, 0, 5)
    assert part.goes_on_with(Logged(0, log, 5, 9))
    assert not part.goes_on_with(Logged(0, log, 6, 9))
    assert not part.goes_on_with(Logged(0, tmp_path / "other.log", 5, 9))


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
