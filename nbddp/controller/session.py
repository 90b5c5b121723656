"""The session: one worker group that any thread may use.

It hands each request to the actor, on the session's thread, and waits for its future. Three more
threads only do I/O: two read ordinary and urgent messages from the store, and one starts processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from nbddp.controller.cell_hooks import SessionHooks
from nbddp.controller.gpu_monitor import GpuMonitor
from nbddp.controller.group_actor import GroupActor, start_event
from nbddp.controller.rank_processes import start_error
from nbddp.controller.surviving_group import SurvivingGroup
from nbddp.controller.threads import Runtime, open_runtime
from nbddp.errors import RequestError
from nbddp.extension.guard import Guard, Hooks
from nbddp.launch.local_launcher import Launcher, LocalLauncher
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.refusals import NO_GROUP
from nbddp.record.cell import CellHandle, NoticeRouter
from nbddp.record.event_log import EventLog
from nbddp.record.heal.heal_report import Healed
from nbddp.record.push_store import PushRecord, PushStore
from nbddp.record.rank_monitor import RankMonitor
from nbddp.record.replay_log import ReplayLog
from nbddp.record.snapshot import Snapshot, build_snapshot
from nbddp.sigint import (
    Future,
    InterruptCount,
    import_interruptibly,
    run_in_thread,
    sigint_deferred,
    sigint_handler,
    wait_for_result,
)
from nbddp.wire.group_spec import GroupSpec, check_variables
from nbddp.wire.messages import CancelRequest, InputReply
from nbddp.wire.request_messages import Request

if TYPE_CHECKING:
    from nbddp.controller.store_link import StoreLink  # imports torch: only when needed

P = ParamSpec("P")
R = TypeVar("R", bound=Request)
T = TypeVar("T")


def _on_thread(
    act: Callable[Concatenate[GroupActor, P], T],
) -> Callable[Concatenate[Session, P], T]:
    """Return a method that runs one of the actor's methods on the session's thread, and waits.

    Raises:
        RequestError: there is no group, or it cannot do this now; then nothing has changed.
    """

    @wraps(act)
    def method(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return session.call(act, session.actor, *args, **kwargs)

    return method


class Session:
    """One worker group of a kernel, through all its attempts; any thread may call any method.

    Attributes:
        actor: owns the state of the group; only the session's thread may change it.
        last_healed: the result of the last heal.
        describe_name: says how to get a name that the ranks do not have from the notebook.
        leaves_ranks: returns whether this process ends, and its ranks go on; it may wait a moment.
    """

    def __init__(
        self,
        launcher: Launcher | None = None,
        *,
        colors: str = "",
        make_runtime: Callable[[], Runtime] = open_runtime,
        owns_launcher: bool = True,
    ) -> None:
        self.describe_name: Callable[[str], str] = lambda _name: ""
        self.leaves_ranks: Callable[[], bool] = lambda: False
        self._has_left = False
        self.actor = GroupActor(
            launcher or LocalLauncher(), colors, lambda name: self.describe_name(name)
        )
        self._colors = colors
        self._make_runtime = make_runtime
        self._owns_launcher = owns_launcher
        self._opening = threading.Lock()
        self._runtime: Runtime | None = None
        self._end_requests: list[None] = []  # append() is atomic, also for signal handlers
        self.last_healed: Healed | None = None
        self._push_store = PushStore()
        self._gpus = GpuMonitor()
        guard = Guard(self.router.notify, lambda: self.life.attempt)
        self._hooks: Hooks[SessionHooks] = Hooks("sessions", guard)

    # ---- what the actor knows

    @property
    def life(self) -> Life:
        """The state of the lifecycle."""
        return self.actor.state.life

    @property
    def spec(self) -> GroupSpec | None:
        """The spec of the last start."""
        return self.actor.state.spec

    @property
    def cell(self) -> CellHandle | None:
        """The cell that runs, or the last one."""
        return self.actor.state.cell

    @property
    def launcher(self) -> Launcher:
        """Starts the ranks of the next start."""
        return self.actor.state.launcher

    @property
    def event_log(self) -> EventLog:
        """The record of the run."""
        return self.actor.state.event_log

    @property
    def rank_monitor(self) -> RankMonitor:
        """What the ranks reported while the cell runs."""
        return self.actor.state.rank_monitor

    @property
    def replay_log(self) -> ReplayLog:
        """The cells and pushes of this attempt."""
        return self.actor.state.replay_log

    @property
    def router(self) -> NoticeRouter:
        """Passes notices to the running cell."""
        return self.actor.state.router

    @property
    def fired_faults(self) -> frozenset[str]:
        """The faults that have fired since the last start that was not a recovery."""
        return self.actor.state.fired_faults

    @property
    def armed_now(self) -> tuple[str, ...]:
        """The faults that are armed in living ranks."""
        return self.actor.state.armed_now

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes whenever a snapshot would change, except for elapsed times."""
        return self.rank_monitor.version, self.life

    def snapshot(self, cell: CellHandle | None = None) -> Snapshot:
        """Return the state of the group now, and the result of a cell."""
        return build_snapshot(
            self.life,
            cell=cell or self.cell,
            rank_monitor=self.rank_monitor,
            event_log=self.event_log,
            ready=self.actor.state.ready,
            is_for_cell=cell is not None,
            rejected_messages=self._runtime.link.refused if self._runtime else 0,
            sample_gpus=self._gpus.sample,
            nodes=self.launcher.nodes(),
        )

    # ---- what the actor does

    submit = _on_thread(GroupActor.submit)
    _answer = _on_thread(GroupActor.answer)
    request_kill = _on_thread(GroupActor.request_kill)
    request_heal = _on_thread(GroupActor.request_heal)
    send_request = _on_thread(GroupActor.send_request)
    set_pending = _on_thread(GroupActor.set_pending)
    record_push = _on_thread(GroupActor.record_push)
    record_recovery = _on_thread(GroupActor.record_recovery)
    _submit_start = _on_thread(GroupActor.request_start)
    _submit_stop = _on_thread(GroupActor.request_stop)
    _pending_start_or_stop = _on_thread(GroupActor.pending_start_or_stop)
    _pending_exits = _on_thread(GroupActor.pending_exits)

    def answer(self, rank: int, answer: InputReply) -> None:
        """Send a rank the answer to its question. If the ranks go on, it stays open."""
        if not self._has_left:
            self._answer(rank, answer)

    def interrupt_once(self) -> None:
        """Interrupt the running cell, unless it was interrupted before."""
        self.call(self.actor.state.interrupt_once)

    def record_fired(self, faults: Set[str]) -> None:
        """Record faults that fired in a script's ranks; a recovery or replay does not arm them."""
        self.call(self.actor.state.record_fired, faults)

    @property
    def _active_runtime(self) -> Runtime:
        if self._runtime is None:
            raise RequestError(NO_GROUP)
        return self._runtime

    def require_link(self) -> StoreLink:
        """Return the link to the ranks; raise RequestError if no group was started."""
        return self._active_runtime.link

    def call(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the session's thread.

        Raises:
            RequestError: there is no group, or it was closed meanwhile.
        """
        return self._active_runtime.event_thread.run(act, *args, **kwargs)

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
        if self._runtime is None:
            self.actor.use_launcher(launcher)
        else:
            self.call(self.actor.use_launcher, launcher)

    def on_node_event(self, event: ev.NodeEvent) -> None:
        """Report that a node joined or was lost, if this session has had ranks."""
        runtime = self._runtime
        if runtime is not None:
            runtime.event_thread.submit(self.actor.on_node_event, event)

    def store_push(
        self, names: Sequence[str], ranks: Sequence[int] | None, data: bytes
    ) -> PushRecord:
        """Store pushed values for a replay."""
        return self._push_store.add(names, ranks, data, self.event_log.folder)

    def start(self, spec: GroupSpec, survivors: SurvivingGroup | None = None) -> None:
        """Start a group, or rejoin the ranks of an earlier notebook; wait until all are ready.

        Raises:
            RequestError: a group is running, or the spec cannot be met.
            StartError: a rank could not start.
        """
        event = survivors.rejoin_event() if survivors else start_event(spec)
        with self._stop_on_interrupt():
            self._open(spec)
            wait_for_result(self._submit_start(spec, event, survivors=survivors))

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
        self._open(spec)
        return self._submit_start(spec, event, is_recovery=is_recovery)

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

    def _open(self, spec: GroupSpec) -> None:
        """Start the processes that ranks of this spec need, and open the link to the ranks."""
        self.prepare(spec)
        self._ensure_runtime()
        self._hooks.call("opened", lambda _, each: each.opened(self))

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise

    def wait_for_pending_start(self) -> None:
        """Wait for a start or stop that was only requested, for example by a button."""
        if self._runtime is not None:
            for future in self._pending_start_or_stop():  # an interrupt here must not stop ranks
                with self._stop_on_interrupt():
                    wait_for_result(future)

    def interrupt(self, *, by_user: bool = True) -> None:
        """Interrupt the cell, and keep variables. The second time, kill unresponsive ranks."""
        runtime = self._runtime
        if runtime is not None:
            if by_user:
                self._end_requests.append(None)
            runtime.event_thread.submit_urgent(self.actor.state.step, ev.InterruptAsked())

    @contextmanager
    def forward_interrupts(self) -> Iterator[InterruptCount]:
        """Forward SIGINT to the ranks; a KeyboardInterrupt here would leave their cell running.

        A SIGINT without a running cell counts for the next cell. A second one of this kind raises
        KeyboardInterrupt, because the event that the notebook waits for may never come.
        """
        forwarded, ignored = InterruptCount(raises_second=False), 0

        def forward(*_: object) -> None:
            nonlocal ignored
            if self.leaves_ranks():
                self._has_left = True
                raise KeyboardInterrupt
            forwarded.count += 1
            if self.life.state in (GroupState.OFF, GroupState.IDLE, GroupState.BROKEN):
                ignored += 1
            self.interrupt()
            if ignored > 1:
                raise KeyboardInterrupt

        with sigint_handler(forward):
            yield forwarded

    def kill(self, rank: int) -> None:
        """Kill one rank, and wait until its process has exited."""
        wait_for_result(self.request_kill(rank))

    def heal(self, ranks: Sequence[int] = (), donor: int | None = None) -> Healed:
        """Replace dead ranks by new processes; the other ranks keep running.

        Args:
            ranks: the dead ranks to replace; empty for all.
            donor: the rank whose variables the replacements get; None for the default one.

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

    def stop(self) -> None:
        """Stop all ranks, and wait until their processes have exited."""
        if self._runtime is not None:
            wait_for_result(self.request_stop())
            if self.actor.state.cleanup is not None:
                wait_for_result(self.actor.state.cleanup)

    def request_stop(self) -> Future[None]:
        """Stop all ranks, and do not wait."""
        self._end_requests.append(None)
        return self._submit_stop()

    def numbered(self, request: R) -> R:
        """Return a request with a new number."""
        return replace(request, request=next(self.actor.state.numbers))

    def cancel_request(self, rank: int, number: int) -> None:
        """Cancel a request whose answer is not needed any more."""
        runtime = self._runtime
        if runtime is not None:
            runtime.event_thread.submit(runtime.link.send, rank, CancelRequest(request=number))

    def close(self) -> None:
        """Stop the group and end all threads and helper processes; a later start opens it again."""
        with self._opening:
            self.stop()
            try:
                made = [*self._hooks.made]  # those of a session that had ranks
                self._hooks.call("closed", lambda _, each: each.closed(self), made, slow=made)
            finally:
                self._close_all()

    def _close_all(self) -> None:
        try:
            if self._owns_launcher:
                self.launcher.close()  # ends a wait for a forkserver that still imports
        finally:
            self._close_runtime()
            self.actor.set_pending((), is_all=True)  # the replay log refers to the pushes
            self._push_store.free()

    def _close_runtime(self) -> None:
        """Close the connection and the threads, after all processes have exited."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()
        self.actor.state.open(None)

    def _ensure_runtime(self) -> None:
        """Open the link and the threads, unless they are open and working.

        Raises:
            StartError: that failed.
        """
        with self._opening:
            if self._runtime is not None and not all(
                reader.is_alive() for reader in self._runtime.readers
            ):
                self.stop()  # the link failed, so the ranks are lost
                self._close_runtime()
            if self._runtime is not None:
                return
            import_interruptibly("nbddp.controller.store_link")  # imports torch: only when needed
            with sigint_deferred():
                try:
                    runtime = self._make_runtime()
                except (OSError, RuntimeError) as error:  # of the store, a socket or a thread
                    raise start_error("the link to the ranks", error) from error
                runtime.event_thread.run(self.actor.open, runtime)
                self._runtime = runtime
