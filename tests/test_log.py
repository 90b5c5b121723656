"""The panel's log: what is sent again, what is found, and what is told of the rest."""

from __future__ import annotations

import re
import time

import ipywidgets as widgets
import pytest

from nbddp.ui.panel import pages as pages_module
from nbddp.ui.panel.log import MAX_BATCH, LogWidgets
from nbddp.ui.panel.pages import BOOK_PAGES, MAX_EMPTY, MAX_PAGES, MAX_ROWS, PAGE_ROWS, Pages
from nbddp.ui.panel.pieces import Plain
from nbddp.ui.tails import Tails


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, for pages to go by."""
    now = [0.0]
    monkeypatch.setattr(pages_module.time, "monotonic", lambda: now[0])
    return now


def leaves(box: widgets.Box) -> list[widgets.HTML]:
    return [page for book in box.children for page in book.children]


def text(log: LogWidgets) -> list[str]:
    """The lines that a page shows, without their times."""
    _, scroll, _ = log.root.children
    earlier, pages, now = scroll.children[0].children
    values = [earlier.value, *(page.value for page in leaves(pages)), now.value]
    drawn = "\n".join(re.sub("<span class=.nbddp-time.>[^<]*</span>", "", each) for each in values)
    return [line for line in re.sub("<[^>]*>", "", drawn).split("\n") if line]


def made() -> tuple[LogWidgets, list[widgets.Widget]]:
    new: list[widgets.Widget] = []
    return LogWidgets([0, 1], new.append), new


def control(log: LogWidgets, kind: type[widgets.Widget], number: int = 0) -> widgets.Widget:
    return [each for each in log.root.children[0].children if type(each) is kind][number]


def written(*lines: str, max_merged: int = MAX_ROWS) -> Tails:
    tails = Tails(max_merged=max_merged)
    for number, line in enumerate(lines):
        tails.write(number % 2, f"{line}\n")
    return tails


# ---- pages


def test_a_page_is_one_widget_without_those_for_its_looks() -> None:
    new: list[widgets.Widget] = []
    Pages(new.append).add(["a"], 1)
    _, page = new
    assert not [name for name in page.keys if isinstance(getattr(page, name), widgets.Widget)]
    assert {"layout", "style"}.isdisjoint(page.get_state())
    assert page.get_state()["_view_name"] == "HTMLView"


def test_rows_that_come_soon_share_a_page_and_a_full_page_is_left_alone(clock: list[float]) -> None:
    pages = Pages(lambda _: None)
    pages.add(["a"], 1)
    clock[0] += 0.1
    pages.add(["b"] * PAGE_ROWS, PAGE_ROWS)
    [first] = leaves(pages.root)
    assert first.value.count("b") > first.value.count("a")
    before = first.value
    pages.add(["c"], 1)
    assert [page is first for page in leaves(pages.root)] == [True, False]
    assert first.value is before


def test_what_is_older_than_a_second_is_not_drawn_again(clock: list[float]) -> None:
    pages = Pages(lambda _: None)
    pages.add(["a"], 1)
    clock[0] += 1.1
    pages.add(["b"], 1)
    assert len(leaves(pages.root)) == 2


def test_the_oldest_rows_go_a_book_at_a_time_and_no_other_child_moves(clock: list[float]) -> None:
    pages = Pages(lambda _: None)
    for _ in range(MAX_PAGES + 2 * BOOK_PAGES):
        clock[0] += 2
        before = pages.root.children
        pages.add(["a"], 1)
        assert pages.root.children[: len(before)] == before, "what follows a change is drawn anew"
    assert MAX_PAGES <= len(leaves(pages.root)) <= MAX_PAGES + BOOK_PAGES
    assert pages.lines == len(leaves(pages.root))
    assert pages.root.children[0].children == ()


def test_long_pages_are_dropped_by_their_rows() -> None:
    pages = Pages(lambda _: None)
    for _ in range(100):
        pages.add(["a"] * 200, 200)
    assert MAX_ROWS <= pages.lines <= MAX_ROWS + 200 * BOOK_PAGES


def test_empty_books_do_not_become_too_many_and_all_is_closed(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "BOOK_PAGES", 1)
    monkeypatch.setattr(pages_module, "MAX_PAGES", 2)
    new: list[widgets.Widget] = []
    pages = Pages(new.append)
    for _ in range(2 * MAX_EMPTY):
        clock[0] += 2
        pages.add(["a"], 1)
    assert len(pages.root.children) <= MAX_EMPTY + 3
    assert sum(each.comm is not None for each in new) <= MAX_EMPTY + 6
    pages.clear()
    assert [each for each in new if each.comm is not None] == []


# ---- lines


def test_lines_are_appended_and_told_to_who_answers_for_new_widgets() -> None:
    log, new = made()
    tails = written("a", "b")
    log.draw(tails)
    log.draw(tails)
    assert text(log) == ["[rank 0] a", "[rank 1] b"]
    assert len(new) == 2  # a book and its page
    tails.write(0, "c\n\r10%")
    log.draw(tails)
    assert text(log) == ["[rank 0] a", "[rank 1] b", "[rank 0] c", "[rank 0] 10%"]
    tails.write(0, "\r20%")
    log.draw(tails)
    assert text(log)[-1] == "[rank 0] 20%"


def test_one_rank_or_one_word_can_be_looked_for_and_what_comes_is_counted_on() -> None:
    log, _ = made()
    tails = written("Loss 1", "acc 1", "loss 2", "acc 2")
    log.draw(tails)
    field = control(log, widgets.Text)
    field.value = " LOSS "
    log.draw(tails)
    assert text(log) == ["[rank 0] Loss 1", "[rank 0] loss 2"]
    found = control(log, Plain)
    assert "2 of 4 lines" in found.value
    tails.write(1, "\x1b[32mlo\x1b[mss 3\nacc 3\n")
    log.draw(tails)
    assert text(log)[-1] == "[rank 1] loss 3"
    assert "3 of 6 lines" in found.value
    control(log, widgets.ToggleButtons).value = 0
    log.draw(tails)
    assert text(log) == ["[rank 0] Loss 1", "[rank 0] loss 2"]
    field.value = ""
    log.draw(tails)
    assert found.value == ""


def test_a_held_log_lets_nothing_come_and_catches_up() -> None:
    log, _ = made()
    tails = written("a")
    log.draw(tails)
    hold = control(log, widgets.ToggleButton, 1)
    hold.value = True
    tails.write(0, "b\n")
    log.draw(tails)
    assert text(log) == ["[rank 0] a"]
    hold.value = False
    log.draw(tails)
    assert text(log) == ["[rank 0] a", "[rank 0] b"]


def test_lines_that_are_not_on_the_page_are_told_of_with_the_place_where_they_are() -> None:
    log, _ = made()
    tails = written(*"abcde", max_merged=3)
    log.draw(tails, "runs/x")
    assert text(log)[0] == "2 earlier lines in runs/x/rank*.log"
    assert "runs/x/rank*.log" in log.root.children[2].value
    control(log, widgets.Text).value = "c"
    log.draw(tails, "runs/x")
    assert text(log) == ["2 earlier lines not searched, in runs/x/rank*.log", "[rank 0] c"]
    control(log, widgets.ToggleButtons).value = 1
    log.draw(tails, "runs/x")
    assert "runs/x/rank1.log" in log.root.children[2].value


def test_of_a_flood_the_newest_lines_are_shown_and_the_others_counted() -> None:
    log, _ = made()
    tails = written("a")
    log.draw(tails)
    tails.write(0, "".join(f"{number}\n" for number in range(MAX_BATCH + 1000)))
    log.draw(tails)
    assert text(log)[:2] == ["[rank 0] a", "… 1,000 more lines, which came too fast"]
    assert text(log)[2] == "[rank 0] 1000"
    tails.write(0, "x\n" * 10_000)
    log.draw(tails)
    assert f"… {10_000 - MAX_BATCH:,} more lines, which came too fast" in text(log)
    assert not any("earlier" in line for line in text(log))


def test_the_last_page_is_waited_for_only_where_lines_came_just_now(clock: list[float]) -> None:
    log, _ = made()
    clock[0] = 100.0
    assert log.begin_end() is None
    log.draw(written("a"))
    last = log.begin_end()
    assert last is not None
    assert (last.value, last._view_count) == ("", 0)
    clock[0] += 5
    assert log.begin_end() is None


def test_times_are_in_the_page_and_shown_when_they_are_asked_for() -> None:
    log, _ = made()
    log.draw(written("a"))
    [page] = leaves(log.root.children[1].children[0].children[1])
    at = time.strftime("%H:%M")
    assert re.search(rf'<span class="nbddp-time">({at}|\d\d:\d\d):\d\d\.\d </span>', page.value)
    before = page.value
    control(log, widgets.ToggleButton, 0).value = True
    assert "nbddp-timed" in log.root._dom_classes
    control(log, widgets.ToggleButton, 0).value = False
    assert "nbddp-timed" not in log.root._dom_classes
    assert page.value is before
