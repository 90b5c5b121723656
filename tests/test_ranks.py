"""Many ranks in one line and a grid, a few as rows with a curve each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pages import Page, column

from nbddp.record.snapshot import RankSnapshot
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.panel.html import rank_table
from nbddp.ui.panel.ranks import (
    PERIOD,
    POINTS,
    Trends,
    grid,
    left_of,
    overview,
    ranks_html,
    seconds_left,
    straggler,
)

BAR = LoopProgress("epoch 1", 50, 250, 50.0)


def group(count: int) -> list[RankSnapshot]:
    one = RankSnapshot(rank=0, state="running", step=50, steps_per_second=10.0, bars=(BAR,))
    return [replace(one, rank=rank) for rank in range(count)]


def test_many_ranks_are_one_line_with_the_slowest_and_the_time_left() -> None:
    ranks = group(64)
    ranks[41] = replace(
        ranks[41], steps_per_second=8.0, bars=(LoopProgress("epoch 1", 40, 230, 40.0),)
    )
    assert overview(ranks) == "64 running · slowest 41 · 3:20 left"


def test_the_line_counts_what_ranks_do_and_who_failed() -> None:
    ranks = group(12)
    ranks[3] = replace(ranks[3], state="was killed", is_alive=False, is_well=False, is_cause=True)
    ranks[5] = replace(ranks[5], state="waiting")
    assert overview(ranks).startswith("10 running · 1 failed · 1 waiting · ")


def test_who_is_about_as_fast_as_the_others_is_no_straggler() -> None:
    ranks = group(4)
    assert straggler(ranks) is None
    ranks[2] = replace(ranks[2], steps_per_second=9.5)
    assert straggler(ranks) is None
    ranks[2] = replace(ranks[2], steps_per_second=8.5)
    assert straggler(ranks) == 2
    assert straggler(ranks[2:3]) is None


@pytest.mark.parametrize(
    ("bars", "left"),
    [
        ((LoopProgress("", 25, 100, 50.0),), 150.0),
        ((LoopProgress("epoch", 1, 4, 30.0), LoopProgress("batch", 50, 100, 10.0)), 50.0),
        ((LoopProgress("", 7, 0, 5.0), LoopProgress("batch", 50, 100, 10.0)), 10.0),
        ((LoopProgress("", 0, 100, 5.0),), None),
        ((LoopProgress("", 7, 0, 5.0),), None),
        ((), None),
    ],
    ids=["one loop", "a loop in a loop", "without a total", "not begun", "no total", "no loop"],
)
def test_the_time_left_is_that_of_the_whole_run(
    bars: tuple[LoopProgress, ...], left: float | None
) -> None:
    assert left_of(bars) == left


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


def test_the_slowest_is_marked_in_the_grid() -> None:
    ranks = group(16)
    ranks[4] = replace(ranks[4], steps_per_second=2.0)
    assert "4↓" in grid(ranks)
    assert grid(ranks).count("↓") == 1
    assert 'title="rank 4: running · step 50 · 2.0/s · slowest"' in grid(ranks)


def test_a_curve_has_a_point_each_second_and_says_what_it_is_of() -> None:
    trends, [rank] = Trends(), group(1)
    for at in range(100):
        trends.note([replace(rank, steps_per_second=float(at))], at * PERIOD / 2)
    drawn = trends.draw(rank)
    assert 'aria-label="steps per second: now 98, at most 98"' in drawn
    points = drawn.partition('points="')[2].partition('"')[0].split()
    assert len(points) == POINTS
    assert points[-1] == "60.0,1.0"
    assert trends.draw(replace(rank, rank=5)) == ""


def test_without_steps_the_curve_is_of_the_cpu() -> None:
    trends, [rank] = Trends(), group(1)
    rank = replace(rank, step=None, cpu=50.0)
    for at in (0, 2):
        trends.note([rank], at)
    assert "CPU in percent: now 50" in trends.draw(rank)
    assert "trend" in ranks_html([rank], is_open=False, trends=trends)
