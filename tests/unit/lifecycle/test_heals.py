"""How a group goes on with other processes: dead ranks are replaced, or ranks are taken back."""

from dataclasses import replace
from typing import Any

from life_states import (
    ALL_GONE,
    BROKEN,
    HEAL,
    HEALING,
    IDLE,
    INTERRUPT,
    OFF,
    RUNNING,
    STOP,
    Row,
    after,
    deadline_set,
    died,
    ended,
    kill,
    leave,
    passed,
    ready,
    run,
    send,
    terminate,
    unable,
)

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.events import Deadline
from nbddp.lifecycle.group_state import GroupState as State
from nbddp.lifecycle.group_state import RankState
from nbddp.lifecycle.heal_steps import CANCEL_TIMEOUT, START_TIMEOUT
from nbddp.lifecycle.transitions import PEERS_TIMEOUT, advance
from nbddp.wire.group_spec import StartOptions

GRACE_SECONDS = StartOptions.grace
GIVEN = ev.NamespacePickled(attempt=1, generation=1)
NO_NAMES = replace(GIVEN, reason="rank 0: no room")
MEET = ev.RequestJoin(ranks=(0, 1), generation=1)
IN_HEAL = {"cell": 0, "generation": 1}
READY_SOON = deadline_set(Deadline.START, START_TIMEOUT, **IN_HEAL)
BACK_SOON = deadline_set(Deadline.CANCEL, CANCEL_TIMEOUT, **IN_HEAL)
RANG_BACK = passed(Deadline.CANCEL, **IN_HEAL)


def met(rank: int, **more: Any) -> ev.GroupJoined:
    return ev.GroupJoined(attempt=1, generation=1, rank=rank, **more)


def give(generation: int, *leave: str) -> ev.RequestNamespace:
    return ev.RequestNamespace(generation=generation, exclude=leave, replacements=(1,))


def start_passed(generation: int) -> ev.DeadlinePassed:
    return passed(Deadline.START, cell=0, generation=generation)


def cancelled(*ranks: int) -> tuple[State, list[Any]]:
    return State.HEALING, [ev.CancelJoin(ranks=ranks), BACK_SOON]


NOT_LOADED = met(1, reason="rank 1: no lock", not_loaded=("lock",))
LEFT = met(0, reason="rank 0: the others left", is_consequence=True)
NO_ROOM = met(1, reason="rank 1: no room")
READY = after(HEALING, ready(1))
MEETING = after(READY, GIVEN)
HEALED = after(MEETING, met(0), met(1))
HEALING_AGAIN = after(HEALING, NO_NAMES, HEAL)
BACK = ev.RejoinAsked(attempt=4, world_size=3, survivors=((0, 0), (2, 1)))
RETURNING = after(OFF, BACK)
LATE = passed(Deadline.START, attempt=4, **IN_HEAL)
LOST = after(RETURNING, died(0, attempt=4), died(2, attempt=4))
IN_CELL = after(
    OFF, replace(BACK, survivors=((0, 0), (1, 0)), world_size=2, cell=5, cell_ranks=(0, 1))
)
HALF = after(OFF, replace(BACK, cell=5, cell_ranks=(0, 1)))
ENDED = ended(0, cell=5, attempt=4)
REJOINED = State.BROKEN, [ev.GroupStarted()]
IN_VAIN = State.BROKEN, [kill(1), ev.HealFailed]

TABLE = {
    "a heal": Row(
        BROKEN, [HEAL], State.HEALING, [ev.StartReplacements(ranks=(1,)), give(1), READY_SOON]
    ),
    "the new rank is ready": Row(HEALING, [ready(1)], State.HEALING, [ev.NoteReplacementsReady()]),
    "the names are there, too": Row(READY, [GIVEN], State.HEALING, [MEET]),
    "the names are there first": Row(HEALING, [GIVEN], State.HEALING),
    "the new rank, too": Row(
        HEALING, [GIVEN, ready(1)], State.HEALING, [ev.NoteReplacementsReady(), MEET]
    ),
    "there are no names": Row(HEALING, [NO_NAMES], *IN_VAIN),
    "one has met": Row(MEETING, [met(0)], State.HEALING),
    "all have met": Row(MEETING, [met(0), met(1)], State.IDLE, [ev.HealFinished()]),
    "a cell after a heal": Row(HEALED, [run()], State.RUNNING, [send(0, 1)]),
    "a name cannot be made": Row(MEETING, [NOT_LOADED], *cancelled(0)),
    "all are back": Row(MEETING, [NOT_LOADED, LEFT], State.HEALING, [give(2, "lock")]),
    "a rank cannot meet": Row(MEETING, [NO_ROOM], *cancelled(0)),
    "the other is back": Row(MEETING, [NO_ROOM, LEFT], *IN_VAIN),
    "the other came back first": Row(MEETING, [LEFT, NO_ROOM], *IN_VAIN),
    "the other does not come back": Row(MEETING, [NO_ROOM, RANG_BACK], *IN_VAIN),
    "an interrupt before they meet": Row(READY, [INTERRUPT], *IN_VAIN),
    "an interrupt while they meet": Row(MEETING, [INTERRUPT], *cancelled(0, 1)),
    "a second one": Row(MEETING, [INTERRUPT, INTERRUPT], *IN_VAIN),
    "they met all the same": Row(MEETING, [INTERRUPT, met(0), met(1)], *IN_VAIN),
    "the new rank dies while they meet": Row(MEETING, [died(1)], *cancelled(0)),
    "the other is back then": Row(MEETING, [died(1), LEFT], State.BROKEN, [ev.HealFailed]),
    "the new rank is unable": Row(HEALING, [unable(1)], *IN_VAIN),
    "the new rank is late": Row(HEALING, [start_passed(1)], *IN_VAIN),
    "the new rank of a second heal is late": Row(HEALING_AGAIN, [start_passed(2)], *IN_VAIN),
    "the new rank dies": Row(HEALING, [died(1)], State.BROKEN, [ev.HealFailed]),
    "the donor dies": Row(HEALING, [died(0)], *IN_VAIN),
    "a stop during a heal": Row(
        HEALING,
        [STOP],
        State.STOPPING,
        [leave(0), terminate(1), deadline_set(Deadline.STOP, GRACE_SECONDS, **IN_HEAL)],
    ),
    "ranks are taken back": Row(
        OFF, [BACK], State.STARTING, [ev.RejoinRanks(), replace(READY_SOON, event=LATE)]
    ),
    "all that live are ready": Row(RETURNING, [ready(0, 4), ready(2, 4)], *REJOINED),
    "a returning rank is late": Row(
        RETURNING, [ready(0, 4), LATE], State.STARTING, [ev.Notify, kill(2)]
    ),
    "all returning ranks die": Row(
        RETURNING,
        [died(0, attempt=4), died(2, attempt=4)],
        State.OFF,
        [ev.GroupStartFailed, ev.GroupStopped()],
    ),
    "a returning rank dies": Row(RETURNING, [ready(0, 4), died(2, attempt=4)], *REJOINED),
    "their cell goes on": Row(
        IN_CELL, [ready(0, 4), ENDED, ready(1, 4)], State.RUNNING, [ev.GroupStarted()]
    ),
    "their cell has ended": Row(
        IN_CELL,
        [ENDED, ready(0, 4), ended(1, cell=5, attempt=4)],
        State.IDLE,
        [ev.GroupStarted(), ev.CellFinished(cell=5)],
    ),
    "their cell has lost a rank": Row(
        HALF,
        [ready(0, 4), ready(2, 4)],
        State.RUNNING,
        [
            ev.GroupStarted(),
            deadline_set(Deadline.PEERS, PEERS_TIMEOUT, cell=5, attempt=4, generation=1),
        ],
    ),
    "it loses its last rank": Row(
        HALF,
        [ready(2, 4), died(0, attempt=4)],
        State.BROKEN,
        [ev.GroupStarted(), ev.CellFinished(cell=5)],
    ),
}
REFUSED = {
    "no group": Row(OFF, [HEAL]),
    "all ranks live": Row(IDLE, [HEAL]),
    "no rank lives": Row(ALL_GONE, [ev.HealAsked(ranks=(0, 1))]),
    "rank 0 lives": Row(BROKEN, [ev.HealAsked(ranks=(0,), donor=0)]),
    "the donor is dead": Row(BROKEN, [ev.HealAsked(ranks=(1,), donor=1)]),
    "an unknown rank": Row(BROKEN, [ev.HealAsked(ranks=(9,), donor=0)]),
    "a second heal": Row(HEALING, [HEAL]),
    "a heal while a cell ends": Row(after(RUNNING, died(1)), [HEAL]),
    "taking ranks back while idle": Row(IDLE, [BACK]),
}
IGNORED = {
    "the deadline of a rejoin before": Row(LOST, [BACK, LATE]),
    "the deadline of the start": Row(HEALING, [start_passed(0)]),
    "the deadline of a heal before": Row(HEALING_AGAIN, [start_passed(1)]),
    "the deadline when all are ready": Row(READY, [start_passed(1)]),
    "names after the end": Row(BROKEN, [GIVEN]),
    "names of a heal before": Row(HEALING_AGAIN, [GIVEN]),
    "a rank that was not told to meet": Row(READY, [met(0)]),
    "the deadline of a meeting that goes on": Row(MEETING, [RANG_BACK]),
    "a rank that was ready before it died": Row(
        RETURNING, [ready(0, 4), died(0, attempt=4), ready(0, 4)]
    ),
    "the deadline of a meeting before": Row(MEETING, [NOT_LOADED, LEFT, RANG_BACK]),
}


def test_a_failed_heal_leaves_the_surviving_ranks_unchanged() -> None:
    assert [each.state for each in HEALING.ranks] == [RankState.IDLE, RankState.STARTING]
    for event in (INTERRUPT, NO_NAMES, unable(1), died(1)):
        assert after(HEALING, event).alive == [0]
    assert after(HEALING, died(0)).alive == []
    assert HEALED.has_group


def test_a_failed_heal_keeps_the_cause_of_death_and_says_whether_to_try_again() -> None:
    healing = after(IDLE, replace(died(1), exitcode=-6, cause="kill"), HEAL)
    refused = [ready(1), GIVEN, met(0), replace(NO_ROOM, is_refused=True)]
    whys: list[list[Any]] = [
        [INTERRUPT],
        [NO_NAMES],
        [unable(1)],
        [died(1)],
        [ready(1), NO_NAMES],
        refused,
    ]
    for events in whys:
        failed, actions = advance(after(healing, *events[:-1]), events[-1])
        assert failed.ranks[1].how_it_ended == "was killed by SIGABRT after the fault kill"
        assert isinstance(actions[-1], ev.HealFailed)
        assert actions[-1].is_refused == (events[-1] in (NO_NAMES, refused[-1]))
        assert failed.is_heal_refused == actions[-1].is_refused
        assert not after(failed, run(0)).is_heal_refused


def test_the_donor_is_the_lowest_living_rank_unless_the_user_chooses_one() -> None:
    back = ev.RejoinAsked(attempt=4, world_size=4, survivors=((1, 0), (3, 0)))
    broken = after(OFF, back, ready(1, 4), ready(3, 4))
    for donor, expected in ((None, (1, True)), (3, (3, False))):
        heal = after(broken, ev.HealAsked(ranks=(0, 2), donor=donor)).heal
        assert heal is not None
        assert (heal.donor, heal.checks) == expected


def test_each_heal_uses_a_new_generation_in_the_store() -> None:
    """What those left in the store would lead them astray."""
    assert [each.generation for each in (BROKEN, HEALING, HEALING_AGAIN)] == [0, 1, 2]


def test_ranks_that_were_not_adopted_count_as_gone() -> None:
    assert (RETURNING.alive, RETURNING.gone, RETURNING.attempt) == ([0, 2], (1,), 4)
    assert [each.incarnation for each in RETURNING.ranks] == [0, 0, 1]
