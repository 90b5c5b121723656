"""What is said of an error that ended a cell."""

from __future__ import annotations

import sys
import traceback

import pytest

from nbddp.worker.failure import describe, hide_end, needs_pythons_format, plain, pythons_format
from nbddp.worker.headline import text_of


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("inner")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def is_this_file(filename: str) -> bool:
    return filename == __file__


def test_an_exception_that_cannot_be_turned_into_text_keeps_its_own_name() -> None:
    failure = describe(
        raised(OddError()), "", is_cell_file=is_this_file, stuck_in=None, at=1.0, names={}
    )
    assert failure.name == "OddError"
    assert failure.text.endswith("__str__() raised RuntimeError")
    assert failure.traceback.endswith("OddError: <exception str() failed>\n")
    assert plain(raised(OddError())).text == failure.text
    assert text_of(ValueError("too low")) == "too low"


def test_ipython_shows_what_it_can() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert not needs_pythons_format(one)  # and does not go round for ever
    assert not needs_pythons_format(raised(ValueError("plain"), KeyError("cause")))
    assert needs_pythons_format(raised(ValueError("plain"), OddError()))
    assert needs_pythons_format(OddError())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_the_members_of_a_group_are_in_its_traceback() -> None:
    group = raised(
        ExceptionGroup("several", [ValueError("first"), TypeError("second")])  # noqa: F821
    )
    assert needs_pythons_format(group)
    text = pythons_format(group, is_cell_file=is_this_file)
    assert "ValueError: first" in text
    assert "TypeError: second" in text


def test_a_traceback_begins_in_the_cell() -> None:
    def cell() -> None:
        raise OddError from None  # not with what the test runner handles just now

    exec_it = compile("cell()", "<machinery>", "exec")
    with pytest.raises(OddError) as caught:
        exec(exec_it, {"cell": cell})
    text = pythons_format(caught.value, is_cell_file=lambda name: name == "<machinery>")
    assert text.count("File ") == 2
    assert "<machinery>" in text.splitlines()[1]


def test_a_traceback_of_very_many_calls_is_pythons() -> None:
    def call(depth: int) -> None:
        if depth:
            call(depth - 1)
        raise ValueError("deep")

    with pytest.raises(ValueError, match="deep") as caught:
        call(300)
    assert needs_pythons_format(caught.value)
    assert "more times]" in pythons_format(caught.value, is_cell_file=is_this_file)


def test_what_hides_at_the_end_of_a_traceback_is_cut() -> None:
    def hides() -> None:
        __tracebackhide__ = True
        raise ValueError("said of the user's line")

    with pytest.raises(ValueError, match="said") as caught:
        hides()
    hide_end(caught.value)
    assert "in hides" not in "".join(traceback.format_exception(caught.value))
    assert "hides()" in "".join(traceback.format_exception(caught.value))
