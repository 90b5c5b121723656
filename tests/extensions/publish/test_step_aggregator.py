"""Steps of all ranks, put together while the run goes on or later, from files that grow."""

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.extensions.publish.step_aggregator import STEP_TIMEOUT, AggregatedStep, StepAggregator

Row = dict[str, Any]


def row(step: int | None, rank: int = 0, at: float = 1.0, **values: float) -> Row:
    of_step = {} if step is None else {"step": step}
    return {"time": at, "rank": rank, "attempt": 1, **of_step, **values}


def points_of(rows: Iterable[Mapping[str, Any]], *begins: float) -> list[AggregatedStep]:
    steps = StepAggregator()
    for at in begins:
        steps.begin_cell(at, is_again=False)
    for added in rows:
        steps.add(added, 0.0)
    return steps.pop_complete(math.inf)


REPORTED: dict[str, list[Row]] = {
    "several ranks": [row(3, rank, loss=value) for rank, value in enumerate((4.0, 1.0, 1.0))],
    "one rank alone": [row(0, loss=0.1), row(1, loss=0.2)],
    "without rank 0": [row(0, 1, loss=1.0), row(0, 2, loss=3.0)],
    "a name like a spread": [row(0, 0, loss=0.0, **{"loss/min": 7.0}), row(0, 1, loss=1.0)],
    "several names in several rows": [row(5, loss=1.0), row(5, accuracy=0.5)],
    "steps that fall back": [row(step, loss=1.0 * at) for at, step in enumerate((0, 1, 0, 1))],
    "a step that a rank reports twice": [row(2, loss=1.0), row(2, loss=3.0)],
    "a count that goes on from a step": [row(7, loss=1.0), row(None, loss=2.0)],
    "without steps, in two cells": [row(None, at=at, loss=at) for at in (1.0, 2.0, 11.0, 12.0)],
    "a rank that died before its first step, and others in the next cell": [
        *(row(0, 1, loss=8.0), row(0, 2, at=11.0, loss=1.0), row(0, 1, at=11.1, loss=3.0))
    ],
    "one value is no number": [row(0, 0, loss=math.nan), row(0, 1, loss=2.0)],
    "infinite values": [row(0, 0, loss=math.inf), row(0, 1, loss=-math.inf)],
    "one infinite value": [row(0, 0, loss=math.inf)],
}


def test_reports_of_ranks_are_merged_by_step(snapshot: SnapshotAssertion) -> None:
    points = {name: points_of(rows, 0.5, 10.0) for name, rows in REPORTED.items()}
    texts = {
        name: [f"step {each.step} of cell {each.cell}: {dict(each.values)}" for each in found]
        for name, found in points.items()
    }
    assert texts == snapshot


def of_ranks(count: int, *rows: Row) -> StepAggregator:
    steps = StepAggregator()
    steps.ranks = frozenset(range(count))
    for added in rows:
        steps.add(added, 0.0)
    return steps


def losses(points: Iterable[AggregatedStep]) -> list[float]:
    return [each.values["loss"] for each in points]


def test_a_step_waits_for_its_own_metrics_only() -> None:
    steps = of_ranks(2, *(row(step, rank, loss=1.0) for rank in (0, 1) for step in (0, 1, 2)))
    assert len(steps.pop_complete(0.0)) == 2
    steps.add(row(0, 0, accuracy=0.0), 0.0)
    assert len(steps.pop_complete(0.0)) == 0
    steps.add(row(0, 1, accuracy=1.0), 1.0)
    found = steps.pop_complete(STEP_TIMEOUT + 0.1)
    assert [(each.step, each.values.get("accuracy")) for each in found] == [(2, None), (0, 0.5)]


def test_a_step_waits_no_longer_than_five_seconds_and_later_values_are_counted() -> None:
    steps = of_ranks(2, row(0, 0, loss=1.0))
    steps.add(row(1, 0, loss=1.0), 1.0)
    assert steps.pop_complete(STEP_TIMEOUT) == []
    assert [each.step for each in steps.pop_complete(STEP_TIMEOUT + 0.5)] == [0]
    steps.add(row(0, 1, loss=9.0), STEP_TIMEOUT + 0.6)
    steps.add(row(1, 1, loss=3.0), STEP_TIMEOUT + 0.7)
    assert steps.late == 1
    assert losses(steps.pop_complete(math.inf)) == [2.0]


def test_the_next_cell_completes_the_steps_of_the_previous_cell() -> None:
    steps = of_ranks(2)
    steps.begin_cell(0.0, is_again=False)
    steps.add(row(0, 0, loss=1.0), 0.0)
    steps.begin_cell(10.0, is_again=True)
    assert steps.pop_complete(0.0) == []
    steps.add(row(0, 0, at=11.0, loss=2.0), 0.0)
    assert losses(steps.pop_complete(0.0)) == [1.0]
    [again] = steps.pop_complete(math.inf)
    assert (again.cell, again.is_again) == (1, True)
    assert steps.late == 0


@pytest.mark.parametrize("seed", range(20))
def test_live_and_later_publication_give_the_same_points(seed: int) -> None:
    """Ranks are at most a few steps apart, as ranks that meet in collectives are."""
    chance, rows = random.Random(seed), []
    at = [0, 0, 0]
    while min(at) < 40:
        rank = chance.choice([each for each in range(3) if at[each] < min(min(at) + 3, 40)])
        if rank == 0 or at[rank] % 2:
            rows.append(row(at[rank] % 25, rank, loss=chance.random()))
        at[rank] += 1
    steps, live = of_ranks(3), []
    for number, added in enumerate(rows):
        steps.add(added, number / 5)
        if chance.random() < 0.3:
            live += steps.pop_complete(number / 5)
    assert live
    assert steps.late == 0
    assert live + steps.pop_complete(math.inf) == points_of(rows)
