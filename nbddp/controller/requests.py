"""What may be asked of an executor, on its thread: it is done at once, refused, or promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.controller.acts import plain
from nbddp.controller.origin import begin_to_ask
from nbddp.errors import RequestError
from nbddp.lifecycle import events as ev
from nbddp.lifecycle import reasons
from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.lifecycle.states import GroupState
from nbddp.promise import Promise
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.healed import Healed
from nbddp.wire import messages as msg

if TYPE_CHECKING:
    from nbddp.controller.executor import Executor
    from nbddp.controller.spec import GroupSpec


class Requests:
    """Turns what is asked into events, and says when it is done.

    Raises:
        RequestError: by each of them, if the group cannot do it now; then nothing has changed.
    """

    def __init__(self, do: Executor) -> None:
        self._do = do

    def _ask(self, event: ev.Event) -> None:
        refusal = self._do.step(event)
        if refusal:
            raise RequestError(refusal)

    def ask_start(
        self, spec: GroupSpec, event: ev.Event, *, is_recovery: bool = False
    ) -> Promise[None]:
        """Start or restart, in a recovery without faults that struck; tells when all are ready."""
        before, self._do.spec = self._do.spec, spec
        if not is_recovery:
            self._do.struck.clear()
        if isinstance(event, ev.RestartAsked):  # a start is refused while a cell runs
            self._mark_end("restart")
        is_new = self._do.time_line.folder is None
        try:
            self._ask(event)
        except RequestError:
            self._do.spec = before
            raise
        if is_new:
            begin_to_ask(spec.cwd(), self._note_origin)
        return self._do.promises.for_start()

    def _note_origin(self, origin: dict[str, Any]) -> None:
        """What git says of the run's folder, from a thread of its own."""
        if self._do.means is not None:
            self._do.means.actor.tell(self._do.time_line.describe, {"git": origin})

    def ask_heal(self, ranks: Sequence[int], donor: int, *, checks: bool) -> Promise[Healed]:
        """Put new processes in the places of dead ranks; the future tells what was done."""
        for rank, pid in self._do.stopped():
            raise RequestError(
                f"rank {rank} is stopped (SIGSTOP) and could not meet the others: "
                f"`kill -CONT {pid}` wakes it, `%ddp kill {rank}` ends it"
            )
        self._do.launcher.take_over(ranks)
        healed = self._do.promises.for_heal()
        self._ask(ev.HealAsked(ranks=tuple(ranks), donor=donor, checks=checks))
        return healed

    def ask_exits(self) -> list[Promise[None]]:
        """Return a promise for the end of each process that was killed and is not gone yet."""
        return [self._do.promises.for_kill(rank) for rank in self._do.ending()]

    def ask_kill(self, rank: int) -> Promise[None]:
        """Kill a rank; the future tells when it is gone."""
        self._ask(ev.KillAsked(rank=rank))
        self._do.time_line.record("kill asked", rank=rank)
        return self._do.promises.for_kill(rank)

    def ask_stop(self) -> Promise[None]:
        """End all ranks; the future tells when they are gone."""
        stopped = self._do.promises.for_stop()
        self._mark_end("stop")
        self._do.step(ev.StopAsked())
        if not self._do.life.state.is_live:
            self._do.promises.stopped()
        return stopped

    def _mark_end(self, how: str) -> None:
        """The user ends the running cell with its ranks: that is then no failure of theirs."""
        if self._do.cell is not None and self._do.life.state.is_busy:
            self._do.cell.end_by(how)
            self._do.time_line.record(f"{how} asked")

    def begun(self) -> Promise[None] | None:
        """The start or stop that is under way, if one is."""
        if self._do.life.state is GroupState.STARTING or self._do.life.next_start:
            return self._do.promises.pending_start
        return self._do.promises.for_stop() if self._do.life.state is GroupState.STOPPING else None

    def begin_cell(self, request: CellRequest, *, is_elastic: bool = False) -> CellHandle:
        """Hand a cell to the ranks; if it is elastic, it ends when a restart would make more."""
        if not self._do.life.state.is_live:
            raise RequestError(NO_GROUP)
        ranks = self._do.life.everybody if request.ranks is None else request.ranks
        before, logs = self._do.cell, self._do.time_line.sizes_of_logs(ranks)  # ranks write at once
        self._do.cell = handle = CellHandle(
            self._do.next_cell(),
            request,
            ranks,
            self._do.means_now.link.unpack,
            attempt=self._do.life.attempt,
            has_others=not {*self._do.life.alive} <= {*ranks},
        )
        asked = ev.RunAsked(
            cell=handle.number,
            ranks=ranks,
            needs_group=request.needs_group,
            is_elastic=is_elastic,
        )
        try:
            self._ask(asked)
        except RequestError:
            self._do.cell = before
            raise
        self._do.time_line.record("cell", **handle.facts(), logs=logs)
        self._do.follow(handle)
        if is_elastic and self._do.launcher.has_room():  # a node came just now
            self._do.step(ev.CapacityChanged())
        return handle

    def send(self, rank: int, make: Callable[[int], msg.Command]) -> Promise[msg.Answer]:
        """Ask an idle rank something."""
        if self._do.life.state not in (GroupState.IDLE, GroupState.BROKEN, GroupState.HEALING):
            raise RequestError(f"the worker group is {self._do.life.state.value}")
        if not self._do.life.lives(rank):
            raise RequestError(reasons.no_such_rank(self._do.life, rank))
        number = next(self._do.numbers)
        try:
            self._do.means_now.link.send(rank, make(number))
        except Exception as error:  # whatever the link's own end says
            raise RequestError(f"rank {rank} cannot be asked: {plain(error)}") from error
        return self._do.promises.for_answer(number, rank)
