"""The last lines of ranks: kept in order and bounded, as HTML and as text; equal values once."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.record.log_reader import MAX_PANEL_LINE, LineAssembler
from nbddp.ui.log_lines import (
    LogBuffer,
    LogLine,
    RepeatedWarnings,
    log_html,
    log_text,
    split_text_and_rich,
)

PIECES = st.lists(st.tuples(st.integers(0, 2), st.text(alphabet="ab \r\n", max_size=12)))


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def shown(lines: list[LogLine]) -> list[tuple[int | None, str]]:
    """Rank, or None for nbddp, and text."""
    return [(line.ranks[0] if line.ranks else None, line.text) for line in lines]


def test_progress_bars_of_several_ranks_come_after_other_lines_in_order_of_rank() -> None:
    log = LogBuffer()
    log.flush(1)
    assert log.lines(1) == log.lines() == []
    log.write(1, "\r10%")
    log.write(0, "\r20%")
    log.write(1, "\r30%")
    log.write(3, "  ")  # an erased bar
    log.write(2, "a\n\n")
    log.write_notice("careful\nor not\n")
    lines = [(2, "a"), (2, ""), (None, "careful"), (None, "or not")]
    assert shown(log.lines()) == [*lines, (0, "20%"), (1, "30%")]


@given(PIECES)
def test_flushing_the_log_buffer_does_not_change_its_lines(pieces: list[tuple[int, str]]) -> None:
    log = LogBuffer()
    for rank, text in pieces:
        log.write(rank, text)
    merged, alone = log.lines(), [log.lines(rank) for rank in range(3)]
    log.flush()
    assert log.lines() == merged
    assert [log.lines(rank) for rank in range(3)] == alone


@given(PIECES, st.integers(1, 5))
def test_each_log_line_is_kept_or_counted(pieces: list[tuple[int, str]], kept: int) -> None:
    log, merged = LogBuffer(max_lines=kept), list[tuple[int, str]]()
    assemblers = {rank: LineAssembler() for rank in range(3)}
    for rank, text in pieces:
        log.write(rank, text)
        merged += [(rank, line) for line in assemblers[rank].add(text)]
    for rank, assembler in assemblers.items():
        lines = [line for writer, line in merged if writer == rank]
        partial = [assembler.partial] if assembler.partial.strip() else []
        assert texts(log.lines(rank)) == lines[-kept:] + partial
        assert log.dropped_count(rank) == max(0, len(lines) - kept)
    assert shown(log.lines())[: len(merged[-kept:])] == merged[-kept:]
    assert log.dropped_count() == max(0, len(merged) - kept)


def test_text_after_a_flush_starts_a_new_line_and_one_rank_can_be_flushed_alone() -> None:
    log = LogBuffer()
    log.write(0, "zero")
    log.write(1, "one")
    log.flush(1)
    before = log.lines()
    log.write(1, "more\n")
    assert shown(log.lines()) == [(1, "one"), (1, "more"), (0, "zero")]
    log.flush()
    log.write(0, "b\n")
    assert texts(log.lines(0)) == ["zero", "b"]
    assert shown(before) == [(1, "one"), (0, "zero")], "what was read changes no more"


def test_the_version_changes_with_new_lines() -> None:
    log = LogBuffer()
    changes = [lambda at=at: log.write(0, f"\r{at}%") for at in (10, 20)]
    changes += [lambda: log.write_notice("careful"), log.flush]
    versions = {log.version, *((change(), log.version) for change in changes)}
    assert len(versions) == 5
    before = log.version
    log.write(0, "")
    log.lines()
    assert log.version == before


def test_a_long_line_without_a_newline_is_truncated() -> None:
    log = LogBuffer(max_lines=10)
    for _ in range(10):
        log.write(0, "x" * 1_000_000)
    assert sum(map(len, texts(log.lines(0)))) <= 11 * (MAX_PANEL_LINE + 50)
    assert sum(map(len, texts(log.lines()))) <= 11 * (MAX_PANEL_LINE + 50)


def test_a_flood_of_output_is_buffered_in_little_time() -> None:
    log, piece = LogBuffer(), ("x" * 99 + "\n") * 50
    began = time.perf_counter()
    for number in range(1600):
        log.write(number % 4, piece)
    assert time.perf_counter() - began < 5  # it takes 0.03 s on a quiet machine
    assert log.dropped_count() == 79_500


def test_values_with_equal_text_but_different_html_are_distinguished() -> None:
    plain, rich = {"data": {"text/plain": "1"}}, {"data": {"text/plain": "1", "text/html": "<b>"}}
    text = LogLine((0,), "1", mark="Out")
    assert split_text_and_rich({0: plain, 1: rich}) == ([text], [([1], rich)])


EARLIER = "12,345 earlier lines in <b>/rank0.log"
KINDS = {
    "none": [],
    "two ranks": [LogLine((0,), "a"), LogLine((3,), "b")],
    "shared": [LogLine((0, 1, 2, 3), "1.5", "Out")],
    "of several lines": [LogLine((1,), "a\nb", "Out")],
    "nbddp's own": [LogLine((), "rank 1 <died>")],
    "in colours": [LogLine((0,), "\x1b[32mok"), LogLine((0,), "next \x08<b>")],
}


@pytest.mark.parametrize("earlier", ["", EARLIER], ids=["all", "the last"])
@pytest.mark.parametrize("lines", KINDS.values(), ids=KINDS)
def test_log_lines_begin_with_ranks(lines: list[LogLine], earlier: str, snapshot: Any) -> None:
    assert [log_html(lines, earlier=earlier), log_text(lines, earlier=earlier)] == snapshot


# ---- warnings that several ranks print

PYTHON = ["a.py:3: UserWarning: slow", "  load(x)"]
LONG = ["a.py:3: UserWarning: slow", "Use another.", "  load(x)"]
CPP = "[rank{}]:[W1126 11:30:3{}.81 reducer.cpp:1529] Warning: unused (function operator())"
NOTE = "warnings of {} that another rank had printed are only in the logs"


@pytest.mark.parametrize(
    ("first", "second"),
    [(PYTHON, PYTHON), (LONG, LONG), ([CPP.format(0, 6)], [CPP.format(1, 7)])],
    ids=["python", "several lines", "c++"],
)
def test_a_second_ranks_warning_is_left_out_and_noted(first: list[str], second: list[str]) -> None:
    warnings = RepeatedWarnings()
    for _ in range(2):  # one rank may repeat itself
        assert list(warnings.without_repeats(0, [*first, "a"])) == [*first, "a"]
    assert warnings.note() == ""
    assert list(warnings.without_repeats(2, [*second, "  b"])) == ["  b"]
    assert list(warnings.without_repeats(1, second)) == []
    assert warnings.note() == NOTE.format("ranks 1-2")


@pytest.mark.parametrize(
    "line",
    [
        "same",
        "Warning: low",
        "caught: UserWarning: slow",
        "result: 42 a.py:3: UserWarning: slow",
        "a.py:4: UserWarning: slow",
        "a.py:3: UserWarning: fast",
    ],
)
def test_other_lines_of_a_second_rank_are_shown(line: str) -> None:
    warnings = RepeatedWarnings()
    warnings.without_repeats(0, [PYTHON[0], *([] if line.startswith("a.py") else [line])])
    assert list(warnings.without_repeats(1, [line])) == [line]


@pytest.mark.parametrize("warning", [PYTHON[0], CPP.format(0, 6)], ids=["python", "c++"])
def test_lines_after_a_warning_without_a_line_of_code_are_shown(warning: str) -> None:
    warnings, lines = RepeatedWarnings(), ["epoch 1", "epoch 2"]
    assert [*warnings.without_repeats(0, [warning, *lines])] == [warning, *lines]
    assert [*warnings.without_repeats(1, [warning, *lines])] == lines


def test_log_of_each_rank_keeps_its_warnings() -> None:
    log = LogBuffer()
    for rank in range(2):
        log.write(rank, "\n".join([*PYTHON, f"end {rank}", ""]))
    log.note_repeated_warnings()
    assert [line.text for line in log.lines(1)] == [*PYTHON, "end 1"]
    shown = [*PYTHON, "end 0", "end 1", NOTE.format("rank 1")]
    assert [line.text for line in log.lines()] == shown
