"""Errors carry the text for the user."""

import traceback

import pytest

from nbddp import errors
from nbddp.errors import CellFailedError, CellInterruptedError, NbddpError, StartError


def test_a_start_error_shows_its_message_before_the_details_of_the_ranks() -> None:
    error = StartError("rank 1 is gone", details="Traceback ...\nOSError: no")
    assert str(error) == "rank 1 is gone"
    lines = ["StartError: rank 1 is gone", "Traceback ...", "OSError: no"]
    assert error._render_traceback_() == lines
    assert StartError("no")._render_traceback_() == ["StartError: no"]


def test_every_error_class_derives_from_nbddp_error() -> None:
    kinds = [each for name, each in vars(errors).items() if name.endswith("Error")]
    assert all(issubclass(each, NbddpError) for each in kinds)


@pytest.mark.parametrize("kind", [CellFailedError, CellInterruptedError])
def test_a_failed_cell_shows_its_report_once_in_place_of_a_traceback(
    kind: type[CellFailedError],
) -> None:
    title = "rank 2: ValueError: no"
    error = kind(title, rank=2, report=f"first cause: {title}\n\n  the others")
    assert (str(error), error.rank) == (title, 2)
    assert error._render_traceback_() == [f"first cause: {title}", "", "  the others"]
    in_python = "".join(traceback.format_exception(error))
    assert in_python.count(title) == 1
    assert "  the others" in in_python
    error.is_shown = True
    [line] = error._render_traceback_()
    assert line.startswith(f"{title} (")
