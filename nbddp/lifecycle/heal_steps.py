"""The steps of a heal: new processes replace dead ranks and get the names of a donor.

The new processes start while the donor packs its names. Then all ranks meet in a new process group,
in which the new ones get the names. A name that cannot be made on a new rank ends that meeting; the
donor packs again without it. Whatever else fails, or an interrupt, ends the heal: the new processes
are killed, and the group is as it was before. Ranks that were told to meet are told to give up, and
are waited for until they are back.
"""

from __future__ import annotations

from dataclasses import replace

from nbddp.errors import format_ranks
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.lifecycle.group_state import GroupState, HealLife, Life, RankLife, RankState

Step = tuple[Life, list[ev.Action]]
START_PATIENCE = 90.0  # seconds for all ranks to get ready (the first may import torch)
KILLED = -9  # exit code of a new process after a failed heal
BACK_PATIENCE = 30.0  # seconds in which ranks must return from a failed meeting


def on_heal_asked(life: Life, event: ev.HealAsked) -> Step:
    """Start new processes for dead ranks, and have the donor pack its names meanwhile."""
    reason = refusals.not_to_heal(life, event.ranks, event.donor)
    if reason:
        return life, [ev.Refuse(reason=reason)]
    ranks = tuple(
        RankLife(each.rank, incarnation=each.incarnation + 1) if each.rank in event.ranks else each
        for each in life.ranks
    )
    heal = HealLife(replacements=event.ranks, donor=event.donor, checks=event.checks)
    healing, give = _ask_donor(replace(life, state=GroupState.HEALING, ranks=ranks), heal)
    return healing, [
        ev.StartReplacements(ranks=event.ranks),
        *give,
        healing.ring_in(ev.Deadline.START, START_PATIENCE),
    ]


def _ask_donor(life: Life, heal: HealLife) -> Step:
    generation = life.generation + 1  # no ranks ever meet where others did, or tried to
    give = ev.RequestNamespace(
        donor=heal.donor,
        generation=generation,
        leave=heal.unmade,
        replacements=heal.replacements if heal.checks else (),
    )
    return replace(life, generation=generation, heal=heal), [give]


def on_newcomer_ready(life: Life, heal: HealLife) -> Step:
    """A new process is ready; the last one of them may complete what a meeting needs."""
    if life.in_state(RankState.STARTING):
        return life, []
    life, actions = _meet(life, heal)
    return life, [ev.ReplacementsReady(), *actions]


def on_names_given(life: Life, event: ev.NamespaceSent) -> Step:
    """The donor has packed its names, or could not."""
    heal = life.heal
    if heal is None or event.generation != life.generation or heal.is_given:
        return life, []
    if event.reason:
        return fail(life, heal, event.reason)
    return _meet(life, replace(heal, is_given=True))


def _meet(life: Life, heal: HealLife) -> Step:
    """Tell all ranks to meet, once the new ranks are ready and the names are packed."""
    if not heal.is_given or life.in_state(RankState.STARTING):
        return replace(life, heal=heal), []
    heal = replace(heal, meeting=frozenset(life.alive))
    meet = ev.RequestJoin(
        ranks=tuple(life.alive),
        generation=life.generation,
        donor=heal.donor,
        replacements=heal.replacements,
    )
    return replace(life, heal=heal), [meet]


def on_rank_met(life: Life, event: ev.GroupJoined) -> Step:
    """A rank is back from the meeting, in which it met all others or not."""
    heal = life.heal
    if heal is None or event.generation != life.generation or event.rank not in heal.meeting:
        return life, []
    failures = [(event.was_left, event.reason)] if event.reason else []
    heal = replace(
        heal,
        meeting=heal.meeting - {event.rank},
        failures=(*heal.failures, *failures),
        unmade=(*heal.unmade, *event.unmade),
        is_again=heal.is_again or bool(event.unmade),
    )
    return _go_on(life, heal)


def fail(life: Life, heal: HealLife, reason: str) -> Step:
    """End the heal as soon as all ranks that were told to meet are back."""
    heal = replace(heal, failures=((False, reason), *heal.failures), is_lost=True)
    return _go_on(life, heal)


def _go_on(life: Life, heal: HealLife) -> Step:
    """See whether all ranks are back; if one of them failed, the others need not wait for it."""
    if heal.meeting and heal.failures and not heal.is_dropped:
        ranks = tuple(sorted(heal.meeting))
        dropped = replace(life, heal=replace(heal, is_dropped=True))
        return dropped, [
            ev.CancelJoin(ranks=ranks),
            dropped.ring_in(ev.Deadline.BACK, BACK_PATIENCE),
        ]
    if heal.meeting:
        return replace(life, heal=heal), []
    if heal.is_again and not heal.is_lost:
        again = HealLife(
            replacements=heal.replacements, donor=heal.donor, checks=heal.checks, unmade=heal.unmade
        )
        return _ask_donor(life, again)
    if heal.failures:  # what one rank failed of is why others were left
        return give_up(life, heal, min(heal.failures, key=lambda each: each[0])[1])
    return replace(life, state=GroupState.IDLE, heal=None, has_group=True), [ev.HealFinished()]


def on_rang(life: Life, heal: HealLife, event: ev.DeadlinePassed) -> Step:
    """New processes are not ready in time, or ranks not back that gave up a meeting."""
    if event.generation != life.generation:
        return life, []  # of the start, or of a meeting before
    starting, late = life.in_state(RankState.STARTING), sorted(heal.meeting)
    if event.alarm is ev.Deadline.START and starting:
        why = f"{format_ranks(starting)} did not get ready in {START_PATIENCE:.0f} s"
        return fail(life, heal, why)
    if event.alarm is not ev.Deadline.BACK or not late or not heal.is_dropped:
        return life, []
    return give_up(
        life,
        heal,
        f"{format_ranks(late)} still tried to form the process group after {BACK_PATIENCE:.0f} s; "
        f"run `%ddp kill {late[0]}`, then `%ddp heal` again",
    )


def give_up(life: Life, heal: HealLife, reason: str) -> Step:
    """Kill the new processes, and report that the heal failed."""
    doomed = tuple(rank for rank in heal.replacements if life.lives(rank))
    ranks = tuple(
        replace(each, state=RankState.GONE, exitcode=KILLED) if each.rank in doomed else each
        for each in life.ranks
    )
    kill: list[ev.Action] = [ev.Kill(ranks=doomed)] if doomed else []
    broken = replace(life, state=GroupState.BROKEN, ranks=ranks, heal=None, has_group=False)
    return broken, [*kill, ev.HealFailed(reason=reason)]  # whoever waited may heal again at once


def on_exited(life: Life, heal: HealLife, rank: int, how: str) -> Step:
    """A rank has died meanwhile."""
    heal = replace(heal, meeting=heal.meeting - {rank})
    return fail(life, heal, f"rank {rank} {how} meanwhile")


def on_interrupt(life: Life, heal: HealLife) -> Step:
    """End the heal; a second interrupt does not wait for the ranks that are to come back."""
    if heal.is_lost:
        return give_up(life, heal, heal.failures[0][1])
    return fail(life, heal, "it was interrupted")
