"""Every byte of a rank's log reaches the cell once: in messages, then from the file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from nbddp.record import log_reader as room
from nbddp.record.log_reader import LogReader, LogSpan, tail
from nbddp.wire.messages import Output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


def mail(text: str, start: int = 0) -> Output:
    return Output(start=start, end=start + len(text.encode()), text=text)


def read(part: LogSpan | None) -> str:
    return "".join(part.texts()) if part else ""


def rest(reader: LogReader) -> str:
    return read(reader.remaining())


def test_sent_log_pieces_are_shown_in_order_and_the_rest_is_read_once_from_the_file(
    log: Path,
) -> None:
    reader = LogReader(log, rank=3)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    log.write_text("one two not mailed")
    assert reader.unseen_part(mail("one ")) == LogSpan(3, log, 0, 4)
    assert reader.unseen_part(mail("two ", 4)) == LogSpan(3, log, 4, 8)
    assert rest(reader) == "not mailed"
    assert rest(reader) == ""
    assert reader.unseen_part(mail("not mailed", 8)) is None, "it comes late"


FATAL = "Fatal Python error: Aborted\n"
MAIN = """(most recent call first):
  File "c10d.py", line 2 in recv
  File "cell", line 1 in <module>
  File "/lib/IPython/core/interactiveshell.py", line 9 in run_code

"""
OTHER = '\nThread 0x7f2 (most recent call first):\n  File "pulse.py", line 3 in look\n'


@pytest.mark.parametrize("name", ["Thread 0x7f1 ", "Current thread 0x7f1 "])
def test_the_final_output_of_a_crash_has_the_stack_of_one_thread(log: Path, name: str) -> None:
    reader = LogReader(log)
    log.write_text(f"wörds\n{FATAL}{OTHER}\n{name}{MAIN}Extension modules: torch\n")
    stack = f"{name}{MAIN}".splitlines()[:3]
    assert reader.final_output().splitlines() == ["wörds", FATAL.strip(), *stack]
    assert rest(reader) == f"wörds\n{FATAL}"


def test_output_of_an_earlier_attempt_is_not_shown(log: Path) -> None:
    log.write_text("earlier ")
    reader = LogReader(log)
    with log.open("a") as file:
        file.write("now")
    assert reader.unseen_part(mail("earlier ")) is None
    assert read(reader.unseen_part(mail("no", 8))) == "no"
    assert rest(reader) == "w"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        *((b"end" + "\U0001f600".encode()[:length], "end\ufffd") for length in (1, 2, 3)),
        (b"one\xff\xfetwo", "one\ufffd\ufffdtwo"),
    ],
)
def test_invalid_utf8_bytes_are_replaced_and_the_text_around_them_is_kept(
    log: Path, written: bytes, shown: str
) -> None:
    reader = LogReader(log)
    log.write_bytes(written)
    assert rest(reader) == shown


def test_a_deleted_log_has_no_remaining_output_and_raises_no_error(log: Path) -> None:
    reader = LogReader(log)
    log.unlink()
    assert rest(reader) == ""


@given(
    pieces=st.lists(st.text(alphabet="aé€\U0001f600\n", min_size=1, max_size=5), max_size=8),
    seen=st.integers(0, 8),
    chunk=st.integers(1, 10),
)
def test_each_character_of_a_dead_rank_is_shown_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], seen: int, chunk: int
) -> None:
    log = tmp_path_factory.mktemp("logs") / "rank0.log"
    reader = LogReader(log)
    log.write_text("".join(pieces))
    letters: list[Output] = []
    for piece in pieces:
        letters.append(mail(piece, letters[-1].end if letters else 0))
    shown = [read(reader.unseen_part(letter)) for letter in letters[:seen]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "CHUNK_BYTES", chunk)
        shown.append(rest(reader))
    shown += [read(reader.unseen_part(letter)) for letter in letters[seen:]]
    assert "".join(shown) == "".join(pieces)


# ---- text that is read when it is shown


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_SHOWN", 1000)
    monkeypatch.setattr(room, "SHOWN_END", 100)


@pytest.mark.usefixtures("short")
def test_a_flood_of_output_is_shown_as_its_last_whole_lines_with_a_note(
    log: Path, snapshot: SnapshotAssertion
) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    said, *lines = read(LogSpan(0, log, 0, log.stat().st_size)).splitlines()
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) == 11
    assert said == snapshot


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("text", "start", "shown"),
    [
        ("x" * 5000, 0, ["SAID", ""]),
        ("begun\n" + "x" * 2000 + "\nend\n", 6, ["SAID", "end", ""]),
        ("begun\n" + "x" * 2000 + "\nend\n", 9, ["", "SAID", "end", ""]),
        ("x" * 5000, 4000, ["x" * 1000]),
    ],
    ids=["no line", "from the start of a line", "in a line", "what just fits"],
)
def test_the_note_about_omitted_output_is_on_its_own_line(
    log: Path, text: str, start: int, shown: list[str]
) -> None:
    log.write_text(text)
    lines = read(LogSpan(0, log, start, log.stat().st_size)).split("\n")
    assert ["SAID" if "rank0.log" in line else line for line in lines] == shown


def test_a_log_deleted_before_it_is_shown_is_named(log: Path, snapshot: SnapshotAssertion) -> None:
    assert read(LogSpan(0, log, 0, 123_456_789)) == snapshot


# ---- its last lines


BAR = "".join(f"\r{number:06}%" for number in range(20_000))
TAILS: dict[str, tuple[bytes, int, list[str]]] = {
    "a short log": (b"one\ntwo\nthree\n", 3, ["one", "two", "three"]),
    "a longer one": (b"one\ntwo\nthree\n", 2, ["EARLIER", "two", "three"]),
    "an empty one": (b"", 5, [""]),
    "a last line without an end": (b"one\ntwo", 1, ["EARLIER", "two"]),
    "a bar": (b"begin\n\r1%\r50%\r100%\nend\n", 3, ["begin", "100%", "end"]),
    "a bar that fills all that is read": (f"a\n{BAR}\n".encode(), 4, ["EARLIER", "019999%"]),
    "bytes that are no text": (b"one \xff\xfe\ntwo\n", 2, ["one \ufffd\ufffd", "two"]),
}


@pytest.mark.parametrize(("written", "count", "shown"), TAILS.values(), ids=TAILS)
def test_tail_returns_the_last_lines_of_a_log(
    log: Path, written: bytes, count: int, shown: list[str]
) -> None:
    log.write_bytes(written)
    lines = tail(log, count).split("\n")
    assert ["EARLIER" if str(log) in line else line for line in lines] == shown


def test_tail_reads_only_the_end_of_a_large_log(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(50_000)))
    monkeypatch.setattr(Path, "read_bytes", None)
    monkeypatch.setattr(Path, "read_text", None)
    assert tail(log, 2).split("\n")[1:] == ["line 49998", "line 49999"]


def test_the_tail_of_a_log_with_a_huge_line_is_bounded(
    log: Path, snapshot: SnapshotAssertion
) -> None:
    log.write_text("first\n" + "x" * 1_000_000 + "\nlast\n")
    said, *shown = tail(log, 3).split("\n")
    assert said.replace(str(log), "LOG") == snapshot
    assert shown[-1] == "last"
    assert len(shown) == 2  # of a huge line, what fits a few lines of usual length
    assert max(len(line) for line in shown) <= 3 * 4096
