"""A cell as plain text: tags, folded values, displays, and nothing lost at the end."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from processes import wait_until
from screens import RecordingScreen
from syrupy.assertion import SnapshotAssertion

from nbddp.record import log_reader
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.log_reader import LogSpan
from nbddp.record.notices import ControllerMessage as Word
from nbddp.record.notices import Notice, NoticeQueue, RichOutput
from nbddp.record.notices import OutputText as Text
from nbddp.ui import text_view
from nbddp.ui.frontend import StreamTarget
from nbddp.ui.report.blocks import note
from nbddp.ui.text_view import ProgressLine, TextView, UnfinishedLines
from nbddp.wire.messages import CellEnded, Display

FIGURE = {"image/png": "iVBORw0=", "text/plain": "<Figure>"}
BOLD = {"text/html": "<b>x</b>"}
BUNDLE = {"data": FIGURE, "metadata": {"image/png": {"width": 9}}}
Results = dict[int, dict[str, Any]]


@pytest.fixture
def screen() -> RecordingScreen:
    return RecordingScreen()


def begun(size: int = 2) -> CellHandle:
    return CellHandle(1, CellRequest(source=""), tuple(range(size)), lambda payload: payload)


def end(handle: CellHandle, results: Results | None = None) -> None:
    for rank in handle.ranks:
        result = (results or {}).get(rank, {})
        handle.add_report(rank, CellEnded(cell=1, in_group=True, result=result))
    handle.finish()


def finished(*notices: Notice, results: Results | None = None, size: int = 2) -> CellHandle:
    """A cell that sent all these notices and then ended."""
    handle = begun(size)
    for notice in notices:
        handle.notice_queue.put(notice)
    end(handle, results)
    return handle


def plain(text: str) -> dict[str, Any]:
    return {"data": {"text/plain": text}, "metadata": {}}


def display(rank: int, data: dict[str, Any], **more: Any) -> RichOutput:
    return RichOutput(rank, Display(data=data, metadata={}, **more))


# ---- cells that have ended

OUTPUT: dict[str, list[Notice]] = {
    "lines are not mixed": [Text(0, "he"), Text(1, "wor"), Text(0, "llo\n"), Text(1, "ld\n")],
    "a bar is shown in its last state": [Text(0, "\r10%"), Text(0, "\r99%"), Text(0, "\rdone\n")],
    "last lines without an end": [Text(1, "one"), Text(0, "nought")],
    "nbddp speaks under its own name": [Text(0, "a\n"), Word("careful"), Text(0, "b\n")],
    "a display between lines": [Text(0, "before\n"), display(0, BOLD), Text(0, "after\n")],
    "a display of text": [display(1, {"text/plain": "a\nb"})],
    "displays with an id": [
        *(display(rank, BOLD, display_id="bar") for rank in range(2)),
        display(1, FIGURE, display_id="bar", is_update=True),
    ],
}


@pytest.mark.parametrize("notices", OUTPUT.values(), ids=OUTPUT)
def test_output_and_displays_of_ranks_as_text(
    screen: RecordingScreen, notices: list[Notice], snapshot: SnapshotAssertion
) -> None:
    TextView(screen).show(finished(*notices))
    assert screen.shown == snapshot
    assert not any(isinstance(held, str) for held in screen.outputs[screen.visible :])


VALUES: dict[str, Results] = {
    "ranks that agree": dict.fromkeys(range(4), plain("1.5")),
    "ranks that differ": {0: plain("0"), 1: plain("1"), 2: plain("0")},
    "several lines": {0: plain("a\nb")},
    "something rich": dict.fromkeys(range(2), BUNDLE),
    "nothing": {0: {"data": {}, "metadata": {}}},
}


@pytest.mark.parametrize("results", VALUES.values(), ids=VALUES)
def test_values_of_ranks_as_text(
    screen: RecordingScreen, results: Results, snapshot: SnapshotAssertion
) -> None:
    handle = finished(results=results, size=4)
    result = TextView(screen).show(handle)
    assert result is handle.result
    assert result.is_ok
    assert screen.shown == snapshot


def test_results_come_after_all_output_and_quiet_hides_rank_output() -> None:
    outputs = [Text(0, "noise\nand more"), display(0, FIGURE), Word("rank 1 is gone")]
    loud, quiet = RecordingScreen(), RecordingScreen()
    view = TextView(loud, remarks=lambda _: [note("a remark")])
    view.show(finished(*outputs, Text(0, "partial"), results={0: plain("1")}))
    assert loud.text.endswith("[rank 0] partial\nOut [rank 0] 1\nnbddp: a remark\n")
    TextView(quiet, is_quiet=True).show(finished(*outputs, results={0: plain("1")}))
    assert quiet.shown == ["nbddp: rank 1 is gone\nOut [rank 0] 1\n"]
    quiet = RecordingScreen()
    TextView(quiet, is_quiet=True).show(finished(*(Text(0, "x\n") for _ in range(100))))
    assert (quiet.outputs, quiet.flushes) == ([], 0)


def test_each_of_eight_ranks_has_its_own_colour_on_a_colour_screen(screen: RecordingScreen) -> None:
    screen.has_color = True
    TextView(screen).show(finished(*(Text(rank, "x\n") for rank in range(9)), size=9))
    begins = [line.partition("m")[0] for line in screen.text.split("\n")]
    assert len(set(begins[:8])) == 8
    assert begins[8] == begins[0]
    for rank, line in enumerate(screen.text.splitlines()):
        assert re.fullmatch(rf"\x1b\[[0-9;]+m\[rank {rank}\]\x1b\[0m x", line)


def test_a_text_stream_shows_rich_displays_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    TextView(StreamTarget()).show(
        finished(
            display(0, FIGURE),
            display(0, FIGURE, display_id="x", is_update=True),
            display(0, {"image/png": "iVBORw0="}),
            results={1: plain("1")},
        )
    )
    assert capsys.readouterr().out == "[rank 0]\n<Figure>\n[rank 0]\nOut [rank 1] 1\n"


class BrokenProgress(ProgressLine):
    def __init__(self) -> None: ...

    def update(self, *_: object) -> None:
        raise TypeError("broken")

    def clear(self, screen: StreamTarget) -> None: ...

    show_charts = update  # type: ignore[assignment]


def test_error_of_a_view_is_told_once_and_the_cell_is_followed_on(
    screen: RecordingScreen, caplog: pytest.LogCaptureFixture
) -> None:
    handle = finished(Text(0, "one\n"), Text(1, "two\n"))
    view = TextView(screen, progress=BrokenProgress(), remarks=lambda _: 1 / 0)  # type: ignore[return-value]
    assert view.show(handle) is handle.result
    assert [line for line in screen.text.splitlines() if "nbddp" not in line] == [
        "[rank 0] one",
        "[rank 1] two",
    ]
    assert screen.text.count("cannot be shown (TypeError: broken). The cell goes on") == 1
    assert [each.name for each in caplog.records] == ["nbddp.ui.frontend"]
    screen.write = Mock(side_effect=BrokenPipeError)  # type: ignore[method-assign]
    with pytest.raises(BrokenPipeError):
        TextView(screen).show(finished(Text(0, "one\n"), Text(0, "two\n")))


def test_notices_that_end_before_their_cell_raise_an_error(screen: RecordingScreen) -> None:
    handle: Any = SimpleNamespace(notice_queue=SimpleNamespace(is_drained=True), result=None)
    with pytest.raises(RuntimeError):
        TextView(screen).show(handle)


# ---- lines that are unfinished while the cell runs


@contextmanager
def shown(handle: CellHandle, view: TextView) -> Iterator[CellHandle]:
    """Show a cell while it runs; it ends with the block."""
    with ThreadPoolExecutor(1) as pool:
        showing = pool.submit(view.show, handle)
        try:
            yield handle
        finally:
            if not handle.is_finished:
                end(handle)
        showing.result(30)


LOAD = "[rank 0] \x1b[32mload"
BELOW = f"{LOAD}\x1b[0m\n[rank 1] other\nnbddp: word\n"
NEXT = "[rank 0] figure:\n[rank 0]\n[rank 0] next"
# what comes while a line is unfinished, and then all that is shown
UNFINISHED: dict[str, list[tuple[list[Notice], str]]] = {
    "continued in place": [
        ([Text(0, ".")], "[rank 0] ."),
        ([Text(0, ".")], "[rank 0] .."),
        ([Text(0, " done\nnext\n")], "[rank 0] .. done\n[rank 0] next\n"),
    ],
    "repeated in full below new output": [
        ([Text(0, "\x1b[32mload")], LOAD),
        ([Text(1, "other\n"), Word("word")], BELOW),
        ([Text(0, "ed\n")], f"{BELOW}{LOAD}ed\n"),
    ],
    "ended by a display, and shown once at the end of the cell": [
        ([Text(0, "figure:")], "[rank 0] figure:"),
        ([display(0, FIGURE), Text(0, "next")], NEXT),
        ([Text(1, "at last")], f"{NEXT}\n[rank 1] at last"),
        ([], f"{NEXT}\n[rank 1] at last\n[rank 0] next\n"),
    ],
}


@pytest.mark.parametrize("steps", UNFINISHED.values(), ids=UNFINISHED)
def test_an_unfinished_line_is_shown(
    screen: RecordingScreen, steps: list[tuple[list[Notice], str]]
) -> None:
    with shown(begun(), TextView(screen)) as handle:
        for notices, text in steps:
            for notice in notices:
                handle.notice_queue.put(notice)
            if not notices:
                end(handle)
            assert wait_until(lambda text=text: screen.text == text)
            assert wait_until(lambda: screen.visible == len(screen.outputs))


def test_ranks_that_print_dots_at_once_show_few_unfinished_lines() -> None:
    lines, shown = UnfinishedLines(), 0
    for tick in range(6000):  # ten minutes
        now = tick / 10
        for rank in range(4):
            lines.update(rank, ".", "." * (tick + 1), now)
        while lines.pop_due(now):
            shown += 1
    assert 12 < shown < 60


def test_a_progress_bar_does_not_count_as_an_unfinished_line() -> None:
    lines = UnfinishedLines()
    lines.update(0, "\r 10%", " 10%", 0.0)
    lines.update(1, "long", "l" * 5000, 0.0)
    assert lines.pop_due(9.0) is None
    lines.update(0, "\r100%\nnext", "next", 9.0)
    assert lines.pop_due(10.0) == (0, "next", "")


# ---- many lines


def test_simultaneous_output_of_all_ranks_is_shown_at_once(
    screen: RecordingScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLUSH_PERIOD", "MAX_PERIOD"):
        monkeypatch.setattr(text_view, name, 60.0)
    monkeypatch.setattr(text_view, "PAUSE_ALLOWANCE", 600.0)
    with shown(begun(4), TextView(screen)) as handle:
        for rank in range(4):
            handle.notice_queue.put(Text(rank, "step 1\n"))
        assert wait_until(lambda: screen.text.count("step 1") == 4)


def test_a_flood_of_output_is_written_in_few_pieces_without_losses(
    screen: RecordingScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLUSH_PERIOD", "MAX_PERIOD"):
        monkeypatch.setattr(text_view, name, 10.0)
    TextView(screen).show(finished(*(Text(0, f"{number}\n") for number in range(5000))))
    assert screen.text == "".join(f"[rank 0] {number}\n" for number in range(5000))
    assert max(len(screen.outputs), screen.flushes) <= 3


def test_a_slow_screen_shows_the_start_and_end_of_a_flood_and_does_not_delay_the_cell(
    screen: RecordingScreen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(text_view, "BURST_SIZE", 5000.0)
    monkeypatch.setattr(log_reader, "MAX_SHOWN", 5000)
    monkeypatch.setattr(log_reader, "SHOWN_END", 500)
    log = tmp_path / "rank0.log"
    text = "".join(f"line {number}\n" for number in range(10_000))
    log.write_text(text)
    handle = begun(1)
    handle.notice_queue = NoticeQueue(max_text=1000)
    screen.pace = 10.0
    with shown(handle, TextView(screen)):
        for at in range(0, len(text), 100):
            piece = text[at : at + 100]
            handle.notice_queue.put(Text(0, piece, LogSpan(0, log, at, at + len(piece))))
            time.sleep(0.0005)
        assert not wait_until(lambda: "line 9999" in screen.text, timeout=0.2)
    lines = screen.text.splitlines()
    assert lines[0] == "[rank 0] line 0"
    assert lines[-1] == "[rank 0] line 9999"
    assert len(screen.text) < 20_000
    assert sum("rank0.log" in line for line in lines) == 1
