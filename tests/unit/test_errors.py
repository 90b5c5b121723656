"""Errors carry the text for the user."""

from __future__ import annotations

import traceback

import pytest

from nbddp import errors
from nbddp.errors import CellFailedError, CellInterruptedError, NbddpError, StartError


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
