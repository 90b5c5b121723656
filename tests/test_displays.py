"""What a rank shows beside text."""

from __future__ import annotations

from nbddp.worker.displays import bundle_of

HINT = (
    "nbddp: IntSlider: a widget of a rank cannot be shown; use nbddp.track and nbddp.log, "
    "or make it in a cell of the notebook's own"
)


def test_a_widget_becomes_a_line_that_says_what_to_use() -> None:
    view = {"model_id": "1", "version_major": 2}
    data = {"text/plain": "IntSlider(value=0)", "application/vnd.jupyter.widget-view+json": view}
    assert bundle_of(data, {"isolated": True}) == ({"text/plain": HINT}, {})


def test_a_widget_without_a_text_is_called_a_widget() -> None:
    data = {"application/vnd.jupyter.widget-view+json": {}}
    assert bundle_of(data, None)[0]["text/plain"].startswith("nbddp: a widget: a widget of a rank")


def test_bytes_travel_as_in_jupyters_own_messages() -> None:
    assert bundle_of({"image/png": b"\x89PNG"}, None) == ({"image/png": "iVBORw=="}, {})
