"""Displays of a rank other than text, and text that is too long for a page."""

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.ui.log_lines import split_text_and_rich
from nbddp.wire.messages import Display, Failure
from nbddp.worker.cell.display import (
    MAX_MESSAGE,
    MAX_TEXT,
    RankDisplayPublisher,
    sendable_bundle,
    truncate_display,
    truncate_failure,
    truncate_value,
)

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


def test_displays_after_clear_output_replace_the_earlier_displays() -> None:
    sent: list[Display] = []
    publisher = RankDisplayPublisher()
    publisher.send = sent.append

    def shown(*texts: str) -> list[str]:
        """The displays of a cell at its end, in which an empty text clears."""
        publisher.begin_cell(1)
        sent.clear()
        for text in texts:
            publisher.publish({"image/png": text}) if text else publisher.clear_output(wait=True)
        first = [each.display_id for each in sent if not each.is_update]
        assert len(first) == len(set(first))
        newest = {each.display_id: each.data["image/png"] for each in sent}
        return [newest[each] for each in first]

    assert shown("", "1", "", "2", "", "3", "3") == ["3"]  # IPython shows an open figure again
    assert shown("1", "", "2", "") == ["2"]
    assert shown("", "1", "a", "", "1", "b") == ["1", "b"]
    assert shown("1", "", "2", "new") == ["2", "new"]
    assert shown("1", "1") == ["1", "1"]
    for clears, count in ((False, 2), (True, 1)):
        publisher.begin_cell(2)
        sent.clear()
        for text in "ab":
            publisher.clear_output() if clears else None
            publisher.publish({"text/plain": text})
        assert len({each.display_id or number for number, each in enumerate(sent)}) == count
        assert all(bool(each.display_id) is clears for each in sent)


# ---- text that is too long


def value(text: str) -> dict[str, object]:
    return {"data": {"text/plain": text, "text/html": text}, "metadata": {"a": 1}}


def test_pictures_and_values_within_the_limit_are_not_truncated() -> None:
    bundle = value("x" * MAX_TEXT)
    assert truncate_value(bundle) == bundle
    assert truncate_display(bundle["data"]) == bundle["data"]
    picture = {"image/png": "A" * 12_000_000}
    assert truncate_display(picture) == picture
    failure = Failure(name="E", text="x" * MAX_MESSAGE, traceback="x" * MAX_TEXT)
    assert truncate_failure(failure) == failure


def test_truncated_values_and_displays_name_a_way_to_the_rest_and_keep_other_mime_types() -> None:
    text = "x" * MAX_TEXT + "y" * 8_900_002
    short = truncate_value(value(text))
    hint = "\n… 8,900,002 more characters; `%ddp pull _` fetches the value"
    assert short["data"] == {"text/plain": "x" * MAX_TEXT + hint, "text/html": text}
    assert short["metadata"] == {"a": 1}
    shown = truncate_display({"text/plain": "x" * (MAX_TEXT + 1), "text/html": text})
    hint = "\n… 1 more characters; print it instead, and the log has all of it"
    assert shown == {"text/plain": "x" * MAX_TEXT + hint, "text/html": text}


def test_truncated_values_that_differ_after_the_cut_are_in_different_groups() -> None:
    texts = ["x" * MAX_TEXT + end for end in ("a", "b", "a")]
    results = {rank: truncate_value(value(text)) for rank, text in enumerate(texts)}
    assert [ranks for ranks, _ in split_text_and_rich(results)[1]] == [[0, 2], [1]]


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    long = Failure(name="E", text="t" * 9_000_000, traceback="begin" + "x" * 9_000_000 + "end")
    short = truncate_failure(long)
    hint = "more characters; `sys.last_value` on the rank has all of it"
    assert short.text == "t" * MAX_MESSAGE + f"\n… 8,990,000 {hint}"
    assert short.traceback.startswith("beginxxx")
    assert short.traceback.endswith("xxxend")
    assert f"\n… 8,900,008 {hint}\n" in short.traceback
    assert len(short.traceback) < MAX_TEXT + 200
