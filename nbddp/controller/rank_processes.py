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

WORKING = 0.05  # of a core; five threads that only wait for Python's lock use 0.015 together
SHORTEST_LOOK = 0.5  # seconds; in a shorter interval a computing rank may get no CPU time

Told = dict[int, Exception]  # the ranks that could not be told, and why


class RankOwner(Protocol):
    """Handles the messages and the ends of ranks, on the session's thread."""

    def read(self, envelope: Envelope) -> None:
        """Handle a message of a rank."""

    def note_unlaunched(self, attempt: int, rank: int, error: Exception) -> None:
        """A rank could not be started."""

    def note_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
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
        self._early: dict[int, list[Envelope]] = {}
        self._killed: set[int] = set()
        self._given_up: set[int] = set()
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
            self._runtime.launching.tell(self._launch, start)

    def revive(self, starts: Iterable[RankStart]) -> None:
        """Start processes in the places of ranks that are gone."""
        for start in (starts := [*starts]):
            rank = start.topology.rank
            self._incarnations[rank] = start.incarnation
            self._runtime.link.open_again(self.attempt, rank, start.incarnation)
            self._logs[rank] = LogReader(Path(start.log_path), rank)
            self._handles.pop(rank, None)
            for known in (self._killed, self._given_up):
                known.discard(rank)
            self._cpu.pop(rank, None)
            self._early.pop(rank, None)
        for start in starts:
            self._runtime.launching.tell(self._launch, start)

    def take_back(self, returned: SurvivingGroup, folder: RunFolder) -> None:
        """Listen to processes that there are, and which write into these logs."""
        self._runtime.link.open_attempt(self.attempt, returned.world_size)
        returned.serve(self._runtime.link.port)
        for rank in range(returned.world_size):
            self._logs[rank] = LogReader(folder.log_path(rank), rank)
        for rank, each in returned.ranks.items():
            if each.incarnation:
                self._incarnations[rank] = each.incarnation
                self._runtime.link.open_again(self.attempt, rank, each.incarnation)
            self._handles[rank] = each.handle
            self._watch(rank, each.handle)

    def _watch(self, rank: int, handle: RankHandle) -> None:
        tell, note_exit = self._runtime.actor.tell, self._owner.note_exit
        self._runtime.watcher.watch(handle, lambda it: tell(note_exit, self.attempt, rank, it))

    def _launch(self, start: RankStart) -> None:
        rank, tell = start.topology.rank, self._runtime.actor.tell
        if rank in self._given_up or self._is_overtaken(start):
            return
        try:
            handle = self._launcher.launch(start)
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank is waited for
            tell(self._note_unlaunched, start, error)
            return
        if not tell(self._adopt, start, handle):  # all was closed meanwhile
            handle.kill()
            handle.join()

    def _note_unlaunched(self, start: RankStart, error: Exception) -> None:
        if not self._is_overtaken(start):
            self._owner.note_unlaunched(self.attempt, start.topology.rank, error)

    def _is_overtaken(self, start: RankStart) -> bool:
        """Whether another process was started in this one's place meanwhile."""
        return start.incarnation != self._incarnations.get(start.topology.rank, 0)

    def _adopt(self, start: RankStart, handle: RankHandle) -> None:
        rank, is_overtaken = start.topology.rank, self._is_overtaken(start)
        if not is_overtaken:
            self._handles[rank] = handle
        try:
            self._watch(rank, handle)
        except OSError as error:
            self._note_unlaunched(start, error)
            handle.kill()
            return
        if rank in self._given_up or is_overtaken:  # it comes late
            handle.kill()
        if is_overtaken:
            return
        for envelope in self._early.pop(rank, ()):
            self._owner.read(envelope)

    def takes(self, envelope: Envelope) -> bool:
        """Whether an envelope is to be read now; one that is earlier than its sender is kept."""
        is_of_now = envelope.incarnation == self._incarnations.get(envelope.sender, 0)
        if envelope.attempt != self.attempt or not is_of_now:
            return False
        if envelope.sender not in self._handles:
            self._early.setdefault(envelope.sender, []).append(envelope)
            return False
        return True

    # ---- what they are told

    def perform(self, action: ev.Action, *, cell: CellHandle | None) -> Told:
        """Do to the ranks what the lifecycle wants done; whom that was not possible for."""
        match action:
            case ev.SendRegroup(ranks=ranks, generation=generation, form=form):
                return self._send(ranks, Regroup(generation=generation, form=form))
            case ev.SendCell(ranks=ranks) if cell is not None:
                for rank in ranks:
                    self._logs[rank].mark_cell_start()
                return self._send(ranks, cell.run_message())
            case ev.SendInterrupt(cell=number, ranks=ranks, is_for_death=is_for_death):
                self.working(ranks)  # measure their CPU time from here on
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

    def _send(self, ranks: Sequence[int], command: MessageToRank) -> Told:
        return try_each(ranks, lambda rank: self._runtime.link.send(rank, command))

    def _interrupt(self, ranks: Sequence[int], command: Interrupt) -> Told:
        """Signal the processes, too: C code that holds Python's lock lets no message in.

        The signal comes first, so that it never strikes a cell that has had its interrupt.
        """

        def tell(rank: int) -> None:
            self._handles[rank].interrupt()
            self._runtime.link.send(rank, command)

        return try_each(ranks, tell)

    def give_up(self, rank: int) -> bool:
        """End a rank that cannot be told anything; whether its process will be seen to end."""
        self._killed.add(rank)
        failed = try_each([rank], lambda rank: self._handles[rank].kill())
        if failed:
            self._given_up.add(rank)
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

    def ending(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose process was killed and is not gone yet."""
        return [r for r in ranks if r in self._handles and self._handles[r].is_ending()]

    def is_working(self, rank: int) -> bool:
        """Whether it has used the CPU since the last time that this was asked; at first, yes."""
        if rank not in self._handles:
            return False
        now, cpu = self._handles[rank].cpu_time()
        at, before, is_working = self._cpu.setdefault(rank, (now, cpu, True))
        if now - at >= SHORTEST_LOOK:
            is_working = bool(cpu - before >= WORKING * (now - at))
            self._cpu[rank] = now, cpu, is_working
        return is_working

    def working(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that have used the CPU since the last call."""
        return tuple(rank for rank in ranks if self.is_working(rank))

    def stopped(self, ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Those that somebody sent a SIGSTOP, with their process ids."""
        return tuple(self.pids([rank for rank in ranks if self.is_stopped(rank)]).items())

    def pids(self, ranks: Sequence[int]) -> dict[int, int]:
        """The process ids of some ranks."""
        return {rank: self._handles[rank].pid or 0 for rank in ranks if rank in self._handles}

    def accept(self, rank: int, output: Output) -> OutputText | LogSpan | None:
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

    def last_output(self, rank: int) -> LogSpan | None:
        """What a rank that is gone wrote and could not mail any more."""
        return self._logs[rank].remaining()


def try_each(ranks: Sequence[int], act: Callable[[int], None]) -> Told:
    """Do it for each rank, whatever becomes of the others."""
    failed: Told = {}
    for rank in ranks:
        try:
            act(rank)
        except Exception as error:  # noqa: BLE001 - the executor makes up for it
            failed[rank] = error
    return failed


def plain(error: Exception) -> str:
    """An error in a few words.

    >>> plain(OSError(28, "No space left on device", "/runs")), plain(EOFError())
    ('No space left on device: /runs', 'EOFError')
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def unable(who: str, error: Exception) -> StartError:
    """Why there is no group."""
    if isinstance(error, StartError):
        return error
    return StartError(f"{who} could not be started: {plain(error)}")
