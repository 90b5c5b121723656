"""Whether the front end draws widgets, found from its request for the running cell."""

from types import SimpleNamespace
from typing import Any

import pytest

from nbddp.ui.frontend import COLAB_VARIABLE, KAGGLE_VARIABLE, supports_widgets

PAGE = {"metadata": {"cellId": "a1b2"}, "content": {"allow_stdin": True, "code": "x"}}
UNNAMED = {**PAGE, "metadata": {}, "header": {"version": "5.3"}}
CLASSIC = {**UNNAMED, "header": {"version": "5.2"}}  # known by its protocol
NO_INPUT = {"allow_stdin": False}  # nbclient


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (COLAB_VARIABLE, KAGGLE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def shows(request: Any) -> bool:
    shell: Any = SimpleNamespace(kernel=SimpleNamespace(get_parent={"shell": request}.get))
    return supports_widgets(shell)


COLAB = {"colab": {"cell_id": "Zf3a", "base_url": "b"}}
WITH_WIDGETS = [PAGE, CLASSIC, {"metadata": COLAB, "content": NO_INPUT}]
WITHOUT: list[Any] = [
    *(None, {}, UNNAMED, {**UNNAMED, "metadata": {"colab": {"cell_id": ""}}}),
    *({**CLASSIC, "content": NO_INPUT}, {**PAGE, "content": NO_INPUT}),
    *({**PAGE, "metadata": {}}, {**PAGE, "metadata": {"cellId": ""}}, {"content": PAGE["content"]}),
    *({**PAGE, "content": {}}, {"metadata": PAGE["metadata"]}),
]


def test_a_frontend_that_identifies_the_cell_and_accepts_input_shows_widgets() -> None:
    assert [request for request in WITH_WIDGETS if not shows(request)] == []
    assert [request for request in WITHOUT if shows(request)] == []


@pytest.mark.parametrize(
    ("name", "value"), [(COLAB_VARIABLE, "release-colab_7"), (KAGGLE_VARIABLE, "Interactive")]
)
def test_known_frontends_show_widgets_if_they_take_input(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert shows(UNNAMED)
    assert not shows({**UNNAMED, "content": NO_INPUT})
    assert not shows({})
    terminals: list[Any] = [SimpleNamespace(), SimpleNamespace(kernel=None)]
    assert not any(map(supports_widgets, terminals))


def test_kaggle_batch_runs_get_text_in_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLAB_VARIABLE, "release-colab_7")  # Kaggle's image is made from Colab's
    monkeypatch.setenv(KAGGLE_VARIABLE, "Batch")
    assert not shows(PAGE)
