"""The panel's pieces of HTML: safe whatever ranks and users wrote, and they say what matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import BIG, EVENTS, SNAPSHOTS, TEXT, Page, cells, column, ranks, titles

from nbddp.lifecycle.states import GroupState
from nbddp.record.devices import DeviceUse
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.timeline import Happening
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.ansi import to_html
from nbddp.ui.panel.html import (
    MAX_EVENTS,
    MAX_ROWS,
    alarm,
    card,
    note,
    rank_table,
    state_line,
    time_line,
)
from nbddp.ui.words import say_bar, say_event, say_refused

ONE = RankSnapshot(rank=0, state="running")


def with_alarm(text: str) -> Snapshot:
    return Snapshot(state=GroupState.RUNNING, alarm=text)


def line_of(*events: Happening, seconds: float = 10.0) -> Page:
    return Page(
        time_line(
            Snapshot(state=GroupState.RUNNING, began=100.0, seconds=seconds, events=tuple(events))
        )
    )


def failure(at: float = 105.0, rank: int = 1) -> Happening:
    return Happening(at, "failure", {"rank": rank, "what": "ValueError: no"})


def marks(page: Page) -> list[float]:
    """Where the marks on the time line are, in percent."""
    styles = [style for style in page.values("style") if style.startswith("left:")]
    return [float(style.removeprefix("left:").removesuffix("%")) for style in styles]


# ---- safe, whatever it is


@BIG
@given(SNAPSHOTS)
def test_the_line_of_the_group_is_ours_and_says_what_it_does(snapshot: Snapshot) -> None:
    page = Page(state_line(snapshot))
    assert page.holds(snapshot.state.value)
    for text in (snapshot.backend, snapshot.run):
        assert page.holds(text)


@BIG
@given(ranks(3))
def test_a_row_of_the_table_is_ours_and_says_all_of_the_rank(each: RankSnapshot) -> None:
    page = Page(rank_table([each]))
    assert page.holds(each.state)
    assert page.holds(each.collective)
    assert page.holds(each.code) or not each.line
    for bar in each.bars:
        assert page.holds(say_bar(bar, goes_on=each.goes_on))


@BIG
@given(SNAPSHOTS)
def test_a_table_and_a_time_line_are_ours(snapshot: Snapshot) -> None:
    table = Page(rank_table(snapshot.ranks))
    assert len(table.by_tag["tr"]) == 1 + len(snapshot.ranks)
    page = Page(time_line(snapshot))
    for event in snapshot.events:
        assert page.holds(say_event(event))


@given(TEXT)
def test_notes_cards_and_alarms_are_ours(text: str) -> None:
    for made in (note(text), alarm(with_alarm(text)), card(to_html(text))):
        assert Page(made).holds(text)


def test_refused_messages_are_told_below_a_hang_and_nothing_while_all_is_well() -> None:
    assert alarm(with_alarm("")) == ""
    hang, said = "no progress for 10 s", say_refused(3)
    text = Page(alarm(replace(with_alarm(hang), refused=3))).text
    assert text.index(hang) < text.index(said)


# ---- the line of the group


@pytest.mark.parametrize("state", list(GroupState))
def test_every_state_has_a_dot_and_says_how_long_a_cell_runs(state: GroupState) -> None:
    page = Page(state_line(Snapshot(state=state, seconds=12.0)))
    assert page.text.startswith(state.value)
    assert any("nbddp-dot" in name for name in page.values("class"))
    is_busy = state in (GroupState.RUNNING, GroupState.INTERRUPTING)
    assert ("12.0 s" in page.text) == is_busy


# ---- the table


def test_columns_that_are_empty_all_the_way_down_are_left_out() -> None:
    page = Page(rank_table([ONE, replace(ONE, rank=1)]))
    assert titles(page) == ["rank", "state"]
    assert cells(page) == [["0", "running"], ["1", "running"]]
    assert Page(rank_table([])).text == ""


@pytest.mark.parametrize(
    ("change", "title", "shown"),
    [
        ({"line": 3, "code": "x = 1"}, "line", "3 x = 1"),
        ({"line": 3, "code": "x = 1", "seconds": 12.0}, "line", "3 12.0 s x = 1"),
        ({"step": 0.0}, "step", "0"),
        ({"step": 120.0, "steps_per_second": 5.0}, "step", "120 · 5.0/s"),
        ({"bars": (LoopProgress("epoch", 1, 4, 2.0),)}, "progress", "epoch 1/4 · 6.0 s left"),
        ({"bars": (LoopProgress("batches", 20, 0, 4.0),)}, "progress", "batches 20 · 5.0/s"),
        ({"cpu": -1.0, "memory": 3 << 30}, "memory", "3.0 GiB"),
        ({"cpu": 98.0, "memory": 3 << 30}, "CPU", "98 %"),
        ({"gpu": "NVIDIA T4", "gpu_memory": 2 << 30}, "GPU", "2.0 GiB · T4"),
        ({"gpu": "T4", "gpu_use": DeviceUse(load=0.0)}, "GPU", "0 % · T4"),
        ({"gpu": "T4", "gpu_ranks": (0,)}, "GPU", "shared with rank 0 · T4"),
    ],
)
def test_a_column_is_there_when_one_rank_has_something_in_it(
    change: dict[str, Any], title: str, shown: str
) -> None:
    page = Page(rank_table([ONE, replace(ONE, rank=1, **change)]))
    assert titles(page)[:3] == ["rank", "state", title]
    assert column(page, title) == ["", shown]


@pytest.mark.parametrize(
    "group", ["", " of group [0, 2]", " of group 'tensor parallel'", " of group c0ffee12"]
)
def test_a_collective_has_its_group_and_while_a_rank_waits_in_it_its_shape(group: str) -> None:
    each = replace(ONE, collective=f"all_reduce #7{group} float [8]")
    assert column(Page(rank_table([each])), "collective") == [f"all_reduce #7{group}"]
    waits = replace(each, state="waiting")
    assert column(Page(rank_table([waits])), "collective") == [each.collective]


def test_trouble_stands_out_and_a_cause_more_than_a_consequence() -> None:
    for facts, mood in (
        ({}, set()),
        ({"state": "waiting"}, {"nbddp-waits"}),
        ({"state": "was killed", "is_well": False, "is_cause": True}, {"nbddp-wrong"}),
        ({"state": "interrupted", "is_well": False}, {"nbddp-waits"}),
    ):
        page = Page(rank_table([replace(ONE, **facts)]))
        assert {*page.values("class")} & {"nbddp-wrong", "nbddp-waits"} == mood, facts


def test_a_bar_is_filled_as_far_as_it_is() -> None:
    for done, total, width in ((0, 4, "0.0%"), (1, 4, "25.0%"), (9, 4, "100.0%"), (20, 0, "")):
        bars = (LoopProgress("", done, total, 1.0),)
        styles = Page(rank_table([replace(ONE, bars=bars)])).values("style")
        filled = [style.partition(";")[0] for style in styles if "width" in style]
        assert filled == ([f"width:{width}"] if width else [])


def group(count: int, **changes: Any) -> list[RankSnapshot]:
    return [replace(ONE, rank=rank, **changes) for rank in range(count)]


def test_of_many_ranks_those_with_trouble_are_shown_in_order_and_the_rest_is_counted() -> None:
    page = Page(rank_table(group(MAX_ROWS)))
    assert column(page, "rank") == [str(rank) for rank in range(MAX_ROWS)]
    assert "more" not in page.text
    many = group(128)
    many[100] = replace(many[100], state="ValueError: no", is_well=False, is_cause=True)
    many[90] = replace(many[90], state="interrupted", is_well=False)
    many[80] = replace(many[80], state="waiting")
    page = Page(rank_table(many))
    assert column(page, "rank") == [str(rank) for rank in [*range(MAX_ROWS - 3), 80, 90, 100]]
    assert "96 more ranks" in page.text


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)))
def test_no_cause_is_left_out_while_there_is_room(causes: set[int], ill: set[int]) -> None:
    many = [
        replace(ONE, rank=rank, is_well=rank not in causes | ill, is_cause=rank in causes)
        for rank in range(100)
    ]
    shown = {int(text) for text in column(Page(rank_table(many)), "rank")}
    assert len(shown) == MAX_ROWS
    assert causes <= shown or shown <= causes
    assert causes | ill <= shown or shown <= causes | ill


# ---- the time line


def test_an_event_is_a_mark_in_its_place_and_a_line_in_words() -> None:
    page = line_of(failure(105.0))
    assert marks(page) == [50.0]
    assert page.by_tag["li"] == ["5.0 s rank 1: ValueError: no"]
    assert marks(line_of(failure(99.0), failure(200.0))) == [0.0, 100.0], "outside of the cell"
    for unsaid in ((), (Happening(101.0, "ready", {"attempt": 1}),)):
        assert time_line(Snapshot(state=GroupState.RUNNING, events=unsaid)) == ""


def test_the_newest_are_listed_and_all_are_on_the_line() -> None:
    count = MAX_EVENTS + 3
    page = line_of(*(failure(101.0 + at, rank=at) for at in range(count)))
    assert len(marks(page)) == count
    assert page.by_tag["li"][0] == "3 earlier"
    listed = page.by_tag["li"][1:]
    assert [text.split(":")[0].split()[-1] for text in listed] == [
        str(rank) for rank in range(3, count)
    ]


@given(st.lists(EVENTS), st.floats(0, 2e9), st.floats(0, 1e7))
def test_every_mark_is_on_the_line(events: list[Happening], began: float, seconds: float) -> None:
    snapshot = Snapshot(
        state=GroupState.RUNNING, began=began, seconds=seconds, events=tuple(events)
    )
    page = Page(time_line(snapshot))
    said = [event for event in events if say_event(event)]
    assert len(marks(page)) == len(said)
    assert all(0 <= place <= 100 for place in marks(page))


def test_a_kind_of_event_that_stands_out_has_a_mood() -> None:
    facts = {"rank": 1, **dict.fromkeys(("what", "how", "reason", "text", "fault"), "x")}
    for mood, kinds in (
        ("nbddp-bad", "exit, failure, not healed, start failed"),
        ("nbddp-warn", "fault, interrupt, kill asked, no progress, restart asked, stop asked"),
        ("", "checkpoint, mine"),
    ):
        for kind in kinds.split(", "):
            classes = {*line_of(Happening(101.0, kind, facts)).values("class")}
            assert classes & {"nbddp-bad", "nbddp-warn"} == {*filter(None, [mood])}, kind
