"""Warnings that several ranks print are shown once, and every other line always."""

from __future__ import annotations

import pytest

from nbddp.ui.log_lines import LogBuffer
from nbddp.ui.repeated_warnings import RepeatedWarnings

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


def test_warning_that_one_rank_repeats_is_shown_each_time() -> None:
    warnings = RepeatedWarnings()
    assert [*warnings.without_repeats(0, PYTHON * 2)] == PYTHON * 2


def test_log_of_each_rank_keeps_its_warnings() -> None:
    log = LogBuffer()
    for rank in range(2):
        log.write(rank, "\n".join([*PYTHON, f"end {rank}", ""]))
    log.note_repeated_warnings()
    assert [line.text for line in log.lines(1)] == [*PYTHON, "end 1"]
    shown = [*PYTHON, "end 0", "end 1", NOTE.format("rank 1")]
    assert [line.text for line in log.lines()] == shown
