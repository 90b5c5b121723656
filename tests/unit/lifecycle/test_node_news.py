"""How a group reacts to nodes that join or leave, and to more capacity."""

from typing import Any

import pytest
from life_states import (
    BROKEN,
    HEAL,
    HEALING,
    IDLE,
    INTERRUPT,
    OFF,
    RUNNING,
    START,
    STARTING,
    STOP,
    STOPPING,
    after,
    died,
    ended,
    failed,
    ready,
    run,
)
from syrupy.assertion import SnapshotAssertion

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.refusals import describe_node
from nbddp.lifecycle.transitions import advance

JOINED = ev.NodeJoined(name="far", nproc=2)
WITH_ROOM = ev.NodeJoined(name="far", nproc=2, adds_capacity=True)
LOST = ev.NodeLost(name="far", address="10.0.0.7", reason="it has left", ranks=(2, 3))
RUN_ELASTIC = ev.RunAsked(cell=1, ranks=(0, 1), is_elastic=True)
ELASTIC = after(IDLE, RUN_ELASTIC)


def texts_of(life: Life, event: ev.Event) -> list[str]:
    return [each.text for each in advance(life, event)[1] if isinstance(each, ev.Notify)]


def test_message_texts_of_node_events(snapshot: SnapshotAssertion) -> None:
    spare = ev.NodeLost(name="far", address="10.0.0.7", reason="it has left", ranks=())
    causes = [(IDLE, JOINED), (RUNNING, WITH_ROOM), (ELASTIC, WITH_ROOM), (IDLE, LOST)]
    assert [describe_node(*cause) for cause in [*causes, (IDLE, spare)]] == snapshot


@pytest.mark.parametrize("event", [JOINED, LOST])
def test_node_changes_are_recorded_and_shown_in_the_running_cell(event: ev.NodeEvent) -> None:
    text = describe_node(RUNNING, event)
    assert advance(RUNNING, event) == (RUNNING, [ev.RecordNode(text=text), ev.Notify(text=text)])


@pytest.mark.parametrize("life", [STARTING, IDLE, BROKEN, HEALING])
def test_node_changes_between_cells_are_shown_once_in_the_next_cell_of_the_same_ranks(
    life: Life,
) -> None:
    life, actions = advance(life, JOINED)
    assert actions == [ev.RecordNode(text=describe_node(life, JOINED))]
    if life.state is GroupState.STARTING:
        life = after(life, ready(0), ready(1))
    elif life.state is GroupState.HEALING:
        life = after(life, INTERRUPT)
    ranks = tuple(life.alive)
    assert texts_of(life, run(*ranks)) == [describe_node(life, JOINED)]
    life = after(life, run(*ranks), *(ended(rank) for rank in ranks))
    assert texts_of(life, run(*ranks, cell=2)) == []


GONE = (STOP, died(0, 0), died(1, 0))


@pytest.mark.parametrize(
    ("life", "events"),
    [
        (IDLE, (JOINED, *GONE, START)),
        (IDLE, (*GONE, JOINED, START)),
        (STOPPING, (JOINED, died(0, 0), died(1, 0), START)),
        (IDLE, (JOINED, ev.RestartAsked(start=START), died(0, 0), died(1, 0))),
        (OFF, (JOINED, START)),
    ],
    ids=["before a stop", "after it", "while it stops", "before a restart", "before a start"],
)
def test_node_changes_are_not_shown_in_cells_of_ranks_that_start_later(
    life: Life, events: tuple[ev.Event, ...]
) -> None:
    life = after(life, *events)
    life = after(life, ready(0, life.attempt), ready(1, life.attempt))
    assert life.state is GroupState.IDLE
    assert texts_of(life, run()) == []


def test_more_capacity_ends_an_elastic_cell_and_marks_it_as_outgrown() -> None:
    life, actions = advance(ELASTIC, ev.CapacityChanged())
    assert life.state is GroupState.INTERRUPTING
    assert ev.SendInterrupt(cell=1, ranks=(0, 1), after_step=True) in actions
    assert advance(life, ev.CapacityChanged()) == (life, [])
    _, actions = advance(after(life, failed(0)), failed(1))
    assert actions == [ev.CellFinished(cell=1, is_outgrown=True)]


@pytest.mark.parametrize(
    "life", [OFF, STARTING, IDLE, RUNNING, after(ELASTIC, INTERRUPT), BROKEN, HEALING, STOPPING]
)
def test_more_capacity_does_not_change_other_states(life: Life) -> None:
    assert advance(life, ev.CapacityChanged()) == (life, [])


def test_a_node_lost_during_a_heal_does_not_change_the_heal() -> None:
    life: Any = after(BROKEN, HEAL, LOST)
    assert life.heal == HEALING.heal
