"""Errors carry the text for the user; exits and ranks have a text."""

from __future__ import annotations

import signal
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from nbddp import errors
from nbddp.errors import (
    CellFailedError,
    CellInterruptedError,
    NbddpError,
    StartError,
    describe_exit,
    format_ranks,
)


def test_a_start_error_shows_its_message_before_the_details_of_the_ranks() -> None:
    error = StartError("rank 1 could not start", details="Traceback ...\nOSError: no")
    assert str(error) == "rank 1 could not start"
    assert error._render_traceback_() == [
        "StartError: rank 1 could not start",
        "Traceback ...",
        "OSError: no",
    ]
    assert StartError("no")._render_traceback_() == ["StartError: no"]


def test_every_error_class_derives_from_nbddp_error() -> None:
    kinds = [each for name, each in vars(errors).items() if name.endswith("Error")]
    assert all(issubclass(each, NbddpError) for each in kinds)


@pytest.mark.parametrize("kind", [CellFailedError, CellInterruptedError])
def test_a_failed_cell_shows_its_report_once_in_place_of_a_traceback(
    kind: type[CellFailedError],
) -> None:
    error = kind("rank 2: ValueError: no", rank=2, report="first cause\n\n  the others")
    assert (str(error), error.rank, error.is_shown) == ("rank 2: ValueError: no", 2, False)
    assert error._render_traceback_() == ["first cause", "", "  the others"]
    error.is_shown = True
    [line] = error._render_traceback_()
    assert line.startswith("rank 2: ValueError: no (")
    assert error.report == "first cause\n\n  the others"
    assert not kind("another", rank=0, report="x").is_shown


def test_a_python_traceback_has_the_report_with_its_first_line_only_once() -> None:
    title, rest = "rank 2: ValueError: no", "  the others\n  what to do"
    error = CellFailedError(title, rank=2, report=f"first cause: {title}\n\n{rest}")
    shown = "".join(traceback.format_exception(error))
    assert shown.count(title) == 1
    assert rest in shown


def test_describe_exit_of_typical_exit_codes(snapshot: SnapshotAssertion) -> None:
    codes = (None, 0, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, -999)
    assert {str(code): describe_exit(code) for code in codes} == snapshot


@given(st.integers())
def test_describe_exit_accepts_every_exit_code(exitcode: int) -> None:
    assert describe_exit(exitcode).startswith(("exited", "was killed"))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_format_ranks_lists_exactly_the_given_ranks(ranks: set[int]) -> None:
    word, _, text = format_ranks(sorted(ranks)).partition(" ")
    said: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        said += range(int(low), int(high or low) + 1)
    assert said == sorted(ranks)
    assert word == ("rank" if len(ranks) == 1 else "ranks")
