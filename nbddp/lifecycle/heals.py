"""How a worker group heals: dead ranks get new processes while the others live on.

``HEALING`` lasts until all have met again. Whatever comes in between ends it: what was started for
it is killed, and the group is as it was before, with its dead ranks.
"""

from __future__ import annotations

from dataclasses import replace

from nbddp.lifecycle import reasons
from nbddp.lifecycle.events import (
    Action,
    Alarm,
    HealAsked,
    HealEnded,
    Kill,
    NotHealed,
    Refuse,
    Revive,
    Revived,
)
from nbddp.lifecycle.states import GroupState, Life, RankLife, RankState
from nbddp.lifecycle.steps import START_PATIENCE, Step, in_state, ring_in

KILLED = -9  # how a newcomer ends that is not needed any more


def on_heal_asked(life: Life, event: HealAsked) -> Step:
    """Start new processes for dead ranks."""
    reason = reasons.not_to_heal(life, event.ranks, event.donor)
    if reason:
        return life, [Refuse(reason=reason)]
    ranks = tuple(
        RankLife(each.rank, incarnation=each.incarnation + 1) if each.rank in event.ranks else each
        for each in life.ranks
    )
    healing = replace(
        life,
        state=GroupState.HEALING,
        ranks=ranks,
        newcomers=event.ranks,
        generation=life.generation + 1,  # no ranks ever meet where others did, or tried to
    )
    born = tuple((each.rank, each.incarnation) for each in ranks if each.rank in event.ranks)
    revive = Revive(attempt=life.attempt, ranks=born)
    return healing, [revive, ring_in(healing, Alarm.START, START_PATIENCE)]


def on_newcomer_ready(life: Life) -> Step:
    """One of them is there, and the last of them can begin."""
    waits = any(each.state is RankState.STARTING for each in life.ranks)
    return life, [] if waits else [Revived()]


def give_up(life: Life, reason: str) -> Step:
    """It cannot be: end those that were to heal it."""
    doomed = tuple(rank for rank in life.newcomers if life.lives(rank))
    ranks = tuple(
        replace(each, state=RankState.GONE, exitcode=KILLED) if each.rank in doomed else each
        for each in life.ranks
    )
    kill: list[Action] = [Kill(ranks=doomed)] if doomed else []
    broken = replace(
        life, state=GroupState.BROKEN, ranks=ranks, newcomers=(), has_group=False, cell=None
    )
    return broken, [NotHealed(reason=reason), *kill]


def on_heal_ended(life: Life, event: HealEnded) -> Step:
    """All have met, or one of them could not."""
    if life.state is not GroupState.HEALING:
        return life, []
    if event.reason or in_state(life, RankState.STARTING):
        return give_up(life, event.reason or "it was ended before all ranks were there")
    is_whole = len(life.alive) == len(life.ranks)
    over = replace(
        life,
        state=GroupState.IDLE if is_whole else GroupState.BROKEN,
        newcomers=(),
        has_group=is_whole,
    )
    return over, []
