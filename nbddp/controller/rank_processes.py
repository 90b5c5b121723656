"""The processes of one attempt: start, signal and stop them, and read their logs to the last byte.

A rank that cannot be reached is killed. A rank that has no process, or cannot be watched or killed,
is abandoned: it counts as exited, so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nbddp.errors import RequestError, StartError
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.lifecycle import events as ev
from nbddp.record.log_reader import LogReader, LogSpan, log_name
from nbddp.record.notices import OutputText
from nbddp.topology import cores_here
from nbddp.wire.messages import Interrupt, MessageToRank, Output
from nbddp.wire.rank_start import RankStart

if TYPE_CHECKING:
    from nbddp.controller.controller_state import ControllerState
    from nbddp.controller.threads import Runtime
    from nbddp.nodes.rejoin import SurvivingGroup
    from nbddp.wire.envelope import Envelope

WORKING_CPU_SHARE = 0.05  # of a core; five threads that wait for the GIL use 0.015 together
MIN_CPU_INTERVAL = 0.5  # seconds; in a shorter interval a computing rank may get no CPU time

FailedRanks = dict[int, Exception]  # the ranks on which an action failed


class RankOwner(Protocol):
    """Handles the messages and exits of ranks, on the session's thread."""

    def handle(self, envelope: Envelope) -> None:
        """Handle a message of a rank."""

    def on_launch_failed(self, attempt: int, rank: int, error: Exception) -> None:
        """Handle a rank that could not be started."""

    def on_exit(self, attempt: int, rank: int, handle: RankHandle) -> None:
        """Handle the exit of a rank's process."""


class RankProcesses:
    """The ranks of the newest attempt, each with its process, its queues and its log.

    Attributes:
        handles: the newest process of each rank that was launched.
        logs: the log of each rank.
        killed: the ranks that got SIGKILL from the controller.

    Args:
        state: the state of the worker group.
        owner: handles their messages and exits.
    """

    def __init__(self, state: ControllerState, owner: RankOwner) -> None:
        self._state = state
        self._owner = owner
        self._attempt = state.life.attempt
        self.handles: dict[int, RankHandle] = {}
        self.logs: dict[int, LogReader] = {}
        self._early_envelopes: dict[int, list[Envelope]] = {}
        self.killed: set[int] = set()
        self._abandoned: set[int] = set()
        # sample time, CPU time, whether it worked
        self._cpu: dict[int, tuple[float, float, bool]] = {}

    # ---- start

    def forget(self, ranks: Sequence[int]) -> None:
        """Forget the processes of dead ranks, which get replacements."""
        self.killed.difference_update(ranks)
        self._abandoned.difference_update(ranks)
        for rank in ranks:
            for known in (self.handles, self._cpu, self._early_envelopes):
                known.pop(rank, None)

    def launch(self, starts: Sequence[RankStart]) -> None:
        """Start a process for each rank. The launch thread may have to wait for the forkserver."""
        runtime = self._state.active_runtime
        for start in starts:
            rank = start.topology.rank
            if start.incarnation:
                runtime.link.open_incarnation(start.attempt, rank, start.incarnation)
            self.logs[rank] = LogReader(Path(start.log_path), rank)
        for start in starts:
            runtime.launch_thread.submit(self._launch, start, self._state.launcher, runtime)

    def rejoin(self, survivors: SurvivingGroup, folder: Path) -> FailedRanks:
        """Connect to the running processes of an earlier notebook, and read their logs.

        If this raises an error, the processes are as before. Return the ranks that cannot be
        watched, with the errors.
        """
        link = self._state.active_runtime.link
        for rank in range(survivors.world_size):
            self.logs[rank] = LogReader(folder / log_name(rank), rank)
        for rank, each in survivors.ranks.items():
            if each.incarnation:
                link.open_incarnation(survivors.attempt, rank, each.incarnation)
        survivors.set_store_port(link.port)  # now they connect
        self.handles = {rank: each.handle for rank, each in survivors.ranks.items()}
        failed = try_each([*self.handles], lambda rank: self._watch_exit(rank, self.handles[rank]))
        self._abandoned.update(failed)
        return failed

    def _watch_exit(self, rank: int, handle: RankHandle) -> None:
        on_exit = partial(self._owner.on_exit, self._attempt, rank, handle)
        self._state.active_runtime.event_thread.watch(handle, on_exit)

    def _launch(self, start: RankStart, launcher: Launcher, runtime: Runtime) -> None:
        if start.topology.rank in self._abandoned or self._is_superseded(start):
            return
        submit = runtime.event_thread.submit
        try:
            handle = launcher.launch(start)
        except Exception as error:  # noqa: BLE001 - any error must end the wait for this rank
            submit(self._report_launch_failure, start, error)
            return
        if not submit(self._add_process, start, handle):  # the session was closed meanwhile
            handle.kill()
            handle.join()

    def _report_launch_failure(self, start: RankStart, error: Exception) -> None:
        if not self._is_superseded(start):
            self._owner.on_launch_failed(start.attempt, start.topology.rank, error)

    def _is_superseded(self, start: RankStart) -> bool:
        """Return whether this process is not the newest one of its rank any more."""
        life = self._state.life
        newest = life.attempt, life.incarnation(start.topology.rank)
        return (start.attempt, start.incarnation) != newest

    def _add_process(self, start: RankStart, handle: RankHandle) -> None:
        rank, is_superseded = start.topology.rank, self._is_superseded(start)
        if not is_superseded:
            self.handles[rank] = handle
        try:
            self._watch_exit(rank, handle)
        except OSError as error:
            self._report_launch_failure(start, error)
            handle.kill()
            return
        if rank in self._abandoned or is_superseded:  # nothing expects it any more
            handle.kill()
        if is_superseded:
            return
        for envelope in self._early_envelopes.pop(rank, ()):
            self._owner.handle(envelope)

    def accepts(self, envelope: Envelope) -> bool:
        """Return whether to handle an envelope now. Keep it if its sender is not registered yet."""
        life, rank = self._state.life, envelope.sender
        if (envelope.attempt, envelope.incarnation) != (life.attempt, life.incarnation(rank)):
            return False
        if rank not in self.handles:
            self._early_envelopes.setdefault(rank, []).append(envelope)
            return False
        return True

    # ---- actions

    def perform(self, action: ev.Action) -> FailedRanks:
        """Carry out an action. Return the ranks on which it failed, with the errors."""
        match action:
            case ev.Send(ranks=ranks, message=message):
                return self._send(ranks, message)
            case ev.SendCell(ranks=ranks) if self._state.cell is not None:
                for rank in ranks:
                    self.logs[rank].mark_cell_start()
                return self._send(ranks, self._state.cell.run_message())
            case ev.SendInterrupt(cell=number, is_second=True):
                self._state.active_runtime.link.end_step_wait(self._state.life.attempt, number)
                return {}
            case ev.SendInterrupt(cell=number, ranks=ranks, rank_died=rank_died) as action:
                self.working_ranks(ranks)  # measure their CPU time from here on
                after_step = [*ranks] if action.after_step else []
                command = Interrupt(cell=number, rank_died=rank_died, ranks=after_step)
                return self._interrupt(ranks, command)
            case ev.Terminate(ranks=ranks):
                return try_each(ranks, lambda rank: self.handles[rank].terminate())
            case ev.Kill(ranks=ranks):
                self.killed.update(ranks)
                return try_each(ranks, lambda rank: self.handles[rank].kill())
            case _:
                raise RuntimeError(f"not an action for ranks: {action}")

    def _send(self, ranks: Sequence[int], command: MessageToRank) -> FailedRanks:
        link = self._state.active_runtime.link
        return try_each(ranks, lambda rank: link.send(rank, command))

    def _interrupt(self, ranks: Sequence[int], command: Interrupt) -> FailedRanks:
        """Send a signal before the message: C code that holds the GIL would delay the message.

        The signal is first, so that it cannot hit a cell that already got its interrupt.
        """

        def interrupt(rank: int) -> None:
            self.handles[rank].interrupt()
            self._state.active_runtime.link.send(rank, command)

        return try_each(ranks, interrupt)

    def abandon(self, rank: int) -> bool:
        """Kill a rank that cannot be reached. Return whether its exit will be seen."""
        self.killed.add(rank)
        if try_each([rank], lambda rank: self.handles[rank].kill()):
            self._abandoned.add(rank)
        return rank not in self._abandoned

    # ---- state

    def is_stopped(self, rank: int) -> bool:
        """Return whether the rank is stopped by SIGSTOP."""
        return rank in self.handles and self.handles[rank].is_stopped()

    def is_working(self, rank: int) -> bool:
        """Return whether the rank has used the CPU since the last call; True at the first call."""
        if rank not in self.handles:
            return False
        # many ranks on few cores: a computing rank gets about cores / ranks
        share = min(WORKING_CPU_SHARE, 0.5 * cores_here() / len(self.handles))
        now, cpu = self.handles[rank].cpu_time()
        at, before, is_working = self._cpu.setdefault(rank, (now, cpu, True))
        if now - at >= MIN_CPU_INTERVAL:
            is_working = bool(cpu - before >= share * (now - at))
            self._cpu[rank] = now, cpu, is_working
        return is_working

    def working_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that have used the CPU since the last call."""
        return tuple(rank for rank in ranks if self.is_working(rank))

    def stopped_ranks(self) -> tuple[tuple[int, int], ...]:
        """Return the ranks that are stopped by SIGSTOP, with their process ids."""
        return tuple((rank, pid) for rank, pid in self.pids().items() if self.is_stopped(rank))

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that is alive."""
        alive = self._state.life.alive
        return {rank: self.handles[rank].pid or 0 for rank in alive if rank in self.handles}

    def unseen_output(self, rank: int, output: Output) -> OutputText | LogSpan | None:
        """Return the part of an output message that was not shown yet."""
        span = self.logs[rank].unseen_part(output)
        if span is None or output.is_omitted:
            return span
        return OutputText(rank, output.text, span) if output.text else None


def try_each(ranks: Sequence[int], act: Callable[[int], None]) -> FailedRanks:
    """Call ``act`` for each rank. Return the ranks on which it raised, with the errors."""
    failed: FailedRanks = {}
    for rank in ranks:
        try:
            act(rank)
        except Exception as error:  # noqa: BLE001 - the actor handles it
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
