"""The lifecycle of healing: new processes for dead ranks, while the others live on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_transitions import ALL_GONE, BROKEN, IDLE, run

from nbddp.lifecycle.events import (
    Alarm,
    Event,
    Exited,
    HealAsked,
    HealEnded,
    InterruptAsked,
    Kill,
    NotHealed,
    Rang,
    RankReady,
    RankUnable,
    Refuse,
    Revive,
    Revived,
    SendCell,
    SendLeave,
    SetAlarm,
    StopAsked,
    Terminate,
)
from nbddp.lifecycle.states import GroupState, Life, RankState
from nbddp.lifecycle.transitions import advance

HEALING, _ = advance(BROKEN, HealAsked(ranks=(1,), donor=0))
READY = RankReady(attempt=BROKEN.attempt, rank=1)


def test_a_group_heals_while_the_others_live_on() -> None:
    life, actions = advance(BROKEN, HealAsked(ranks=(1,), donor=0))
    assert life.state is GroupState.HEALING
    assert [each.state for each in life.ranks] == [RankState.IDLE, RankState.STARTING]
    assert actions[0] == Revive(attempt=BROKEN.attempt, ranks=((1, 1),))
    life, actions = advance(life, READY)
    assert actions == [Revived()]
    assert advance(life, run())[1] == [Refuse(reason="the worker group is healing")]
    life, actions = advance(life, HealEnded(attempt=BROKEN.attempt))
    assert (life.state, actions, life.has_group) == (GroupState.IDLE, [], True)
    assert life.generation == BROKEN.generation + 1
    assert advance(life, run())[1] == [SendCell(cell=1, ranks=(0, 1))]


def test_no_ranks_meet_where_others_have_tried_to() -> None:
    """What those left in the store would lead them astray."""
    life, _ = advance(HEALING, HealEnded(attempt=BROKEN.attempt, reason="one could not"))
    again, _ = advance(life, HealAsked(ranks=(1,), donor=0))
    assert len({each.generation for each in (BROKEN, HEALING, again)}) == 3


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (InterruptAsked(), "it was interrupted"),
        (HealEnded(attempt=BROKEN.attempt, reason="no room"), "no room"),
        (RankUnable(attempt=BROKEN.attempt, rank=1, reason="no"), "rank 1 could not start: no"),
        (
            Rang(alarm=Alarm.START, attempt=BROKEN.attempt, cell=0, generation=HEALING.generation),
            "rank 1 did not get ready in 90 s",
        ),
        (HealEnded(attempt=BROKEN.attempt), "it was ended before all ranks were there"),
    ],
)
def test_what_ends_it_leaves_the_others_as_they_were(event: Event, why: str) -> None:
    life, actions = advance(HEALING, event)
    assert life.state is GroupState.BROKEN
    assert life.alive == [0]
    assert actions == [NotHealed(reason=why), Kill(ranks=(1,))]


@pytest.mark.parametrize(("rank", "alive"), [(1, [0]), (0, [])])
def test_a_death_while_it_heals_ends_it(rank: int, alive: list[int]) -> None:
    life, actions = advance(HEALING, Exited(attempt=BROKEN.attempt, rank=rank, exitcode=-9))
    assert (life.state, life.alive) == (GroupState.BROKEN, alive)
    assert actions[0] == NotHealed(reason=f"rank {rank} was killed by SIGKILL meanwhile")


def test_a_group_that_heals_may_be_stopped() -> None:
    life, actions = advance(HEALING, StopAsked())
    assert life.state is GroupState.STOPPING
    assert actions[:2] == [SendLeave(ranks=(0,)), Terminate(ranks=(1,))]


@pytest.mark.parametrize(
    ("life", "ranks", "donor", "said"),
    [
        (IDLE, (1,), 0, "no rank is gone"),
        (ALL_GONE, (0,), 0, "no rank lives that could give its names"),
        (BROKEN, (0,), 0, "rank 0 lives"),
        (BROKEN, (1,), 1, "rank 1 was killed by SIGKILL"),
        (BROKEN, (9,), 0, "there is no rank 9"),
        (HEALING, (1,), 0, "the worker group is healing"),
    ],
)
def test_what_cannot_be_healed_is_refused(
    life: Life, ranks: tuple[int, ...], donor: int, said: str
) -> None:
    after, [refusal] = advance(life, HealAsked(ranks=ranks, donor=donor))
    assert after is life
    assert isinstance(refusal, Refuse)
    assert refusal.reason.startswith(said)


def test_a_deadline_of_what_was_before_ends_no_heal() -> None:
    """That of the start, or of a heal before: each rings a minute and a half after it began."""
    start = Rang(alarm=Alarm.START, attempt=BROKEN.attempt, cell=0, generation=BROKEN.generation)
    assert advance(HEALING, start) == (HEALING, [])
    life, _ = advance(HEALING, HealEnded(attempt=BROKEN.attempt, reason="one could not"))
    again, actions = advance(life, HealAsked(ranks=(1,), donor=0))
    before = replace(start, generation=HEALING.generation)
    assert advance(again, before) == (again, [])
    [alarm] = [each for each in actions if isinstance(each, SetAlarm)]
    rings = replace(start, generation=alarm.generation)
    assert advance(again, rings)[0].state is GroupState.BROKEN
