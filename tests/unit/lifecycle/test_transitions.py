"""The worker group's life as tables: what follows from an event, in which state.

``controller/test_group_actor_orders.py`` plays the events in any order.
"""

from dataclasses import replace
from typing import Any, NamedTuple

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
    Row,
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
    step_awaited,
    terminate,
    texts_of,
    unable,
)
from syrupy.assertion import SnapshotAssertion
from unit.lifecycle import test_heals

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.events import Deadline
from nbddp.lifecycle.group_state import GroupState as State
from nbddp.lifecycle.group_state import Life, RankState
from nbddp.lifecycle.heal_steps import START_TIMEOUT
from nbddp.lifecycle.transitions import (
    DEATH_TIMEOUT,
    INTERRUPT_TIMEOUT,
    PEERS_TIMEOUT,
    STUCK_AFTER,
    advance,
)
from nbddp.wire.group_spec import StartOptions
from nbddp.wire.messages import Regroup

GRACE_SECONDS = StartOptions.grace
RESTART = ev.RestartAsked(start=START)
PEERS, STUCK, GRACE, CLEANUP = map(
    passed, (Deadline.PEERS, Deadline.STUCK, Deadline.GRACE, Deadline.CLEANUP)
)
NO_GROUP = ev.StartAsked(world_size=1, joins_group=False)
RESTART_ALONE = ev.RestartAsked(start=NO_GROUP)
FOUR = after(OFF, ev.StartAsked(world_size=4))
FOUR_RUN = after(FOUR, *map(ready, range(4)), run(0, 1, 2, 3))
PATIENT = after(OFF, ev.StartAsked(world_size=2, grace=20.0), ready(0), ready(1), run())
LOST = after(RUNNING, ended(0), ended(1, in_group=False))  # no process group on rank 1
SOME = after(OFF, ev.StartAsked(world_size=3, joins_group=False, ranks=(0, 2)), ready(0))
SOME_RUN = after(SOME, ready(2), run(0, 2, needs_group=False), ended(0))
PEER_FREED = after(RUNNING, failed(1), PEERS)
ALL_ANSWERED = acknowledged(0), acknowledged(1)
SIGSTOP = {"stopped": ((1, 4321),)}  # rank 1 got one, its process id is 4321
ONE_COMPUTES = passed(Deadline.GRACE, working=(0,))
ALL_COMPUTE = passed(Deadline.GRACE, working=(0, 1))
DONE = ev.CellFinished(cell=1)
OVER = State.IDLE, [DONE]
STOPPED = State.OFF, [ev.GroupStopped()]
REMARK = State.INTERRUPTING, [ev.Notify]
AGAIN = deadline_set(Deadline.GRACE, GRACE_SECONDS)
SET_STUCK = deadline_set(Deadline.STUCK, STUCK_AFTER)


def begins(attempt: int) -> list[ev.Action]:
    return [ev.StartRanks(), deadline_set(Deadline.START, START_TIMEOUT, cell=0, attempt=attempt)]


RESTARTED = State.STARTING, [ev.GroupStopped(), *begins(2)]


def killed(*ranks: int) -> tuple[State, list[Any]]:
    """Return the effect of killing ranks that an interrupt has not stopped."""
    return State.INTERRUPTING, [ev.Notify, kill(*ranks)]


def limits(grace: float = GRACE_SECONDS) -> tuple[ev.SetDeadline, ...]:
    """Return the deadlines that an interrupt of a cell sets."""
    return deadline_set(Deadline.GRACE, grace), deadline_set(Deadline.CLEANUP, INTERRUPT_TIMEOUT)


def regroup(*ranks: int, form: bool) -> ev.Send:
    return ev.Send(ranks=ranks, message=Regroup(generation=1, form=form))


WITHOUT_GROUP = State.RUNNING, [regroup(0, 1, form=False), send(0, 1)]
RANK_LOST = State.RUNNING, [ev.Notify, deadline_set(Deadline.PEERS, DEATH_TIMEOUT)]

STARTS = {
    "a start": Row(OFF, [START], State.STARTING, begins(1)),
    "a start without a process group": Row(OFF, [NO_GROUP], State.STARTING, begins(1)),
    "the first rank is ready": Row(STARTING, [ready(1)], State.STARTING),
    "the last rank is ready": Row(STARTING, [ready(1), ready(0)], State.IDLE, [ev.GroupStarted()]),
    "the last of some ranks is ready": Row(SOME, [ready(2)], State.IDLE, [ev.GroupStarted()]),
    "a rank is unable": Row(
        STARTING, [ready(0), unable(1)], State.STOPPING, [ev.GroupStartFailed, kill(0, 1)]
    ),
    "a rank dies early": Row(STARTING, [died(1)], State.STOPPING, [ev.GroupStartFailed, kill(0)]),
    "the only rank dies early": Row(
        OFF, [NO_GROUP, died(0, 3)], State.OFF, [ev.GroupStartFailed, ev.GroupStopped()]
    ),
    "ranks are late": Row(
        FOUR,
        [ready(1), passed(Deadline.START, cell=0)],
        State.STOPPING,
        [ev.GroupStartFailed, kill(0, 1, 2, 3)],
    ),
    "a process of a failed start ends": Row(STARTING, [unable(1), died(1, 1)], State.STOPPING),
    "the last process of a failed start ends": Row(
        STARTING, [unable(1), died(1, 1), died(0)], *STOPPED
    ),
    "an interrupt of a start": Row(
        STARTING,
        [ready(0), INTERRUPT],
        State.STOPPING,
        [leave(0), terminate(1), deadline_set(Deadline.STOP, GRACE_SECONDS, cell=0)],
    ),
}
CELLS = {
    "a cell": Row(IDLE, [run(cell=5)], State.RUNNING, [send(0, 1, cell=5)]),
    "a cell on one rank": Row(IDLE, [run(1)], State.RUNNING, [send(1)]),
    "a cell on survivors": Row(BROKEN, [run(0)], State.RUNNING, [send(0)]),
    "the first rank ends": Row(RUNNING, [ended(1)], State.RUNNING),
    "the last rank ends": Row(RUNNING, [ended(1), ended(0)], *OVER),
    "the last of some ranks ends": Row(SOME_RUN, [ended(2)], *OVER),
    "the only rank of the cell ends": Row(IDLE, [run(1), ended(1)], *OVER),
    "a survivor ends": Row(BROKEN, [run(0), ended(0)], State.BROKEN, [DONE]),
    "no group for a cell that needs none": Row(IDLE, [run(needs_group=False)], *WITHOUT_GROUP),
    "no group after it was lost": Row(LOST, [run(needs_group=False)], *WITHOUT_GROUP),
    "no group on survivors": Row(
        BROKEN, [run(0, needs_group=False)], State.RUNNING, [regroup(0, form=False), send(0)]
    ),
    "a new group for a cell on one rank": Row(
        LOST, [run(0)], State.RUNNING, [regroup(0, 1, form=True), send(0)]
    ),
    "the group is left as it is": Row(LOST, [run(needs_group=None)], State.RUNNING, [send(0, 1)]),
}
FAILURES = {
    "the first failure": Row(
        RUNNING, [failed(1)], State.RUNNING, [deadline_set(Deadline.PEERS, PEERS_TIMEOUT)]
    ),
    "the second failure": Row(FOUR_RUN, [failed(0), failed(1)], State.RUNNING),
    "the last rank fails": Row(RUNNING, [ended(0), failed(1)], *OVER),
    "a death": Row(RUNNING, [died(1)], *RANK_LOST),
    "a death after a failure": Row(FOUR_RUN, [failed(0), died(1)], *RANK_LOST),
    "a second death": Row(FOUR_RUN, [died(1), died(2)], State.RUNNING, [ev.Notify]),
    "the last rank dies": Row(RUNNING, [ended(0), died(1)], State.BROKEN, [DONE]),
    "all ranks die": Row(RUNNING, [died(1), died(0)], State.BROKEN, [DONE]),
    "peers still wait after a failure": Row(
        RUNNING, [failed(1), PEERS], State.INTERRUPTING, [interrupt(0), *limits()]
    ),
    "peers still wait after a death": Row(
        RUNNING, [died(1), PEERS], State.INTERRUPTING, [interrupt(0, rank_died=True), *limits()]
    ),
    "a death beside a cell": Row(IDLE, [run(0), died(1)], State.RUNNING, [ev.Notify]),
    "the death of an idle rank": Row(IDLE, [died(1, 3)], State.BROKEN),
}
INTERRUPTS = {
    "an interrupt": Row(
        PATIENT, [ended(0), INTERRUPT], State.INTERRUPTING, [interrupt(1), SET_STUCK, *limits(20.0)]
    ),
    "an interrupt of ranks that may end the same step": Row(
        RUNNING,
        [INTERRUPT],
        State.INTERRUPTING,
        [interrupt(0, 1, after_step=True), SET_STUCK, *limits()],
    ),
    "they end a short step": Row(
        INTERRUPTING,
        [step_awaited(0, 1.0)],
        State.INTERRUPTING,
        [deadline_set(Deadline.GRACE, GRACE_SECONDS + 1.0)],
    ),
    "no remark before its limit": Row(
        INTERRUPTING,
        [step_awaited(0, 1.0), STUCK],
        State.INTERRUPTING,
        [deadline_set(Deadline.STUCK, 1.0)],
    ),
    "a remark on a long step": Row(
        INTERRUPTING,
        [step_awaited(0, 8.0), STUCK],
        State.INTERRUPTING,
        [ev.Notify, deadline_set(Deadline.STUCK, 8.0)],
    ),
    "the first limit does not end a long step": Row(
        INTERRUPTING, [step_awaited(0, 1.0), step_awaited(1, 8.0), GRACE, GRACE], State.INTERRUPTING
    ),
    "the last one does": Row(
        INTERRUPTING,
        [step_awaited(0, 1.0), step_awaited(1, 8.0), GRACE, GRACE, GRACE],
        *killed(0, 1),
    ),
    "the remark after a long step": Row(
        INTERRUPTING, [step_awaited(0, 8.0), STUCK, STUCK], State.INTERRUPTING, [ev.Notify]
    ),
    "a double click ends the wait for a step": Row(
        INTERRUPTING, [INTERRUPT], State.INTERRUPTING, [interrupt(0, 1, is_second=True)]
    ),
    "a second interrupt after the remark on a long step": Row(
        INTERRUPTING,
        [step_awaited(0, 8.0), STUCK, INTERRUPT],
        State.INTERRUPTING,
        [interrupt(0, 1, is_second=True)],
    ),
    "a second interrupt after the remark": Row(
        INTERRUPTING, [ended(0), STUCK, INTERRUPT], *killed(1)
    ),
    "a third one after a double click": Row(
        INTERRUPTING, [INTERRUPT, STUCK, INTERRUPT], *killed(0, 1)
    ),
    "the user's first interrupt after nbddp's own": Row(
        PEER_FREED, [INTERRUPT], State.INTERRUPTING, [interrupt(0), SET_STUCK, *limits()]
    ),
    "all ranks were interrupted": Row(INTERRUPTING, [INTERRUPT, failed(0), failed(1)], *OVER),
    "one rank was interrupted": Row(INTERRUPTING, [ended(0), failed(1)], *OVER),
    "it ended all the same": Row(INTERRUPTING, [ended(0), ended(1)], State.IDLE, [ev.Notify, DONE]),
    "a failure while interrupting": Row(INTERRUPTING, [failed(0)], State.INTERRUPTING),
    "a killed rank is not told of again": Row(INTERRUPTING, [GRACE, died(0)], State.INTERRUPTING),
    "the last killed rank": Row(INTERRUPTING, [GRACE, died(0), died(1)], State.BROKEN, [DONE]),
}
REMARKS = {
    "stuck: all ranks are deaf": Row(PATIENT, [INTERRUPT, STUCK], *REMARK),
    "stuck: one rank is deaf": Row(INTERRUPTING, [acknowledged(0), STUCK], *REMARK),
    "stuck: one rank is stopped": Row(
        INTERRUPTING, [acknowledged(0), passed(Deadline.STUCK, **SIGSTOP)], *REMARK
    ),
    "stuck: one rank is stopped, one is deaf": Row(
        INTERRUPTING, [passed(Deadline.STUCK, **SIGSTOP)], *REMARK
    ),
    "stuck: all ranks clean up": Row(INTERRUPTING, [*ALL_ANSWERED, STUCK], *REMARK),
    "stuck: one rank imports": Row(
        INTERRUPTING, [*ALL_ANSWERED, passed(Deadline.STUCK, importing=((1, "yaml"),))], *REMARK
    ),
    "stuck: all ranks compute": Row(
        INTERRUPTING, [passed(Deadline.STUCK, working=(0, 1))], *REMARK
    ),
    "stuck: one rank computes, one is deaf": Row(
        INTERRUPTING, [passed(Deadline.STUCK, working=(0,))], *REMARK
    ),
}
ONE_KILLED = after(INTERRUPTING, ONE_COMPUTES, died(1))
KILLS = {
    "kill: all ranks are deaf": Row(PATIENT, [INTERRUPT, GRACE], *killed(0, 1)),
    "kill: one rank is stopped": Row(
        INTERRUPTING, [passed(Deadline.GRACE, **SIGSTOP)], *killed(0, 1)
    ),
    "kill: one rank cleans up": Row(INTERRUPTING, [acknowledged(0), GRACE], *killed(1)),
    "kill: a rank that computed waits": Row(ONE_KILLED, [GRACE], *killed(0)),
    "kill: a rank computes too long": Row(
        ONE_KILLED, [passed(Deadline.CLEANUP, working=(0,))], *killed(0)
    ),
    "kill: a rank cleans up too long": Row(
        INTERRUPTING, [acknowledged(0), ended(1), CLEANUP], *killed(0)
    ),
}
GRACES = {
    "a rank that computes outlives the grace": Row(
        INTERRUPTING, [ONE_COMPUTES], State.INTERRUPTING, [ev.Notify, kill(1), AGAIN]
    ),
    "all ranks compute": Row(INTERRUPTING, [ALL_COMPUTE], State.INTERRUPTING, [AGAIN]),
}
STOPS = {
    "a stop": Row(
        PATIENT,
        [ended(0), STOP],
        State.STOPPING,
        [leave(0), terminate(1), deadline_set(Deadline.STOP, 20.0)],
    ),
    "a stop of dead ranks": Row(ALL_GONE, [STOP], *STOPPED),
    "the first process is gone": Row(STOPPING, [died(0, 0)], State.STOPPING),
    "the last process is gone": Row(STOPPING, [died(0, 0), died(1, 0)], *STOPPED),
    "the grace of a stop is over": Row(
        STOPPING, [died(0, 0), passed(Deadline.STOP, cell=0)], State.STOPPING, [ev.Notify, kill(1)]
    ),
    "an interrupt of a stop": Row(STOPPING, [died(0, 0), INTERRUPT], State.STOPPING, [kill(1)]),
    "a cell ends while stopping": Row(RUNNING, [STOP, ended(0), ended(1)], State.STOPPING),
    "the last process of a cell is gone": Row(
        RUNNING, [STOP, ended(0), ended(1), died(0), died(1)], State.OFF, [DONE, ev.GroupStopped()]
    ),
}
RESTARTS = {
    "a restart of no group": Row(OFF, [RESTART], State.STARTING, begins(1)),
    "a restart of a cell": Row(
        RUNNING, [RESTART, died(0), died(1)], State.STARTING, [DONE, ev.GroupStopped(), *begins(2)]
    ),
    "a restart of a stop": Row(STOPPING, [RESTART, died(0), died(1)], *RESTARTED),
    "a restart of dead ranks": Row(ALL_GONE, [RESTART], *RESTARTED),
    "a stop cancels a restart": Row(IDLE, [RESTART, STOP, died(0), died(1)], *STOPPED),
    "the later of two restarts": Row(IDLE, [RESTART, RESTART_ALONE, died(0), died(1)], *RESTARTED),
}
TABLE = STARTS | CELLS | FAILURES | INTERRUPTS | KILLS | GRACES | STOPS | RESTARTS | REMARKS
LOSES_40 = after(OFF, ev.StartAsked(world_size=64), *map(ready, range(64)), died(40))
REFUSED = {
    "a cell on a rank that was not started": Row(SOME, [ready(2), run(1)]),
    "a start while starting": Row(STARTING, [START]),
    "a start while idle": Row(IDLE, [START]),
    "a start while running": Row(RUNNING, [START]),
    "a start while interrupting": Row(INTERRUPTING, [START]),
    "a start while stopping": Row(STOPPING, [START]),
    "a start beside a dead rank": Row(BROKEN, [START]),
    "a cell before a start": Row(OFF, [run()]),
    "a cell while starting": Row(STARTING, [run()]),
    "a cell while healing": Row(HEALING, [run()]),
    "a cell while stopping": Row(STOPPING, [run()]),
    "a second cell": Row(RUNNING, [run(cell=2)]),
    "a second cell while interrupting": Row(INTERRUPTING, [run(cell=2)]),
    "a cell for rank 2 of 2": Row(IDLE, [run(0, 2)]),
    "a cell for rank -1": Row(IDLE, [run(0, -1)]),
    "a cell for no rank": Row(IDLE, [ev.RunAsked(cell=1, ranks=())]),
    "a cell for a rank twice": Row(IDLE, [run(1, 1)]),
    "a cell for a dead rank": Row(BROKEN, [run()]),
    "a cell for dead ranks": Row(ALL_GONE, [run()]),
    "a kill before a start": Row(OFF, [ev.KillAsked(rank=0)]),
    "a kill of a dead rank": Row(BROKEN, [ev.KillAsked(rank=1)]),
    "a cell for a dead rank of 64": Row(LOSES_40, [ev.RunAsked(cell=1, ranks=(40,))]),
}
ONE_RUNS = after(IDLE, run(0))
IGNORED = {
    "a rank is ready twice": Row(STARTING, [ready(1), ready(1)]),
    "a rank without the cell ends it": Row(ONE_RUNS, [ended(1)]),
    "a rank ends twice": Row(RUNNING, [ended(0), ended(0)]),
    "a report after the exit": Row(RUNNING, [died(1), ended(1)]),
    "a report after the exit, in a stop": Row(RUNNING, [STOP, died(1), ended(1)]),
    "an exit twice": Row(BROKEN, [died(1, 0)]),
    "an exit of an unknown rank": Row(IDLE, [died(7)]),
    "peers of an interrupted cell": Row(RUNNING, [failed(1), INTERRUPT, PEERS]),
    "no deaf ranks at the end of the grace": Row(INTERRUPTING, [*ALL_ANSWERED, GRACE]),
    "no deaf ranks after all computed": Row(INTERRUPTING, [ALL_COMPUTE, *ALL_ANSWERED, GRACE]),
    "the grace of a stop while running": Row(RUNNING, [passed(Deadline.STOP)]),
    "noticed in an earlier cell": Row(INTERRUPTING, [acknowledged(0, cell=9)]),
    "noticed without a cell": Row(IDLE, [acknowledged(0)]),
    "an interrupt before a start": Row(OFF, [INTERRUPT]),
    "an interrupt without a cell": Row(IDLE, [INTERRUPT]),
    "an interrupt beside a dead rank": Row(BROKEN, [INTERRUPT]),
    "a stop before a start": Row(OFF, [STOP]),
    "a second stop": Row(STOPPING, [STOP]),
    **{
        f"{type(event).__name__} of the start while {life.state.name}": Row(life, [event])
        for life in (IDLE, RUNNING, INTERRUPTING, BROKEN)
        for event in (ready(0), unable(0), passed(Deadline.START, cell=0))
    },
    **{
        f"{kind.name} of an earlier cell while {life.state.name}": Row(
            life, [passed(kind, cell=99)]
        )
        for kind in (
            Deadline.PEERS,
            Deadline.STUCK,
            Deadline.GRACE,
            Deadline.CLEANUP,
            Deadline.STOP,
        )
        for life in (STARTING, IDLE, RUNNING, INTERRUPTING, BROKEN)
    },
    **{
        f"{kind.name} of a cell while stopping": Row(after(RUNNING, STOP), [passed(kind)])
        for kind in (Deadline.PEERS, Deadline.STUCK, Deadline.GRACE, Deadline.CLEANUP)
    },
}


ALL = TABLE | test_heals.TABLE
ALL_REFUSED = REFUSED | test_heals.REFUSED


@pytest.mark.parametrize("row", ALL.values(), ids=ALL)
def test_each_event_leads_to_the_expected_state_and_actions(row: Row) -> None:
    assert effect_of(row) == (row.state, [*row.actions])


def test_refused_and_late_events_change_no_state() -> None:
    assert_unchanged(ALL_REFUSED, IGNORED | test_heals.IGNORED)


def test_every_refusal_has_a_reason_for_the_user(snapshot: SnapshotAssertion) -> None:
    assert texts_of(ALL | ALL_REFUSED) == snapshot


@pytest.mark.parametrize("life", [STARTING, IDLE, RUNNING, INTERRUPTING, STOPPING])
def test_any_living_rank_can_be_killed(life: Life) -> None:
    assert advance(life, ev.KillAsked(rank=1)) == (life, [kill(1)])


class Membership(NamedTuple):
    life: Life
    has_group: bool


GROUPS = {
    "a start with one": Membership(STARTING, has_group=True),
    "a start without one": Membership(after(OFF, NO_GROUP), has_group=False),
    "all ended at the same collective": Membership(
        after(RUNNING, ended(0, sequence=3), ended(1, sequence=3)), has_group=True
    ),
    "all failed at the same collective": Membership(
        after(RUNNING, failed(0, sequence=3), failed(1, sequence=3)), has_group=True
    ),
    "the ranks left at different collectives": Membership(
        after(RUNNING, failed(0, sequence=3), ended(1, sequence=4)), has_group=False
    ),
    "a rank lost it": Membership(LOST, has_group=False),
    "a cell on the other rank says nothing of it": Membership(
        after(LOST, run(0, needs_group=None), ended(0)), has_group=False
    ),
    "it was formed anew": Membership(after(LOST, run(0)), has_group=True),
    "a cell needs none": Membership(after(IDLE, run(needs_group=False)), has_group=False),
    "a cell made its own": Membership(
        after(IDLE, run(needs_group=False), ended(0), ended(1)), has_group=True
    ),
    "a cell leaves it as it is": Membership(after(IDLE, run(needs_group=None)), has_group=True),
    "a cell leaves none as it is": Membership(after(LOST, run(needs_group=None)), has_group=False),
    "survivors left it": Membership(after(BROKEN, run(0, needs_group=False)), has_group=False),
    "an idle rank died": Membership(BROKEN, has_group=False),
    "a rank died in a cell": Membership(after(RUNNING, died(1), ended(0)), has_group=False),
}


@pytest.mark.parametrize("row", GROUPS.values(), ids=GROUPS)
def test_has_group_in_each_state(row: Membership) -> None:
    assert row.life.has_group is row.has_group


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
    later = after(IDLE, RESTART, RESTART_ALONE, died(0), died(1))
    assert [each.state for each in later.ranks] == [RankState.STARTING]


def test_attempts_of_a_run_are_counted_from_its_start() -> None:
    restarted = after(IDLE, RESTART, died(0), died(1))
    stopped = after(restarted, STOP, died(0, attempt=2), died(1, attempt=2))
    lives = [IDLE, restarted, stopped, after(stopped, START), after(stopped, RESTART)]
    counts = [(life.attempt, life.run_attempt) for life in lives]
    assert counts == [(1, 1), (2, 2), (2, 2), (3, 1), (3, 1)]
    back = ev.RejoinAsked(attempt=4, world_size=2, survivors=((0, 0),), attempts_before_run=2)
    assert after(Life(), back).run_attempt == 2


def test_a_restarted_group_keeps_no_state_of_the_old_one() -> None:
    old = after(LOST, run(cell=2))
    assert old.generation == 1
    again = ev.RestartAsked(start=ev.StartAsked(world_size=2, grace=2.0))
    life = after(old, again, died(0), died(1))
    assert life == replace(after(OFF, again.start), attempt=2)


LATE = [ready(0), unable(0), acknowledged(0), ended(0), died(0)]
LATE += map(passed, (Deadline.START, Deadline.GRACE, Deadline.STOP))


@pytest.mark.parametrize("late", LATE, ids=lambda event: type(event).__name__)
def test_events_of_an_earlier_attempt_are_dropped(late: ev.Event) -> None:
    life = after(IDLE, RESTART, died(0), died(1))
    assert advance(life, late) == (life, [])
    for event in (ready(0, attempt=2), ready(1, attempt=2), run()):
        life = after(life, event)
        assert advance(life, late) == (life, [])
