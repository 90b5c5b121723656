"""One worker group for whoever asks, from any thread; the executor does it on a thread of its own.

Three more threads only bring news: two collect letters from the store, what cells say and what
does not wait for that; one waits for processes to end. Another one starts processes. What the user
asks comes in on the caller's thread and is done on the session's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from nbddp.controller.actor import ClosedError
from nbddp.controller.acts import unable
from nbddp.controller.executor import Executor
from nbddp.controller.gpus import GpuWatch
from nbddp.controller.means import Means, open_means
from nbddp.controller.requests import Requests
from nbddp.controller.signals import handing_on
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.imports import import_aside
from nbddp.interrupts import interrupt_held_back
from nbddp.launch.launcher import Launcher, LocalLauncher
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.comeback import Comeback
from nbddp.lifecycle.reasons import NO_GROUP
from nbddp.lifecycle.states import Life
from nbddp.nodes.returning import Returned
from nbddp.promise import Promise, kept
from nbddp.record.cell import CellHandle, CellRequest, Deed
from nbddp.record.healed import Healed
from nbddp.record.metrics import MetricsSnapshot
from nbddp.record.push_store import PushRecord, PushStore
from nbddp.record.snapshot import Snapshot, take
from nbddp.record.timeline import TimeLine
from nbddp.record.whereabouts import Whereabouts
from nbddp.wire.messages import Answer, Answered, Command, Drop

if TYPE_CHECKING:
    from nbddp.controller.link import StoreLink  # imports torch: not before it is needed

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 5.0  # seconds that a thread gets to end when all is closed


class Session:
    """One worker group of a kernel, through all its attempts; any thread may call any method.

    Attributes:
        times_ended: how often the user has asked to interrupt, to stop or to restart: whoever
            does one thing after the other on the ranks, as a replay does, does not go on then.
    """

    def __init__(
        self,
        launcher: Launcher | None = None,
        *,
        colors: str = "",
        make_means: Callable[[], Means] = open_means,
    ) -> None:
        self._make_means = make_means
        self._do = Executor(launcher or LocalLauncher(), colors=colors)
        self._asks = Requests(self._do)
        self._collectors: list[threading.Thread] = []
        self._opening = threading.Lock()
        self.times_ended = 0
        self._push_store = PushStore()
        self._gpus = GpuWatch()

    @property
    def launcher(self) -> Launcher:
        """Where ranks come from at the next start."""
        return self._do.launcher

    @property
    def life(self) -> Life:
        """What the lifecycle knows."""
        return self._do.life

    @property
    def spec(self) -> GroupSpec | None:
        """How the group was started last."""
        return self._do.spec

    @property
    def whereabouts(self) -> Whereabouts:
        """What ranks say of themselves."""
        return self._do.whereabouts

    @property
    def time_line(self) -> TimeLine:
        """What happened."""
        return self._do.time_line

    def second(self) -> Session:
        """Return a session for other ranks next to these: of a script, or one run of several.

        It shares launcher and store with this one. Its close ends its own ranks and threads, and
        leaves the launcher, the store and these ranks alone. Close it before this one.
        """
        self._open()
        link = self.require_link()
        return Session(
            self.launcher.share(),
            colors=self._do.colors,
            make_means=partial(open_means, link.second),
        )

    def use(self, launcher: Launcher) -> None:
        """Start ranks elsewhere from the next start on; there must be none now."""
        self._do.launcher = launcher

    def note_node(self, event: ev.NodeNews) -> None:
        """Note what has become of a node, if there are, or were, ranks."""
        means = self._do.means
        if means is not None:
            means.actor.tell(self._do.note_node, event)

    def snapshot(self, cell: CellHandle | None = None) -> Snapshot:
        """All that is known right now of the group, and what became of this cell."""
        return take(
            self.life,
            cell=cell or self._do.cell,
            whereabouts=self.whereabouts,
            time_line=self.time_line,
            ready=self._do.ready,
            is_for_cell=cell is not None,
            refused=self._do.means.link.refused if self._do.means else 0,
            look=self._gpus.look,
            nodes=self.launcher.nodes(),
        )

    def metrics(
        self,
        known: Mapping[str, int] | None = None,
        *,
        most: int,
        chosen: Collection[str] | None = None,
    ) -> MetricsSnapshot:
        """Return the metrics of the last cell; see :meth:`MetricStore.snapshot`."""
        return self.whereabouts.metrics.snapshot(known, most=most, chosen=chosen)

    @property
    def version(self) -> tuple[object, ...]:
        """Another value whenever a snapshot would be another, but for times that go on."""
        return self.whereabouts.version, self.life

    @property
    def deeds(self) -> tuple[Deed, ...]:
        """What was done to the namespaces of this attempt, and went well, in order."""
        return self._do.deeds.done

    @property
    def undone(self) -> tuple[Deed, ...]:
        """What a replay that ended too early has left to do, unless something else was done."""
        return self._do.deeds.undone

    @property
    def replay_log(self) -> tuple[Deed, ...]:
        """What a replay does: what was done, then what an earlier replay has left to do."""
        return (*self.deeds, *self.undone)

    def leave_undone(self, deeds: Sequence[Deed], *, is_all: bool = False) -> None:
        """A replay has ended before it came to these; ``is_all``: before it did anything."""
        self.call(self._do.deeds.leave, deeds, is_all=is_all)

    def store_push(
        self, names: Sequence[str], ranks: Sequence[int] | None, data: bytes
    ) -> PushRecord:
        """Store values for a replay, as they are sent."""
        folder = self.time_line.folder
        return self._push_store.add(names, ranks, data, folder.path if folder else None)

    def note_push(self, pushed: PushRecord) -> None:
        """Remember values that were sent, for a replay."""
        self.call(self._do.note_push, pushed)

    def expect(self, comeback: Comeback) -> None:
        """The next step that is reported is the first one after a failure."""
        self.call(self._note_expected, comeback)

    def _note_expected(self, comeback: Comeback) -> None:
        self._do.comeback = comeback
        self.time_line.record("recovery", attempt=self.life.attempt, **comeback.facts())

    @property
    def struck(self) -> Set[str]:
        """The faults that struck since the last start that was no recovery."""
        return self._do.struck

    @property
    def armed(self) -> Sequence[str]:
        """The faults that its ranks have in mind."""
        return [each for armed in tuple(self._do.armed.values()) for each in armed]

    def hand_over(self, faults: Sequence[str]) -> None:
        """Arm these faults in the ranks of the next starts."""
        self._do.handed_over = tuple(faults)

    def note_struck(self, faults: Set[str]) -> None:
        """Faults struck the ranks of a script: a recovery or a replay does not arm them again."""
        self.call(self._do.note_struck, faults)

    def process_ids(self) -> dict[int, int]:
        """The process id of every rank that lives."""
        return self._do.process_ids()

    def require_link(self) -> StoreLink:
        """The link, which exists as soon as a group was started; else this is refused."""
        return self._means().link

    def _means(self) -> Means:
        means = self._do.means
        if means is None:
            raise RequestError(NO_GROUP)
        return means

    def start(self, spec: GroupSpec, returned: Returned | None = None) -> None:
        """Start a group, or take ranks back, and wait until every rank is ready.

        Raises:
            RequestError: there is one already, or the spec cannot be met.
            StartError: a rank could not start.
        """
        self._do.returned = returned
        with self._stopping_if_interrupted():
            kept(self._begin(spec, returned.event() if returned else spec.start_event()))

    def restart(self, spec: GroupSpec | None = None, *, is_recovery: bool = False) -> None:
        """End the group, whatever it does, and start it anew as the next attempt.

        In a recovery, faults that have struck do not strike again.
        """
        with self._stopping_if_interrupted():
            kept(self.begin_restart(spec, is_recovery=is_recovery))

    def begin_restart(
        self, spec: GroupSpec | None = None, *, is_recovery: bool = False
    ) -> Promise[None]:
        """As :meth:`restart`, and do not wait until every rank is ready."""
        spec = spec or self._do.spec
        if spec is None:
            raise RequestError(NO_GROUP)
        self.times_ended += not is_recovery
        if is_recovery:
            spec = replace(spec, nproc=self.launcher.world_size(spec.nproc))
        event = ev.RestartAsked(start=spec.start_event())
        return self._begin(spec, event, is_recovery=is_recovery)

    def _begin(
        self, spec: GroupSpec, event: ev.Event, *, is_recovery: bool = False
    ) -> Promise[None]:
        spec.check_gpus()
        self._open()
        return self.call(self._asks.ask_start, spec, event, is_recovery=is_recovery)

    @contextmanager
    def _stopping_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise

    def call(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have the session's thread do something.

        Raises:
            RequestError: there is no group, or it is closed meanwhile.
        """
        try:
            return self._means().actor.call(act, *args, **kwargs)
        except ClosedError:
            raise RequestError(NO_GROUP) from None

    def settle(self) -> None:
        """Wait for a start or a stop that was begun and not waited for, as by a button."""
        if self._do.means is not None and (begun := self.call(self._asks.begun)):
            with self._stopping_if_interrupted():
                kept(begun)

    def submit(self, request: CellRequest, *, is_elastic: bool = False) -> CellHandle:
        """Hand a cell to the ranks and return at once.

        An elastic cell ends when a node comes and a restart would make more ranks.

        Raises:
            RequestError: the group cannot run it now; nothing was started, nothing lost.
        """
        return self.call(self._asks.begin_cell, request, is_elastic=is_elastic)

    def interrupt(self, *, by_user: bool = True) -> None:
        """End the running cell and keep every name; a second time, kill what does not answer."""
        means = self._do.means
        if means is not None:
            self.times_ended += by_user
            means.actor.tell_first(self._do.step, ev.InterruptAsked())

    def interrupt_unless_asked(self) -> None:
        """See to it that the running cell has its first interrupt, and no second one."""
        self.call(self._do.interrupt_unless_asked)

    def answer(self, rank: int, answer: Answered) -> None:
        """Hand a rank the answer to its question."""
        self.call(self._answer, rank, answer)

    def _answer(self, rank: int, answer: Answered) -> None:
        if self._do.cell is not None:
            self._do.cell.note_answer(rank, answer)
        self._do.answer(rank, answer)

    def taking_interrupts(self) -> AbstractContextManager[None]:
        """Pass SIGINT on to the ranks: raised here, it would leave their cell running."""
        return handing_on(self.interrupt, lambda: self.life.state)

    def kill(self, rank: int) -> None:
        """Kill one rank and wait until it is gone."""
        kept(self.begin_kill(rank))

    def begin_kill(self, rank: int) -> Promise[None]:
        """Kill one rank and do not wait until it is gone."""
        return self.call(self._asks.ask_kill, rank)

    def heal(self, ranks: Sequence[int] = (), donor: int | None = None) -> Healed:
        """Put new processes in the places of dead ranks, while the others live on.

        Args:
            ranks: which; all that are gone if empty.
            donor: whose names they get; the lowest rank that lives if None.

        Raises:
            RequestError: it cannot be done; the group is as it was before.
            KeyboardInterrupt: it was interrupted; the same holds.
        """
        heard: list[None] = []

        def interrupt() -> None:
            heard.append(None)
            self.interrupt()

        try:
            with handing_on(interrupt, lambda: self.life.state):
                for gone in self.call(self._asks.ask_exits):
                    kept(gone)
                begun = self.begin_heal(ranks, donor)
                if heard:  # it may have come too early to be heard
                    self.interrupt(by_user=False)
                return kept(begun)
        except RequestError:
            if heard:
                raise KeyboardInterrupt from None
            raise

    def begin_heal(self, ranks: Sequence[int] = (), donor: int | None = None) -> Promise[Healed]:
        """As :meth:`heal`, and do not wait until it is done."""
        chosen = tuple(sorted({*ranks})) or self.life.gone
        source = min(self.life.alive, default=0) if donor is None else donor
        # the user who chooses a donor knows that its names are the right ones
        return self.call(self._asks.ask_heal, chosen, source, checks=donor is None)

    def stop(self) -> None:
        """End all ranks and wait until they are gone."""
        if self._do.means is not None:
            kept(self.begin_stop())

    def begin_stop(self) -> Promise[None]:
        """End all ranks and do not wait until they are gone."""
        self.times_ended += 1
        return self.call(self._asks.ask_stop)

    def send(self, rank: int, make: Callable[[int], Command]) -> Promise[Answer]:
        """Send ``make(number)`` to an idle rank; the future will hold what it answers."""
        return self.call(self._asks.send, rank, make)

    def drop(self, rank: int, number: int) -> None:
        """Tell a rank that nobody waits any more for the answer to this request."""
        means = self._do.means
        if means is not None:
            means.actor.tell(means.link.send, rank, Drop(request=number))

    def close(self) -> None:
        """Stop the group and end all threads and helpers; a later start opens it again."""
        with self._opening:
            means = self._do.means
            if means is not None:
                self.stop()
            try:
                self.launcher.close()  # frees whoever waits for a helper that still imports
            finally:
                if means is not None:
                    self._close(means)

    def _close(self, means: Means) -> None:
        """End the threads, those first who bring something to the others."""
        means.launching.close(patience=PATIENCE)
        try:
            means.link.close()
        except Exception:
            logger.exception("nbddp could not close its end of the store")
        for collector in self._collectors:
            collector.join(PATIENCE)
        means.actor.call(lambda: None)  # what was launched late is watched by now
        means.watcher.close()
        means.actor.close()
        self._do.forget()

    def _open(self) -> None:
        """See to it that there is a link, and threads that can do something."""
        with self._opening:
            means = self._do.means
            if means is not None and not all(each.is_alive() for each in self._collectors):
                self.stop()  # the link was lost, and the ranks with it
                self._close(means)
            if self._do.means is None:
                import_aside("nbddp.controller.link")  # imports torch: not before it is needed
                with interrupt_held_back():
                    self._make()

    def _make(self) -> None:
        try:
            means = self._make_means()
        except (OSError, RuntimeError) as error:  # of the store, a pipe or a thread
            raise unable("the link to the ranks", error) from error
        self._collectors = []
        for name, collect in (("mail", self._collect), ("news", self._collect_urgent)):
            reading = partial(self._read_on, means, collect)
            collector = threading.Thread(target=reading, name=f"nbddp-{name}", daemon=True)
            collector.start()
            self._collectors.append(collector)
        self._do.means = means

    def _read_on(self, means: Means, collect: Callable[[Means], None]) -> None:
        try:
            collect(means)
        except Exception as error:
            logger.exception("nbddp cannot read what the ranks say")
            means.actor.tell_first(self._do.lose_link, error)

    def _collect(self, means: Means) -> None:
        while (letter := means.link.collect()) is not None:
            for part in letter.parts:
                means.actor.tell(self._do.read, part)

    def _collect_urgent(self, means: Means) -> None:
        while (letter := means.link.collect_urgent()) is not None:
            means.actor.tell_first(self._do.read, letter)
