"""The panel's log: pages that are sent again, filters, and counts of the hidden lines."""

import re
import time

import ipywidgets as widgets
import pytest
from pages import Page
from syrupy.assertion import SnapshotAssertion

from nbddp.ui.log_lines import LogBuffer
from nbddp.ui.panel import log_area


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Log(log_area.LogArea):
    """The log of two ranks, with what they have written."""

    def __init__(self, *lines: str, max_merged: int = log_area.MAX_ROWS) -> None:
        super().__init__([0, 1])
        self.tails = LogBuffer(max_merged=max_merged)
        for number, line in enumerate(lines):
            self.tails.write(number % 2, f"{line}\n")
        controls, self.scroll, self.path = self.root.children
        self.ranks, self.word, self.times, self.hold, self.found = controls.children

    def shows(self, folder: str = "") -> list[str]:
        """Draw it: the lines that a page shows, without their times."""
        self.draw(self.tails, folder)
        earlier, pages, now = self.scroll.children[0].children
        values = [earlier.value, *(page.value for page in pages.children), now.value]
        drawn = [re.sub("<span class=.nbddp-time.>[^<]*</span>", "", each) for each in values]
        return [line for line in Page("\n".join(drawn)).text.split("\n") if line]


def test_a_log_page_is_one_widget_without_layout_and_style_widgets() -> None:
    pages = log_area.LogPages()
    pages.add(["a"], 1)
    [page] = pages.root.children
    assert not [name for name in page.keys if isinstance(getattr(page, name), widgets.Widget)]
    assert {"layout", "style"}.isdisjoint(page.get_state())
    assert page.get_state()["_view_name"] == "HTMLView"


def test_log_rows_of_a_second_share_a_page_and_a_full_page_stays(clock: list[float]) -> None:
    pages = log_area.LogPages()
    pages.add(["a"], 1)
    clock[0] += 0.1
    pages.add(["b"] * log_area.PAGE_ROWS, log_area.PAGE_ROWS)
    [first] = pages.root.children
    assert first.value.count("b") > first.value.count("a")
    before = first.value
    pages.add(["c"], 1)
    assert [page is first for page in pages.root.children] == [True, False]
    assert first.value is before
    clock[0] += 1.1
    pages.add(["d"], 1)
    assert len(pages.root.children) == 3


def test_the_oldest_pages_are_removed_a_hundred_at_a_time(clock: list[float]) -> None:
    shown: set[widgets.Widget] = set()
    pages, removals = log_area.LogPages(), 0
    for _ in range(3 * log_area.MAX_PAGES):
        clock[0] += 2
        before = pages.root.children
        pages.add(["a"], 1)
        shown |= {*pages.root.children}
        if pages.root.children[:-1] != before:
            removals += 1
            assert pages.root.children[:-1] == before[log_area.MAX_PAGES // 2 :]
        assert pages.line_count == len(pages.root.children) <= log_area.MAX_PAGES
    assert removals == 4
    assert {each for each in shown if each.comm is not None} == {*pages.root.children}


def test_the_total_number_of_kept_log_rows_is_bounded() -> None:
    pages = log_area.LogPages()
    for _ in range(100):
        pages.add(["a"] * log_area.MAX_BATCH, log_area.MAX_BATCH)
        assert pages.line_count <= log_area.MAX_PAGE_ROWS
    assert pages.line_count >= log_area.MAX_ROWS
    pages.remove()
    assert pages.root.children == ()


def test_log_lines_are_appended_to_a_page() -> None:
    log = Log("a", "b")
    log.shows()
    assert log.shows() == ["[rank 0] a", "[rank 1] b"]
    assert len(log.scroll.children[0].children[1].children) == 1
    log.tails.write(0, "c\n\r10%")
    assert log.shows() == ["[rank 0] a", "[rank 1] b", "[rank 0] c", "[rank 0] 10%"]
    log.tails.write(0, "\r20%")
    assert log.shows()[-1] == "[rank 0] 20%"


def test_the_log_can_be_filtered_by_rank_or_word_and_counts_new_matches() -> None:
    log = Log("Loss 1", "acc 1", "loss 2", "acc 2")
    log.shows()
    log.word.value = " LOSS "
    assert log.shows() == ["[rank 0] Loss 1", "[rank 0] loss 2"]
    assert "2 of 4 " in log.found.value
    log.tails.write(1, "\x1b[32mlo\x1b[mss 3\nacc 3\n")
    assert log.shows()[-1] == "[rank 1] loss 3"
    assert "3 of 6 " in log.found.value
    log.ranks.value = 0
    assert log.shows() == ["[rank 0] Loss 1", "[rank 0] loss 2"]
    log.word.value = ""
    log.shows()
    assert log.found.value == ""


def test_a_paused_log_shows_no_new_lines_and_catches_up() -> None:
    log = Log("a")
    log.shows()
    log.hold.value = True
    log.tails.write(0, "b\n")
    assert log.shows() == ["[rank 0] a"]
    log.hold.value = False
    assert log.shows() == ["[rank 0] a", "[rank 0] b"]


def test_hidden_log_lines_are_counted_with_the_path_of_the_log(snapshot: SnapshotAssertion) -> None:
    log = Log(*"abcde", max_merged=3)
    assert log.shows("runs/x")[0] == snapshot(name="earlier")
    assert "runs/x/rank*.log" in log.path.value
    log.word.value = "c"
    assert log.shows("runs/x") == [snapshot(name="not searched"), "[rank 0] c"]
    log.ranks.value = 1
    log.shows("runs/x")
    assert "runs/x/rank1.log" in log.path.value


def test_a_flood_shows_its_newest_lines_and_counts_the_others(snapshot: SnapshotAssertion) -> None:
    log = Log("a")
    log.shows()
    log.tails.write(0, "".join(f"{number}\n" for number in range(log_area.MAX_BATCH + 1000)))
    first, *lines = log.shows()
    assert first == "[rank 0] a"
    assert lines[0] == snapshot
    assert lines[1:] == [f"[rank 0] {1000 + number}" for number in range(log_area.MAX_BATCH)]
    log.tails.write(0, "x\n" * 10_000)
    [gap] = [line for line in log.shows()[2:] if not line.startswith("[rank 0] ")]
    assert f"{10_000 - log_area.MAX_BATCH:,} " in gap


def test_times_of_log_lines_are_hidden_until_requested() -> None:
    log = Log("a")
    log.shows()
    [page] = log.scroll.children[0].children[1].children
    assert re.search(r'<span class="nbddp-time">\d\d:\d\d:\d\d\.\d </span>', page.value)
    before = page.value
    for is_timed in (True, False):
        log.times.value = is_timed
        assert ("nbddp-timed" in log.root._dom_classes) == is_timed
    assert page.value is before
