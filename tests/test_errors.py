"""Errors carry what the user reads, and exits and ranks are said in words."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp import errors
from nbddp.errors import (
    ArgumentError,
    CellFailedError,
    CellInterruptedError,
    CommandInterruptedError,
    NbddpError,
    ReplayError,
    RequestError,
    SignatureError,
    StartError,
    WireError,
    describe_exit,
    say_ranks,
)


@pytest.mark.parametrize(
    ("kind", "parent"),
    [
        (NbddpError, Exception),
        (RequestError, NbddpError),
        (ArgumentError, (RequestError, ValueError)),
        (StartError, NbddpError),
        (CellFailedError, NbddpError),
        (CellInterruptedError, CellFailedError),
        (CommandInterruptedError, NbddpError),
        (WireError, NbddpError),
        (SignatureError, WireError),
        (ReplayError, WireError),
    ],
)
def test_every_error_hangs_where_the_drawn_tree_has_it(
    kind: type[Exception], parent: type[Exception] | tuple[type[Exception], ...]
) -> None:
    assert kind.__bases__ == (parent if isinstance(parent, tuple) else (parent,))
    assert kind.__name__ in (errors.__doc__ or "")


def test_a_start_error_shows_its_message_and_then_what_the_ranks_said() -> None:
    error = StartError("rank 1 could not start", details="Traceback ...\nOSError: no")
    assert str(error) == "rank 1 could not start"
    assert error._render_traceback_() == [
        "StartError: rank 1 could not start",
        "Traceback ...",
        "OSError: no",
    ]


def test_a_start_error_without_details_is_one_line() -> None:
    assert StartError("no")._render_traceback_() == ["StartError: no"]


@pytest.mark.parametrize("kind", [CellFailedError, CellInterruptedError])
def test_a_failed_cell_shows_its_report_in_place_of_a_traceback(
    kind: type[CellFailedError],
) -> None:
    error = kind("rank 2: ValueError: no", rank=2, report="first cause\n\n  the others")
    assert str(error) == "rank 2: ValueError: no"
    assert error.rank == 2
    assert error._render_traceback_() == ["first cause", "", "  the others"]


@pytest.mark.parametrize("kind", [CellFailedError, CellInterruptedError])
def test_a_failed_cell_whose_report_was_shown_already_is_one_line(
    kind: type[CellFailedError],
) -> None:
    error = kind("rank 2: ValueError: no", rank=2, report="first cause\n\n  the others")
    assert not error.is_shown
    error.is_shown = True
    assert error._render_traceback_() == ["rank 2: ValueError: no (more above)"]
    assert error.report == "first cause\n\n  the others"
    assert not kind("another", rank=0, report="x").is_shown


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (None, "disappeared"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-999, "was killed by signal 999"),
    ],
)
def test_an_exit_is_said_in_words(exitcode: int | None, words: str) -> None:
    assert describe_exit(exitcode) == words


@given(st.integers())
def test_every_exit_code_has_words(exitcode: int) -> None:
    assert describe_exit(exitcode).startswith(("exited with code ", "was killed by "))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0], "rank 0"),
        ([0, 1], "ranks 0-1"),
        ([3, 1, 2, 0], "ranks 0-3"),
        ([0, 2], "ranks 0,2"),
        ([7, 0, 2, 3, 5], "ranks 0,2-3,5,7"),
    ],
)
def test_ranks_are_named_with_runs_folded(ranks: list[int], words: str) -> None:
    assert say_ranks(ranks) == words


@given(st.sets(st.integers(0, 40), min_size=1))
def test_no_rank_is_left_out_and_none_is_added(ranks: set[int]) -> None:
    word, _, text = say_ranks(sorted(ranks)).partition(" ")
    said: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        said += range(int(low), int(high or low) + 1)
    assert said == sorted(ranks)
    assert word == ("rank" if len(ranks) == 1 else "ranks")
