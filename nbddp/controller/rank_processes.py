"""The processes of one attempt: how they are doing, and their logs to the last byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nbddp.errors import RequestError, StartError
from nbddp.launch.local_launcher import RankHandle
from nbddp.record.log_reader import LogReader, LogSpan
from nbddp.record.notices import OutputText
from nbddp.topology import cores_here
from nbddp.wire.messages import Output

if TYPE_CHECKING:
    from nbddp.wire.envelope import Envelope

WORKING_CPU_SHARE = 0.05  # of a core; five threads that wait for the GIL use 0.015 together
MIN_CPU_INTERVAL = 0.5  # seconds; in a shorter interval a computing rank may get no CPU time

FailedRanks = dict[int, Exception]  # the ranks on which an action failed


class RankProcesses:
    """The ranks of the newest attempt, each with its process and its log.

    Attributes:
        handles: the newest process of each rank that was launched.
        logs: the log of each rank.
        early_envelopes: messages of processes that are not in ``handles`` yet.
        killed: the ranks that got SIGKILL from the controller.
        causes: the last fault that fired in the newest cell, by rank; BY_USER for a rank that the
            user killed.
        abandoned: the ranks whose exit will not be seen.
    """

    def __init__(self) -> None:
        self.handles: dict[int, RankHandle] = {}
        self.logs: dict[int, LogReader] = {}
        self.early_envelopes: dict[int, list[Envelope]] = {}
        self.killed: set[int] = set()
        self.abandoned: set[int] = set()
        self.causes: dict[int, str] = {}
        # sample time, CPU time, whether it worked
        self._cpu: dict[int, tuple[float, float, bool]] = {}

    def forget(self, ranks: Sequence[int]) -> None:
        """Forget the processes of dead ranks, which get replacements."""
        self.killed.difference_update(ranks)
        self.abandoned.difference_update(ranks)
        for rank in ranks:
            for by_rank in (self.handles, self._cpu, self.early_envelopes, self.causes):
                by_rank.pop(rank, None)

    def abandon(self, rank: int) -> bool:
        """Kill a rank that cannot be reached. Return whether its exit will be seen."""
        self.killed.add(rank)
        if try_each([rank], lambda rank: self.handles[rank].kill()):
            self.abandoned.add(rank)
        return rank not in self.abandoned

    def is_stopped(self, rank: int) -> bool:
        """Return whether the rank is stopped by SIGSTOP."""
        return rank in self.handles and self.handles[rank].is_stopped()

    def is_working(self, rank: int) -> bool:
        """Return whether the rank has used the CPU since the last call; True at the first call."""
        if rank not in self.handles:
            return False
        # many ranks on few cores: a computing rank gets about cores / ranks
        share = min(WORKING_CPU_SHARE, 0.5 * cores_here() / len(self.handles))
        now, cpu = self.handles[rank].busy_time()
        at, before, is_working = self._cpu.setdefault(rank, (now, cpu, True))
        if now - at >= MIN_CPU_INTERVAL:
            is_working = bool(cpu - before >= share * (now - at))
            self._cpu[rank] = now, cpu, is_working
        return is_working

    def working_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that have used the CPU since the last call."""
        return tuple(rank for rank in ranks if self.is_working(rank))

    def unseen_output(self, rank: int, output: Output) -> OutputText | LogSpan | None:
        """Return the part of an output message that was not shown yet."""
        if output.text and output.start == output.end:
            return OutputText(rank, output.text)
        span = self.logs[rank].unseen_part(output)
        if span is None or output.is_omitted or span.start > output.start:
            return span
        return OutputText(rank, output.text, span) if output.text else None


def try_each(ranks: Sequence[int], act: Callable[[int], None]) -> FailedRanks:
    """Call ``act`` for each rank. Return the ranks on which it raised, with the errors."""
    failed: FailedRanks = {}
    for rank in ranks:
        try:
            act(rank)
        except Exception as error:  # noqa: BLE001 - the executor handles it
            failed[rank] = error
    return failed


def short_error(error: Exception) -> str:
    """Describe an error in one line.

    >>> short_error(OSError(28, "No space left on device", "/runs")), short_error(EOFError())
    ('No space left on device: /runs', 'EOFError')
    >>> short_error(RequestError("the nodes have room for 2 ranks"))
    'the nodes have room for 2 ranks'
    """
    if isinstance(error, RequestError | StartError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def start_error(what: str, error: Exception, *, verb: str = "started") -> StartError:
    """Return a StartError with the cause."""
    if isinstance(error, StartError):
        return error
    return StartError(f"{what} could not be {verb}: {short_error(error)}")
