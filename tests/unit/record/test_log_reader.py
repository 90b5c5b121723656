"""Output of a rank becomes lines, in any pieces, and each byte of its log is shown once."""

import itertools
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_use import keeps_less_than
from syrupy.assertion import SnapshotAssertion

from nbddp.record import log_reader
from nbddp.record.log_reader import MAX_LINE, LineAssembler, LogReader, LogSpan, tail
from nbddp.wire.messages import Output

TEXT = st.text(alphabet="abc \r\n", max_size=60)


def lines_of(*pieces: str, log: str = "the log", max_line: int = MAX_LINE) -> list[str]:
    """All lines that come of output in these pieces."""
    lines = LineAssembler(log, max_line=max_line)
    return [line for piece in pieces for line in lines.add(piece)] + lines.flush()


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def last_state(line: str) -> str:
    """The text after the last carriage return that text follows."""
    return line.rstrip("\r").rpartition("\r")[2]


@given(st.text(alphabet="ab\r\n", max_size=60), st.lists(st.integers(0, 60)), st.integers(1, 7))
def test_any_split_truncates_long_lines_equally(text: str, places: list[int], width: int) -> None:
    cut_lines = lines_of(*cut(text, places), log="x", max_line=width)
    for whole, line in zip(lines_of(text), cut_lines, strict=True):
        if len(whole) <= width:
            assert line == whole
        else:
            shown, _, remark = line.partition(" … ")
            assert shown == whole[:width]
            assert remark == "the rest of the line is in x"


UP = "\x1b[A"
MOVES = st.lists(
    st.sampled_from(["ab", "c", " ", "\r", "\n", UP, "\x1b[2A", "\x1b[31m"]), max_size=30
)


@given(MOVES.map("".join), st.lists(st.integers(0, 90)))
def test_nested_bars_give_the_same_lines_for_any_split(text: str, places: list[int]) -> None:
    assert lines_of(*cut(text, places)) == lines_of(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"outer 0\n\rinner 0{UP}\n\rinner 1{UP}\router 1", ["outer 0", "outer 1", "inner 1"]),
        (f"outer 0\n\rinner 0{UP}\n\r       {UP}\router 1\n", ["outer 0", "outer 1"]),
        (f"o\n\ri{UP}\n\r {UP}\rO\nafter\nmore\n", ["o", "O", "after", "more"]),
        (f"a\n\n\rc{UP}{UP}\n\rb{UP}\n\n\rC{UP}{UP}\rA", ["a", "", "A", "b", "C"]),
        ("a\n\rb\x1b[1A\n\rB\x1b[1A\rA", ["a", "A", "B"]),
        (f"{UP * 1000}up\n", ["up"]),
        ("\r\x1b[31mlong and red\x1b[0m\rshort\n", ["short"]),
        (f"a long bar{UP}\rb\n\rc\n", ["b", "c"]),
        (f"o\n\ri\r\x1b[2K{UP}\x1b[2KO", ["o", "\x1b[2KO"]),
    ],
)
def test_text_at_the_cursor_is_overwritten(text: str, shown: list[str]) -> None:
    assert lines_of(text) == shown


@given(TEXT, st.lists(st.integers(0, 60)))
def test_whole_and_partial_lines_have_their_last_state(text: str, places: list[int]) -> None:
    lines, found, added = LineAssembler(), list[str](), ""
    for piece in cut(text, places):
        found += lines.add(piece)
        added += piece
        *complete, partial = map(last_state, added.split("\n"))
        assert found == complete
        assert lines.partial == (partial if partial.strip() else "")
    shown = lines.partial
    assert lines.flush() == ([shown] if shown else [])
    assert lines.partial == ""


# ---- long lines


def test_a_truncated_line_resets_its_colour_and_names_the_log() -> None:
    red, bar = "\x1b[31m" + "x" * 20, [f"\r{number:4}" + "#" * 30 for number in range(1000)]
    for pieces, width, shown in (
        ([red], 15, "\x1b[31m" + "x" * 10 + "\x1b[0m"),
        *(([red], width, "\x1b[0m") for width in range(1, 5)),  # in the sequence
        (bar, 10, " 999######"),
    ):
        [line] = lines_of(*pieces, max_line=width)
        assert line == f"{shown} … the rest of the line is in the log"


def test_a_line_of_20_megabytes_and_30000_bar_updates_use_little_memory_and_time() -> None:
    lines, bars, began = LineAssembler(), LineAssembler(), time.process_time()
    with keeps_less_than(3 * MAX_LINE):
        for _ in range(20):
            lines.add("x" * (1 << 20))
        for number in range(30_000):
            lines.add("y")
            bars.add(f"\rstep {number}")
    assert time.process_time() - began < 10  # 0.5 s where it was written
    assert len(lines.flush()[0]) < MAX_LINE + 100


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


TRACE = (  # of a connection that the end of a notebook has closed
    "[rank0]:[W1121 21:44:42.5 TCPStore.cpp:106] [c10d] sendBytes failed on it: Broken pipe\n"
    "Exception raised from sendBytes at Utils.hpp:758 (most recent call first):\n"
    "frame #0: c10::Error::Error(std::string) + 0x9d (0x7f in libc10.so)\n\n"
)


def mail(text: str, start: int = 0) -> Output:
    return Output(start=start, end=start + len(text.encode()), text=text)


def read(part: LogSpan | None) -> str:
    return "".join(part.texts()) if part else ""


def rest(reader: LogReader) -> str:
    return read(reader.remaining())


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
    reader = LogReader(log, rank=3)
    with log.open("a") as file:
        file.write("now")
    assert reader.unseen_part(mail("earlier ")) is None
    assert reader.unseen_part(mail("no", 8)) == LogSpan(3, log, 8, 10)
    assert rest(reader) == "w"
    assert reader.unseen_part(mail("w", 10)) is None, "it comes late"


def test_invalid_utf8_bytes_are_replaced_and_the_text_around_them_is_kept(log: Path) -> None:
    cut = {b"end" + "\U0001f600".encode()[:length]: "end\ufffd" for length in (1, 2, 3)}
    for written, shown in (cut | {b"one\xff\xfetwo": "one\ufffd\ufffdtwo"}).items():
        log.write_bytes(b"")
        reader = LogReader(log)
        log.write_bytes(written)
        assert rest(reader) == shown


def test_a_trace_of_torch_is_not_shown(log: Path) -> None:
    reader = LogReader(log)
    log.write_text(f"one\n{TRACE}two\n")
    assert reader.final_output() == rest(reader).rstrip("\n") == "one\ntwo"


def test_a_log_is_for_its_owner_only_and_named_after_its_deletion(
    log: Path, snapshot: SnapshotAssertion
) -> None:
    reader = LogReader(log)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    log.unlink()
    assert rest(reader) == ""
    assert read(LogSpan(0, log, 0, 123_456_789)) == snapshot


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
    outputs: list[Output] = []
    for piece in pieces:
        outputs.append(mail(piece, outputs[-1].end if outputs else 0))
    shown = [read(reader.unseen_part(output)) for output in outputs[:seen]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_reader, "CHUNK_BYTES", chunk)
        shown.append(rest(reader))
    shown += [read(reader.unseen_part(output)) for output in outputs[seen:]]
    assert "".join(shown) == "".join(pieces)


# ---- text that is read when it is shown


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "MAX_SHOWN", 1000)
    monkeypatch.setattr(log_reader, "SHOWN_END", 100)


@pytest.mark.usefixtures("short")
def test_a_flood_is_shown_as_its_last_whole_lines(log: Path, snapshot: SnapshotAssertion) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    remark, *lines = read(LogSpan(0, log, 0, log.stat().st_size)).splitlines()
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) == 11
    assert remark == snapshot


@pytest.mark.usefixtures("short")
def test_the_note_about_omitted_output_is_on_its_own_line(log: Path) -> None:
    lines_before = "begun\n" + "x" * 2000 + "\nend\n"
    for text, start, shown in (
        ("x" * 5000, 0, ["SAID"]),  # the end of the line may follow
        ("x" * 5000 + "\n", 0, ["SAID", ""]),
        (lines_before, 6, ["SAID", "end", ""]),
        (lines_before, 9, ["", "SAID", "end", ""]),  # from the middle of a line
        ("x" * 5000, 4000, ["x" * 1000]),  # what just fits
    ):
        log.write_text(text)
        lines = read(LogSpan(0, log, start, log.stat().st_size)).split("\n")
        assert ["SAID" if "rank0.log" in line else line for line in lines] == shown


# ---- its last lines


BAR = "".join(f"\r{number:06}%" for number in range(20_000))
TAILS: dict[str, tuple[bytes, int, list[str]]] = {
    "a short log": (b"one\ntwo\nthree\n", 3, ["one", "two", "three"]),
    "a longer one": (b"one\ntwo\nthree\n", 2, ["EARLIER", "two", "three"]),
    "an empty one": (b"", 5, [""]),
    "a last line without an end": (b"one\ntwo", 1, ["EARLIER", "two"]),
    "a bar": (b"begin\n\r1%\r50%\r100%\nend\n", 3, ["begin", "100%", "end"]),
    "a bar that fills all that is read": (f"a\n{BAR}\n".encode(), 4, ["EARLIER", "019999%"]),
    "a trace of torch": (f"one\n{TRACE}two\n".encode(), 2, ["one", "two"]),
    "bytes that are no text": (b"one \xff\xfe\ntwo\n", 2, ["one \ufffd\ufffd", "two"]),
}


@pytest.mark.parametrize(("written", "count", "shown"), TAILS.values(), ids=TAILS)
def test_tail_has_the_last_lines(log: Path, written: bytes, count: int, shown: list[str]) -> None:
    log.write_bytes(written)
    lines = tail(log, count).split("\n")
    assert ["EARLIER" if str(log) in line else line for line in lines] == shown


def test_the_tail_of_a_huge_line_is_bounded(log: Path, snapshot: SnapshotAssertion) -> None:
    log.write_text("first\n" + "x" * 1_000_000 + "\nlast\n")
    remark, *shown = tail(log, 3).split("\n")
    assert remark.replace(str(log), "LOG") == snapshot
    assert shown[-1] == "last"
    assert len(shown) == 2  # of a huge line, what fits a few lines of usual length
    assert max(len(line) for line in shown) <= 3 * 4096
