"""Many ranks in one line and a grid, a few as rows with a curve each."""

from __future__ import annotations

from dataclasses import replace

from pages import Page, column

from nbddp.record.lags import Lag
from nbddp.record.snapshot import RankSnapshot
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.panel.html import rank_table
from nbddp.ui.panel.ranks import (
    grid,
    left_of,
    overview,
    ranks_html,
    seconds_left,
    stragglers,
)
from nbddp.ui.words import say_lag

BAR = LoopProgress("epoch 1", 50, 250, 50.0)


def group(count: int) -> list[RankSnapshot]:
    one = RankSnapshot(rank=0, state="running", step=50, steps_per_second=10.0, bars=(BAR,))
    return [replace(one, rank=rank) for rank in range(count)]


def test_a_slow_rank_is_marked_in_its_row_and_the_mark_says_why() -> None:
    ranks = group(4)
    assert "slow" not in ranks_html(ranks, is_open=False)
    ranks[2] = replace(ranks[2], lag=Lag(0.384, 11.6))
    page = Page(ranks_html(ranks, is_open=False))
    assert column(page, "rank") == ["0", "1", "2 ↓ slow", "3"]
    [mark] = [known for _, known in page.tags if "slow" in known.get("title", "")]
    said = say_lag(Lag(0.384, 11.6))
    assert (mark["title"], mark["aria-label"], mark["role"]) == (said, said, "img")
    assert "4 running · slowest 2 · " in page.text


def test_who_is_slow_is_in_the_line_while_it_goes_on() -> None:
    ranks = group(4)
    assert stragglers(ranks) == []
    ranks[2] = replace(ranks[2], lag=Lag(0.2, 10.0))
    ranks[1] = replace(ranks[1], lag=Lag(0.3, 10.0, is_waited_for=False))
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
    running, dead = group(2)
    dead = replace(dead, state="was killed by SIGKILL", is_alive=False, is_well=False)
    done = replace(running, state="done")
    assert seconds_left([running, dead]) == 200.0
    assert seconds_left([dead, done]) is None
    assert "left" in column(Page(rank_table([running])), "progress")[0]
    for ended in (dead, done):
        assert column(Page(rank_table([ended])), "progress") == ["epoch 1 50/250 · 1.0/s"]


def test_of_64_ranks_all_are_in_the_grid_when_it_is_open_and_the_failed_ones_have_a_row() -> None:
    ranks = group(64)
    ranks[9] = replace(ranks[9], state="ValueError: <no>", is_well=False, is_cause=True)
    closed, opened = (ranks_html(ranks, is_open=each) for each in (False, True))
    assert "nbddp-grid" not in closed
    assert opened.count("nbddp-field") == 64
    for html in (closed, opened):
        assert "ValueError: &lt;no&gt;" in html
        assert html.count("<tr>") == 2
    assert "63 running · 1 failed" in closed


def test_ranks_that_were_interrupted_did_not_fail() -> None:
    ranks = [replace(each, state="interrupted, line 4", is_well=False) for each in group(12)]
    assert overview(ranks) == "12 interrupted"
    assert "nbddp-wrong" not in grid(ranks)
    ranks[3] = replace(ranks[3], state="was killed", is_cause=True)
    assert overview(ranks) == "11 interrupted · 1 failed"
    assert grid(ranks).count("nbddp-wrong") == 1
