"""Notices that nothing moves, and says who waits for whom. Pure: it is told the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nbddp.errors import say_place, say_ranks
from nbddp.record.mismatch import why
from nbddp.wire.messages import Pulse

HANG_AFTER = 10.0  # seconds without progress on any rank
SILENT_AFTER = 8.0  # seconds without a sign of life


@dataclass(frozen=True, slots=True)
class Sign:
    """A pulse, and when it came."""

    pulse: Pulse
    at: float


class HangWatch:
    """Keeps the last sign of life of every rank, and each piece of news once.

    Args:
        is_stopped: whether somebody stopped this rank's process.
        is_working: whether it has used the CPU since this was asked last: a rank whose C code holds
            Python's lock gives no sign of life, and may compute all the same.
        hang_after: seconds without progress on any rank that make a hang.
    """

    def __init__(
        self,
        is_stopped: Callable[[int], bool],
        is_working: Callable[[int], bool] = lambda _rank: False,
        hang_after: float = HANG_AFTER,
    ) -> None:
        self._is_stopped = is_stopped
        self._is_working = is_working
        self.hang_after = hang_after
        self._signs: dict[int, Sign] = {}
        self._told: set[object] = set()
        self.alarm = ""

    def sign(self, rank: int) -> Sign | None:
        """When and where a rank was last seen."""
        return self._signs.get(rank)

    def memory(self) -> int:
        """Bytes that all ranks together used when they were last seen."""
        return sum(sign.pulse.memory for sign in self._signs.values())

    def forget(self) -> None:
        """The ranks that were seen are gone."""
        self._signs.clear()
        self.alarm = ""

    def note(self, rank: int, pulse: Pulse, now: float) -> None:
        """A rank gave a sign of life."""
        self._signs[rank] = Sign(pulse, now)

    def begin_cell(self, ranks: Iterable[int], now: float) -> None:
        """A cell begins: whatever was seen before says nothing about it."""
        self._told.clear()
        self.alarm = ""
        for rank in ranks:
            self._signs[rank] = Sign(Pulse(cell=0, line=0, function=""), now)

    def look(self, cell: int, waiting: Iterable[int], ranks: Iterable[int], now: float) -> str:
        """What is new: a rank that is silent, or a hang; empty if nothing is.

        Args:
            cell: the cell that runs.
            waiting: ranks that have not ended it.
            ranks: all ranks it runs on.
            now: the time, in the seconds of ``note``.
        """
        running = sorted(waiting)
        late = [rank for rank in running if now - self._signs[rank].at > SILENT_AFTER]
        silent = [rank for rank in late if not self._is_working(rank)]
        text = self._say_silent(silent) if silent else self._say_hang(cell, running, ranks)
        self.alarm = text
        news = tuple(silent) or text
        if not text or news in self._told:
            return ""
        self._told.add(news)
        return text

    def _say_silent(self, silent: list[int]) -> str:
        stopped = [rank for rank in silent if self._is_stopped(rank)]
        who = say_ranks(stopped or silent)
        why = (
            "stopped (SIGSTOP)"
            if stopped
            else "in code that holds Python's lock, or the machine is too busy"
        )
        number = (stopped or silent)[0]
        return f"no sign of life from {who}: {why}; `%ddp kill {number}` ends it"

    def _say_hang(self, cell: int, running: list[int], ranks: Iterable[int]) -> str:
        pulses = {rank: self._signs[rank].pulse for rank in running}
        is_stuck = all(
            pulse.cell == cell and pulse.seconds >= self.hang_after for pulse in pulses.values()
        )
        is_asked = any(pulse.asks for pulse in pulses.values())  # the user is waited for
        if not is_stuck or is_asked or not any(pulse.collective for pulse in pulses.values()):
            return ""
        ended = {rank: self._signs[rank].pulse for rank in ranks if rank not in pulses}
        lines = [f"no progress for {self.hang_after:.0f} s: {why(cell, pulses, ended)}"]
        lines += [f"  {who} {what}" for what, who in _grouped(pulses)]
        if ended:
            lines.append(f"  {say_ranks(list(ended))} done with the cell: will not come")
        lines.append("  the cell goes on waiting; interrupt it to end it and keep all names")
        return "\n".join(lines)


def _grouped(pulses: Mapping[int, Pulse]) -> list[tuple[str, str]]:
    groups: dict[str, list[int]] = {}
    for rank, pulse in pulses.items():
        groups.setdefault(_where(pulse), []).append(rank)
    return [(what, say_ranks(ranks)) for what, ranks in groups.items()]


def _where(pulse: Pulse) -> str:
    place = say_place(pulse.line, pulse.file)
    inside = f" in {pulse.function}()" if pulse.function else ""
    if pulse.thread:
        waiting = f"waiting in {pulse.collective} in {pulse.thread}"
        return f"{waiting}; the main thread is at {place}{inside}"
    if pulse.collective:
        return f"waiting in {pulse.collective}, {place}"
    return f"never came: {place}{inside}"
