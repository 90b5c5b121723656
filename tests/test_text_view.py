"""A cell as plain text: tags, folded values, displays, and nothing lost at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import wait_until

from nbddp.record import logs
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.logs import Logged
from nbddp.record.notices import Displayed, Notice, Notices, Said, Wrote
from nbddp.ui.screen import StreamScreen
from nbddp.ui.text import view as room
from nbddp.ui.text.unfinished import UnfinishedLines
from nbddp.ui.text.view import TextView
from nbddp.wire.messages import CellEnded, Display

FIGURE = {"image/png": "iVBORw0=", "text/plain": "<Figure>"}


class RecordingScreen:
    """Keeps what was put on it, in order, and what was visible when."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.flushed = 0

    def write(self, text: str) -> None:
        self.things.append(text)

    def flush(self) -> None:
        self.flushed = len(self.things)

    def display(self, data: Any, metadata: Any, *, display_id: str, is_update: bool) -> None:
        self.things.append((data, metadata, display_id, is_update))

    @property
    def text(self) -> str:
        return "".join(each for each in self.things if isinstance(each, str))


@pytest.fixture
def screen() -> RecordingScreen:
    return RecordingScreen()


def plain(text: str) -> dict[str, Any]:
    return {"data": {"text/plain": text}, "metadata": {}}


def finished(*notices: Notice, results: dict[int, Any] | None = None, size: int = 2) -> CellHandle:
    """A cell that said all this and then ended."""
    handle = CellHandle(1, CellRequest(source=""), range(size), lambda parcel: parcel)
    for notice in notices:
        handle.feed(notice)
    for rank in range(size):
        result = (results or {}).get(rank, {})
        handle.note_report(rank, CellEnded(cell=1, seconds=0.1, in_group=True, result=result))
    handle.finish()
    return handle


def display(rank: int, data: dict[str, Any], **more: Any) -> Displayed:
    return Displayed(rank, Display(cell=1, data=data, metadata={}, **more))


def test_every_line_has_its_rank_in_front(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(0, "a\nb\n"), Wrote(1, "c\n")))
    assert screen.text == "[rank 0] a\n[rank 0] b\n[rank 1] c\n"


def test_lines_of_ranks_that_write_at_once_are_not_mixed(screen: RecordingScreen) -> None:
    TextView(screen).show(
        finished(Wrote(0, "he"), Wrote(1, "wor"), Wrote(0, "llo\n"), Wrote(1, "ld\n"))
    )
    assert screen.text == "[rank 0] hello\n[rank 1] world\n"


def test_a_progress_bar_is_shown_in_its_last_state(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(0, "\r10%"), Wrote(0, "\r99%"), Wrote(0, "\rdone\n")))
    assert screen.text == "[rank 0] done\n"


def test_a_last_line_without_an_end_is_shown_too_in_order_of_rank(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(1, "one"), Wrote(0, "nought")))
    assert screen.text == "[rank 0] nought\n[rank 1] one\n"


@pytest.fixture
def going(screen: RecordingScreen) -> Iterator[CellHandle]:
    """A cell of two ranks that is shown while it runs, and ends after the test."""
    handle = CellHandle(1, CellRequest(source=""), range(2), lambda parcel: parcel)
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(TextView(screen).show, handle)
        yield handle
        if not handle.is_finished:
            end(handle)
        shown.result()


def end(handle: CellHandle) -> None:
    for rank in range(2):
        handle.note_report(rank, CellEnded(cell=1, seconds=0.1, in_group=True))
    handle.finish()


def test_an_unfinished_line_is_shown_and_goes_on_where_it_is(
    screen: RecordingScreen, going: CellHandle
) -> None:
    for dots in (".", "..", "..."):
        going.feed(Wrote(0, "."))
        assert wait_until(lambda dots=dots: screen.text == f"[rank 0] {dots}")
        assert screen.flushed == len(screen.things)
    going.feed(Wrote(0, " done\nnext\n"))
    assert wait_until(lambda: screen.text == "[rank 0] ... done\n[rank 0] next\n")


def test_what_comes_meanwhile_stands_below_an_unfinished_line_and_the_line_comes_again_in_full(
    screen: RecordingScreen, going: CellHandle
) -> None:
    going.feed(Wrote(0, "\x1b[32mload"))
    assert wait_until(lambda: screen.text == "[rank 0] \x1b[32mload")
    going.feed(Wrote(1, "other\n"))
    going.feed(Said("word"))
    below = "[rank 0] \x1b[32mload\x1b[0m\n[rank 1] other\nnbddp: word\n"
    assert wait_until(lambda: screen.text == below)
    going.feed(Wrote(0, "ed\n"))
    assert wait_until(lambda: screen.text == f"{below}[rank 0] \x1b[32mloaded\n")


def test_an_unfinished_line_at_the_end_of_the_cell_is_shown_once(
    screen: RecordingScreen, going: CellHandle
) -> None:
    going.feed(Wrote(0, "at first"))
    going.feed(Wrote(1, "at last"))
    assert wait_until(lambda: screen.text == "[rank 0] at first\n[rank 1] at last")
    end(going)
    ended = "[rank 0] at first\n[rank 1] at last\n[rank 0] at first\n"
    assert wait_until(lambda: screen.text == ended)


def test_a_display_ends_an_unfinished_line(screen: RecordingScreen, going: CellHandle) -> None:
    going.feed(Wrote(0, "figure:"))
    assert wait_until(lambda: screen.text == "[rank 0] figure:")
    going.feed(display(0, FIGURE))
    going.feed(Wrote(0, "next"))
    assert wait_until(lambda: screen.text == "[rank 0] figure:\n[rank 0]\n[rank 0] next")


def test_ranks_that_print_dots_at_once_show_few_unfinished_lines() -> None:
    lines, shown = UnfinishedLines(), 0
    for tick in range(6000):  # ten minutes
        now = tick / 10
        for rank in range(4):
            lines.note(rank, ".", "." * (tick + 1), now)
        while lines.take_due(now):
            shown += 1
    assert 12 < shown < 60


def test_a_bar_is_no_unfinished_line() -> None:
    lines = UnfinishedLines()
    lines.note(0, "\r 10%", " 10%", 0.0)
    lines.note(1, "long", "l" * 5000, 0.0)
    assert lines.take_due(9.0) is None
    lines.note(0, "\r100%\nnext", "next", 9.0)
    assert lines.take_due(10.0) == (0, "next", "")


def test_what_was_shown_is_visible_when_the_cell_has_ended(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(0, "a\n"), results={0: plain("1")}))
    assert screen.flushed == len(screen.things) > 0


def test_a_line_is_visible_at_once_when_nothing_else_waits(screen: RecordingScreen) -> None:
    view = TextView(screen)
    view.follow(finished(Wrote(0, "a\n"), Wrote(0, "b\n")))
    assert screen.flushed >= 1


def test_values_of_ranks_that_agree_are_shown_once(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(results={rank: plain("1.5") for rank in range(4)}, size=4))
    assert screen.text == "Out [ranks 0-3] 1.5\n"


def test_values_that_differ_are_shown_apart(screen: RecordingScreen) -> None:
    results = {0: plain("0"), 1: plain("1"), 2: plain("0")}
    TextView(screen).show(finished(results=results, size=3))
    assert screen.text == "Out [ranks 0,2] 0\nOut [rank 1] 1\n"


def test_a_value_of_several_lines_has_its_ranks_before_each(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(results={0: plain("a\nb")}))
    assert screen.text == "Out [rank 0] a\nOut [rank 0] b\n"


def test_a_rich_value_is_displayed_under_its_ranks(screen: RecordingScreen) -> None:
    bundle = {"data": FIGURE, "metadata": {"image/png": {"width": 9}}}
    TextView(screen).show(finished(results={0: bundle, 1: bundle}))
    assert screen.things == [
        "[ranks 0-1]\n",
        (FIGURE, {"image/png": {"width": 9}}, "", False),
    ]


def test_a_rank_without_a_value_shows_none(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(results={1: plain("1")}))
    assert screen.text == "Out [rank 1] 1\n"


def test_an_empty_bundle_shows_nothing(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(results={0: {"data": {}, "metadata": {}}}))
    assert screen.things == []


def test_values_come_after_all_output(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(0, "partial"), results={0: plain("1")}))
    assert screen.text == "[rank 0] partial\nOut [rank 0] 1\n"


def test_a_display_is_shown_under_its_rank(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(display(1, FIGURE)))
    assert screen.things == ["[rank 1]\n", (FIGURE, {}, "", False)]


def test_a_display_of_text_is_lines_like_any_other(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(display(1, {"text/plain": "a\nb"})))
    assert screen.things == ["[rank 1] a\n[rank 1] b\n"]


def test_a_display_with_an_id_keeps_it_apart_from_the_other_ranks(
    screen: RecordingScreen,
) -> None:
    text = {"text/plain": "5%"}
    TextView(screen).show(
        finished(
            display(0, text, display_id="bar"),
            display(1, text, display_id="bar"),
            display(1, {"text/plain": "9%"}, display_id="bar", is_update=True),
        )
    )
    assert screen.things == [
        "[rank 0]\n",
        (text, {}, "nbddp-0-bar", False),
        "[rank 1]\n",
        (text, {}, "nbddp-1-bar", False),
        ({"text/plain": "9%"}, {}, "nbddp-1-bar", True),
    ]


def test_quiet_shows_values_and_words_of_the_controller_only(screen: RecordingScreen) -> None:
    TextView(screen, is_quiet=True).show(
        finished(
            Wrote(0, "noise\nand more"),
            display(0, FIGURE),
            Said("rank 1 did not answer"),
            results={0: plain("1")},
        )
    )
    assert screen.things == ["nbddp: rank 1 did not answer\n", "Out [rank 0] 1\n"]


def test_the_controller_speaks_under_its_own_name(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(0, "a\n"), Said("careful"), Wrote(0, "b\n")))
    assert screen.text == "[rank 0] a\nnbddp: careful\n[rank 0] b\n"


def test_every_rank_has_a_colour_where_there_are_colours(screen: RecordingScreen) -> None:
    view = TextView(screen, has_color=True)
    view.show(finished(*(Wrote(rank, "x\n") for rank in range(9)), size=9))
    begins = [line.partition("m")[0] for line in screen.text.split("\n")]
    assert len(set(begins[:8])) == 8
    assert begins[8] == begins[0]
    for rank, line in enumerate(screen.text.splitlines()):
        assert re.fullmatch(rf"\x1b\[[0-9;]+m\[rank {rank}\]\x1b\[0m x", line)


def test_markup_that_a_rank_prints_stays_text(screen: RecordingScreen) -> None:
    TextView(screen).show(finished(Wrote(0, "<script>alert(1)</script>\n")))
    assert screen.things == ["[rank 0] <script>alert(1)</script>\n"]


def test_the_result_is_returned(screen: RecordingScreen) -> None:
    handle = finished(results={0: plain("1")})
    result = TextView(screen).show(handle)
    assert result is handle.result
    assert result.is_ok


def test_a_cell_whose_notices_end_before_it_does_is_a_mistake_of_ours(
    screen: RecordingScreen,
) -> None:
    handle: Any = SimpleNamespace(is_told=True, result=None)
    with pytest.raises(RuntimeError) as caught:
        TextView(screen).show(handle)
    assert str(caught.value) == "the cell's notices ended before the cell did"


def test_a_stream_shows_rich_things_as_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    TextView(StreamScreen()).show(
        finished(
            display(0, FIGURE),
            display(0, FIGURE, display_id="x", is_update=True),
            display(0, {"image/png": "iVBORw0="}),
            results={1: plain("1")},
        )
    )
    assert capsys.readouterr().out == "[rank 0]\n<Figure>\n[rank 0]\nOut [rank 1] 1\n"


class CountingScreen(RecordingScreen):
    """Counts how often it is made to show what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def flush(self) -> None:
        super().flush()
        self.times += 1


def test_a_flood_is_shown_in_few_pieces_and_none_is_lost() -> None:
    screen = CountingScreen()
    TextView(screen).show(finished(*(Wrote(0, f"{number}\n") for number in range(5000))))
    assert screen.text == "".join(f"[rank 0] {number}\n" for number in range(5000))
    assert screen.times < 50


def test_quiet_cells_make_the_screen_show_nothing_again_and_again() -> None:
    screen = CountingScreen()
    TextView(screen, is_quiet=True).show(finished(*(Wrote(0, "x\n") for _ in range(100))))
    assert (screen.things, screen.times) == ([], 0)


def test_what_was_printed_stands_above_what_was_displayed_after_it(
    screen: RecordingScreen,
) -> None:
    rich = display(0, {"text/html": "<b>x</b>"})
    TextView(screen).show(finished(Wrote(0, "before\n"), rich, Wrote(0, "after\n")))
    before, _caption, shown, after = screen.things
    assert (before, after) == ("[rank 0] before\n", "[rank 0] after\n")
    assert shown[0] == {"text/html": "<b>x</b>"}


def test_what_ranks_print_at_the_same_moment_is_shown_at_once(
    screen: RecordingScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLUSH_PERIOD", "MAX_PERIOD"):
        monkeypatch.setattr(room, name, 60.0)
    monkeypatch.setattr(room, "SLACK", 600.0)
    handle = CellHandle(1, CellRequest(source=""), tuple(range(4)), lambda parcel: parcel)
    view = TextView(screen)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(view.follow, handle)
        for rank in range(4):
            handle.feed(Wrote(rank, "step 1\n"))
        came = wait_until(lambda: screen.text.count("step 1") == 4)
        handle.finish()
        following.result(30)
    assert came


def test_of_a_flood_the_pieces_are_rare(
    screen: RecordingScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLUSH_PERIOD", "MAX_PERIOD"):
        monkeypatch.setattr(room, name, 10.0)
    handle = CellHandle(1, CellRequest(source=""), (0,), lambda parcel: parcel)
    for number in range(10_000):
        handle.feed(Wrote(0, f"{number}\n"))
    handle.finish()
    TextView(screen).show(handle)
    assert screen.text.count("\n") == 10_000
    assert len(screen.things) <= 3


def test_a_screen_that_cannot_follow_gets_the_end_of_a_flood_and_its_cell_ends_at_once(
    screen: RecordingScreen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(room, "BURST", 5000.0)
    monkeypatch.setattr(logs, "MAX_SHOWN", 5000)
    monkeypatch.setattr(logs, "SHOWN_END", 500)
    log = tmp_path / "rank0.log"
    text = "".join(f"line {number}\n" for number in range(10_000))
    log.write_text(text)
    handle = CellHandle(1, CellRequest(source=""), (0,), lambda parcel: parcel)
    handle.told = Notices(max_text=1000)
    view = TextView(screen, pace=10.0)
    with ThreadPoolExecutor(1) as pool:
        showing = pool.submit(view.show, handle)
        for at in range(0, len(text), 100):
            piece = text[at : at + 100]
            handle.feed(Wrote(0, piece, Logged(0, log, at, at + len(piece))))
            time.sleep(0.0005)
        assert not wait_until(lambda: "line 9999" in screen.text, timeout=0.2)
        handle.finish()
        showing.result(30)
    lines = screen.text.splitlines()
    assert lines[0] == "[rank 0] line 0"
    assert lines[-1] == "[rank 0] line 9999"
    assert len(screen.text) < 20_000
    assert sum("not shown, all in rank0.log" in line for line in lines) == 1
