"""However output is cut into pieces, the same lines come of it, folded as a terminal would."""

from __future__ import annotations

import io
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from nbddp.record.lines import MAX_LINE, LineAssembler

TEXT = st.text(alphabet="abc \r\n", max_size=60)


def lines_of(*pieces: str, log: str = "the log", max_line: int = MAX_LINE) -> list[str]:
    """All lines that come of output in these pieces."""
    lines = LineAssembler(log, max_line=max_line)
    return [line for piece in pieces for line in lines.add(piece)] + lines.flush()


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def terminal(line: str) -> str:
    """What a terminal shows of one line, written a character at a time."""
    shown: list[str] = []
    column = 0
    for character in line:
        if character == "\r":
            column = 0
        else:
            shown[column : column + 1] = [character]
            column += 1
    return "".join(shown)


@given(TEXT, st.lists(st.integers(0, 60)))
def test_the_same_text_in_any_pieces_gives_the_same_lines(text: str, places: list[int]) -> None:
    assert lines_of(*cut(text, places)) == lines_of(text)


@given(TEXT)
def test_every_line_is_what_a_terminal_would_show(text: str) -> None:
    *complete, partial = text.split("\n")
    expected = [terminal(line) for line in complete]
    expected += [terminal(partial)] if partial.strip("\r") else []
    assert lines_of(text) == expected


@given(st.text(alphabet="ab\r\n", max_size=60), st.lists(st.integers(0, 60)), st.integers(1, 7))
def test_long_lines_are_cut_once_and_the_same_in_any_pieces(
    text: str, places: list[int], width: int
) -> None:
    expected = [
        line if len(line) <= width else f"{line[:width]} … {len(line) - width} more characters in x"
        for line in lines_of(text)
    ]
    assert lines_of(*cut(text, places), log="x", max_line=width) == expected


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=20).map("\r".join),
    st.lists(st.integers(0, 80)),
)
def test_a_bar_written_over_many_times_is_the_same_in_any_pieces(
    text: str, places: list[int]
) -> None:
    shown = [terminal(text)] if text.strip("\r") else []
    assert lines_of(*cut(text, places), max_line=10) == shown


@pytest.mark.parametrize("end", ["\r", ""])
@pytest.mark.parametrize("begin", ["\r", ""])
def test_a_progress_bar_of_any_length_shows_its_last_state(begin: str, end: str) -> None:
    if not begin and not end:
        return
    bar = [f"{begin}step {number:05}{end}" for number in range(3000)]
    assert lines_of(*bar) == ["step 02999"]


def test_a_progress_bar_takes_no_more_memory_than_a_line() -> None:
    lines = LineAssembler()
    for number in range(3000):
        assert lines.add(f"\rstep {number}") == []
    assert kept_in(lines) < 20


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10%\r20%\r30%\n", ["30%"]),
        ("a long state\rshort\n", ["shortg state"]),
        ("done   \r\n", ["done   "]),
        ("\rone\n\rtwo\n", ["one", "two"]),
        ("\r\r\n", [""]),
        ("one\r\r\rtwo\n", ["two"]),
        ("\n\n", ["", ""]),
        ("", []),
    ],
)
def test_carriage_returns_are_folded(text: str, shown: list[str]) -> None:
    assert lines_of(text) == shown


UP = "\x1b[A"
MOVES = st.lists(
    st.sampled_from(["ab", "c", " ", "\r", "\n", UP, "\x1b[2A", "\x1b[31m"]), max_size=30
)


@given(MOVES.map("".join), st.lists(st.integers(0, 90)))
def test_bars_in_bars_are_the_same_in_any_pieces(text: str, places: list[int]) -> None:
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
        ("\r\x1b[31mlong and red\x1b[0m\rshort\n", ["shortand red"]),
        (f"a long bar{UP}\rb\n\rc\n", ["b", "c long bar"]),
    ],
)
def test_what_the_cursor_has_come_back_to_is_written_over(text: str, shown: list[str]) -> None:
    assert lines_of(text) == shown


def test_bars_of_nested_loops_are_two_rows_that_are_written_over() -> None:
    out = io.StringIO()
    for _ in tqdm(range(3), desc="outer", file=out, mininterval=0):
        for _ in tqdm(range(50), desc="inner", file=out, mininterval=0, leave=False):
            pass
    half = out.getvalue().index("inner:  50%") + len("inner:  50%")
    lines = LineAssembler()
    assert len(lines.add(out.getvalue()[:half])) == 1
    assert [row[:11] for row in lines.partial.split("\n")] == ["inner:  50%"]
    told = [*lines.add(out.getvalue()[half:]), *lines.flush()]
    assert [line[:11] for line in told] == ["outer: 100%"]
    assert lines.flush() == []
    assert kept_in(lines) == 0


def test_a_line_comes_only_when_it_is_complete() -> None:
    lines = LineAssembler()
    assert lines.add("one\ntw") == ["one"]
    assert lines.add("o") == []
    assert lines.add("\nthree") == ["two"]
    assert lines.flush() == ["three"]


def test_flushing_leaves_nothing() -> None:
    lines = LineAssembler()
    lines.add("partial")
    assert lines.flush() == ["partial"]
    assert lines.flush() == []
    assert lines.add("next\n") == ["next"]


def test_a_bar_that_was_wiped_is_no_line() -> None:
    lines = LineAssembler()
    lines.add("\r")
    assert lines.flush() == []


@given(TEXT, st.lists(st.integers(0, 60)))
def test_what_is_being_written_looks_as_it_would_if_it_ended_now(
    text: str, places: list[int]
) -> None:
    lines = LineAssembler()
    for piece in cut(text, places):
        lines.add(piece)
    shown = lines.partial
    assert shown == terminal(text.rpartition("\n")[2])
    assert lines.flush() == ([shown] if shown else [])
    assert lines.partial == ""


def test_a_progress_bar_is_seen_while_it_is_written() -> None:
    lines = LineAssembler()
    seen = []
    for piece in ("begin\n\r 10%", "\r 2", "0%", "\r", "done"):
        lines.add(piece)
        seen.append(lines.partial)
    assert seen == [" 10%", " 20%", " 20%", " 20%", "done"]


def kept_in(lines: LineAssembler) -> int:
    """How many characters it holds."""
    rows = [*lines._above, lines._row, *lines._below]
    written = [each for row in rows for each in (row._now, row._before)]
    return sum(len(piece) for each in written for piece in each._pieces)


@pytest.mark.parametrize("ends", [True, False])
def test_a_line_of_three_hundred_thousand_characters_is_one_line_cut_once(ends: bool) -> None:
    text = "".join(chr(97 + at % 26) for at in range(300_000))
    expected = [f"{text[:MAX_LINE]} … 200,000 more characters in rank0.log"]
    for pieces in ([text], list(cut(text, [1000, 5000])), cut(text, list(range(0, 300_000, 777)))):
        assert lines_of(*pieces, "\n" * ends, log="rank0.log") == expected


@pytest.mark.parametrize("length", [MAX_LINE - 1, MAX_LINE])
def test_a_line_that_fits_is_whole(length: int) -> None:
    assert lines_of("x" * length, "\nnext") == ["x" * length, "next"]


def test_a_line_that_is_cut_leaves_no_colour_behind() -> None:
    red = "\x1b[31m" + "x" * 20
    assert lines_of(red, max_line=15) == [
        "\x1b[31m" + "x" * 10 + "\x1b[0m … 10 more characters in the log"
    ]
    for width in range(1, 5):  # in the middle of the escape sequence itself
        [line] = lines_of(red, max_line=width)
        assert line == f"\x1b[0m … {25 - width} more characters in the log"


def test_a_bar_longer_than_a_line_is_folded_all_the_same() -> None:
    bars = [f"\r{number:4}" + "#" * 30 for number in range(1000)]
    assert lines_of(*bars, max_line=10) == [" 999###### … 24 more characters in the log"]


def test_a_short_line_over_a_long_one_shows_the_rest_of_the_long_one() -> None:
    assert lines_of("x" * 30 + "\rab\n", max_line=10) == [
        "abxxxxxxxx … 20 more characters in the log"
    ]


def test_fifty_megabytes_without_a_newline_are_not_kept_and_take_no_time() -> None:
    lines, began = LineAssembler(), time.process_time()
    for _ in range(50):
        lines.add("x" * (1 << 20))
        assert kept_in(lines) <= MAX_LINE
    for _ in range(300_000):
        lines.add("y")
    assert time.process_time() - began < 10  # 0.5 s where it was written
    assert lines.flush()[0].endswith(" … 52,628,800 more characters in the log")
