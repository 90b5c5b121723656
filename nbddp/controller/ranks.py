"""The processes of one attempt: started, told, ended, and their logs read to the last byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbddp.controller import events as ev
from nbddp.controller.cell import CellHandle
from nbddp.controller.launcher import Launcher, RankHandle
from nbddp.controller.notices import Wrote
from nbddp.controller.output import Logged, LogReader
from nbddp.controller.watcher import ExitWatcher
from nbddp.wire.messages import Command, Interrupt, Leave, Output, Regroup
from nbddp.worker.start import RankStart

if TYPE_CHECKING:
    from nbddp.controller.means import Link

OnExit = Callable[[int, int, RankHandle], None]


class Ranks:
    """All ranks of one attempt, each with its process, its queues and its log."""

    def __init__(self, attempt: int, link: Link, launcher: Launcher) -> None:
        self.attempt = attempt
        self._link = link
        self._launcher = launcher
        self._handles: dict[int, RankHandle] = {}
        self._logs: dict[int, LogReader] = {}
        self._killed: set[int] = set()

    def launch(
        self, starts: Sequence[RankStart], watcher: ExitWatcher, on_exit: OnExit
    ) -> dict[int, OSError | EOFError]:
        """Start a process for each; ``on_exit(attempt, rank, handle)`` tells how it ended.

        Returns:
            The ranks that could not be started, and why.
        """
        self._link.open_attempt(self.attempt, len(starts))
        failed: dict[int, OSError | EOFError] = {}
        for start in starts:
            rank = start.topology.rank
            try:
                self._logs[rank] = LogReader(Path(start.log_path), rank)
                self._handles[rank] = self._launcher.launch(start)
            except (OSError, EOFError) as error:
                failed[rank] = error
            else:
                self._watch(rank, watcher, on_exit)
        return failed

    def _watch(self, rank: int, watcher: ExitWatcher, on_exit: OnExit) -> None:
        watcher.watch(self._handles[rank], lambda it: on_exit(self.attempt, rank, it))

    def perform(  # noqa: C901 - a table, a line or two a case
        self, action: ev.Action, *, cell: CellHandle | None
    ) -> None:
        """Do to the ranks what the lifecycle wants done."""
        match action:
            case ev.SendRegroup(ranks=ranks, generation=generation, form=form):
                self._send(ranks, Regroup(generation=generation, form=form))
            case ev.SendCell(ranks=ranks) if cell is not None:
                for rank in ranks:
                    self._logs[rank].begin_cell()
                self._send(ranks, cell.command())
            case ev.SendInterrupt(cell=number, ranks=ranks):
                self._send(ranks, Interrupt(cell=number))
            case ev.SendLeave(ranks=ranks):
                self._send(ranks, Leave())
            case ev.Terminate(ranks=ranks):
                for handle in self._started(ranks):
                    handle.terminate()
            case ev.Kill(ranks=ranks):
                self._killed.update(ranks)
                for handle in self._started(ranks):
                    handle.kill()
            case _:
                raise RuntimeError(f"nothing that ranks could do: {action}")

    def _started(self, ranks: Sequence[int]) -> list[RankHandle]:
        return [self._handles[rank] for rank in ranks if rank in self._handles]

    def _send(self, ranks: Sequence[int], command: Command) -> None:
        for rank in ranks:
            self._link.send(rank, command)

    def is_stopped(self, rank: int) -> bool:
        """Whether somebody sent it SIGSTOP."""
        try:
            return bool(psutil.Process(self._handles[rank].pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def pids(self, ranks: Sequence[int]) -> dict[int, int]:
        """The process ids of some ranks."""
        return {rank: self._handles[rank].pid or 0 for rank in ranks if rank in self._handles}

    def accept(self, rank: int, output: Output) -> Wrote | Logged | None:
        """What of a mailed piece of output was not shown yet."""
        log = self._logs[rank].accept(output)
        if log is None or output.is_left:
            return log
        return Wrote(rank, output.text, log) if output.text else None

    def was_killed(self, rank: int) -> bool:
        """Whether it got its SIGKILL from here."""
        return rank in self._killed

    def last_words(self, rank: int) -> str:
        """The last lines that a rank wrote in its cell."""
        return self._logs[rank].last_words()

    def last_output(self, rank: int) -> Logged | None:
        """What a rank that is gone wrote and could not mail any more."""
        return self._logs[rank].rest()
