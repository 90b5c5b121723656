"""Whether the other end draws widgets: told by how it asks for the cell that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbddp.ui.frontend import OF_COLAB, OF_KAGGLE, shows_widgets

PAGE = {"metadata": {"cellId": "a1b2"}, "content": {"allow_stdin": True, "code": "x"}}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on Colab nor on Kaggle."""
    for name in (OF_COLAB, OF_KAGGLE):
        monkeypatch.delenv(name, raising=False)


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


def terminal() -> Any:
    return SimpleNamespace()


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
    assert not shows_widgets(terminal())
    without: Any = SimpleNamespace(kernel=None)
    assert not shows_widgets(without)


def test_the_answer_is_a_claim() -> None:
    assert shows(PAGE) is True
    assert shows({}) is False


UNNAMED = {"metadata": {}, "content": PAGE["content"], "header": {"version": "5.3"}}


def test_colabs_page_names_its_cell_in_a_way_of_its_own() -> None:
    named = {"colab": {"cell_id": "Zf3a", "base_url": "https://colab"}}
    assert shows({"metadata": named, "content": {"allow_stdin": False}})
    assert not shows({**UNNAMED, "metadata": {"colab": {"cell_id": ""}}})
    assert not shows({**UNNAMED, "metadata": {"colab": {}}})


@pytest.mark.parametrize(
    ("name", "value"), [(OF_COLAB, "release-colab_7"), (OF_KAGGLE, "Interactive")]
)
def test_there_it_is_a_page_if_it_takes_input(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not shows(UNNAMED)
    monkeypatch.setenv(name, value)
    assert shows(UNNAMED)
    assert not shows({**UNNAMED, "content": {"allow_stdin": False}})  # nbclient
    assert not shows({})
    assert not shows_widgets(terminal())


def test_kaggles_batch_runs_get_text_whatever_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OF_COLAB, "release-colab_7")  # whose image Kaggle's is made from
    monkeypatch.setenv(OF_KAGGLE, "Batch")
    kernel = SimpleNamespace(get_parent=lambda _channel: PAGE)
    shell: Any = SimpleNamespace(kernel=kernel)
    assert not shows_widgets(shell)
