"""Steps of all ranks, put together while the run goes on or later, from files that grow."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from nbddp.publish.points import KEPT, PATIENCE, Point, Points

Row = dict[str, Any]


def row(step: int | None, rank: int = 0, at: float = 1.0, **values: float) -> Row:
    of_step = {} if step is None else {"step": step}
    return {"time": at, "rank": rank, "attempt": 1, **of_step, **values}


def points_of(rows: Iterable[Mapping[str, Any]], *begins: float) -> list[Point]:
    points = Points()
    for at in begins:
        points.begin_part(at, is_again=False)
    for each in rows:
        points.add(each)
    return points.rest()


# ---- steps of all ranks

REPORTED: dict[str, tuple[list[Row], list[tuple[int, dict[str, float]]]]] = {
    "mean, rank 0 and spread of several ranks": (
        [row(3, rank, loss=value) for rank, value in enumerate((4.0, 1.0, 1.0))],
        [(3, {"loss": 2.0, "loss/rank0": 4.0, "loss/min": 1.0, "loss/max": 4.0})],
    ),
    "one rank alone": (
        [row(0, loss=0.1), row(1, loss=0.2)],
        [(0, {"loss": 0.1}), (1, {"loss": 0.2})],
    ),
    "without rank 0": (
        [row(0, 1, loss=1.0), row(0, 2, loss=3.0)],
        [(0, {"loss": 2.0, "loss/min": 1.0, "loss/max": 3.0})],
    ),
    "a name that the user has given, like a spread": (
        [row(0, 0, loss=0.0, **{"loss/min": 7.0}), row(0, 1, loss=1.0)],
        [(0, {"loss": 0.5, "loss/rank0": 0.0, "loss/min": 7.0, "loss/max": 1.0})],
    ),
    "several names in several rows": (
        [row(5, loss=1.0), row(5, accuracy=0.5)],
        [(5, {"loss": 1.0, "accuracy": 0.5})],
    ),
    "steps that fall back": (
        [row(step, loss=loss) for step, loss in ((0, 0.0), (1, 1.0), (0, 10.0), (1, 11.0))],
        [(step, {"loss": loss}) for step, loss in ((0, 0.0), (1, 1.0), (0, 10.0), (1, 11.0))],
    ),
    "a step that a rank reports twice": (
        [row(2, loss=1.0), row(2, loss=3.0)],
        [(2, {"loss": 1.0}), (2, {"loss": 3.0})],
    ),
    "without steps they are counted, and counted on in the next cell": (
        [row(None, at=at, loss=at) for at in (1.0, 2.0, 11.0, 12.0)],
        [(step, {"loss": loss}) for step, loss in enumerate((1.0, 2.0, 11.0, 12.0))],
    ),
    "a rank that died before its first step, and others in the next cell": (
        [row(0, 1, loss=8.0), row(0, 2, at=11.0, loss=1.0), row(0, 1, at=11.1, loss=3.0)],
        [(0, {"loss": 8.0}), (0, {"loss": 2.0, "loss/min": 1.0, "loss/max": 3.0})],
    ),
}


@pytest.mark.parametrize("case", REPORTED)
def test_what_ranks_report_is_put_together_step_by_step(case: str) -> None:
    rows, expected = REPORTED[case]
    found = points_of(rows, 0.5, 10.0)
    assert [(each.step, dict(each.values)) for each in found] == expected
    assert [each.part for each in found] == sorted(int(each.at > 10) for each in found)


def test_values_that_are_not_finite_stay_so() -> None:
    [nan] = points_of([row(0, 0, loss=math.nan), row(0, 1, loss=2.0)])
    assert math.isnan(nan.values["loss"])
    assert math.isnan(nan.values["loss/rank0"])
    assert (nan.values["loss/min"], nan.values["loss/max"]) == (2.0, 2.0)
    [infinite] = points_of([row(0, 0, loss=math.inf), row(0, 1, loss=-math.inf)])
    assert math.isnan(infinite.values["loss"])
    [alone] = points_of([row(0, 0, loss=math.inf)])
    assert alone.values == {"loss": math.inf}


# ---- while the run goes on


def test_a_step_waits_for_the_ranks_that_are_behind() -> None:
    points = Points()
    points.world = frozenset({0, 1})
    points.add(row(0, 0, loss=1.0))
    points.add(row(1, 0, loss=1.0))
    assert points.ready() == []
    points.add(row(0, 1, at=1.5, loss=3.0))
    assert [each.values["loss"] for each in points.ready()] == [2.0]
    points.add(row(1, 1, at=1.6, loss=5.0))
    assert [each.values["loss"] for each in points.ready()] == [3.0]


def test_what_rank_0_alone_reports_waits_for_nobody_after_a_moment() -> None:
    points = Points()
    points.world = frozenset({0, 1})
    found = []
    for step in range(100):
        points.add(row(step, 0, at=float(step), loss=1.0))
        found += points.ready()
    assert len(found) > 90
    assert len(found + points.rest()) == 100


def test_a_rank_that_never_comes_holds_nothing_up_for_ever_and_what_it_brings_late_is_counted() -> (
    None
):
    points = Points()
    points.add(row(0, 0, at=0.0, loss=1.0))
    points.add(row(0, 1, at=0.0, loss=3.0))
    assert len(points.ready()) == 1
    points.add(row(1, 0, at=1.0, loss=1.0))
    assert points.ready() == []
    points.add(row(2, 0, at=2.0 + PATIENCE, loss=1.0))
    assert [each.step for each in points.ready()] == [1]
    points.add(row(1, 1, at=2.5 + PATIENCE, loss=9.0))
    assert points.late == 1
    assert [each.values for each in points.rest()] == [{"loss": 1.0}]


@pytest.mark.parametrize("seed", range(20))
def test_live_or_later_the_points_are_the_same(seed: int) -> None:
    """Ranks are at most a few steps apart, as those that meet in collectives are."""
    chance, rows = random.Random(seed), []
    at = [0, 0, 0]
    while min(at) < 40:
        rank = chance.choice(
            [each for each in range(3) if at[each] <= min(at) + 2 and at[each] < 40]
        )
        if rank == 0 or at[rank] % 2:
            rows.append(row(at[rank] % 25, rank, 1 + len(rows) / 50, loss=chance.random()))
        at[rank] += 1
    points, live = Points(), []
    points.world = frozenset(range(3))
    for each in rows:
        points.add(each)
        if chance.random() < 0.3:
            live += points.ready()
    assert points.late == 0
    assert live + points.rest() == points_of(rows)


def test_what_is_remembered_of_a_long_run_is_bounded() -> None:
    points = Points()
    for step in range(KEPT + 500):
        points.add(row(step, loss=1.0))
        points.ready()
    assert len(points._done) <= KEPT
    assert not points._open
