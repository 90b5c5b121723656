"""One worker group for whoever asks, from any thread; the executor does it on a thread of its own.

Three more threads only bring news: two collect letters from the store, what cells say and what
does not wait for that; one waits for processes to end. What the user asks comes in on the caller's
thread and is done on the session's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from nbddp.controller import events as ev
from nbddp.controller.cell import CellHandle, CellRequest, Deed
from nbddp.controller.chronicle import Chronicle
from nbddp.controller.executor import NO_GROUP, Executor
from nbddp.controller.launcher import Launcher, LocalLauncher
from nbddp.controller.lookout import Lookout
from nbddp.controller.means import Link, Means, open_means
from nbddp.controller.pushes import Pushed, Pushes
from nbddp.controller.recovery import Comeback
from nbddp.controller.snapshot import Snapshot, take
from nbddp.controller.spec import GroupSpec
from nbddp.controller.states import Life
from nbddp.errors import RequestError
from nbddp.wire.messages import Answer, Command, Display


class Session:
    """One worker group of a kernel, through all its attempts; any thread may call any method."""

    def __init__(
        self,
        launcher: Launcher | None = None,
        *,
        colors: str = "",
        make_means: Callable[[], Means] = open_means,
    ) -> None:
        self.launcher: Launcher = launcher or LocalLauncher()
        self._make_means = make_means
        self._do = Executor(self.launcher, colors=colors)
        self._collectors: list[threading.Thread] = []
        self._opening = threading.Lock()
        self._pushes = Pushes()

    # ---- what is known

    @property
    def life(self) -> Life:
        """What the lifecycle knows."""
        return self._do.life

    @property
    def lookout(self) -> Lookout:
        """What ranks say of themselves."""
        return self._do.lookout

    @property
    def chronicle(self) -> Chronicle:
        """What happened."""
        return self._do.chronicle

    def snapshot(self, cell: CellHandle | None = None) -> Snapshot:
        """All that is known right now of the group, and what became of this cell."""
        return take(
            self.life,
            cell=cell or self._do.cell,
            lookout=self.lookout,
            chronicle=self.chronicle,
            ready=self._do.ready,
            is_for_cell=cell is not None,
            refused=self._do.means.link.refused if self._do.means else 0,
        )

    @property
    def deeds(self) -> tuple[Deed, ...]:
        """What was done to the namespaces of this attempt, and went well, in order."""
        return tuple(self._do.deeds)

    def keep_push(self, names: Sequence[str], ranks: Sequence[int] | None, data: bytes) -> Pushed:
        """Keep values that are sent, as they are sent."""
        folder = self.chronicle.folder
        return self._pushes.keep(names, ranks, data, folder.path if folder else None)

    def note_push(self, pushed: Pushed) -> None:
        """Remember values that were sent, for a replay."""
        self._means().actor.call(self._do.note_push, pushed)

    def expect(self, comeback: Comeback) -> None:
        """The next step that is reported is the first one after a failure."""
        self._means().actor.call(self._note_expected, comeback)

    def _note_expected(self, comeback: Comeback) -> None:
        self._do.comeback = comeback
        self.chronicle.record("recovery", attempt=self.life.attempt, **comeback.facts())

    def process_ids(self) -> dict[int, int]:
        """The process id of every rank that lives."""
        return self._do.process_ids()

    def require_link(self) -> Link:
        """The link, which exists as soon as a group was started.

        Raises:
            RequestError: none was.
        """
        return self._means().link

    def _means(self) -> Means:
        means = self._do.means
        if means is None:
            raise RequestError(NO_GROUP)
        return means

    # ---- what may be asked, from any thread

    def start(self, spec: GroupSpec) -> None:
        """Start a group and wait until every rank is ready.

        Raises:
            RequestError: there is one already, or the spec cannot be met.
            StartError: a rank could not start.
        """
        self._await_start(self._begin(spec, spec.start_event()))

    def restart(self, spec: GroupSpec | None = None, *, is_recovery: bool = False) -> None:
        """End the group, whatever it does, and start it anew as the next attempt.

        In a recovery, faults that have struck do not strike again.
        """
        self._await_start(self.begin_restart(spec, is_recovery=is_recovery))

    def begin_restart(
        self, spec: GroupSpec | None = None, *, is_recovery: bool = False
    ) -> Future[None]:
        """As :meth:`restart`, and do not wait until every rank is ready."""
        spec = spec or self._do.spec
        if spec is None:
            raise RequestError(NO_GROUP)
        event = ev.RestartAsked(start=spec.start_event())
        return self._begin(spec, event, is_recovery=is_recovery)

    def _begin(
        self, spec: GroupSpec, event: ev.Event, *, is_recovery: bool = False
    ) -> Future[None]:
        spec.check_gpus()
        self._open()
        ask = self._do.ask_start
        return self._means().actor.call(ask, spec, event, is_recovery=is_recovery)

    def _await_start(self, started: Future[None]) -> None:
        try:
            started.result()
        except KeyboardInterrupt:
            self.stop()
            raise

    def settle(self) -> None:
        """Wait for a start or a stop that was begun and not waited for, as by a button."""
        means = self._do.means
        if means is not None and (begun := means.actor.call(self._do.begun)):
            self._await_start(begun)

    def run(self, request: CellRequest) -> CellHandle:
        """Hand a cell to the ranks and return at once.

        Raises:
            RequestError: the group cannot run it now; nothing was started, nothing lost.
        """
        return self._means().actor.call(self._do.run, request)

    def interrupt(self) -> None:
        """End the running cell and keep every name; a second time, kill what does not answer."""
        if self._do.means is not None:
            self._do.means.actor.tell_first(self._do.step, ev.InterruptAsked())

    def kill(self, rank: int) -> None:
        """Kill one rank and wait until it is gone."""
        self.begin_kill(rank).result()

    def begin_kill(self, rank: int) -> Future[None]:
        """Kill one rank and do not wait until it is gone."""
        return self._means().actor.call(self._do.ask_kill, rank)

    def stop(self) -> None:
        """End all ranks and wait until they are gone."""
        if self._do.means is not None:
            self.begin_stop().result()

    def begin_stop(self) -> Future[None]:
        """End all ranks and do not wait until they are gone."""
        return self._means().actor.call(self._do.ask_stop)

    def send(self, rank: int, make: Callable[[int], Command]) -> Future[Answer]:
        """Send ``make(number)`` to an idle rank; the future will hold what it answers."""
        return self._means().actor.call(self._do.send, rank, make)

    def close(self) -> None:
        """Stop the group and end all threads and helpers; a later start opens it again."""
        with self._opening:
            means = self._do.means
            if means is not None:
                self.stop()
                means.link.close()
                for collector in self._collectors:
                    collector.join()
                means.watcher.close()
                means.actor.close()
                self._do.forget()
            self._pushes.close()
            self.launcher.close()

    def _open(self) -> None:
        with self._opening:
            if self._do.means is None:
                self._do.means = means = self._make_means()
                self._collectors = [
                    threading.Thread(target=collect, args=(means,), name=name, daemon=True)
                    for name, collect in (
                        ("nbddp-mail", self._collect),
                        ("nbddp-news", self._collect_urgent),
                    )
                ]
                for collector in self._collectors:
                    collector.start()

    def _collect(self, means: Means) -> None:
        while (letter := means.link.collect()) is not None:
            means.actor.tell(self._do.read, letter)
            cell = self._do.cell
            if isinstance(letter.message, Display) and cell is not None:
                cell.await_room()

    def _collect_urgent(self, means: Means) -> None:
        while (letter := means.link.collect_urgent()) is not None:
            means.actor.tell_first(self._do.read, letter)
