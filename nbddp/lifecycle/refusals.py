"""Why the group refuses a request, or why something takes long, with the way out."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.formatting import (
    format_number_ranges,
    format_ranks,
    plural,
    unknown_rank,
)
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life, RankState

NO_GROUP = "there are no ranks; `%ddp start` or a `%%ddp` cell starts them"
BUSY = "a cell is still running; `%ddp wait` waits for it, `%ddp interrupt` ends it"
RAN_TO_ITS_END = (
    "the interrupt did not stop the cell: the cell had already ended, or it caught the "
    "KeyboardInterrupt"
)
NOT_HEALED = "the group was not healed"
CANNOT_HEAL = "the group cannot be healed"  # another try would fail in the same way


def not_ready(life: Life) -> str:
    """Say why the ranks cannot do anything else now."""
    return BUSY if life.state.is_busy else f"the ranks are {life.state.value}"


def already_running(life: Life) -> str:
    """Say why a group cannot be started."""
    if life.state is GroupState.BROKEN:
        return "the ranks are already running, and one is dead; `%ddp restart` restarts all ranks"
    return f"the ranks are {life.state.value} already"


def why_no_heal(life: Life, ranks: Sequence[int], donor: int | None) -> str:
    """Say why a group cannot be healed; empty if it can."""
    if not life.state.is_live:
        return NO_GROUP
    if life.state is not GroupState.BROKEN:
        return "no rank is dead" if life.state is GroupState.IDLE else not_ready(life)
    if not life.alive:
        return (
            "no rank is alive to copy variables from: `%ddp restart --replay` runs the cells again"
        )
    for rank in ranks:
        if not 0 <= rank < len(life.ranks):
            return unknown_rank(rank, len(life.ranks))
        if life.is_alive(rank):
            return f"rank {rank} is alive"
    missing = [rank for rank in life.gone if rank not in ranks]
    if missing:
        are = "is" if len(missing) == 1 else "are"  # a process group needs all ranks
        return f"{format_ranks(missing)} {are} dead, too: `%ddp heal` replaces all at once"
    return "" if donor is None or life.is_alive(donor) else rank_not_running(life, donor)


def rank_not_running(life: Life, rank: int) -> str:
    """Say why a rank cannot be used."""
    if not life.ranks:
        return NO_GROUP
    if not 0 <= rank < len(life.ranks):
        return unknown_rank(rank, len(life.ranks))
    if life.ranks[rank].state is RankState.ABSENT:
        return f"rank {rank} was not started: `--ranks` leaves it out"
    return f"rank {rank} {life.ranks[rank].how_it_ended}; {way_out(life)}"


def exited_before_answer(life: Life, rank: int, how: str) -> str:
    """Say that a rank exited before it answered a request."""
    text = f"rank {rank} {how} before it could answer"
    return f"{text}; {way_out(life)}" if life.state is GroupState.BROKEN else text


def way_out(life: Life) -> str:
    """Say what the user can do after ranks have died."""
    alive = format_number_ranges(life.alive)
    others = f", `%%ddp --ranks {alive}` uses the others" if alive else ""
    those = "it" if len(life.gone) == 1 else "the dead ranks"
    can_heal = life.alive and not life.is_heal_refused
    heal = f"`%ddp heal` replaces {those}, " if can_heal else ""
    return f"{heal}`%ddp restart` restarts all ranks{others}"


def with_way_out(text: str, life: Life) -> str:
    """Add the way out to the message of a failed heal."""
    has_failed = text.startswith((NOT_HEALED, CANNOT_HEAL))
    if not has_failed or not life.gone or "`%ddp restart" in text:
        return text
    return f"{text}; {way_out(life)}"


def describe_node(life: Life, event: ev.NodeEvent) -> str:
    """Describe an event of a node to the user."""
    if isinstance(event, ev.LogCopyFailed):
        text = f"the logs in {event.folder} are incomplete: {event.reason}"
        return f"{text}; each node has the full logs of its ranks"
    if isinstance(event, ev.NodeJoined):
        text = f"node {event.name} has joined with {plural(event.nproc, 'rank')}"
        if not event.adds_capacity:
            return text
        if life.cell is not None and life.cell.is_elastic:
            return f"{text}: the cell starts again with them"
        return f"{text}; `%ddp restart` uses it, and so does a cell with --elastic"
    lost = f": {format_ranks(event.ranks)} gone" if event.ranks else ""
    return f"node {event.name} ({event.address}): {event.reason}{lost}"


def step_awaited(waiting: Sequence[int], *, seconds: float) -> str:
    """Say that an interrupted cell goes on to the end of a step."""
    return (
        f"{format_ranks(waiting)}: the interrupt waits until all ranks have ended the same step, "
        f"at most {seconds:.0f} s; interrupt again to end the cell at once"
    )


def interrupt_pending(
    waiting: Sequence[int],
    unresponsive: Sequence[int],
    event: ev.DeadlinePassed,
    *,
    killed_in: tuple[float, float],
) -> str:
    """Say why an interrupted cell still runs.

    Args:
        waiting: ranks that have not ended the cell.
        unresponsive: ranks on which Python has not seen the signal.
        event: has the state of the processes.
        killed_in: seconds until unresponsive ranks are killed, for idle and for computing ones.
    """
    if not unresponsive:
        busy = "still busy (cleaning up, or in C code that computes)"
        imports = dict(event.importing)
        texts: dict[str, list[int]] = {}
        for rank in waiting:
            name = imports.get(rank)
            what = f"still importing {name}, which must end first" if name else busy
            texts.setdefault(what, []).append(rank)
        parts = [f"{format_ranks(ranks)}: interrupted, and {what}" for what, ranks in texts.items()]
        return "; ".join([*parts, "interrupt again to kill at once"])
    stopped = dict(event.stopped)
    asleep = [rank for rank in unresponsive if rank in stopped]
    computing = [rank for rank in unresponsive if rank in event.working and rank not in stopped]
    awake = [rank for rank in unresponsive if rank not in asleep and rank not in computing]
    parts = []
    if computing:
        are = "is" if len(computing) == 1 else "are"
        what = f"{format_ranks(computing)} {are} still computing in C code that holds the GIL"
        parts.append(f"{what} and will be killed in {killed_in[1]:.0f} s")
    if asleep:
        pids = " ".join(str(stopped[rank]) for rank in asleep)
        parts.append(f"{format_ranks(asleep)} stopped by SIGSTOP (`kill -CONT {pids}` resumes)")
    if awake:
        names = format_ranks(awake)
        parts.append(f"{names} did not answer the interrupt yet (in C code that does not return?)")
    if asleep or awake:
        parts.append(f"will be killed in {killed_in[0]:.0f} s")
    return "; ".join(parts) + ", or at once if you interrupt again"


def killed_unresponsive(
    unresponsive: Sequence[int], event: ev.DeadlinePassed, *, seconds: float
) -> str:
    """Say why ranks are killed that did not react to an interrupt."""
    asleep = [rank for rank in unresponsive if rank in dict(event.stopped)]
    why = f" ({format_ranks(asleep)} stopped by SIGSTOP)" if asleep else ""
    return (
        f"{format_ranks(unresponsive)} did not answer the interrupt in {seconds:.0f} s{why}: killed"
    )
