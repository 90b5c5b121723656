"""The steps of a heal: new processes replace dead ranks and get the variables of a donor.

The replacements start while the donor pickles its variables. Then all ranks join a new process
group, in which the replacements load the variables. If a variable cannot be loaded,
the join fails and the donor pickles again without it. Any other failure, or an interrupt, ends the
heal: the replacements are killed, and the group is as before. Ranks that were asked to join are
asked to give up, and the heal waits for their answers.
"""

from __future__ import annotations

from dataclasses import replace

from nbddp.formatting import format_ranks
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import refusals
from nbddp.lifecycle.group_state import GroupState, HealLife, Life, RankLife, RankState

Step = tuple[Life, list[ev.Action]]
START_TIMEOUT = 90.0  # seconds for all ranks to get ready (the first one may import torch)
KILLED = -9  # exit code of a replacement after a failed heal
# Seconds in which ranks must give up a failed join: longer than they wait for a transfer to end,
# and for NCCL to abort. A join and the donor's pickling have no limit, because they may take long;
# an interrupt of the user ends them.
CANCEL_TIMEOUT = 30.0


def on_heal_asked(life: Life, event: ev.HealAsked) -> Step:
    """Start replacements for dead ranks; meanwhile the donor pickles its variables."""
    reason = refusals.why_no_heal(life, event.ranks, event.donor)
    if reason:
        return life, [ev.Refuse(reason=reason)]
    ranks = tuple(
        RankLife(r.rank, incarnation=r.incarnation + 1) if r.rank in event.ranks else r
        for r in life.ranks
    )
    heal = HealLife(
        replacements=event.ranks,
        dead=tuple(life.ranks[rank] for rank in event.ranks),
        # texts say that it is the lowest one: grep "lowest living rank"; models of subgroups are
        # sent by the first rank that lives, see _first_survivor in regroup.py
        donor=min(life.alive) if event.donor is None else event.donor,
        checks=event.donor is None,
    )
    healing, request = _request_namespace(
        replace(life, state=GroupState.HEALING, ranks=ranks, is_heal_refused=False), heal
    )
    return healing, [
        ev.StartReplacements(ranks=event.ranks),  # first: it creates what carries out the others
        *request,
        # of the new generation: a deadline of an earlier one is ignored
        healing.set_deadline(ev.Deadline.START, START_TIMEOUT),
    ]


def _request_namespace(life: Life, heal: HealLife) -> Step:
    # each join has its own generation, so that late answers and deadlines of an earlier one are
    # ignored, and that no rank meets an earlier join in the store
    generation = life.generation + 1
    request = ev.RequestNamespace(
        generation=generation,
        exclude=heal.not_loaded,
        replacements=heal.replacements,
        checks=heal.checks,
    )
    return replace(life, generation=generation, heal=heal), [request]


def on_replacement_ready(life: Life, heal: HealLife) -> Step:
    """Note that a replacement is ready. After the last one, ask all ranks to join."""
    if life.ranks_in_state(RankState.STARTING):
        return life, []
    life, actions = _join_when_ready(life, heal)
    # first: the times of the report, which RequestJoin sets too, have this order
    return life, [ev.NoteReplacementsReady(), *actions]


def on_namespace_pickled(life: Life, event: ev.NamespacePickled) -> Step:
    """Note that the donor has pickled its variables; end the heal if it could not.

    If the replacements are ready too, ask all ranks to join.
    """
    heal = life.heal
    if heal is None or event.generation != life.generation or heal.is_pickled:
        return life, []
    if event.reason:
        return abandon_heal(life, heal, event.reason, is_refused=True)
    return _join_when_ready(life, replace(heal, is_pickled=True))


def _join_when_ready(life: Life, heal: HealLife) -> Step:
    """Ask all ranks to join, once the replacements are ready and the variables are pickled."""
    if not heal.is_pickled or life.ranks_in_state(RankState.STARTING):
        return replace(life, heal=heal), []
    heal = replace(heal, joining=frozenset(life.alive))
    join = ev.RequestJoin(ranks=tuple(life.alive), generation=life.generation)
    return replace(life, heal=heal), [join]


def on_group_joined(life: Life, event: ev.GroupJoined) -> Step:
    """Count a rank that has joined the new group, or could not."""
    heal = life.heal
    if heal is None or event.generation != life.generation or event.rank not in heal.joining:
        return life, []
    failures = [(event.is_consequence, event.reason)] if event.reason else []
    heal = replace(
        heal,
        joining=heal.joining - {event.rank},
        failures=(*heal.failures, *failures),
        not_loaded=(*heal.not_loaded, *event.not_loaded),
        must_repeat=heal.must_repeat or bool(event.not_loaded),
        is_refused=heal.is_refused or event.is_refused,
    )
    return _finish_when_all_answered(life, heal)


def fail_heal(life: Life, heal: HealLife, reason: str) -> Step:
    """Fail the heal as soon as all ranks that were asked to join have answered."""
    heal = replace(heal, failures=((False, reason), *heal.failures), has_failed=True)
    return _finish_when_all_answered(life, heal)


def _finish_when_all_answered(life: Life, heal: HealLife) -> Step:
    """Finish, repeat or fail the heal once all ranks have answered; cancel it if one failed."""
    # A rank that still tries to join can do nothing else, so wait for all answers before the heal
    # is repeated or fails. The first failure cancels the join; later ones are its consequences.
    if heal.joining:
        is_first = heal.failures and life.heal is not None and not life.heal.failures
        life = replace(life, heal=heal)
        deadline = life.set_deadline(ev.Deadline.CANCEL, CANCEL_TIMEOUT)
        cancel = [ev.CancelJoin(ranks=tuple(sorted(heal.joining))), deadline]
        return life, cancel if is_first else []
    # A variable that was not loaded fails the join on all ranks, but not the heal. A death, an
    # interrupt or a deadline does (``has_failed``).
    if heal.must_repeat and not heal.has_failed:
        repeated = HealLife(
            replacements=heal.replacements,
            dead=heal.dead,
            donor=heal.donor,
            checks=heal.checks,
            not_loaded=heal.not_loaded,
        )
        return _request_namespace(life, repeated)
    if heal.failures:  # prefer the first cause to its consequences
        reason = min(heal.failures, key=lambda each: each[0])[1]
        return abandon_heal(life, heal, reason, is_refused=heal.is_refused)
    return replace(life, state=GroupState.IDLE, heal=None, has_group=True), [ev.HealFinished()]


def on_deadline(life: Life, heal: HealLife, event: ev.DeadlinePassed) -> Step:
    """Fail the heal if replacements are not ready, or if ranks have not given up a failed join."""
    starting, late = life.ranks_in_state(RankState.STARTING), sorted(heal.joining)
    if event.deadline is ev.Deadline.START and starting:
        reason = f"{format_ranks(starting)} did not get ready in {START_TIMEOUT:.0f} s"
        return fail_heal(life, heal, "; ".join(filter(None, [reason, event.overload])))
    if event.deadline is not ev.Deadline.CANCEL or not late or not heal.failures:
        return life, []
    return abandon_heal(
        life,
        heal,
        f"{format_ranks(late)} still tried to form the process group after {CANCEL_TIMEOUT:.0f} s; "
        f"run `%ddp kill {late[0]}`, then `%ddp heal` again",
    )


def abandon_heal(life: Life, heal: HealLife, reason: str, *, is_refused: bool = False) -> Step:
    """Kill the replacements, and report that the heal failed.

    The dead ranks are dead from their first cause again. ``is_refused``: a rank refused the heal,
    as it would the next time.
    """
    alive = tuple(rank for rank in heal.replacements if life.is_alive(rank))
    dead = {r.rank: r for r in heal.dead}
    ranks = tuple(
        replace(dead[r.rank], incarnation=r.incarnation) if r.rank in dead else r
        for r in life.ranks
    )
    kill: list[ev.Action] = [ev.Kill(ranks=alive)] if alive else []
    broken = replace(
        life,
        state=GroupState.BROKEN,
        ranks=ranks,
        heal=None,
        has_group=False,
        is_heal_refused=is_refused,
    )
    # last: the user may heal again at once
    return broken, [*kill, ev.HealFailed(reason=reason, is_refused=is_refused)]


def on_exited(life: Life, heal: HealLife, rank: int, how: str) -> Step:
    """Fail the heal, because a rank has died."""
    heal = replace(heal, joining=heal.joining - {rank})  # a dead rank does not answer
    return fail_heal(life, heal, f"rank {rank} {how} during the heal")


def on_interrupt(life: Life, heal: HealLife) -> Step:
    """Fail the heal; the second time, do not wait for ranks that have not answered."""
    if heal.has_failed:
        return abandon_heal(life, heal, heal.failures[0][1])
    return fail_heal(life, heal, "it was interrupted")
