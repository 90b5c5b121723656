"""Displays of a rank other than text."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.worker.cell.display import sendable_bundle

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize(
    "text", [{"text/plain": "IntSlider(value=0)"}, {}], ids=["a widget", "one without a text"]
)
def test_a_widget_is_sent_as_a_text_line_that_suggests_an_alternative(
    text: dict[str, str], snapshot: SnapshotAssertion
) -> None:
    assert sendable_bundle(text | {WIDGET: {"model_id": "1"}}, {"isolated": True}) == snapshot


def test_bytes_in_a_display_are_base64_encoded_as_in_jupyter_messages() -> None:
    assert sendable_bundle({"image/png": b"\x89PNG"}, None) == ({"image/png": "iVBORw=="}, {})
