"""Many ranks: what is alike is said once, of each node or in one line; who differs has a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Page, cells, column, ranks, readable, titles

from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.waiting.stragglers import StragglerLag
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.by_node import STILL, by_node
from nbddp.ui.panel.html import rank_table
from nbddp.ui.panel.nodes import MAX_NODES, MAX_OTHERS, node_table
from nbddp.ui.panel.ranks import grid, left_of, overview, ranks_html, seconds_left, stragglers
from nbddp.ui.text.status import status
from nbddp.ui.words import say_lag

GONE = {"state": "was killed by SIGKILL", "is_alive": False, "is_well": False, "is_cause": True}


def group(nodes: int = 16, each: int = 8) -> list[RankSnapshot]:
    """Ranks in the middle of a training."""
    return [
        RankSnapshot(
            rank=rank,
            node=f"gpu-{rank // each:02}",
            state="waiting" if rank % 3 else "running",
            line=12,
            collective=f"all_reduce #{40 + rank % 2}, [25]",
            step=120 + rank % 2,
            steps_per_second=4.0,
            cpu=97.0,
            memory=1 << 30,
        )
        for rank in range(nodes * each)
    ]


def change(known: Sequence[RankSnapshot], *who: int, **facts: Any) -> list[RankSnapshot]:
    return [replace(each, **facts) if each.rank in who else each for each in known]


def still(known: Sequence[RankSnapshot], **facts: Any) -> list[RankSnapshot]:
    """All have waited for a while in the same collective."""
    here = {"state": "waiting", "seconds": 30.0, "collective": "all_reduce #41, [25]"} | facts
    return [replace(each, **here) for each in known]


def others(known: Sequence[RankSnapshot]) -> dict[int, list[int]]:
    """The ranks that differ, by the node rank."""
    found = {node.number: [each.rank for each in node.others] for node in by_node(known)}
    return {number: differ for number, differ in found.items() if differ}


# ---- who differs


def test_ranks_of_one_node_or_of_none_are_not_put_together() -> None:
    assert by_node(group(1)) == []
    assert by_node([replace(each, node="") for each in group()]) == []


def test_while_all_go_on_nobody_differs_wherever_he_just_is() -> None:
    assert others(group()) == {}
    assert [len(node.usual) for node in by_node(group())] == [8] * 16
    assert not any(node.is_odd for node in by_node(group()))


@pytest.mark.parametrize(
    "facts",
    [
        GONE,
        {"state": "ValueError: no", "is_well": False, "is_cause": True},
        {"state": "interrupted, line 4", "is_well": False},
        {"lag": StragglerLag(0.3, 10.0)},
        {"state": "done", "line": 0},
        {"seconds": STILL, "state": "waiting"},
    ],
    ids=["died", "failed", "interrupted", "slow", "done", "waits for long"],
)
def test_a_rank_that_is_not_as_the_others_differs(facts: dict[str, Any]) -> None:
    assert others(change(group(), 19, **facts)) == {2: [19]}


def test_a_node_that_is_gone_is_one_row() -> None:
    known = change(group(), *range(16, 24), **GONE)
    assert others(known) == {}
    [gone] = [node for node in by_node(known) if node.is_odd]
    assert (gone.number, gone.state, gone.cpu) == (2, "was killed by SIGKILL", "")


def test_in_a_hang_who_is_elsewhere_differs() -> None:
    known = still(group())
    assert others(known) == {}
    assert by_node(known)[3].collective == "all_reduce #41"
    known = change(known, 100, state="running", line=9, collective="all_reduce #40, [25]")
    known = change(known, *range(16, 24), line=31, collective="broadcast #41, [1]")
    assert others(known) == {12: [100]}
    assert [node.number for node in by_node(known) if node.is_odd] == [2]


def test_who_has_come_to_the_others_a_moment_ago_is_not_elsewhere() -> None:
    known = change(still(group()), *range(0, 128, 5), seconds=STILL - 1)
    assert others(known) == {}
    assert not any(node.is_odd for node in by_node(known))


# ---- on a page, and as text


def in_a_snapshot(known: Sequence[RankSnapshot]) -> Snapshot:
    return Snapshot(state=GroupState.RUNNING, ranks=tuple(known), backend="gloo", attempt=1)


def test_ranks_of_three_nodes_on_a_page_and_as_text(snapshot: Any) -> None:
    bar = LoopProgress("epoch 1", 50, 250, 50.0)
    known = change(group(3, 4), *range(12), bars=(bar,))
    known = change(known, 10, bars=(replace(bar, done=40),))
    known = change(change(known, 5, **GONE), 9, lag=StragglerLag(0.3, 10.0))
    assert readable(ranks_html(known, is_open=True)) == snapshot(name="page")
    assert status(in_a_snapshot(known)) == snapshot(name="text")


def test_a_few_ranks_have_a_row_each_with_the_name_of_their_node() -> None:
    page = Page(ranks_html(group(2, 4), is_open=False))
    assert column(page, "rank") == [str(rank) for rank in range(8)]
    assert set(column(page, "node")) == {"gpu-00", "gpu-01"}
    assert len(status(in_a_snapshot(group(2, 4))).splitlines()) == 1 + 1 + 8


def test_a_node_that_does_something_else_stands_out() -> None:
    known = change(still(group()), *range(16, 24), line=31)
    table = node_table(by_node(known))
    assert table.count("<strong>") == 1
    assert "<strong>node 2 (gpu-02)</strong>" in table


def test_gpus_of_a_node_are_counted() -> None:
    known = [replace(each, gpu="NVIDIA H100", gpu_memory=2 << 30) for each in group(2)]
    assert column(Page(node_table(by_node(known))), "GPU") == ["16.0 GiB · 8 H100"] * 2


def test_many_that_differ_are_counted_and_those_that_failed_are_shown() -> None:
    known = change(group(), *range(0, 128, 3), state="interrupted, line 4", is_well=False)
    known = change(known, 127, **GONE)
    page = Page(node_table(by_node(known)))
    assert len(cells(page)) == 16 + MAX_OTHERS
    assert "127" in column(page, "rank")
    assert f"{43 - MAX_OTHERS + 1} more ranks" in page.text


def test_of_128_nodes_those_that_matter_are_shown() -> None:
    known = change(group(128), 1000, **GONE)
    page = Page(node_table(by_node(known)))
    assert len(cells(page)) == MAX_NODES + 1
    assert "node 125 (gpu-125)" in column(page, "node")
    assert "96 more nodes" in page.text


@settings(max_examples=10)  # each is a group of up to 20 ranks
@given(st.lists(st.integers(0, 100).flatmap(ranks), min_size=9, max_size=20))
def test_whatever_ranks_say_of_themselves_all_are_on_some_node_and_it_is_escaped(
    known: list[RankSnapshot],
) -> None:
    placed = [replace(each, rank=at, node=f"<b>{at % 3}") for at, each in enumerate(known)]
    nodes = by_node(placed)
    told = [each.rank for node in nodes for each in (*node.usual, *node.others)]
    assert sorted(told) == list(range(len(known)))
    page = Page(ranks_html(placed, is_open=True))
    assert {"node", "rank"} <= set(titles(page))
    assert "<b>" not in ranks_html(placed, is_open=True)


# ---- ranks of one node

BAR = LoopProgress("epoch 1", 50, 250, 50.0)


def on_one_node(count: int) -> list[RankSnapshot]:
    one = RankSnapshot(rank=0, state="running", step=50, steps_per_second=10.0, bars=(BAR,))
    return [replace(one, rank=rank) for rank in range(count)]


def test_a_slow_rank_is_marked_in_its_row_and_the_mark_says_why() -> None:
    ranks = on_one_node(4)
    assert "slow" not in ranks_html(ranks, is_open=False)
    ranks[2] = replace(ranks[2], lag=StragglerLag(0.384, 11.6))
    page = Page(ranks_html(ranks, is_open=False))
    assert column(page, "rank") == ["0", "1", "2 ↓ slow", "3"]
    [mark] = [known for _, known in page.tags if "slow" in known.get("title", "")]
    said = say_lag(StragglerLag(0.384, 11.6))
    assert (mark["title"], mark["aria-label"], mark["role"]) == (said, said, "img")
    assert "4 running · slowest 2 · " in page.text


def test_who_is_slow_is_in_the_line_while_it_goes_on() -> None:
    ranks = on_one_node(4)
    assert stragglers(ranks) == []
    ranks[2] = replace(ranks[2], lag=StragglerLag(0.2, 10.0))
    ranks[1] = replace(ranks[1], lag=StragglerLag(0.3, 10.0, is_waited_for=False))
    assert stragglers(ranks) == [1, 2]
    ranks[1] = replace(ranks[1], state="done")
    assert stragglers(ranks) == [2]


def test_the_time_left_is_that_of_the_whole_run() -> None:
    batches = LoopProgress("batch", 50, 100, 10.0)
    for bars, left in (
        ([LoopProgress("", 25, 100, 50.0)], 150.0),
        ([LoopProgress("epoch", 1, 4, 30.0), batches], 50.0),
        ([LoopProgress("no total", 7, 0, 5.0), batches], 10.0),
        ([LoopProgress("not begun", 0, 100, 5.0)], None),
        ([LoopProgress("no total", 7, 0, 5.0)], None),
        ([], None),
    ):
        assert left_of(bars) == left, bars


def test_a_rank_that_has_ended_has_no_time_left() -> None:
    running, dead = on_one_node(2)
    dead = replace(dead, state="was killed by SIGKILL", is_alive=False, is_well=False)
    done = replace(running, state="done")
    assert seconds_left([running, dead]) == 200.0
    assert seconds_left([dead, done]) is None
    assert "left" in column(Page(rank_table([running])), "progress")[0]
    for ended in (dead, done):
        assert column(Page(rank_table([ended])), "progress") == ["epoch 1 50/250 · 1.0/s"]


def test_of_64_ranks_all_are_in_the_grid_when_it_is_open_and_the_failed_ones_have_a_row() -> None:
    ranks = on_one_node(64)
    ranks[9] = replace(ranks[9], state="ValueError: <no>", is_well=False, is_cause=True)
    closed, opened = (ranks_html(ranks, is_open=each) for each in (False, True))
    assert "nbddp-grid" not in closed
    assert opened.count("nbddp-field") == 64
    for html in (closed, opened):
        assert "ValueError: &lt;no&gt;" in html
        assert html.count("<tr>") == 2
    assert "63 running · 1 failed" in closed


def test_ranks_that_were_interrupted_did_not_fail() -> None:
    ranks = [replace(each, state="interrupted, line 4", is_well=False) for each in on_one_node(12)]
    assert overview(ranks) == "12 interrupted"
    assert "nbddp-wrong" not in grid(ranks)
    ranks[3] = replace(ranks[3], state="was killed", is_cause=True)
    assert overview(ranks) == "11 interrupted · 1 failed"
    assert grid(ranks).count("nbddp-wrong") == 1
