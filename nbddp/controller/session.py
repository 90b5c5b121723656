"""The session: one worker group that any thread may use; the actor runs on the session's thread.

Three more threads only do I/O: two read ordinary and urgent messages from the store, and one starts
processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from nbddp.controller.controller_state import start_event
from nbddp.controller.gpu_monitor import GpuMonitor
from nbddp.controller.group_actor import GroupActor
from nbddp.controller.rank_processes import short_error
from nbddp.controller.run_facts import start_git_query
from nbddp.controller.threads import Runtime, on_thread, open_runtime
from nbddp.errors import RequestError, StartError
from nbddp.launch.local_launcher import Launcher, LocalLauncher
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.refusals import NO_GROUP, rank_not_running
from nbddp.lifecycle.retries import AttemptFailure
from nbddp.nodes.rejoin import SurvivingGroup
from nbddp.record.cell import CellHandle, CellRequest, ReplayEntry
from nbddp.record.heal.heal_report import Healed
from nbddp.record.push_store import PushRecord, PushStore
from nbddp.record.snapshot import Snapshot, build_snapshot
from nbddp.record.verdict import RESTART_WITH_REPLAY
from nbddp.sigint import (
    Future,
    InterruptCount,
    run_in_thread,
    sigint_handler,
    wait_for_result,
)
from nbddp.wire.group_spec import GroupSpec, check_variables
from nbddp.wire.messages import CancelRequest, InputReply
from nbddp.wire.request_messages import Answer, Request

if TYPE_CHECKING:
    from nbddp.controller.store_link import StoreLink  # imports torch: only when needed

P = ParamSpec("P")
R = TypeVar("R", bound=Request)
T = TypeVar("T")


class Session(GroupActor):
    """One worker group of a kernel, through all its attempts; any thread may call any method.

    Attributes:
        last_healed: the result of the last heal.
        describe_name: says how to get a name that the ranks do not have from the notebook.
        reported_findings: the findings below cells so far: attempt, rule and text of each.
    """

    def __init__(
        self,
        launcher: Launcher | None = None,
        *,
        colors: str = "",
        make_runtime: Callable[[], Runtime] = open_runtime,
        owns_launcher: bool = True,
    ) -> None:
        super().__init__(launcher or LocalLauncher(), colors=colors)
        self._make_runtime = make_runtime
        self._owns_launcher = owns_launcher
        self._opening = threading.Lock()
        self._end_requests: list[None] = []  # append() is atomic, also for signal handlers
        self.describe_name: Callable[[str], str] = lambda _name: ""
        self.last_healed: Healed | None = None
        self.reported_findings: set[tuple[int, str, str]] = set()
        self._push_store = PushStore()
        self._gpus = GpuMonitor()

    @property
    def end_requests(self) -> int:
        """How often the user interrupted, stopped or restarted the group.

        A caller that does several things in turn, such as a replay, ends if this number changes.
        """
        return len(self._end_requests)

    def create_sibling(self) -> Session:
        """Return a session for other ranks: those of a script, or of one of several runs.

        It shares the launcher and the store with this one. Its ``close`` ends its own ranks and
        threads only. Close it before this one.
        """
        self._ensure_runtime()
        link = self.require_link()
        sibling = Session(
            self.launcher.share(),
            colors=self._colors,
            make_runtime=partial(open_runtime, link.create_sibling),
            owns_launcher=False,
        )
        sibling.describe_name = self.describe_name
        return sibling

    def use_launcher(self, launcher: Launcher) -> None:
        """Use another launcher from the next start on; no rank may be running."""
        self.launcher = launcher

    def on_node_event(self, event: ev.NodeEvent) -> None:
        """Report that a node joined or was lost, if this session has had ranks."""
        runtime = self.runtime
        if runtime is not None:
            runtime.event_thread.submit(self._on_node_event, event)

    def snapshot(self, cell: CellHandle | None = None) -> Snapshot:
        """Return the state of the group now, and the result of a cell."""
        return build_snapshot(
            self.life,
            cell=cell or self.cell,
            rank_monitor=self.rank_monitor,
            event_log=self.event_log,
            ready=self.ready,
            is_for_cell=cell is not None,
            rejected_messages=self.runtime.link.refused if self.runtime else 0,
            sample_gpus=self._gpus.sample,
            nodes=self.launcher.nodes(),
        )

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes whenever a snapshot would change, except for elapsed times."""
        return self.rank_monitor.version, self.life

    @on_thread
    def set_pending(self, entries: Sequence[ReplayEntry], *, is_all: bool = False) -> None:
        """Set the entries that a replay did not run. ``is_all``: it ran none."""
        self.replay_log.set_pending(entries, clears_entries=is_all)

    def store_push(
        self, names: Sequence[str], ranks: Sequence[int] | None, data: bytes
    ) -> PushRecord:
        """Store pushed values for a replay."""
        return self._push_store.add(names, ranks, data, self.event_log.folder)

    @on_thread
    def record_push(self, pushed: PushRecord) -> None:
        """Add a push to the replay log, and show its notice."""
        self.replay_log.add(pushed)
        self.router.notify(pushed.notice)

    @on_thread
    def record_recovery(self, recovery: AttemptFailure) -> None:
        """Record a recovery; its cost is known at the next step that a rank reports."""
        self.recovery = recovery
        self.event_log.record("recovery", attempt=self.life.run_attempt, **recovery.facts)

    @on_thread
    def add_fired_faults(self, faults: Set[str]) -> None:
        """Add faults that fired in a script's ranks; a recovery or replay does not arm them."""
        self.record_fired(faults)

    def require_link(self) -> StoreLink:
        """Return the link to the ranks; raise RequestError if no group was started."""
        return self.active_runtime.link

    def start(self, spec: GroupSpec, survivors: SurvivingGroup | None = None) -> None:
        """Start a group, or rejoin the ranks of an earlier notebook; wait until all are ready.

        Raises:
            RequestError: a group is running, or the spec cannot be met.
            StartError: a rank could not start.
        """
        self._surviving_group = survivors
        event = survivors.rejoin_event() if survivors else start_event(spec)
        with self._stop_on_interrupt():
            wait_for_result(self._request_start(spec, event))

    def restart(self, spec: GroupSpec | None = None, *, is_recovery: bool = False) -> None:
        """End the group, even during a cell, and start it again as the next attempt.

        In a recovery, faults that have fired do not fire again.
        """
        with self._stop_on_interrupt():
            wait_for_result(self.request_restart(spec, is_recovery=is_recovery))

    def request_restart(
        self, spec: GroupSpec | None = None, *, is_recovery: bool = False
    ) -> Future[None]:
        """Like :meth:`restart`, but do not wait until the ranks are ready."""
        spec = spec or self.spec
        if spec is None:
            raise RequestError(NO_GROUP)
        if not is_recovery:
            self._end_requests.append(None)
        else:
            spec = replace(spec, nproc=self.launcher.world_size(spec.nproc))
        event = ev.RestartAsked(start=start_event(spec))
        return self._request_start(spec, event, is_recovery=is_recovery)

    def check_gpus(self, spec: GroupSpec) -> None:
        """Refuse NCCL without a GPU on this machine; a rank on a node checks that by itself.

        Raises:
            RequestError: there is no GPU.
        """
        if self.launcher.is_local:
            spec.check_gpus()

    def prepare(self, spec: GroupSpec) -> None:
        """Start the processes that ranks of this spec need. Call it before other ranks are ended.

        Raises:
            RequestError: there is no GPU for NCCL, or torch refuses a variable.
            StartError: a rank with these variables cannot start.
        """
        self.check_gpus(spec)
        env = spec.environment(base=self.launcher.base_env)
        check_variables(env, is_local=self.launcher.is_local)
        wait_for_result(run_in_thread("nbddp-prepare", partial(self.launcher.prepare, env)))

    def _request_start(
        self, spec: GroupSpec, event: ev.Event, *, is_recovery: bool = False
    ) -> Future[None]:
        self.prepare(spec)
        self._ensure_runtime()
        return self._submit_start(spec, event, is_recovery=is_recovery)

    @on_thread
    def _submit_start(self, spec: GroupSpec, event: ev.Event, *, is_recovery: bool) -> Future[None]:
        before, self.spec = self.spec, spec
        if not is_recovery:
            self.fired_faults.clear()
        if isinstance(event, ev.RestartAsked):  # a start is refused while a cell runs
            self._mark_cell_ended("restart", is_recovery=is_recovery)
        is_new = self.event_log.folder is None
        try:
            self._submit_event(event)
        except RequestError:
            self.spec = before
            raise
        if is_new:
            submit = self.active_runtime.event_thread.submit
            add_facts = self.event_log.add_facts
            start_git_query(spec.cwd(), lambda origin: submit(add_facts, {"git": origin}))
        self.futures.reject(StartError("restarted before it was ready"), "start")
        return self.futures.new("start")

    def _submit_event(self, event: ev.Event) -> None:
        refusal = self._step(event)
        if refusal:
            raise RequestError(refusal)

    def _mark_cell_ended(self, how: str, *, is_recovery: bool = False) -> None:
        """Mark the running cell as ended by the user, so that its ranks do not count as failed."""
        if self.cell is not None and self.life.state.is_busy:
            self.cell.set_ended_by(RESTART_WITH_REPLAY if is_recovery else how)
            self.event_log.record(f"{how} asked")

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise

    def call(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the session's thread.

        Raises:
            RequestError: there is no group, or it was closed meanwhile.
        """
        return self.active_runtime.event_thread.run(act, *args, **kwargs)

    def wait_for_pending_start(self) -> None:
        """Wait for a start or stop that was only requested, for example by a button."""
        if self.runtime is not None:
            for future in self._pending_start_or_stop():  # an interrupt here must not stop ranks
                with self._stop_on_interrupt():
                    wait_for_result(future)

    @on_thread
    def _pending_start_or_stop(self) -> list[Future[None]]:
        """Return a future for the start or stop that is in progress, if there is one."""
        is_starting = self.life.state is GroupState.STARTING or self.life.next_start
        is_stopping = self.life.state is GroupState.STOPPING
        key = "start" if is_starting else "stop"
        return [self.futures.new(key)] if is_starting or is_stopping else []

    @on_thread
    def submit(self, request: CellRequest, *, is_elastic: bool = False) -> CellHandle:
        """Send a cell to the ranks, and do not wait for its end.

        An elastic cell ends when a node joins, if a restart would then give more ranks.

        Raises:
            RequestError: the group cannot run the cell now; nothing has changed.
        """
        if not self.life.state.is_live:
            raise RequestError(NO_GROUP)
        ranks = self.life.all_ranks if request.ranks is None else request.ranks
        before = self.cell
        logs = self.event_log.log_sizes(ranks)  # before the ranks write
        self.newest_cell += 1
        self.cell = handle = CellHandle(
            self.newest_cell,
            request,
            ranks,
            self.require_link().load_payload,
            attempt=self.life.attempt,
            run_attempt=self.life.run_attempt,
            has_other_ranks=not {*self.life.alive} <= {*ranks},
            lost=self.replay_log.lost,
            describe_name=lambda name: (
                self.replay_log.describe_not_carried(name) or self.describe_name(name)
            ),
        )
        event = ev.RunAsked(
            cell=handle.number,
            ranks=ranks,
            needs_group=request.needs_group,
            is_elastic=is_elastic,
        )
        try:
            self._submit_event(event)
        except RequestError:
            self.cell = before
            raise
        self.event_log.record("cell", **handle.facts(), logs=logs)
        self._watch_cell(handle)
        if is_elastic and self.launcher.has_free_capacity():  # a node joined just now
            self._step(ev.CapacityChanged())
        return handle

    def interrupt(self, *, by_user: bool = True) -> None:
        """Interrupt the cell, and keep variables. The second time, kill unresponsive ranks."""
        runtime = self.runtime
        if runtime is not None:
            if by_user:
                self._end_requests.append(None)
            runtime.event_thread.submit_urgent(self._step, ev.InterruptAsked())

    @on_thread
    def interrupt_once(self) -> None:
        """Interrupt the running cell, unless it was interrupted before."""
        self.messages.interrupt_once()

    @on_thread
    def answer(self, rank: int, answer: InputReply) -> None:
        if self.cell is not None:
            self.cell.record_answer(rank, answer)
        self.send_answer(rank, answer)

    @contextmanager
    def forward_interrupts(self) -> Iterator[InterruptCount]:
        """Forward SIGINT to the ranks; a KeyboardInterrupt here would leave their cell running.

        A SIGINT without a running cell counts for the next cell. A second one of this kind raises
        KeyboardInterrupt, because the event that the notebook waits for may never come.
        """
        forwarded, ignored = InterruptCount(raises_second=False), 0

        def forward(*_: object) -> None:
            nonlocal ignored
            forwarded.count += 1
            ignored += self.life.state in (GroupState.OFF, GroupState.IDLE, GroupState.BROKEN)
            self.interrupt()
            if ignored > 1:
                raise KeyboardInterrupt

        with sigint_handler(forward):
            yield forwarded

    def kill(self, rank: int) -> None:
        """Kill one rank, and wait until its process has exited."""
        wait_for_result(self.request_kill(rank))

    @on_thread
    def request_kill(self, rank: int) -> Future[None]:
        """Kill one rank, and do not wait."""
        self._submit_event(ev.KillAsked(rank=rank))
        self.event_log.record("kill asked", rank=rank)
        if self.cell is not None:
            self.cell.set_killed_by_user(rank)
        return self.futures.new("kill", rank)

    def heal(self, ranks: Sequence[int] = (), donor: int | None = None) -> Healed:
        """Replace dead ranks by new processes; the other ranks keep running.

        Args:
            ranks: the dead ranks to replace; empty for all.
            donor: the rank whose variables the replacements get; None for the lowest rank alive.

        Raises:
            RequestError: the heal failed; the group is as before.
            KeyboardInterrupt: the heal was interrupted; the group is as before.
        """
        with self.forward_interrupts() as interrupts:
            try:
                for gone in self._pending_exits():
                    wait_for_result(gone)
                future = self.request_heal(ranks, donor)
                if interrupts.count:  # the interrupt may have come before the heal
                    self.interrupt(by_user=False)
                self.last_healed = wait_for_result(future)
                return self.last_healed
            except RequestError:
                if interrupts.count:
                    raise KeyboardInterrupt from None
                raise

    @on_thread
    def _pending_exits(self) -> list[Future[None]]:
        """Return a future for each process that was killed but has not exited yet."""
        ending = [rank for rank in self.ranks.pids() if self.ranks.handles[rank].is_ending()]
        return [self.futures.new("kill", rank) for rank in ending]

    @on_thread
    def request_heal(self, ranks: Sequence[int] = (), donor: int | None = None) -> Future[Healed]:
        """Like :meth:`heal`, but do not wait."""
        chosen = tuple(sorted({*ranks})) or self.life.gone
        source = min(self.life.alive, default=0) if donor is None else donor
        for rank, pid in self.ranks.stopped_ranks():
            raise RequestError(
                f"rank {rank} is stopped (SIGSTOP) and cannot join the others: "
                f"`kill -CONT {pid}` resumes it, `%ddp kill {rank}` ends it"
            )
        self.launcher.reassign(chosen)
        # no check if the user chose the donor
        self._submit_event(ev.HealAsked(ranks=chosen, donor=source, checks=donor is None))
        return self.futures.new("heal")

    def stop(self) -> None:
        """Stop all ranks, and wait until their processes have exited."""
        if self.runtime is not None:
            wait_for_result(self.request_stop())
            if self.cleanup is not None:
                wait_for_result(self.cleanup)

    @on_thread
    def request_stop(self) -> Future[None]:
        """Stop all ranks, and do not wait."""
        self._end_requests.append(None)
        future = self.futures.new("stop")
        self._mark_cell_ended("stop")
        self._step(ev.StopAsked())
        if not self.life.state.is_live:
            self.futures.resolve("stop")
        return future

    def numbered(self, request: R) -> R:
        """Return a request with a new number."""
        return replace(request, request=next(self.numbers))

    @on_thread
    def send_request(self, rank: int, request: Request) -> Future[Answer]:
        """Send a numbered request to an idle rank. Return a future for its answer."""
        if self.life.state not in (GroupState.IDLE, GroupState.BROKEN, GroupState.HEALING):
            raise RequestError(f"the ranks are {self.life.state.value}")
        if not self.life.is_alive(rank):
            raise RequestError(rank_not_running(self.life, rank))
        try:
            return self.request(rank, request)
        except Exception as error:  # any error of the store
            raise RequestError(f"rank {rank} cannot be reached: {short_error(error)}") from error

    def cancel_request(self, rank: int, number: int) -> None:
        """Cancel a request whose answer is not needed any more."""
        runtime = self.runtime
        if runtime is not None:
            runtime.event_thread.submit(runtime.link.send, rank, CancelRequest(request=number))

    def close(self) -> None:
        """Stop the group and end all threads and helper processes; a later start opens it again."""
        with self._opening:
            self.stop()
            try:
                if self._owns_launcher:
                    self.launcher.close()  # ends a wait for a forkserver that still imports
            finally:
                self._close_runtime()
                self.replay_log.set_pending((), clears_entries=True)  # it refers to the pushes
                self._push_store.free()

    def _ensure_runtime(self) -> None:
        """Open the link and the threads, unless they are open and working."""
        with self._opening:
            if self.runtime is not None and not all(
                each.is_alive() for each in self.runtime.readers
            ):
                self.stop()  # the link failed, so the ranks are lost
                self._close_runtime()
            if self.runtime is None:
                self._open_runtime(self._make_runtime)
