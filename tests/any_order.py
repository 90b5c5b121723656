"""A user, ranks and a clock that act in any order on a session, without a process."""

import contextlib
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from fakes import (
    FakeHandle,
    FakeLauncher,
    ManualEventThread,
    SilentLink,
    manual_runtime,
    manual_session,
    ready,
    request_start,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from life_history import History

from nbddp.controller import actor_state
from nbddp.controller.group_actor import start_event
from nbddp.controller.rank_processes import RankProcesses
from nbddp.controller.threads import Runtime
from nbddp.errors import RequestError, StartError
from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life
from nbddp.lifecycle.transitions import advance
from nbddp.record import run_folder
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.sigint import Future
from nbddp.wire import messages as msg
from nbddp.wire.envelope import Envelope
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.request_messages import (
    Answer,
    Complete,
    JoinedGroup,
    JoinGroup,
    PickledNames,
    PickleNamespace,
)

WORLD = st.integers(1, 3)
RANK = st.integers(0, 2)
NUMBER = st.integers(0, 9)
FAILURE = {"name": "ValueError", "text": "no", "traceback": "ValueError: no", "at": 1.0}
NAMES = PickledNames(
    payload={}, size=1, names=["x"], not_pickled={}, more=0, storages=[], shards=""
)
HELLO = CellRequest(source="hello")


class InjectedError(OSError):
    """The faults that the test injects."""


INJECTED = InjectedError(5, "injected")


@dataclass
class Rank:
    attempt: int
    rank: int
    handle: FakeHandle
    incarnation: int = 0
    is_ready: bool = False
    cell: int = 0
    commands: deque[msg.MessageToRank] = field(default_factory=deque)

    @property
    def is_being_killed(self) -> bool:
        """Return whether the rank was killed, or the kill failed."""
        return self.handle.end_requested or self.handle.kill_failed

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.cell and bool(self.commands)


class AnyOrder(RuleBasedStateMachine):
    """A user, ranks and a clock that act in any order on a session without a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = tempfile.TemporaryDirectory()
        self.patch.chdir(self.folder.name)
        self.patch.setattr(run_folder, "_version", lambda _package: "1")
        self.launcher = FakeLauncher(obeys=False)
        self.launcher.on_launch = self.add_rank
        self.session = manual_session(self.launcher, self.make_runtime)
        self.ranks: dict[tuple[int, int], Rank] = {}
        self.replaced: list[Rank] = []
        self.mail: list[Envelope] = []
        self.futures: list[tuple[str, Future[Any]]] = []
        self.cells: list[CellHandle] = []
        self.finished: Counter[int] = Counter()
        self.cannot_connect = False
        self.stops_in_the_end = True
        self.heal_error = ""
        self.unopened: dict[str, str] = {}
        self.working: set[int] = set()
        self.nodes = 0
        self.history = History()
        self.steps: list[tuple[ev.Event, Life, list[ev.Action]]] = []
        self.patch.setattr(actor_state, "advance", self.advance)
        self.patch.setattr(RankProcesses, "working_ranks", self.working_ranks)
        finish = CellHandle.finish

        def count(handle: CellHandle, *arguments: Any) -> object:
            self.finished[handle.number] += 1
            return finish(handle, *arguments)

        self.patch.setattr(CellHandle, "finish", count)

    def advance(self, life: Life, event: ev.Event) -> tuple[Life, list[ev.Action]]:
        """Record a step, because the actor handles errors that are raised here."""
        changed, actions = advance(life, event)
        self.steps.append((event, changed, actions))
        return changed, actions

    def working_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self.working)

    @invariant()
    def the_life_has_no_dead_end(self) -> None:
        for step in self.steps:
            self.history.follow(*step)
        self.steps.clear()
        assert self.history.life == self.session.life
        self.history.check()

    def make_runtime(self) -> Runtime:
        if self.cannot_connect:
            raise INJECTED
        self.link = SilentLink()
        self.link.on_send = self.handle_command
        runtime = manual_runtime(self.link)
        self.actor, self.launching = runtime.event_thread, runtime.launch_thread
        return runtime

    def add_rank(self, start: Any) -> None:
        key = start.attempt, start.topology.rank
        if key in self.ranks:  # the old process may live longer; its messages are dropped
            self.replaced.append(self.ranks[key])
        self.ranks[key] = Rank(*key, self.launcher.handles[key], start.incarnation)

    def handle_command(self, attempt: int, rank: int, command: msg.MessageToRank) -> None:
        if isinstance(command, msg.Interrupt):
            self.acknowledge_interrupt(self.ranks[attempt, rank])
        else:
            self.ranks[attempt, rank].commands.append(command)

    @property
    def state(self) -> GroupState:
        return self.session.life.state

    # ---- the session's threads

    def turn(self, actor: ManualEventThread) -> None:
        """Handle one event; like the real thread, continue after an injected exception."""
        with contextlib.suppress(InjectedError):
            actor.run_next()

    def is_open(self) -> bool:
        return self.session._runtime is not None

    @precondition(lambda self: self.is_open() and (self.actor.inbox or self.actor.urgent_inbox))
    @rule()
    def the_session_handles_an_event(self) -> None:
        self.turn(self.actor)

    @precondition(lambda self: self.is_open() and self.launching.inbox)
    @rule()
    def a_process_is_started(self) -> None:
        self.turn(self.launching)

    @precondition(lambda self: self.is_open() and self.actor.watched)
    @rule()
    def exits_are_noticed(self) -> None:
        self.actor.report_exit()

    @precondition(lambda self: self.is_open() and self.actor.due)
    @rule(number=NUMBER, working=st.sets(RANK))
    def a_deadline_expires(self, number: int, working: set[int]) -> None:
        self.working = working
        self.actor.run_delayed(number % len(self.actor.due))

    # ---- the user

    @initialize(
        world_size=WORLD,
        joins_group=st.booleans(),
        first_phase=st.sampled_from(
            ["a heal", "a death", "a cell", "a group", "a start", "a stopped group"]
        ),
        is_stopped=st.booleans(),
    )
    def reaches_a_first_phase(
        self, world_size: int, joins_group: bool, first_phase: str, is_stopped: bool
    ) -> None:
        self.stops_in_the_end = is_stopped
        self.starts_or_restarts(world_size, joins_group)
        if first_phase != "a start":
            self.ranks_work_normally()
        if first_phase == "a cell":
            self.submits_a_cell(is_for_all=True, needs_group=True, is_elastic=True)
            self.ranks_work_normally()
        if first_phase == "a stopped group":
            self.requests_a_stop()
            self.ranks_work_normally()
        if first_phase in ("a death", "a heal"):
            self.ranks[self.session.life.attempt, world_size - 1].handle.end(-9)
            self.handle_all_events()
        if first_phase == "a heal" and world_size > 1:
            self.requests_a_heal(is_for_all=True, donor=0)

    def make_request(self, what: str, call: Callable[..., Future[Any]], *arguments: Any) -> None:
        """Make a request as callers of the session do, after all earlier events."""
        self.catch_up()
        with contextlib.suppress(RequestError, StartError):
            self.futures.append((what, call(*arguments)))

    def catch_up(self) -> None:
        """Handle all queued events; otherwise the next call would raise their faults."""
        while self.is_open() and (self.actor.inbox or self.actor.urgent_inbox):
            self.turn(self.actor)

    @rule(world_size=WORLD, joins_group=st.booleans(), is_refused=st.booleans())
    def starts_or_restarts(
        self, world_size: int, joins_group: bool, is_refused: bool = False
    ) -> None:
        spec = GroupSpec(nproc=world_size, joins_group=joins_group)
        if self.state is GroupState.OFF or is_refused:
            self.make_request("start", request_start, self.session, spec, start_event(spec))
        else:
            self.make_request("restart", self.session.request_restart, spec)

    @precondition(lambda self: self.is_open())
    @rule()
    def requests_a_stop(self) -> None:
        self.make_request("stop", self.session.request_stop)

    @precondition(lambda self: self.is_open())
    @rule(rank=st.integers(-1, 3))
    def requests_a_kill(self, rank: int) -> None:
        self.make_request("kill", self.session.request_kill, rank)

    @precondition(lambda self: self.state is GroupState.BROKEN)
    @rule(is_for_all=st.booleans(), donor=RANK)
    def requests_a_heal(self, is_for_all: bool, donor: int) -> None:
        gone = self.session.life.gone
        self.make_request(
            "heal", self.session.request_heal, gone if is_for_all else gone[:1], donor
        )

    @rule(error=st.sampled_from(["", "", "no"]), is_not_opened=st.booleans())
    def the_outcome_of_heals_changes(self, error: str, is_not_opened: bool) -> None:
        self.heal_error = error
        self.unopened = {"x": error} if error and is_not_opened else {}

    @precondition(lambda self: self.is_open())
    @rule(rank=RANK)
    def requests_a_completion(self, rank: int) -> None:
        request = self.session.numbered(Complete(code="", cursor=0))
        self.make_request("answer", self.session.send_request, rank, request)

    @precondition(lambda self: self.state in (GroupState.IDLE, GroupState.BROKEN))
    @rule(is_for_all=st.booleans(), needs_group=st.booleans(), is_elastic=st.booleans())
    def submits_a_cell(self, is_for_all: bool, needs_group: bool, is_elastic: bool) -> None:
        self.submits_a_cell_on_some_ranks(
            None if is_for_all else self.session.life.alive, needs_group, is_elastic
        )

    @precondition(lambda self: self.session.life.alive)
    @rule(
        ranks=st.lists(RANK, min_size=1, unique=True),
        needs_group=st.booleans(),
        is_elastic=st.booleans(),
    )
    def submits_a_cell_on_some_ranks(
        self, ranks: list[int] | None, needs_group: bool, is_elastic: bool
    ) -> None:
        chosen = None if ranks is None else tuple(ranks)
        request = CellRequest(source="x", ranks=chosen, needs_group=needs_group)
        self.catch_up()
        with contextlib.suppress(RequestError):
            self.cells.append(self.session.submit(request, is_elastic=is_elastic))

    @rule(has_room=st.booleans())
    def a_node_joins(self, has_room: bool) -> None:
        self.nodes += 1
        self.launcher.room = has_room
        self.session.on_node_event(ev.NodeJoined(name=f"far{self.nodes}", nproc=1))

    @precondition(lambda self: self.living())
    @rule(numbers=st.sets(NUMBER), is_first=st.booleans())
    def a_node_is_lost(self, numbers: set[int], is_first: bool) -> None:
        """Lose a node with its ranks; exits of some may be noticed before."""
        lost = [each for number, each in enumerate(self.living()) if number in numbers]
        for rank in lost:
            rank.handle.end(-9)
        if not is_first:
            self.actor.report_exit()
        ranks = tuple(each.rank for each in lost)
        event = ev.NodeLost(name="near", address="10.0.0.7", reason="no sign", ranks=ranks)
        self.session.on_node_event(event)

    @rule()
    def interrupts(self) -> None:
        self.session.interrupt()

    @precondition(lambda self: self.is_open() and self.state is GroupState.OFF)
    @rule()
    def closes_the_session(self) -> None:
        self.catch_up()
        while self.launching.inbox:
            self.turn(self.launching)
        if self.state is GroupState.OFF:
            self.catch_up()
            self.session.close()

    # ---- the ranks

    def living(self, condition: Callable[[Rank], object] = lambda _rank: True) -> list[Rank]:
        handles_seen = [*self.ranks.values(), *self.replaced]
        alive = [each for each in handles_seen if each.handle.exitcode is None]
        return [each for each in alive if condition(each)]

    def post(self, rank: Rank, message: msg.Message) -> None:
        self.mail.append(Envelope(rank.rank, rank.attempt, 1, message, rank.incarnation))

    @precondition(lambda self: self.living(lambda each: not each.is_ready))
    @rule(number=NUMBER, is_able=st.sampled_from([True, True, True, False]))
    def becomes_ready_or_fails(self, number: int, is_able: bool) -> None:
        starting = self.living(lambda each: not each.is_ready)
        rank = starting[number % len(starting)]
        rank.is_ready = True
        self.post(rank, ready(rank.rank) if is_able else msg.StartFailed(reason="no", traceback=""))

    @precondition(lambda self: self.living(lambda each: each.is_free))
    @rule(number=NUMBER)
    def takes_next_command(self, number: int) -> None:
        free = self.living(lambda each: each.is_free)
        self.take_command(free[number % len(free)])

    def take_command(self, rank: Rank) -> None:
        match rank.commands.popleft():
            case msg.RunCell(cell=cell):
                rank.cell = cell
            case Complete(request=request):
                self.post(rank, Answer(request=request))
            case msg.Shutdown():
                rank.handle.end(0)
            case PickleNamespace(request=request):
                content = asdict(replace(NAMES, payload=self.link.store_payload(b"")))
                self.post(rank, Answer(request=request, error=self.heal_error, content=content))
            case JoinGroup(request=request):
                content = asdict(JoinedGroup(not_loaded=self.unopened))
                self.post(rank, Answer(request=request, error=self.heal_error, content=content))
            case msg.Regroup() | msg.CancelRequest():
                pass

    def acknowledge_interrupt(self, rank: Rank) -> None:
        if rank.cell:
            self.post(rank, msg.InterruptAcknowledged(cell=rank.cell))

    @precondition(lambda self: self.living(lambda each: each.cell))
    @rule(number=NUMBER, is_ok=st.booleans(), in_group=st.booleans(), sequence=st.integers(0, 1))
    def reports_the_end_of_its_cell(
        self, number: int, is_ok: bool, in_group: bool, sequence: int
    ) -> None:
        busy = self.living(lambda each: each.cell)
        rank = busy[number % len(busy)]
        failure = {} if is_ok else FAILURE
        report = msg.CellEnded(
            cell=rank.cell, in_group=in_group, sequence=sequence, failure=failure
        )
        self.post(rank, report)
        rank.cell = 0

    @precondition(lambda self: self.living())
    @rule(number=NUMBER, exitcode=st.sampled_from([-9, 0, 1]))
    def a_process_exits(self, number: int, exitcode: int) -> None:
        living = self.living()
        living[number % len(living)].handle.end(exitcode)

    @precondition(lambda self: self.living(lambda each: each.handle.end_requested))
    @rule()
    def killed_processes_exit(self) -> None:
        for rank in self.living(lambda each: each.handle.end_requested):
            rank.handle.end(-15)

    @precondition(lambda self: self.is_open() and self.mail)
    @rule(number=NUMBER, is_first=st.booleans())
    def a_message_arrives(self, number: int, is_first: bool) -> None:
        envelope = self.mail.pop(number % len(self.mail))
        tell = self.actor.submit_urgent if is_first else self.actor.submit
        tell(self.session.actor.messages.handle, envelope)

    @rule()
    def ranks_work_normally(self) -> None:
        """Let all ranks do their pending work; no rank exits."""
        for _ in range(3):
            self.handle_all_events()
            for rank in self.living():
                if not rank.is_ready:
                    rank.is_ready = True
                    self.post(rank, ready(rank.rank))
                while rank.is_free:
                    self.take_command(rank)
            while self.is_open() and self.mail:
                self.actor.submit(self.session.actor.messages.handle, self.mail.pop(0))

    def handle_all_events(self) -> None:
        while self.is_open() and any(self.turn_threads()):
            pass

    def turn_threads(self) -> Iterator[bool]:
        for actor in (self.actor, self.launching):
            if actor.inbox or actor.urgent_inbox:
                self.turn(actor)
                yield True
        yield self.actor.report_exit()
