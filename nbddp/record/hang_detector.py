"""Detect hangs, and say which ranks wait for which others, and why they do not arrive. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nbddp.formatting import format_line, format_ranks, ranks_by_text
from nbddp.wire.collective import Collective
from nbddp.wire.messages import RankStatus

HANG_AFTER = 10.0  # seconds without progress on any rank
SILENT_AFTER = 8.0  # seconds without a heartbeat
_MEMBERS = re.compile(r" of group (\[[\d, ]+\])$")
# collectives that need the same dtype and sizes on every rank
_SAME_SIZE_CALLS = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank status, and when it arrived."""

    status: RankStatus
    at: float


@dataclass(eq=False, repr=False)
class HangDetector:
    """Keeps the last heartbeat of each rank, and reports each hang once.

    Args:
        is_stopped: whether a signal stopped the process of this rank.
        is_working: whether the rank used the CPU since the last call. A rank in C code that holds
            Python's lock sends no heartbeat, but may still compute.

    Attributes:
        hang_after: seconds without progress on any rank that make a hang.
        heartbeats: the last heartbeat of each rank.
        problem_text: the current problem: a hang, or a silent rank; empty if there is none.
        likely_causes: returns sentences about mistakes in the code of the cell that end in a hang.
    """

    is_stopped: Callable[[int], bool]
    is_working: Callable[[int], bool] = lambda _rank: False
    hang_after: float = field(init=False, default=HANG_AFTER)
    heartbeats: dict[int, Heartbeat] = field(init=False, default_factory=dict)
    problem_text: str = field(init=False, default="")
    likely_causes: Callable[[], Sequence[str]] = field(init=False, default=tuple)
    _reported: set[object] = field(init=False, default_factory=set)

    def memory_used(self) -> int:
        """Return the bytes that all ranks together used at their last heartbeat."""
        return sum(heartbeat.status.memory for heartbeat in self.heartbeats.values())

    def clear(self) -> None:
        """Remove the heartbeats of ranks that were replaced."""
        self.heartbeats.clear()
        self.problem_text = ""

    def reset_for_cell(self, ranks: Iterable[int], now: float) -> None:
        """Reset the heartbeats and the problem at the start of a cell."""
        self._reported.clear()
        self.problem_text = ""
        for rank in ranks:
            self.heartbeats[rank] = Heartbeat(RankStatus(cell=0, line=0, function=""), now)

    def check(
        self,
        cell: int,
        waiting: Iterable[int],
        ranks: Iterable[int],
        now: float,
        *,
        outside: Sequence[int] = (),
    ) -> str:
        """Return a new problem: a silent rank, or a hang; empty if there is none.

        Args:
            cell: the running cell.
            waiting: the ranks that have not ended it.
            ranks: all its ranks.
            now: the time, in the seconds of ``Heartbeat.at``.
            outside: the ranks of the group that do not run it.
        """
        running = sorted(waiting)
        late = [rank for rank in running if now - self.heartbeats[rank].at > SILENT_AFTER]
        silent = [rank for rank in late if not self.is_working(rank)]
        stopped = [rank for rank in silent if self.is_stopped(rank)]
        busy = "in code that holds Python's lock, or the machine is too busy"
        reason, shown = ("stopped (SIGSTOP)", stopped) if stopped else (busy, silent)
        text = (
            _describe_silent(shown, reason)
            if shown
            else self._describe_hang(cell, running, ranks, outside)
        )
        self.problem_text = text
        problems: set[object] = {(reason, rank) for rank in shown} or {text}
        if not text or problems <= self._reported:
            return ""
        self._reported |= problems
        return text

    def _describe_hang(
        self, cell: int, running: list[int], ranks: Iterable[int], outside: Sequence[int]
    ) -> str:
        statuses = {rank: self.heartbeats[rank].status for rank in running}
        is_stuck = all(
            report.cell == cell and report.seconds >= self.hang_after
            for report in statuses.values()
        )
        is_asked = any(status.asks for status in statuses.values())  # a rank waits for the user
        calls = [status.collective for status in statuses.values() if status.collective]
        if not is_stuck or is_asked or not calls:
            return ""
        ended = {rank: self.heartbeats[rank].status for rank in ranks if rank not in statuses}
        positions = {rank: _describe_position(status) for rank, status in statuses.items()}
        waits = ranks_by_text(positions)
        mismatch = describe_mismatch(cell, statuses, ended)
        lines = [f"no progress for {self.hang_after:.0f} s: {mismatch}"]
        lines += [f"  {format_ranks(group)} {text}" for text, group in waits.items()]
        if ended:
            lines.append(f"  {format_ranks(list(ended))} done with the cell: will not come")
        if absent := [rank for rank in outside if any(_has_rank(call, rank) for call in calls)]:
            lines.append(f"  {format_ranks(absent)} not in this cell: will not come")
        lines += [f"  {cause}" for cause in self.likely_causes()]
        lines.append("  the cell keeps waiting; an interrupt ends it and keeps all variables")
        return "\n".join(lines)


def _describe_silent(ranks: Sequence[int], reason: str) -> str:
    way_out = (
        f"`%ddp kill {ranks[0]}` ends it"
        if len(ranks) == 1
        else "interrupt the cell to end it, twice to kill them"
    )
    return f"no sign of life from {format_ranks(ranks)}: {reason}; {way_out}"


def _has_rank(call: Collective, rank: int) -> bool:
    """Return whether a rank is in the group of a call; False if its group has another name."""
    members = _MEMBERS.search(call.title)
    return rank in json.loads(members[1]) if members else not call.group


def _describe_position(status: RankStatus) -> str:
    line = format_line(status.line, status.file)
    inside = f" in {status.function}()" if status.function else ""
    if status.thread:
        waiting = f"waiting in {status.collective} in {status.thread}"
        return f"{waiting}; the main thread is at {line}{inside}"
    if status.collective:
        return f"waiting in {status.collective}, {line}"
    return f"never came: {line}{inside}"


def describe_mismatch(
    cell: int, running: Mapping[int, RankStatus], ended: Mapping[int, RankStatus]
) -> str:
    """Return in one line which ranks called which collective, and which did not.

    Args:
        cell: the running cell.
        running: the last status of the ranks that run it; at least one of them waits.
        ended: the last status of the ranks that ended it.

    >>> def at(name):
    ...     return RankStatus(cell=1, line=1, function="", collective=Collective(name, 1))
    >>> describe_mismatch(1, {0: at("all_reduce"), 1: at("broadcast")}, {})
    'rank 0 called all_reduce #1, rank 1 broadcast #1'
    """
    calls = {rank: status.collective for rank, status in running.items() if status.collective}
    waited_in = set(calls.values())
    for rank, status in {**running, **ended}.items():
        call = status.last
        if call is None or rank in calls or status.last_cell != cell:
            continue
        rivals = [other for other in waited_in if other.position == call.position]
        # the rank made another call instead of the one in which others wait, and continued
        if any(other.name != call.name or _sizes_differ([other, call]) for other in rivals):
            calls[rank] = call
    parts = [_describe_calls(calls)]
    absent = [rank for rank in running if rank not in calls]
    gone = [rank for rank in ended if rank not in calls]
    if absent:
        parts.append(f"{format_ranks(absent)} never came")
    if gone:
        parts.append(f"{format_ranks(gone)} {'is' if len(gone) == 1 else 'are'} done with the cell")
    return ", ".join(parts)


def _sizes_differ(calls: Iterable[Collective]) -> bool:
    """Return whether one collective got different sizes, although it needs equal ones."""
    distinct = set(calls)
    titles, shapes = {call.title for call in distinct}, {call.shape for call in distinct}
    needs_one = all(call.name.strip("_").startswith(_SAME_SIZE_CALLS) for call in distinct)
    return len(titles) == 1 and needs_one and len(shapes) > 1


def _describe_calls(calls: Mapping[int, Collective]) -> str:
    is_uneven, ordered = _sizes_differ(calls.values()), sorted(calls.items())
    texts = {rank: call.shape if is_uneven else call.title for rank, call in ordered}
    groups = ranks_by_text(texts)
    if is_uneven:
        parts = [f"{format_ranks(ranks)} with {shape}" for shape, ranks in groups.items()]
        title = next(iter(calls.values())).title
        return "sizes differ: " + ", ".join(parts).replace(" with", f" called {title} with", 1)
    parts = [f"{format_ranks(ranks)} {title}" for title, ranks in groups.items()]
    first = format_ranks(next(iter(groups.values())))
    return f"{first} called" + ", ".join(parts).removeprefix(first)
