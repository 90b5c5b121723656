"""However output is cut into pieces, the same lines come of it, with their last state only."""

from __future__ import annotations

import io
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_use import keeps_less_than
from syrupy.assertion import SnapshotAssertion
from tqdm import tqdm

from nbddp.record.log_reader import MAX_LINE, LineAssembler

TEXT = st.text(alphabet="abc \r\n", max_size=60)


def lines_of(*pieces: str, log: str = "the log", max_line: int = MAX_LINE) -> list[str]:
    """All lines that come of output in these pieces."""
    lines = LineAssembler(log, max_line=max_line)
    return [line for piece in pieces for line in lines.add(piece)] + lines.flush()


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def last_state(line: str) -> str:
    """The text after the last carriage return that text follows."""
    return line.rstrip("\r").rpartition("\r")[2]


@given(TEXT)
def test_every_assembled_line_has_its_last_state(text: str) -> None:
    *complete, partial = map(last_state, text.split("\n"))
    assert lines_of(text) == complete + ([partial] if partial.strip() else [])


@given(st.text(alphabet="ab\r\n", max_size=60), st.lists(st.integers(0, 60)), st.integers(1, 7))
def test_long_lines_are_truncated_equally_for_any_split_of_the_text(
    text: str, places: list[int], width: int
) -> None:
    cut_lines = lines_of(*cut(text, places), log="x", max_line=width)
    for whole, line in zip(lines_of(text), cut_lines, strict=True):
        if len(whole) <= width:
            assert line == whole
        else:
            shown, _, said = line.partition(" … ")
            assert shown == whole[:width]
            assert said == "the rest of the line is in x"


UP = "\x1b[A"
MOVES = st.lists(
    st.sampled_from(["ab", "c", " ", "\r", "\n", UP, "\x1b[2A", "\x1b[31m"]), max_size=30
)


@given(MOVES.map("".join), st.lists(st.integers(0, 90)))
def test_nested_progress_bars_give_the_same_lines_for_any_split_of_the_text(
    text: str, places: list[int]
) -> None:
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


def test_the_inner_bar_of_nested_loops_is_erased_and_the_outer_bar_is_kept() -> None:
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
    assert (lines.flush(), lines.partial) == ([], "")


@given(TEXT, st.lists(st.integers(0, 60)))
def test_a_partial_line_is_shown_as_if_it_were_complete(text: str, places: list[int]) -> None:
    lines, added = LineAssembler(), ""
    for piece in cut(text, places):
        lines.add(piece)
        added += piece
        unfinished = last_state(added.rpartition("\n")[2])
        assert lines.partial == (unfinished if unfinished.strip() else "")
    shown = lines.partial
    assert lines.flush() == ([shown] if shown else [])
    assert lines.partial == ""


# ---- long lines


def test_a_line_of_300000_characters_is_one_line_truncated_once(
    snapshot: SnapshotAssertion,
) -> None:
    text = "".join(chr(97 + at % 26) for at in range(300_000))
    for pieces in ([text], cut(text, [1000, 5000]), cut(text, list(range(0, 300_000, 777)))):
        for end in ("\n", ""):
            [line] = lines_of(*pieces, end, log="rank0.log")
            assert line[:MAX_LINE] == text[:MAX_LINE]
            assert line[MAX_LINE:] == snapshot(name="cut")


@pytest.mark.parametrize(
    ("pieces", "width", "shown"),
    [
        (["\x1b[31m" + "x" * 20], 15, "\x1b[31m" + "x" * 10 + "\x1b[0m"),
        *((["\x1b[31m" + "x" * 20], width, "\x1b[0m") for width in range(1, 5)),
        ([f"\r{number:4}" + "#" * 30 for number in range(1000)], 10, " 999######"),
    ],
    ids=["a colour", *(f"a colour, cut after {at}" for at in range(1, 5)), "a bar"],
)
def test_a_truncated_line_resets_its_colour_and_names_the_log(
    pieces: list[str], width: int, shown: str
) -> None:
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
