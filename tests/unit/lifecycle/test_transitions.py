"""The worker group's life as tables: what follows from an event, in which state.

``controller/test_executor_orders.py`` plays the events in any order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from life_states import (
    ALL_GONE,
    BROKEN,
    HEALING,
    IDLE,
    INTERRUPT,
    INTERRUPTING,
    OFF,
    RUNNING,
    START,
    STARTING,
    STOP,
    STOPPING,
    acknowledged,
    after,
    assert_unchanged,
    deadline_set,
    died,
    effect_of,
    ended,
    failed,
    interrupt,
    kill,
    leave,
    passed,
    ready,
    run,
    send,
    terminate,
    texts_of,
    unable,
)
from syrupy.assertion import SnapshotAssertion

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState as State
from nbddp.lifecycle.group_state import Life, RankState
from nbddp.lifecycle.transitions import (
    DEATH_TIMEOUT,
    INTERRUPT_TIMEOUT,
    PEERS_TIMEOUT,
    START_TIMEOUT,
    STUCK_AFTER,
    advance,
)
from nbddp.wire.messages import Regroup

RESTART = ev.RestartAsked(start=START)
NO_GROUP = ev.StartAsked(world_size=1, joins_group=False)
FOUR = after(OFF, ev.StartAsked(world_size=4))
FOUR_RUN = after(FOUR, *map(ready, range(4)), run(0, 1, 2, 3))
PATIENT = after(OFF, ev.StartAsked(world_size=2, grace=20.0), ready(0), ready(1), run())
LOST = after(RUNNING, ended(0), ended(1, in_group=False))  # no process group on rank 1
SOME = after(OFF, ev.StartAsked(world_size=3, joins_group=False, ranks=(0, 2)), ready(0))
SOME_RUN = after(SOME, ready(2), run(0, 2, needs_group=False), ended(0))
PEER_FREED = after(RUNNING, failed(1), passed(ev.Deadline.PEERS))
SIGSTOP = {"stopped": ((1, 4321),)}  # rank 1 got one, its process id is 4321
ALL_COMPUTE = passed(ev.Deadline.GRACE, working=(0, 1))
DONE = ev.CellFinished(cell=1)
STUCK = deadline_set(ev.Deadline.STUCK, STUCK_AFTER)


def begins(attempt: int) -> tuple[Any, ...]:
    """Return what makes an attempt start."""
    return ev.StartRanks(), deadline_set(ev.Deadline.START, START_TIMEOUT, cell=0, attempt=attempt)


def limits(grace: float = ev.GRACE) -> tuple[ev.SetDeadline, ...]:
    """Return the alarms of an interrupted cell."""
    return deadline_set(ev.Deadline.GRACE, grace), deadline_set(
        ev.Deadline.CLEANUP, INTERRUPT_TIMEOUT
    )


def regroup(*ranks: int, form: bool) -> ev.Send:
    return ev.Send(ranks=ranks, message=Regroup(generation=1, form=form))


STARTS = {
    "a start": ((OFF, START), (State.STARTING, *begins(1))),
    "a start without a process group": ((OFF, NO_GROUP), (State.STARTING, *begins(1))),
    "the first rank is ready": ((STARTING, ready(1)), (State.STARTING,)),
    "the last rank is ready": (
        (after(STARTING, ready(1)), ready(0)),
        (State.IDLE, ev.GroupStarted()),
    ),
    "the last of some ranks is ready": ((SOME, ready(2)), (State.IDLE, ev.GroupStarted())),
    "a rank is unable": (
        (after(STARTING, ready(0)), unable(1)),
        (State.STOPPING, ev.GroupStartFailed, kill(0, 1)),
    ),
    "a rank dies early": ((STARTING, died(1)), (State.STOPPING, ev.GroupStartFailed, kill(0))),
    "the only rank dies early": (
        (after(OFF, NO_GROUP), died(0, 3)),
        (State.OFF, ev.GroupStartFailed, ev.GroupStopped()),
    ),
    "ranks are late": (
        (after(FOUR, ready(1)), passed(ev.Deadline.START, cell=0)),
        (State.STOPPING, ev.GroupStartFailed, kill(0, 1, 2, 3)),
    ),
    "a process ends after a failed start": (
        (after(STARTING, unable(1)), died(1, 1)),
        (State.STOPPING,),
    ),
    "the last process ends after a failed start": (
        (after(STARTING, unable(1), died(1, 1)), died(0)),
        (State.OFF, ev.GroupStopped()),
    ),
    "an interrupt of a start": (
        (after(STARTING, ready(0)), INTERRUPT),
        (State.STOPPING, leave(0), terminate(1), deadline_set(ev.Deadline.STOP, ev.GRACE, cell=0)),
    ),
}
CELLS = {
    "a cell": ((IDLE, run(cell=5)), (State.RUNNING, send(0, 1, cell=5))),
    "a cell on one rank": ((IDLE, run(1)), (State.RUNNING, send(1))),
    "a cell on survivors": ((BROKEN, run(0)), (State.RUNNING, send(0))),
    "the first rank ends": ((RUNNING, ended(1)), (State.RUNNING,)),
    "the last rank ends": ((after(RUNNING, ended(1)), ended(0)), (State.IDLE, DONE)),
    "the last of some ranks ends": ((SOME_RUN, ended(2)), (State.IDLE, DONE)),
    "the only rank of the cell ends": ((after(IDLE, run(1)), ended(1)), (State.IDLE, DONE)),
    "a survivor ends": ((after(BROKEN, run(0)), ended(0)), (State.BROKEN, DONE)),
    "no group for a cell that needs none": (
        (IDLE, run(needs_group=False)),
        (State.RUNNING, regroup(0, 1, form=False), send(0, 1)),
    ),
    "no group after it was lost": (
        (LOST, run(needs_group=False)),
        (State.RUNNING, regroup(0, 1, form=False), send(0, 1)),
    ),
    "no group on survivors": (
        (BROKEN, run(0, needs_group=False)),
        (State.RUNNING, regroup(0, form=False), send(0)),
    ),
    "a new group for a cell on one rank": (
        (LOST, run(0)),
        (State.RUNNING, regroup(0, 1, form=True), send(0)),
    ),
    "the group is left as it is": ((LOST, run(needs_group=None)), (State.RUNNING, send(0, 1))),
}
FAILURES = {
    "the first failure": (
        (RUNNING, failed(1)),
        (State.RUNNING, deadline_set(ev.Deadline.PEERS, PEERS_TIMEOUT)),
    ),
    "the second failure": ((after(FOUR_RUN, failed(0)), failed(1)), (State.RUNNING,)),
    "the last rank fails": ((after(RUNNING, ended(0)), failed(1)), (State.IDLE, DONE)),
    "a death": (
        (RUNNING, died(1)),
        (State.RUNNING, ev.Notify, deadline_set(ev.Deadline.PEERS, DEATH_TIMEOUT)),
    ),
    "a death after a failure": (
        (after(FOUR_RUN, failed(0)), died(1)),
        (State.RUNNING, ev.Notify, deadline_set(ev.Deadline.PEERS, DEATH_TIMEOUT)),
    ),
    "a second death": ((after(FOUR_RUN, died(1)), died(2)), (State.RUNNING, ev.Notify)),
    "the last rank dies": ((after(RUNNING, ended(0)), died(1)), (State.BROKEN, DONE)),
    "all ranks die": ((after(RUNNING, died(1)), died(0)), (State.BROKEN, DONE)),
    "peers still wait after a failure": (
        (after(RUNNING, failed(1)), passed(ev.Deadline.PEERS)),
        (State.INTERRUPTING, interrupt(0), *limits()),
    ),
    "peers still wait after a death": (
        (after(RUNNING, died(1)), passed(ev.Deadline.PEERS)),
        (State.INTERRUPTING, interrupt(0, rank_died=True), *limits()),
    ),
    "a death beside a cell": ((after(IDLE, run(0)), died(1)), (State.RUNNING, ev.Notify)),
    "the death of an idle rank": ((IDLE, died(1, 3)), (State.BROKEN,)),
}
INTERRUPTS = {
    "an interrupt": (
        (after(PATIENT, ended(0)), INTERRUPT),
        (State.INTERRUPTING, interrupt(1), STUCK, *limits(20.0)),
    ),
    "a double click": ((INTERRUPTING, INTERRUPT), (State.INTERRUPTING,)),
    "a second interrupt after the remark": (
        (after(INTERRUPTING, ended(0), passed(ev.Deadline.STUCK)), INTERRUPT),
        (State.INTERRUPTING, ev.Notify, kill(1)),
    ),
    "a third interrupt after a double click": (
        (after(INTERRUPTING, INTERRUPT, passed(ev.Deadline.STUCK)), INTERRUPT),
        (State.INTERRUPTING, ev.Notify, kill(0, 1)),
    ),
    "the user's first interrupt after nbddp's own": (
        (PEER_FREED, INTERRUPT),
        (State.INTERRUPTING, interrupt(0), STUCK, *limits()),
    ),
    "all ranks were interrupted": (
        (after(INTERRUPTING, INTERRUPT, failed(0)), failed(1)),
        (State.IDLE, DONE),
    ),
    "one rank was interrupted": ((after(INTERRUPTING, ended(0)), failed(1)), (State.IDLE, DONE)),
    "the cell ended all the same": (
        (after(INTERRUPTING, ended(0)), ended(1)),
        (State.IDLE, ev.Notify, DONE),
    ),
    "a failure while interrupting": ((INTERRUPTING, failed(0)), (State.INTERRUPTING,)),
    "a killed rank is not told of again": (
        (after(INTERRUPTING, passed(ev.Deadline.GRACE)), died(0)),
        (State.INTERRUPTING,),
    ),
    "the last killed rank": (
        (after(INTERRUPTING, passed(ev.Deadline.GRACE), died(0)), died(1)),
        (State.BROKEN, DONE),
    ),
}
STUCK_RANKS = {
    "all ranks are deaf": (after(PATIENT, INTERRUPT), passed(ev.Deadline.STUCK)),
    "one rank is deaf": (after(INTERRUPTING, acknowledged(0)), passed(ev.Deadline.STUCK)),
    "one rank is stopped": (
        after(INTERRUPTING, acknowledged(0)),
        passed(ev.Deadline.STUCK, **SIGSTOP),
    ),
    "one rank is stopped, one is deaf": (INTERRUPTING, passed(ev.Deadline.STUCK, **SIGSTOP)),
    "all ranks clean up": (
        after(INTERRUPTING, acknowledged(0), acknowledged(1)),
        passed(ev.Deadline.STUCK),
    ),
    "all ranks compute": (INTERRUPTING, passed(ev.Deadline.STUCK, working=(0, 1))),
    "one rank computes, one is deaf": (INTERRUPTING, passed(ev.Deadline.STUCK, working=(0,))),
}
ONE_KILLED = after(INTERRUPTING, passed(ev.Deadline.GRACE, working=(0,)), died(1))
KILLS = {
    "all ranks are deaf": ((after(PATIENT, INTERRUPT), passed(ev.Deadline.GRACE)), (0, 1)),
    "one rank is stopped": ((INTERRUPTING, passed(ev.Deadline.GRACE, **SIGSTOP)), (0, 1)),
    "one rank cleans up": ((after(INTERRUPTING, acknowledged(0)), passed(ev.Deadline.GRACE)), (1,)),
    "a rank that computed waits": ((ONE_KILLED, passed(ev.Deadline.GRACE)), (0,)),
    "a rank computes for too long": ((ONE_KILLED, passed(ev.Deadline.CLEANUP, working=(0,))), (0,)),
    "a rank cleans up for too long": (
        (after(INTERRUPTING, acknowledged(0), ended(1)), passed(ev.Deadline.CLEANUP)),
        (0,),
    ),
}
GRACES = {
    "a rank that computes outlives the grace": (
        (INTERRUPTING, passed(ev.Deadline.GRACE, working=(0,))),
        (State.INTERRUPTING, ev.Notify, kill(1), deadline_set(ev.Deadline.GRACE, ev.GRACE)),
    ),
    "all ranks compute": (
        (INTERRUPTING, ALL_COMPUTE),
        (State.INTERRUPTING, deadline_set(ev.Deadline.GRACE, ev.GRACE)),
    ),
    "all ranks answered after they computed": (
        (
            after(INTERRUPTING, ALL_COMPUTE, acknowledged(0), acknowledged(1)),
            passed(ev.Deadline.GRACE),
        ),
        (State.INTERRUPTING,),
    ),
}
STOPS = {
    "a stop": (
        (after(PATIENT, ended(0)), STOP),
        (State.STOPPING, leave(0), terminate(1), deadline_set(ev.Deadline.STOP, 20.0)),
    ),
    "a stop of dead ranks": ((ALL_GONE, STOP), (State.OFF, ev.GroupStopped())),
    "the first process is gone": ((STOPPING, died(0, 0)), (State.STOPPING,)),
    "the last process is gone": (
        (after(STOPPING, died(0, 0)), died(1, 0)),
        (State.OFF, ev.GroupStopped()),
    ),
    "the grace of a stop is over": (
        (after(STOPPING, died(0, 0)), passed(ev.Deadline.STOP, cell=0)),
        (State.STOPPING, ev.Notify, kill(1)),
    ),
    "an interrupt of a stop": ((after(STOPPING, died(0, 0)), INTERRUPT), (State.STOPPING, kill(1))),
    "a cell ends while stopping": ((after(RUNNING, STOP, ended(0)), ended(1)), (State.STOPPING,)),
    "the last process of a cell is gone": (
        (after(RUNNING, STOP, ended(0), ended(1), died(0)), died(1)),
        (State.OFF, DONE, ev.GroupStopped()),
    ),
}
RESTARTS = {
    "a restart of no group": ((OFF, RESTART), (State.STARTING, *begins(1))),
    "a restart of a cell": (
        (after(RUNNING, RESTART, died(0)), died(1)),
        (State.STARTING, DONE, ev.GroupStopped(), *begins(2)),
    ),
    "a restart of a stop": (
        (after(STOPPING, RESTART, died(0)), died(1)),
        (State.STARTING, ev.GroupStopped(), *begins(2)),
    ),
    "a restart of dead ranks": (
        (ALL_GONE, RESTART),
        (State.STARTING, ev.GroupStopped(), *begins(2)),
    ),
    "a stop cancels a restart": (
        (after(IDLE, RESTART, STOP, died(0)), died(1)),
        (State.OFF, ev.GroupStopped()),
    ),
    "the later of two restarts": (
        (after(IDLE, RESTART, ev.RestartAsked(start=NO_GROUP), died(0)), died(1)),
        (State.STARTING, ev.GroupStopped(), *begins(2)),
    ),
}
TABLE = (
    STARTS
    | CELLS
    | FAILURES
    | INTERRUPTS
    | GRACES
    | STOPS
    | RESTARTS
    | {
        f"stuck: {name}": (row, (State.INTERRUPTING, ev.Notify))
        for name, row in STUCK_RANKS.items()
    }
    | {
        f"kill: {name}": (row, (State.INTERRUPTING, ev.Notify, kill(*ranks)))
        for name, (row, ranks) in KILLS.items()
    }
)
REFUSED = {
    "a cell on a rank that was not started": (after(SOME, ready(2)), run(1)),
    "a start while starting": (STARTING, START),
    "a start while idle": (IDLE, START),
    "a start while running": (RUNNING, START),
    "a start while interrupting": (INTERRUPTING, START),
    "a start while stopping": (STOPPING, START),
    "a start beside a dead rank": (BROKEN, START),
    "a cell before a start": (OFF, run()),
    "a cell while starting": (STARTING, run()),
    "a cell while healing": (HEALING, run()),
    "a cell while stopping": (STOPPING, run()),
    "a second cell": (RUNNING, run(cell=2)),
    "a second cell while interrupting": (INTERRUPTING, run(cell=2)),
    "a cell for rank 2 of 2": (IDLE, run(0, 2)),
    "a cell for rank -1": (IDLE, run(0, -1)),
    "a cell for no rank": (IDLE, ev.RunAsked(cell=1, ranks=())),
    "a cell for a rank twice": (IDLE, run(1, 1)),
    "a cell for a dead rank": (BROKEN, run()),
    "a cell for dead ranks": (ALL_GONE, run()),
    "a kill before a start": (OFF, ev.KillAsked(rank=0)),
    "a kill of a dead rank": (BROKEN, ev.KillAsked(rank=1)),
}
ONE_RUNS = after(IDLE, run(0))
IGNORED = {
    "a rank is ready twice": (after(STARTING, ready(1)), ready(1)),
    "a rank without the cell ends it": (ONE_RUNS, ended(1)),
    "a rank ends twice": (after(RUNNING, ended(0)), ended(0)),
    "a report after the exit": (after(RUNNING, died(1)), ended(1)),
    "a report after the exit, in a stop": (after(RUNNING, STOP, died(1)), ended(1)),
    "an exit twice": (BROKEN, died(1, 0)),
    "an exit of an unknown rank": (IDLE, died(7)),
    "peers of an interrupted cell": (
        after(RUNNING, failed(1), INTERRUPT),
        passed(ev.Deadline.PEERS),
    ),
    "no deaf ranks at the end of the grace": (
        after(INTERRUPTING, acknowledged(0), acknowledged(1)),
        passed(ev.Deadline.GRACE),
    ),
    "the grace of a stop while running": (RUNNING, passed(ev.Deadline.STOP)),
    "noticed in an earlier cell": (INTERRUPTING, acknowledged(0, cell=9)),
    "noticed without a cell": (IDLE, acknowledged(0)),
    "an interrupt before a start": (OFF, INTERRUPT),
    "an interrupt without a cell": (IDLE, INTERRUPT),
    "an interrupt beside a dead rank": (BROKEN, INTERRUPT),
    "a stop before a start": (OFF, STOP),
    "a second stop": (STOPPING, STOP),
    **{
        f"{type(event).__name__} of the start while {life.state.name}": (life, event)
        for life in (IDLE, RUNNING, INTERRUPTING, BROKEN)
        for event in (ready(0), unable(0), passed(ev.Deadline.START, cell=0))
    },
    **{
        f"{kind.name} of an earlier cell while {life.state.name}": (life, passed(kind, cell=99))
        for kind in (
            ev.Deadline.PEERS,
            ev.Deadline.STUCK,
            ev.Deadline.GRACE,
            ev.Deadline.CLEANUP,
            ev.Deadline.STOP,
        )
        for life in (STARTING, IDLE, RUNNING, INTERRUPTING, BROKEN)
    },
    **{
        f"{kind.name} of a cell while stopping": (after(RUNNING, STOP), passed(kind))
        for kind in (ev.Deadline.PEERS, ev.Deadline.STUCK, ev.Deadline.GRACE, ev.Deadline.CLEANUP)
    },
}


@pytest.mark.parametrize(("cause", "effect"), TABLE.values(), ids=TABLE)
def test_each_event_leads_to_the_expected_state_and_actions(
    cause: tuple[Life, ev.Event], effect: tuple[Any, ...]
) -> None:
    assert effect_of(*cause) == effect


def test_refused_and_late_events_change_no_state() -> None:
    assert_unchanged(REFUSED, IGNORED)


def test_every_refusal_has_a_reason_for_the_user(snapshot: SnapshotAssertion) -> None:
    causes = {name: cause for name, (cause, _) in TABLE.items()} | REFUSED
    assert texts_of(causes) == snapshot


@pytest.mark.parametrize("life", [STARTING, IDLE, RUNNING, INTERRUPTING, STOPPING])
def test_any_living_rank_can_be_killed(life: Life) -> None:
    assert advance(life, ev.KillAsked(rank=1)) == (life, [kill(1)])


GROUPS = {
    "a start with one": (STARTING, True),
    "a start without one": (after(OFF, NO_GROUP), False),
    "all ended at the same collective": (
        after(RUNNING, ended(0, sequence=3), ended(1, sequence=3)),
        True,
    ),
    "all failed at the same collective": (
        after(RUNNING, failed(0, sequence=3), failed(1, sequence=3)),
        True,
    ),
    "the ranks left at different collectives": (
        after(RUNNING, failed(0, sequence=3), ended(1, sequence=4)),
        False,
    ),
    "a rank lost it": (LOST, False),
    "a cell on the other rank says nothing of it": (
        after(LOST, run(0, needs_group=None), ended(0)),
        False,
    ),
    "it was formed anew": (after(LOST, run(0)), True),
    "a cell needs none": (after(IDLE, run(needs_group=False)), False),
    "a cell made its own": (after(IDLE, run(needs_group=False), ended(0), ended(1)), True),
    "a cell leaves it as it is": (after(IDLE, run(needs_group=None)), True),
    "a cell leaves none as it is": (after(LOST, run(needs_group=None)), False),
    "survivors left it": (after(BROKEN, run(0, needs_group=False)), False),
    "an idle rank died": (BROKEN, False),
    "a rank died in a cell": (after(RUNNING, died(1), ended(0)), False),
}


@pytest.mark.parametrize(("life", "has_group"), GROUPS.values(), ids=GROUPS)
def test_has_group_in_each_state(life: Life, *, has_group: bool) -> None:
    assert life.has_group is has_group


def test_each_new_process_group_gets_a_new_generation() -> None:
    life, generations = IDLE, []
    for number in (1, 2, 3):
        life, actions = advance(life, run(cell=number))
        generations += [each.message.generation for each in actions if isinstance(each, ev.Send)]
        life = after(life, ended(0, cell=number, in_group=False), ended(1, cell=number))
    assert generations == [1, 2]


def test_events_update_the_state_of_each_rank() -> None:
    states = [each.state for each in ONE_RUNS.ranks]
    assert states == [RankState.RUNNING, RankState.IDLE]
    assert after(RUNNING, ended(0), ended(1)).cell is None
    assert after(IDLE, died(1, 3)).ranks[1].exitcode == 3
    assert after(RUNNING, died(1), ended(1)).alive == [0]
    assert after(STOPPING, died(0), died(1)).ranks == ()
    assert (SOME.alive, SOME.gone, SOME.ranks[1].state) == ([0, 2], (), RankState.ABSENT)
    later = after(IDLE, RESTART, ev.RestartAsked(start=NO_GROUP), died(0), died(1))
    assert [each.state for each in later.ranks] == [RankState.STARTING]


def test_attempts_of_a_run_are_counted_from_its_start() -> None:
    again = ev.RestartAsked(start=ev.StartAsked(world_size=2))
    restarted = after(IDLE, again, died(0), died(1))
    stopped = after(restarted, ev.StopAsked(), died(0, attempt=2), died(1, attempt=2))
    counts = [
        (life.attempt, life.run_attempt)
        for life in (IDLE, restarted, stopped, after(stopped, START), after(stopped, again))
    ]
    assert counts == [(1, 1), (2, 2), (2, 2), (3, 1), (3, 1)]
    back = ev.RejoinAsked(attempt=4, world_size=2, survivors=((0, 0),), attempts_before_run=2)
    assert after(Life(), back).run_attempt == 2


def test_a_restarted_group_keeps_no_state_of_the_old_one() -> None:
    old = after(LOST, run(cell=2))
    assert old.generation == 1
    again = ev.RestartAsked(start=ev.StartAsked(world_size=2, grace=2.0))
    life = after(old, again, died(0), died(1))
    assert life == replace(after(OFF, again.start), attempt=2)


@pytest.mark.parametrize(
    "late",
    [
        ready(0),
        unable(0),
        acknowledged(0),
        ended(0),
        died(0),
        passed(ev.Deadline.START),
        passed(ev.Deadline.GRACE),
        passed(ev.Deadline.STOP),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_an_earlier_attempt_are_dropped(late: ev.Event) -> None:
    life = after(IDLE, RESTART, died(0), died(1))
    assert advance(life, late) == (life, [])
    for event in (ready(0, attempt=2), ready(1, attempt=2), run()):
        life = after(life, event)
        assert advance(life, late) == (life, [])
