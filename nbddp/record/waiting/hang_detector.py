"""Notices that nothing moves, and says who waits for whom, and why in vain. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nbddp.errors import format_place, format_ranks
from nbddp.wire.collective import Collective
from nbddp.wire.messages import RankStatus

HANG_AFTER = 10.0  # seconds without progress on any rank
SILENT_AFTER = 8.0  # seconds without a sign of life
# those to which every rank must give the same type and sizes
_EVEN = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A pulse, and when it came."""

    pulse: RankStatus
    at: float


class HangDetector:
    """Keeps the last sign of life of every rank, and each piece of news once.

    Args:
        is_stopped: whether somebody stopped this rank's process.
        is_working: whether it has used the CPU since this was asked last: a rank whose C code holds
            Python's lock gives no sign of life, and may compute all the same.

    Attributes:
        hang_after: seconds without progress on any rank that make a hang.
        signs: when and where each rank was last seen.
        alarm: what is wrong right now: nobody moves, or a rank is silent; empty if nothing is.
    """

    def __init__(
        self,
        is_stopped: Callable[[int], bool],
        is_working: Callable[[int], bool] = lambda _rank: False,
    ) -> None:
        self.is_stopped = is_stopped
        self._is_working = is_working
        self.hang_after = HANG_AFTER
        self.signs: dict[int, Heartbeat] = {}
        self._told: set[object] = set()
        self.alarm = ""

    def memory(self) -> int:
        """Bytes that all ranks together used when they were last seen."""
        return sum(sign.pulse.memory for sign in self.signs.values())

    def forget(self) -> None:
        """The ranks that were seen are gone."""
        self.signs.clear()
        self.alarm = ""

    def begin_cell(self, ranks: Iterable[int], now: float) -> None:
        """A cell begins: whatever was seen before says nothing about it."""
        self._told.clear()
        self.alarm = ""
        for rank in ranks:
            self.signs[rank] = Heartbeat(RankStatus(cell=0, line=0, function=""), now)

    def look(self, cell: int, waiting: Iterable[int], ranks: Iterable[int], now: float) -> str:
        """What is new: a rank that is silent, or a hang; empty if nothing is.

        Args:
            cell: the cell that runs.
            waiting: ranks that have not ended it.
            ranks: all ranks it runs on.
            now: the time, in the seconds of ``Heartbeat.at``.
        """
        running = sorted(waiting)
        late = [rank for rank in running if now - self.signs[rank].at > SILENT_AFTER]
        silent = [rank for rank in late if not self._is_working(rank)]
        text = self._say_silent(silent) if silent else self._say_hang(cell, running, ranks)
        self.alarm = text
        news = tuple(silent) or text
        if not text or news in self._told:
            return ""
        self._told.add(news)
        return text

    def _say_silent(self, silent: list[int]) -> str:
        stopped = [rank for rank in silent if self.is_stopped(rank)]
        who = stopped or silent
        why = "in code that holds Python's lock, or the machine is too busy"
        why = "stopped (SIGSTOP)" if stopped else why
        return f"no sign of life from {format_ranks(who)}: {why}; `%ddp kill {who[0]}` ends it"

    def _say_hang(self, cell: int, running: list[int], ranks: Iterable[int]) -> str:
        pulses = {rank: self.signs[rank].pulse for rank in running}
        is_stuck = all(
            pulse.cell == cell and pulse.seconds >= self.hang_after for pulse in pulses.values()
        )
        is_asked = any(pulse.asks for pulse in pulses.values())  # the user is waited for
        if not is_stuck or is_asked or not any(pulse.collective for pulse in pulses.values()):
            return ""
        ended = {rank: self.signs[rank].pulse for rank in ranks if rank not in pulses}
        waits = _grouped({rank: _where(pulse) for rank, pulse in pulses.items()})
        lines = [f"no progress for {self.hang_after:.0f} s: {why_in_vain(cell, pulses, ended)}"]
        lines += [f"  {format_ranks(who)} {what}" for what, who in waits.items()]
        if ended:
            lines.append(f"  {format_ranks(list(ended))} done with the cell: will not come")
        lines.append("  the cell goes on waiting; interrupt it to end it and keep all names")
        return "\n".join(lines)


def _grouped(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each text."""
    groups: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        groups.setdefault(text, []).append(rank)
    return groups


def _where(pulse: RankStatus) -> str:
    place = format_place(pulse.line, pulse.file)
    inside = f" in {pulse.function}()" if pulse.function else ""
    if pulse.thread:
        waiting = f"waiting in {pulse.collective} in {pulse.thread}"
        return f"{waiting}; the main thread is at {place}{inside}"
    if pulse.collective:
        return f"waiting in {pulse.collective}, {place}"
    return f"never came: {place}{inside}"


def why_in_vain(
    cell: int, running: Mapping[int, RankStatus], ended: Mapping[int, RankStatus]
) -> str:
    """Who called what and who did not, in one line.

    Args:
        cell: the cell that runs.
        running: what the ranks that are in it said last; one at least waits for others.
        ended: the same of those that are through with it.

    >>> def at(name):
    ...     return RankStatus(cell=1, line=1, function="", collective=Collective(name, 1))
    >>> why_in_vain(1, {0: at("all_reduce"), 1: at("broadcast")}, {})
    'rank 0 called all_reduce #1, rank 1 broadcast #1'
    """
    calls = {rank: pulse.collective for rank, pulse in running.items() if pulse.collective}
    waited_in = set(calls.values())
    for rank, pulse in {**running, **ended}.items():
        call = pulse.last
        if call is None or rank in calls or pulse.last_cell != cell:
            continue
        rivals = [each for each in waited_in if each.position == call.position]
        # it made another call in the place of one that is waited in, and went on
        if any(each.name != call.name or _is_uneven([each, call]) for each in rivals):
            calls[rank] = call
    told = [_say_calls(calls)]
    absent = [rank for rank in running if rank not in calls]
    gone = [rank for rank in ended if rank not in calls]
    if absent:
        told.append(f"{format_ranks(absent)} never came")
    if gone:
        told.append(f"{format_ranks(gone)} {'is' if len(gone) == 1 else 'are'} done with the cell")
    return ", ".join(told)


def _is_uneven(calls: Iterable[Collective]) -> bool:
    """Whether one call was given different sizes, and must not be."""
    known = set(calls)
    titles, shapes = {each.title for each in known}, {each.shape for each in known}
    is_one = len(titles) == 1 and all(each.name.strip("_").startswith(_EVEN) for each in known)
    return is_one and len(shapes) > 1


def _say_calls(calls: Mapping[int, Collective]) -> str:
    is_uneven, ordered = _is_uneven(calls.values()), sorted(calls.items())
    groups = _grouped({rank: each.shape if is_uneven else each.title for rank, each in ordered})
    if is_uneven:
        told = [f"{format_ranks(ranks)} with {shape}" for shape, ranks in groups.items()]
        title = next(iter(calls.values())).title
        return "sizes differ: " + ", ".join(told).replace(" with", f" called {title} with", 1)
    told = [f"{format_ranks(ranks)} {title}" for title, ranks in groups.items()]
    first = format_ranks(next(iter(groups.values())))
    return f"{first} called" + ", ".join(told).removeprefix(first)
