"""The processes of one attempt: started, told, ended, and their logs read to the last byte.

A rank that cannot be told what to do is ended, and one that has no process, or cannot be ended, is
given up: so whoever waits for a rank waits for something that will happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nbddp.errors import StartError
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.lifecycle import events as ev
from nbddp.record.cell import CellHandle
from nbddp.record.log_reader import LogReader, LogSpan
from nbddp.record.notices import OutputText
from nbddp.wire.messages import Interrupt, MessageToRank, Output, Regroup, Shutdown
from nbddp.wire.rank_start import RankStart

if TYPE_CHECKING:
    from nbddp.controller.threads import Runtime
    from nbddp.nodes.rejoin import SurvivingGroup
    from nbddp.record.run_folder import RunFolder
    from nbddp.wire.envelope import Envelope

WORKING_CPU_SHARE = (
    0.05  # of a core; five threads that only wait for Python's lock use 0.015 together
)
MIN_CPU_INTERVAL = 0.5  # seconds; in a shorter interval a computing rank may get no CPU time

FailedRanks = dict[int, Exception]  # the ranks that could not be told, and why


class RankOwner(Protocol):
    """Handles the messages and the ends of ranks, on the session's thread."""

    def handle(self, envelope: Envelope) -> None:
        """Handle a message of a rank."""

    def on_launch_failed(self, attempt: int, rank: int, error: Exception) -> None:
        """A rank could not be started."""

    def on_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
        """A rank's process has ended."""


class RankProcesses:
    """All ranks of one attempt, each with its process, its queues and its log.

    Args:
        attempt: which one.
        runtime: the link to the ranks, and the threads.
        launcher: starts the processes.
        owner: told of them, on the session's thread.
    """

    def __init__(
        self, attempt: int, runtime: Runtime, launcher: Launcher, owner: RankOwner
    ) -> None:
        self.attempt = attempt
        self._runtime = runtime
        self._launcher = launcher
        self._owner = owner
        self._handles: dict[int, RankHandle] = {}
        self._logs: dict[int, LogReader] = {}
        self._early_envelopes: dict[int, list[Envelope]] = {}
        self._killed: set[int] = set()
        self._abandoned: set[int] = set()
        self._cpu: dict[int, tuple[float, float, bool]] = {}  # time, CPU time, whether it worked
        self._incarnations: dict[int, int] = {}  # of those that are not the first of their rank

    # ---- how they begin

    def launch(self, starts: Sequence[RankStart], world_size: int) -> None:
        """Start a process for each, on the launching thread: a helper may keep it waiting."""
        self._runtime.link.open_attempt(self.attempt, world_size)
        for start in starts:
            rank = start.topology.rank
            self._logs[rank] = LogReader(Path(start.log_path), rank)
        for start in starts:
            self._runtime.launch_thread.submit(self._launch, start)

    def start_replacements(self, starts: Iterable[RankStart]) -> None:
        """Start processes in the places of ranks that are gone."""
        for start in (starts := [*starts]):
            rank = start.topology.rank
            self._incarnations[rank] = start.incarnation
            self._runtime.link.open_incarnation(self.attempt, rank, start.incarnation)
            self._logs[rank] = LogReader(Path(start.log_path), rank)
            self._handles.pop(rank, None)
            for known in (self._killed, self._abandoned):
                known.discard(rank)
            self._cpu.pop(rank, None)
            self._early_envelopes.pop(rank, None)
        for start in starts:
            self._runtime.launch_thread.submit(self._launch, start)

    def rejoin(self, survivors: SurvivingGroup, folder: RunFolder) -> None:
        """Listen to processes that there are, and which write into these logs."""
        self._runtime.link.open_attempt(self.attempt, survivors.world_size)
        survivors.set_store_port(self._runtime.link.port)
        for rank in range(survivors.world_size):
            self._logs[rank] = LogReader(folder.log_path(rank), rank)
        for rank, each in survivors.ranks.items():
            if each.incarnation:
                self._incarnations[rank] = each.incarnation
                self._runtime.link.open_incarnation(self.attempt, rank, each.incarnation)
            self._handles[rank] = each.handle
            self._watch_exit(rank, each.handle)

    def _watch_exit(self, rank: int, handle: RankHandle) -> None:
        submit, on_exit = self._runtime.event_thread.submit, self._owner.on_exit
        self._runtime.exit_watcher.watch(handle, lambda it: submit(on_exit, self.attempt, rank, it))

    def _launch(self, start: RankStart) -> None:
        rank, submit = start.topology.rank, self._runtime.event_thread.submit
        if rank in self._abandoned or self._is_superseded(start):
            return
        try:
            handle = self._launcher.launch(start)
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank is waited for
            submit(self._report_launch_failure, start, error)
            return
        if not submit(self._add_process, start, handle):  # all was closed meanwhile
            handle.kill()
            handle.join()

    def _report_launch_failure(self, start: RankStart, error: Exception) -> None:
        if not self._is_superseded(start):
            self._owner.on_launch_failed(self.attempt, start.topology.rank, error)

    def _is_superseded(self, start: RankStart) -> bool:
        """Whether another process was started in this one's place meanwhile."""
        return start.incarnation != self._incarnations.get(start.topology.rank, 0)

    def _add_process(self, start: RankStart, handle: RankHandle) -> None:
        rank, is_superseded = start.topology.rank, self._is_superseded(start)
        if not is_superseded:
            self._handles[rank] = handle
        try:
            self._watch_exit(rank, handle)
        except OSError as error:
            self._report_launch_failure(start, error)
            handle.kill()
            return
        if rank in self._abandoned or is_superseded:  # it comes late
            handle.kill()
        if is_superseded:
            return
        for envelope in self._early_envelopes.pop(rank, ()):
            self._owner.handle(envelope)

    def accepts(self, envelope: Envelope) -> bool:
        """Whether an envelope is to be read now; one that is earlier than its sender is kept."""
        is_newest = envelope.incarnation == self._incarnations.get(envelope.sender, 0)
        if envelope.attempt != self.attempt or not is_newest:
            return False
        if envelope.sender not in self._handles:
            self._early_envelopes.setdefault(envelope.sender, []).append(envelope)
            return False
        return True

    # ---- what they are told

    def perform(self, action: ev.Action, *, cell: CellHandle | None) -> FailedRanks:
        """Do to the ranks what the lifecycle wants done; whom that was not possible for."""
        match action:
            case ev.SendRegroup(ranks=ranks, generation=generation, form=form):
                return self._send(ranks, Regroup(generation=generation, form=form))
            case ev.SendCell(ranks=ranks) if cell is not None:
                for rank in ranks:
                    self._logs[rank].mark_cell_start()
                return self._send(ranks, cell.run_message())
            case ev.SendInterrupt(cell=number, ranks=ranks, is_for_death=is_for_death):
                self.working_ranks(ranks)  # measure their CPU time from here on
                return self._interrupt(ranks, Interrupt(cell=number, rank_died=is_for_death))
            case ev.SendShutdown(ranks=ranks):
                return self._send(ranks, Shutdown())
            case ev.Terminate(ranks=ranks):
                return try_each(ranks, lambda rank: self._handles[rank].terminate())
            case ev.Kill(ranks=ranks):
                self._killed.update(ranks)
                return try_each(ranks, lambda rank: self._handles[rank].kill())
            case _:
                raise RuntimeError(f"nothing that ranks could do: {action}")

    def _send(self, ranks: Sequence[int], command: MessageToRank) -> FailedRanks:
        return try_each(ranks, lambda rank: self._runtime.link.send(rank, command))

    def _interrupt(self, ranks: Sequence[int], command: Interrupt) -> FailedRanks:
        """Signal the processes, too: C code that holds Python's lock lets no message in.

        The signal comes first, so that it never strikes a cell that has had its interrupt.
        """

        def submit(rank: int) -> None:
            self._handles[rank].interrupt()
            self._runtime.link.send(rank, command)

        return try_each(ranks, submit)

    def abandon(self, rank: int) -> bool:
        """End a rank that cannot be told anything; whether its process will be seen to end."""
        self._killed.add(rank)
        failed = try_each([rank], lambda rank: self._handles[rank].kill())
        if failed:
            self._abandoned.add(rank)
        return not failed

    # ---- what is known of them

    def is_current(self, rank: int, handle: RankHandle) -> bool:
        """Whether this is the rank's process, and not one that was replaced."""
        return self._handles.get(rank) is handle

    def has_process(self, rank: int) -> bool:
        """Whether it was launched."""
        return rank in self._handles

    def is_stopped(self, rank: int) -> bool:
        """Whether somebody sent it SIGSTOP."""
        return rank in self._handles and self._handles[rank].is_stopped()

    def exiting_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose process was killed and is not gone yet."""
        return [r for r in ranks if r in self._handles and self._handles[r].is_ending()]

    def is_working(self, rank: int) -> bool:
        """Whether it has used the CPU since the last time that this was asked; at first, yes."""
        if rank not in self._handles:
            return False
        now, cpu = self._handles[rank].cpu_time()
        at, before, is_working = self._cpu.setdefault(rank, (now, cpu, True))
        if now - at >= MIN_CPU_INTERVAL:
            is_working = bool(cpu - before >= WORKING_CPU_SHARE * (now - at))
            self._cpu[rank] = now, cpu, is_working
        return is_working

    def working_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that have used the CPU since the last call."""
        return tuple(rank for rank in ranks if self.is_working(rank))

    def stopped_ranks(self, ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Those that somebody sent a SIGSTOP, with their process ids."""
        return tuple(self.pids([rank for rank in ranks if self.is_stopped(rank)]).items())

    def pids(self, ranks: Sequence[int]) -> dict[int, int]:
        """The process ids of some ranks."""
        return {rank: self._handles[rank].pid or 0 for rank in ranks if rank in self._handles}

    def unseen_output(self, rank: int, output: Output) -> OutputText | LogSpan | None:
        """What of a mailed piece of output was not shown yet."""
        log = self._logs[rank].unseen_part(output)
        if log is None or output.is_omitted:
            return log
        return OutputText(rank, output.text, log) if output.text else None

    def was_killed(self, rank: int) -> bool:
        """Whether it got its SIGKILL from here."""
        return rank in self._killed

    def final_output(self, rank: int) -> str:
        """The last lines that a rank wrote in its cell."""
        return self._logs[rank].final_output()

    def unsent_output(self, rank: int) -> LogSpan | None:
        """What a rank that is gone wrote and could not mail any more."""
        return self._logs[rank].remaining()


def try_each(ranks: Sequence[int], act: Callable[[int], None]) -> FailedRanks:
    """Do it for each rank, whatever becomes of the others."""
    failed: FailedRanks = {}
    for rank in ranks:
        try:
            act(rank)
        except Exception as error:  # noqa: BLE001 - the executor makes up for it
            failed[rank] = error
    return failed


def short_error(error: Exception) -> str:
    """An error in a few words.

    >>> short_error(OSError(28, "No space left on device", "/runs")), short_error(EOFError())
    ('No space left on device: /runs', 'EOFError')
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def start_error(who: str, error: Exception) -> StartError:
    """Why there is no group."""
    if isinstance(error, StartError):
        return error
    return StartError(f"{who} could not be started: {short_error(error)}")
