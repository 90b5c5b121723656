"""Whether the other end draws widgets: told by how it asks for the cell that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbddp.ui.frontend import shows_widgets

PAGE = {"metadata": {"cellId": "a1b2"}, "content": {"allow_stdin": True, "code": "x"}}


def shows(request: Any) -> bool:
    """Whether a kernel that was asked this shows widgets."""
    asked: list[str] = []

    def get_parent(channel: str) -> Any:
        asked.append(channel)
        return request

    shell: Any = SimpleNamespace(kernel=SimpleNamespace(get_parent=get_parent))
    answer = shows_widgets(shell)
    assert asked == ["shell"]
    return answer


def test_a_page_that_names_its_cell_and_takes_input_shows_widgets() -> None:
    assert shows(PAGE)
    assert shows({**PAGE, "header": {"msg_type": "execute_request"}})


def test_a_page_that_names_no_cell_is_known_by_its_protocol() -> None:
    classic = {"content": PAGE["content"], "metadata": {}, "header": {"version": "5.2"}}
    assert shows(classic)
    assert not shows({**classic, "content": {"allow_stdin": False}})


@pytest.mark.parametrize(
    "request_",
    [
        {**PAGE, "metadata": {}},
        {**PAGE, "metadata": {}, "header": {"version": "5.3"}},
        {**PAGE, "metadata": {"cellId": ""}},
        {**PAGE, "metadata": {"deletedCells": []}},
        {"content": PAGE["content"]},
        {**PAGE, "content": {"allow_stdin": False}},
        {**PAGE, "content": {}},
        {"metadata": PAGE["metadata"]},
        {},
        None,
    ],
    ids=repr,
)
def test_nothing_else_does(request_: Any) -> None:
    assert not shows(request_)


def test_a_shell_without_a_kernel_is_a_terminal() -> None:
    terminal: Any = SimpleNamespace()
    assert not shows_widgets(terminal)
    terminal.kernel = None
    assert not shows_widgets(terminal)


def test_the_answer_is_a_claim() -> None:
    assert shows(PAGE) is True
    assert shows({}) is False
