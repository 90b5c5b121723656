"""Ranks: a row each; of many ranks a line, a row for each node, and rows for those with trouble."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from pages import TEXT, Page, cells, column, readable, titles

from nbddp.record.collectives.stragglers import StragglerLag
from nbddp.record.rank_monitor import LoopProgress
from nbddp.record.snapshot import GpuUsage, RankSnapshot
from nbddp.ui.report.rank_table import (
    MAX_ROWS,
    STALL_AFTER,
    grid,
    rank_blocks,
    rank_table,
    seconds_left,
)
from nbddp.ui.report.render import blocks_html, text_lines
from nbddp.ui.wording import format_progress_bar

ONE = RankSnapshot(rank=0, state="running")
BAR = LoopProgress("epoch 1", 50, 250, 50.0)
FAILED = {"is_healthy": False, "is_first_cause": True}
GONE = {"state": "was killed by SIGKILL", "is_alive": False, **FAILED}


def table(ranks: Sequence[RankSnapshot]) -> Page:
    return Page(blocks_html(rank_table(ranks)))


def ranks_html(ranks: Sequence[RankSnapshot], **look: Any) -> str:
    return blocks_html(rank_blocks(ranks, **look))


def as_text(ranks: Sequence[RankSnapshot]) -> str:
    return "\n".join(text_lines(rank_blocks(ranks)))


def group(count: int, **changes: Any) -> list[RankSnapshot]:
    return [replace(ONE, rank=rank, **changes) for rank in range(count)]


def change(ranks: Sequence[RankSnapshot], *changed: int, **facts: Any) -> list[RankSnapshot]:
    return [replace(each, **facts) if each.rank in changed else each for each in ranks]


# ---- a row for each rank


@given(TEXT)
def test_rows_and_grids_have_all_facts_of_their_ranks_escaped(text: str) -> None:
    bar = LoopProgress(text, 1, 4, 2.0)
    facts = {"state": text, "node": text, "code": text, "gpu": text, "collective": f"#7 {text}"}
    rank = replace(ONE, line=3, progress_bars=(bar,), **facts)
    page = table([rank])
    assert all(map(page.holds, [*facts.values(), format_progress_bar(bar)]))
    assert len(cells(page)) == 1
    assert Page(grid([rank])).holds(text)


@pytest.mark.parametrize(
    ("change", "title", "shown"),
    [
        ({"line": 3, "code": "x = 1"}, "line", "3 x = 1"),
        ({"line": 3, "code": "x = 1", "seconds": 12.0}, "line", "3 12.0 s x = 1"),
        ({"line": 12, "file": "train.py"}, "line", "train.py:12 "),
        ({"step": 0.0}, "step", "0"),
        ({"progress_bars": (LoopProgress("all", 20, 0, 4.0),)}, "progress", "all 20 · 5.0/s"),
        ({"cpu": -1.0, "memory": 3 << 30}, "memory", "3.0 GiB"),
        ({"gpu": "NVIDIA T4", "gpu_memory": 2 << 30}, "GPU", "2.0 GiB · T4"),
        ({"gpu": "T4", "gpu_usage": GpuUsage(load=0.0)}, "GPU", "0 % · T4"),
        ({"gpu": "T4", "gpu_ranks": (0,)}, "GPU", "shared with rank 0 · T4"),
    ],
)
def test_a_column_is_shown_if_a_rank_has_it(change: dict[str, Any], title: str, shown: str) -> None:
    page = table([ONE, replace(ONE, rank=1, **change)])
    assert titles(page)[:3] == ["rank", "state", title]
    assert column(page, title) == ["", shown]


@pytest.mark.parametrize(
    "group", ["", " of group [0, 2]", " of group 'tensor parallel'", " of group c0ffee12"]
)
def test_a_collective_is_shown_with_its_group_and_in_a_wait_with_its_shape(group: str) -> None:
    rank = replace(ONE, collective=f"all_reduce #7{group} float [8]")
    assert column(table([rank]), "collective") == [f"all_reduce #7{group}"]
    waits = replace(rank, state="waiting")
    assert column(table([waits]), "collective") == [rank.collective]


def test_first_causes_are_red_and_waiting_or_interrupted_ranks_are_yellow() -> None:
    for facts, mood in (
        ({}, set()),
        ({"state": "waiting"}, {"nbddp-waits"}),
        ({"state": "was killed", **FAILED}, {"nbddp-wrong"}),
        ({"state": "interrupted", "is_healthy": False}, {"nbddp-waits"}),
    ):
        page = table([replace(ONE, **facts)])
        assert {*page.values("class")} & {"nbddp-wrong", "nbddp-waits"} == mood, facts


def test_progress_bars_have_their_share_and_sparklines_are_before_texts() -> None:
    widths = {(0, 4): ["0.0%"], (1, 4): ["25.0%"], (9, 4): ["100.0%"], (9, 0): []}
    for (done, total), shown in widths.items():
        html = ranks_html([replace(ONE, progress_bars=(LoopProgress("", done, total, 1.0),))])
        assert re.findall(r"[^-]width:([\d.]+%)", html) == shown
    curves = {"step": "<svg></svg>"}
    ranks = [replace(ONE, step=7.0)]
    html = ranks_html(ranks, curves=lambda _each, title: curves.get(title, ""))
    assert "<td><svg></svg> 7</td>" in html


def test_the_table_of_many_ranks_shows_failed_ranks_and_counts_the_rest() -> None:
    def shown(ranks: Sequence[RankSnapshot]) -> list[int]:
        return [int(text.split()[0]) for text in column(table(ranks), "rank")]

    assert shown(group(MAX_ROWS)) == [*range(MAX_ROWS)]
    assert "more" not in table(group(MAX_ROWS)).text
    many = group(128, state="waiting")
    running = change(many, *range(80, 120), state="running")
    assert shown(running) == [*range(80, 80 + MAX_ROWS)]
    slow = change(running, 127, lag=StragglerLag(0.3, 10.0))
    assert shown(slow) == [*range(80, 79 + MAX_ROWS), 127]
    ill = change(slow, *range(40, 80), state="interrupted", is_healthy=False)
    assert shown(ill) == [*range(40, 40 + MAX_ROWS)]
    failed = change(ill, 126, state="ValueError: no", **FAILED)
    assert shown(failed) == [*range(40, 39 + MAX_ROWS), 126]
    assert "96 more ranks" in table(failed).text


# ---- ranks of several nodes


def on_nodes(nodes: int = 16, per_node: int = 8) -> list[RankSnapshot]:
    return [
        RankSnapshot(
            rank=rank,
            node=f"gpu-{rank // per_node:02}",
            state="waiting" if rank % 3 else "running",
            line=12,
            collective=f"all_reduce #{40 + rank % 2}, [25]",
            step=120 + rank % 2,
            steps_per_second=4.0,
            cpu=97.0,
            memory=1 << 30,
        )
        for rank in range(nodes * per_node)
    ]


def shown_ranks(ranks: Sequence[RankSnapshot]) -> list[int]:
    page = Page(ranks_html(ranks, is_open=False))
    rows = zip(column(page, "node"), column(page, "rank"), strict=True)
    return [int(rank.split()[0]) for node, rank in rows if not node]


def test_the_rank_table_of_three_nodes_as_html_and_as_text(snapshot: Any) -> None:
    ranks = change(on_nodes(3, 4), *range(12), progress_bars=(BAR,))
    ranks = change(ranks, 10, progress_bars=(replace(BAR, done=40),))
    ranks = change(change(ranks, 5, **GONE), 9, lag=StragglerLag(0.3, 10.0))
    assert readable(ranks_html(ranks, is_open=True)) == snapshot(name="page")
    assert as_text(ranks) == snapshot(name="text")


def test_a_few_ranks_have_a_row_each_and_names_of_nodes_are_escaped() -> None:
    page = Page(ranks_html(on_nodes(2, 4), is_open=False))
    assert column(page, "rank") == [str(rank) for rank in range(8)]
    ranks = [replace(each, node=f"<b>{each.node}") for each in on_nodes()]
    assert "<b>" not in ranks_html(ranks, is_open=True)


@pytest.mark.parametrize(
    "facts",
    [
        GONE,
        {"state": "ValueError: no", **FAILED},
        {"state": "interrupted, line 4", "is_healthy": False},
        {"lag": StragglerLag(0.3, 10.0)},
        {"seconds": STALL_AFTER},
    ],
    ids=["died", "failed", "interrupted", "slow", "does not move"],
)
def test_a_failed_rank_has_a_row_below_its_node(facts: dict[str, Any]) -> None:
    assert shown_ranks(on_nodes()) == []
    assert shown_ranks(change(on_nodes(), 19, **facts)) == [19]
    done = change(on_nodes(), 19, state="done", is_over=True, seconds=STALL_AFTER, line=0)
    assert shown_ranks(change(done, 20, seconds=STALL_AFTER - 1)) == []


def test_the_table_shows_the_only_rank_that_does_not_wait_in_a_hang() -> None:
    ranks = [replace(each, state="waiting", seconds=30.0) for each in on_nodes()]
    ranks = change(ranks, 100, state="running", line=9)
    shown = shown_ranks(ranks)
    assert 100 in shown
    assert 16 + len(shown) == MAX_ROWS
    page = Page(ranks_html(ranks, is_open=False))
    assert f"and {128 - len(shown)} more ranks" in page.text


def test_the_table_of_128_nodes_shows_nodes_with_failed_ranks() -> None:
    ranks = change(on_nodes(128), 1000, **GONE)
    page = Page(ranks_html(ranks, is_open=False))
    assert len(cells(page)) == MAX_ROWS
    assert "node 125 (gpu-125)" in column(page, "node")
    assert "97 more nodes" in page.text
    assert shown_ranks(ranks) == [1000]


# ---- ranks of one node


def training(count: int) -> list[RankSnapshot]:
    return group(count, step=50, steps_per_second=10.0, progress_bars=(BAR,))


def test_a_slow_rank_is_marked_in_its_row_and_the_slowest_is_named_above() -> None:
    ranks = training(4)
    assert "slow" not in ranks_html(ranks, is_open=False)
    ranks = change(ranks, 2, lag=StragglerLag(0.384, 11.6))
    page = Page(ranks_html(ranks, is_open=False))
    assert column(page, "rank") == ["0", "1", "2 ↓ slow", "3"]
    assert "4 running" not in page.text, "a line that comes and goes would move the panel"
    ranks = change(training(12), 2, lag=StragglerLag(0.384, 11.6))
    ranks = change(ranks, 1, lag=StragglerLag(0.4, 10.0, is_waited_for=False))
    assert "12 running · rank 1 is the slowest · 3:20 left in epoch 1" in as_text(ranks)
    assert "rank 2 is the slowest" in as_text(change(ranks, 1, is_over=True))


def test_a_row_is_dimmed_if_the_reports_of_other_ranks_are_newer() -> None:
    ranks = change(change(training(4), 2, age=2.0), 3, age=2.0, is_over=True)
    dimmed = ranks_html(ranks, is_open=False).split("<tr>")
    assert ["nbddp-dim" in row for row in dimmed[2:]] == [False, False, True, False]
    assert "reported 2.0 s ago" in dimmed[4]
    assert "nbddp-dim" not in ranks_html([replace(each, age=2.0) for each in training(4)])


def test_the_time_left_is_estimated_from_the_outermost_loop_with_a_total() -> None:
    batches = LoopProgress("batch", 50, 100, 10.0)
    for bars, seconds in (
        ((LoopProgress("", 25, 100, 50.0),), 150.0),
        ((LoopProgress("epoch", 1, 4, 30.0), batches), 50.0),
        ((LoopProgress("no total", 7, 0, 5.0), batches), 10.0),
        ((LoopProgress("not begun", 0, 100, 5.0),), None),
        ((LoopProgress("no total", 7, 0, 5.0),), None),
        ((), None),
    ):
        assert seconds_left([replace(ONE, progress_bars=bars)]) == seconds, bars


def test_a_rank_that_has_ended_has_no_time_left() -> None:
    running, dead = training(2)
    dead = replace(dead, state="was killed by SIGKILL", is_alive=False, is_healthy=False)
    done = replace(running, state="done", is_over=True)
    assert seconds_left([running, dead]) == 200.0
    assert seconds_left([dead, done]) is None
    assert "left" in column(table([running]), "progress")[0]
    for ended in (dead, done):
        assert column(table([ended]), "progress") == ["epoch 1 50/250 · 1.0/s"]


def test_the_open_grid_shows_all_64_ranks_and_failed_ranks_have_a_row() -> None:
    ranks = change(training(64), 9, state="ValueError: <no>", **FAILED)
    ranks = change(ranks, *range(20, 32), state="interrupted, line 4", is_healthy=False)
    closed, opened = (ranks_html(ranks, is_open=each) for each in (False, True))
    assert "nbddp-grid" not in closed
    assert opened.count("nbddp-field") == 64
    assert opened.count("nbddp-field nbddp-wrong") == 1
    for html in (closed, opened):
        assert "ValueError: &lt;no&gt;" in html
        assert html.count("<tr>") == 2
    assert "51 running · 12 interrupted · 1 failed" in closed
    assert as_text(ranks).splitlines()[-1] == "and 32 more ranks"
