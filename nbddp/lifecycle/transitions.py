"""The lifecycle of a worker group as a pure function: ``advance(life, event) -> (life, actions)``.

This module waits for nothing and starts nothing: the actor carries out the actions and reports
events. Each rank has its own state. Events of an earlier attempt are dropped here and only here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbddp.formatting import format_ranks
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import heal_steps, refusals
from nbddp.lifecycle.group_state import CellLife, GroupState, Life, RankLife, RankState
from nbddp.lifecycle.heal_steps import START_TIMEOUT, Step
from nbddp.wire.messages import Regroup, Shutdown

PEERS_TIMEOUT = 1.0  # seconds that the other ranks get to end by themselves after a failure
DEATH_TIMEOUT = 0.1  # or a death: a rank that is not its neighbor in a ring does not notice it
STUCK_AFTER = 1.0  # seconds after which the user is told that an interrupt has had no effect yet
INTERRUPT_TIMEOUT = 60.0  # seconds for an interrupted cell to clean up, or to leave C code


def advance(life: Life, event: ev.Event) -> Step:
    """Return the next state, and the actions to get there."""
    if isinstance(event, ev.AttemptEvent) and event.attempt != life.attempt:
        return life, []  # a late event of an attempt that has ended
    if isinstance(event, ev.DeadlinePassed) and event.generation != life.generation:
        return life, []  # a deadline of an earlier rejoin, heal or cell of this attempt
    handler: Callable[[Life, Any], Step] = _HANDLERS[type(event)]
    return handler(life, event)


# ---- start and stop


def _on_start_asked(life: Life, event: ev.StartAsked) -> Step:
    if life.state.is_live:
        return life, [ev.Refuse(reason=refusals.already_running(life))]
    return _start_run(life, event)


def _start_run(life: Life, event: ev.StartAsked) -> Step:
    return _start(replace(life, attempts_before_run=life.attempt), event)


def _start(life: Life, event: ev.StartAsked) -> Step:
    starting = Life(
        state=GroupState.STARTING,
        attempt=life.attempt + 1,
        attempts_before_run=life.attempts_before_run,
        has_group=event.joins_group,
        ranks=tuple(
            RankLife(rank)
            if event.ranks is None or rank in event.ranks
            else RankLife(rank, RankState.ABSENT)
            for rank in range(event.world_size)
        ),
        grace=event.grace,
    )
    return starting, [
        ev.StartRanks(),
        starting.set_deadline(ev.Deadline.START, START_TIMEOUT),
    ]


def _on_rejoin_asked(life: Life, event: ev.RejoinAsked) -> Step:
    """Wait until each surviving rank has connected. It may be in a cell, which goes on.

    Missing ranks count as dead, and a late rank does not fail the others.
    """
    if life.state.is_live:
        return life, [ev.Refuse(reason=refusals.already_running(life))]
    incarnations = dict(event.survivors)
    waiting = frozenset(incarnations).intersection(event.cell_ranks)
    has_lost_rank = len(waiting) < len(event.cell_ranks)
    cell = CellLife(
        number=event.cell,
        waiting=waiting,
        has_failed=has_lost_rank,
        has_lost_rank=has_lost_rank,
        group_broken=True,  # its store is gone, so no other group can form
    )
    starting = Life(
        state=GroupState.STARTING,
        attempt=event.attempt,
        attempts_before_run=event.attempts_before_run,
        generation=life.generation + 1,  # the attempt may be rejoined again, if this fails
        ranks=tuple(
            RankLife(rank, incarnation=incarnations[rank])
            if rank in incarnations
            else RankLife(rank, RankState.GONE)
            for rank in range(event.world_size)
        ),
        cell=cell if event.cell else None,
        is_rejoin=True,
    )
    return starting, [ev.RejoinRanks(), starting.set_deadline(ev.Deadline.START, START_TIMEOUT)]


def _on_restart_asked(life: Life, event: ev.RestartAsked) -> Step:
    if not life.state.is_live:
        return _start_run(life, event.start)
    if not life.alive:
        return _all_gone(replace(life, next_start=event.start))
    life, actions = _on_stop_asked(life, ev.StopAsked())
    return replace(life, next_start=event.start), actions


def _on_stop_asked(life: Life, _event: ev.StopAsked) -> Step:
    if not life.state.is_live:
        return life, []
    if life.state is GroupState.STOPPING:
        return replace(life, next_start=None), []
    idle = life.ranks_in_state(RankState.IDLE)
    busy = tuple(rank for rank in life.alive if rank not in idle)
    stopping = replace(life, state=GroupState.STOPPING, heal=None)
    if not life.alive:
        return _all_gone(stopping)
    actions: list[ev.Action] = [ev.Send(ranks=idle, message=Shutdown())] if idle else []
    actions += [ev.Terminate(ranks=busy)] if busy else []
    return stopping, [*actions, stopping.set_deadline(ev.Deadline.STOP, life.grace)]


def _all_gone(life: Life) -> Step:
    gone = replace(
        life, state=GroupState.OFF, ranks=(), cell=None, pending_notices=(), next_start=None
    )
    actions: list[ev.Action] = [ev.CellFinished(cell=life.cell.number)] if life.cell else []
    actions.append(ev.GroupStopped())
    if life.next_start is None:
        return gone, actions
    started, more = _start(gone, life.next_start)
    return started, actions + more


def _on_rank_ready(life: Life, event: ev.RankReady) -> Step:
    if event.rank not in life.ranks_in_state(RankState.STARTING):
        return life, []  # its end was noticed before this message arrived
    if life.heal is not None and event.rank in life.heal.replacements:
        return heal_steps.on_replacement_ready(
            life.with_rank_state(event.rank, RankState.IDLE), life.heal
        )
    if life.state is not GroupState.STARTING:
        return life, []
    is_in_cell = life.cell is not None and event.rank in life.cell.waiting
    state = RankState.RUNNING if is_in_cell else RankState.IDLE
    return _finish_start(life.with_rank_state(event.rank, state))


def _finish_start(life: Life) -> Step:
    """Finish the start once all ranks that are alive are ready."""
    if life.ranks_in_state(RankState.STARTING):
        return life, []
    if life.cell is not None:
        return _continue_cell(life, life.cell)
    state = GroupState.BROKEN if life.gone else GroupState.IDLE
    return replace(life, state=state, is_rejoin=False), [ev.GroupStarted()]


def _continue_cell(life: Life, cell: CellLife) -> Step:
    """Continue the cell of an earlier notebook; it may have ended meanwhile."""
    life = replace(life, state=GroupState.RUNNING, is_rejoin=False)
    if not cell.waiting:
        life, actions = _finish(life, cell)
        return life, [ev.GroupStarted(), *actions]
    actions = [ev.GroupStarted()]
    if cell.has_failed:
        actions.append(life.set_deadline(ev.Deadline.PEERS, PEERS_TIMEOUT))
    return life, actions


def _on_rank_start_failed(life: Life, event: ev.RankStartFailed) -> Step:
    reason = f"rank {event.rank} could not start: {event.reason}"
    if life.heal is not None:
        return heal_steps.fail_heal(life, life.heal, reason)
    if life.state is not GroupState.STARTING:
        return life, []
    return _abandon_start(life, reason, details=event.details)


def _abandon_start(life: Life, reason: str, *, details: str = "") -> Step:
    stopping = replace(life, state=GroupState.STOPPING)
    failed = ev.GroupStartFailed(reason=reason, details=details)
    if not life.alive:
        gone, actions = _all_gone(stopping)
        return gone, [failed, *actions]
    return stopping, [failed, ev.Kill(ranks=tuple(life.alive))]


# ---- processes that end


def _on_exited(life: Life, event: ev.ProcessExited) -> Step:
    if all(each.rank != event.rank or not each.is_alive for each in life.ranks):
        return life, []
    life = life.with_rank_state(event.rank, RankState.GONE, event.exitcode, event.cause)
    how = life.ranks[event.rank].how_it_ended
    life = replace(life, has_group=False)
    if life.state is GroupState.STOPPING:
        return (life, []) if life.alive else _all_gone(life)
    if life.heal is not None:
        return heal_steps.on_exited(life, life.heal, event.rank, how)
    if life.state is GroupState.STARTING and life.is_rejoin and life.alive:
        if life.cell is not None and event.rank in life.cell.waiting:
            return _rank_left_cell(life, life.cell, event.rank, has_failed=True, lost_group=True)
        return _finish_start(life)
    if life.state is GroupState.STARTING:
        what = "rejoined" if life.is_rejoin else "started"
        return _abandon_start(life, f"rank {event.rank} {how} while it {what}")
    if life.cell is not None:
        return _exited_in_cell(life, life.cell, event)
    return replace(life, state=GroupState.BROKEN), []


def _exited_in_cell(life: Life, cell: CellLife, event: ev.ProcessExited) -> Step:
    actions: list[ev.Action] = []
    if event.rank in cell.waiting:
        life, actions = _rank_left_cell(life, cell, event.rank, has_failed=True, lost_group=True)
    is_reported = event.is_reported or life.cell is None or event.rank in cell.killed
    if not is_reported:  # other ranks may run on for long: report the death now
        text = f"rank {event.rank} {life.ranks[event.rank].how_it_ended}"
        actions = [ev.Notify(text=text), *actions]
    return life, actions


def _on_kill_asked(life: Life, event: ev.KillAsked) -> Step:
    if not life.is_alive(event.rank):
        return life, [ev.Refuse(reason=refusals.rank_not_running(life, event.rank))]
    return life, [ev.Kill(ranks=(event.rank,))]


# ---- cells


def _on_run_asked(life: Life, event: ev.RunAsked) -> Step:
    reason = _why_not_run(life, event)
    if reason:
        return life, [ev.Refuse(reason=reason)]
    life, actions = _regroup_if_needed(life, needs_group=event.needs_group)
    # if the group is broken, a cell on some of the ranks cannot make it whole again
    is_lost = not life.has_group and len(event.ranks) < len(life.ranks)
    concerned = frozenset(event.ranks)
    cell = CellLife(
        number=event.cell, waiting=concerned, group_broken=is_lost, is_elastic=event.is_elastic
    )
    ranks = tuple(
        replace(rank, state=RankState.RUNNING) if rank.rank in concerned else rank
        for rank in life.ranks
    )
    # the cell may delete what the heal was refused for
    life = replace(life, is_heal_refused=False)
    running = replace(life, state=GroupState.RUNNING, cell=cell, ranks=ranks, pending_notices=())
    notices = [ev.Notify(text=text) for text in life.pending_notices]
    return running, [*actions, ev.SendCell(cell=event.cell, ranks=event.ranks), *notices]


def _why_not_run(life: Life, event: ev.RunAsked) -> str:
    if not life.state.is_ready:
        return refusals.not_ready(life)
    if not event.ranks or len(set(event.ranks)) < len(event.ranks):
        return "a cell needs at least one rank, and no rank twice"
    for rank in event.ranks:
        if not life.is_alive(rank):
            return refusals.rank_not_running(life, rank)
    return ""


def _regroup_if_needed(life: Life, *, needs_group: bool | None) -> Step:
    if needs_group is None or (needs_group and (life.has_group or life.gone)):
        return life, []  # a process group needs all ranks
    # A cell that failed may leave a group on some ranks although ``has_group`` is false. A rank
    # without a group ignores the message.
    generation = life.generation + 1
    regroup = Regroup(generation=generation, form=needs_group)
    return replace(life, generation=generation, has_group=needs_group), [
        ev.Send(ranks=tuple(life.alive), message=regroup)
    ]


def _on_rank_ended(life: Life, event: ev.RankEndedCell) -> Step:
    cell = life.cell
    if cell is None or cell.number != event.cell or event.rank not in cell.waiting:
        return life, []
    if not life.is_alive(event.rank):
        return life, []  # its exit was seen before this message
    life = life.with_rank_state(event.rank, RankState.IDLE)
    cell = replace(cell, sequences=cell.sequences | {event.sequence})
    return _rank_left_cell(
        life, cell, event.rank, has_failed=not event.is_ok, lost_group=not event.in_group
    )


def _on_rank_acknowledged(life: Life, event: ev.RankAcknowledged) -> Step:
    cell = life.cell
    if cell is None or cell.number != event.cell:
        return life, []
    return replace(life, cell=replace(cell, acknowledged=cell.acknowledged | {event.rank})), []


def _on_step_awaited(life: Life, event: ev.StepAwaited) -> Step:
    cell = life.cell
    if cell is None or cell.number != event.cell:
        return life, []
    step_wait = max(cell.step_wait, event.seconds)
    cell = replace(cell, step_wait=step_wait, later_graces=cell.later_graces + 1)
    life = replace(life, cell=cell)
    return life, [life.set_deadline(ev.Deadline.GRACE, life.grace + cell.step_wait)]


def _rank_left_cell(
    life: Life, cell: CellLife, rank: int, *, has_failed: bool, lost_group: bool
) -> Step:
    is_dead = not life.is_alive(rank)
    is_first = has_failed and not (cell.has_lost_rank if is_dead else cell.has_failed)
    cell = replace(
        cell,
        waiting=cell.waiting - {rank},
        has_failed=cell.has_failed or has_failed,
        has_lost_rank=cell.has_lost_rank or is_dead,
        group_broken=cell.group_broken or lost_group,
    )
    life = replace(life, cell=cell)
    if life.state is GroupState.STARTING:  # the cell of an earlier notebook
        return _finish_start(life)
    if not cell.waiting:
        return _finish(life, cell)
    if life.state is GroupState.RUNNING and is_first:
        return life, [
            life.set_deadline(ev.Deadline.PEERS, DEATH_TIMEOUT if is_dead else PEERS_TIMEOUT)
        ]
    return life, []


def _finish(life: Life, cell: CellLife) -> Step:
    if life.state is GroupState.STOPPING:
        return life, []  # reported when the processes have exited
    is_torn = cell.has_failed and len(cell.sequences) > 1  # ranks stopped at different places
    over = replace(
        life,
        state=GroupState.BROKEN if life.gone else GroupState.IDLE,
        cell=None,
        has_group=not (cell.group_broken or is_torn),
    )
    ran_to_its_end = cell.interrupts > 0 and not cell.has_failed
    notices = [ev.Notify(text=refusals.RAN_TO_ITS_END)] if ran_to_its_end else []
    return over, [*notices, ev.CellFinished(cell=cell.number, is_outgrown=cell.is_outgrown)]


def _on_interrupt_asked(life: Life, _event: ev.InterruptAsked) -> Step:
    match life.state:
        case GroupState.STARTING:
            return _on_stop_asked(life, ev.StopAsked())
        case GroupState.HEALING if life.heal is not None:
            return heal_steps.on_interrupt(life, life.heal)
        case GroupState.STOPPING:
            return life, [ev.Kill(ranks=tuple(life.alive))]
        case GroupState.RUNNING | GroupState.INTERRUPTING if life.cell is not None:
            return _interrupt(life, life.cell)
        case _:
            return life, []


def _interrupt(life: Life, cell: CellLife) -> Step:
    waiting = tuple(sorted(cell.waiting))
    cell = replace(cell, interrupts=cell.interrupts + 1)
    life = replace(life, state=GroupState.INTERRUPTING, cell=cell)
    if cell.interrupts > 1 and cell.is_stuck:  # the user was told what a second one does
        return _kill(life, cell, waiting)
    if cell.interrupts > 1:  # a double click, or the user does not want to wait for a step
        return life, [ev.SendInterrupt(cell=cell.number, ranks=waiting, is_second=True)]
    is_whole = not (cell.has_failed or cell.sequences)  # no rank has left the cell
    return life, [
        ev.SendInterrupt(cell=cell.number, ranks=waiting, after_step=is_whole),
        life.set_deadline(ev.Deadline.STUCK, STUCK_AFTER),
        life.set_deadline(ev.Deadline.GRACE, life.grace),
        life.set_deadline(ev.Deadline.CLEANUP, INTERRUPT_TIMEOUT),
    ]


# ---- nodes


def _on_node_event(life: Life, event: ev.NodeEvent) -> Step:
    """Tell the running cell, or else the next cell of these ranks."""
    text = refusals.describe_node(life, event)
    if life.cell is not None:
        return life, [ev.RecordNode(text=text), ev.Notify(text=text)]
    notices = (*life.pending_notices, text) if life.state.is_live else ()
    return replace(life, pending_notices=notices), [ev.RecordNode(text=text)]


def _on_capacity_changed(life: Life, _event: ev.CapacityChanged) -> Step:
    cell = life.cell
    if cell is None or not cell.is_elastic or life.state is not GroupState.RUNNING:
        return life, []
    return _interrupt(life, replace(cell, is_outgrown=True))


# ---- deadlines


def _on_deadline(life: Life, event: ev.DeadlinePassed) -> Step:
    if event.deadline is ev.Deadline.START and life.state is GroupState.STARTING:
        late = life.ranks_in_state(RankState.STARTING)
        text = f"{format_ranks(late)} did not get ready in {START_TIMEOUT:.0f} s"
        if life.is_rejoin:
            return life, [ev.Notify(text=f"{text}: killed"), ev.Kill(ranks=late)]
        return _abandon_start(life, "; ".join(filter(None, [text, event.overload])))
    if life.heal is not None:
        return heal_steps.on_deadline(life, life.heal, event)
    if event.deadline is ev.Deadline.STOP and life.state is GroupState.STOPPING:
        text = f"{format_ranks(life.alive)} did not end in {life.grace:g} s: killed"
        return life, [ev.Notify(text=text), ev.Kill(ranks=tuple(life.alive))]
    cell = life.cell
    if cell is None or cell.number != event.cell or not life.state.is_busy:
        return life, []
    return _on_cell_deadline(life, cell, event)


def _on_cell_deadline(life: Life, cell: CellLife, event: ev.DeadlinePassed) -> Step:
    waiting = tuple(sorted(cell.waiting))
    unresponsive = tuple(sorted(cell.waiting - cell.acknowledged))
    match event.deadline:
        case ev.Deadline.PEERS if life.state is GroupState.RUNNING:
            life = replace(life, state=GroupState.INTERRUPTING)
            return life, [
                ev.SendInterrupt(cell=cell.number, ranks=waiting, rank_died=cell.has_lost_rank),
                life.set_deadline(ev.Deadline.GRACE, life.grace),
                life.set_deadline(ev.Deadline.CLEANUP, INTERRUPT_TIMEOUT),
            ]
        case ev.Deadline.STUCK if cell.step_wait:
            text = refusals.step_awaited(waiting, seconds=cell.step_wait)
            life = replace(life, cell=replace(cell, step_wait=0.0))
            notices = [ev.Notify(text=text)] if cell.step_wait > STUCK_AFTER else []
            return life, [*notices, life.set_deadline(ev.Deadline.STUCK, cell.step_wait)]
        case ev.Deadline.STUCK:
            cell = replace(cell, is_stuck=True)
            killed_in = life.grace - STUCK_AFTER, INTERRUPT_TIMEOUT - STUCK_AFTER
            text = refusals.interrupt_pending(waiting, unresponsive, event, killed_in=killed_in)
            return replace(life, cell=cell), [ev.Notify(text=text)]
        case ev.Deadline.GRACE if cell.later_graces:
            return replace(life, cell=replace(cell, later_graces=cell.later_graces - 1)), []
        case ev.Deadline.GRACE if unresponsive:
            return _kill_unresponsive(life, cell, unresponsive, event)
        case ev.Deadline.CLEANUP:
            late = (
                f"{format_ranks(waiting)} still ran {INTERRUPT_TIMEOUT:.0f} s after the interrupt"
            )
            return _kill(life, cell, waiting, f"{late}: killed")
        case _:
            return life, []


def _kill_unresponsive(
    life: Life, cell: CellLife, unresponsive: tuple[int, ...], event: ev.DeadlinePassed
) -> Step:
    """Kill unresponsive ranks that do not compute. Check the others after a further grace.

    C code that computes may hold the GIL.
    """
    hung = tuple(rank for rank in unresponsive if rank not in event.working)
    text = refusals.killed_unresponsive(hung, event, seconds=life.grace)
    life, actions = _kill(life, cell, hung, text) if hung else (life, [])
    again = [life.set_deadline(ev.Deadline.GRACE, life.grace)] if hung != unresponsive else []
    return life, [*actions, *again]


def _kill(life: Life, cell: CellLife, ranks: tuple[int, ...], text: str = "") -> Step:
    """Kill ranks during a cell, and show one notice for all."""
    text = text or f"{format_ranks(ranks)}: killed, as the cell was interrupted again"
    life = replace(life, cell=replace(cell, killed=cell.killed | set(ranks)))
    return life, [ev.Notify(text=text), ev.Kill(ranks=ranks)]


_HANDLERS: dict[type, Callable[[Life, Any], Step]] = {
    ev.StartAsked: _on_start_asked,
    ev.RejoinAsked: _on_rejoin_asked,
    ev.RestartAsked: _on_restart_asked,
    ev.HealAsked: heal_steps.on_heal_asked,
    ev.NamespacePickled: heal_steps.on_namespace_pickled,
    ev.GroupJoined: heal_steps.on_group_joined,
    ev.RunAsked: _on_run_asked,
    ev.InterruptAsked: _on_interrupt_asked,
    ev.StepAwaited: _on_step_awaited,
    ev.KillAsked: _on_kill_asked,
    ev.NodeJoined: _on_node_event,
    ev.NodeLost: _on_node_event,
    ev.LogCopyFailed: _on_node_event,
    ev.CapacityChanged: _on_capacity_changed,
    ev.StopAsked: _on_stop_asked,
    ev.RankReady: _on_rank_ready,
    ev.RankStartFailed: _on_rank_start_failed,
    ev.RankAcknowledged: _on_rank_acknowledged,
    ev.RankEndedCell: _on_rank_ended,
    ev.ProcessExited: _on_exited,
    ev.DeadlinePassed: _on_deadline,
}
