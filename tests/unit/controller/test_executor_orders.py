"""No order of events, and no fault in any action, leaves a request pending.

Hypothesis plays a user, ranks, a clock and faults against a session without a thread: the disk
is full, a process cannot be started, watched or killed, nothing can be sent. In the end it either
stops the group or lets every process die, and checks that no request is pending.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import FakeHandle, FakeLauncher, HandTurnedActor, SilentLink, hand_turned, ready
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nbddp.controller.group_spec import GroupSpec
from nbddp.controller.session import Session
from nbddp.errors import RequestError, StartError
from nbddp.lifecycle.events import NodeJoined, NodeLost
from nbddp.lifecycle.group_state import GroupState
from nbddp.record import run_folder
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.sigint import Future
from nbddp.wire import messages as msg
from nbddp.wire.envelope import Envelope
from nbddp.wire.request_messages import Answer, Complete, JoinGroup, SendNamespace

RANK = st.integers(0, 2)
NUMBER = st.integers(0, 9)
FAILURE = {"name": "ValueError", "text": "no", "traceback": "ValueError: no", "at": 1.0}
NAMES = {"names": ["x"], "bytes": 1, "left": {}, "more": {}, "storages": []}
HELLO = CellRequest(source="hello")


class BadLuckError(OSError):
    """The faults that the test injects."""


NO_LUCK = BadLuckError(5, "no luck")


@dataclass
class Rank:
    """One rank as it really is."""

    attempt: int
    rank: int
    handle: FakeHandle
    incarnation: int = 0
    is_ready: bool = False
    cell: int = 0
    commands: deque[msg.MessageToRank] = field(default_factory=deque)

    @property
    def is_dealt_with(self) -> bool:
        """Whether it was killed, or could not be."""
        return self.handle.is_doomed or self.handle.was_spared

    @property
    def is_free(self) -> bool:
        """Whether it can take its next command."""
        return self.is_ready and not self.cell and bool(self.commands)


class AnyOrder(RuleBasedStateMachine):
    """Everything that may happen, one thing at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = tempfile.TemporaryDirectory()
        self.patch.chdir(self.folder.name)
        self.patch.setattr(run_folder, "_version", lambda _package: "1")
        self.launcher = FakeLauncher(obeys=False)
        self.launcher.on_launch = self.is_born
        self.session = Session(self.launcher, make_runtime=self.make_runtime)
        self.ranks: dict[tuple[int, int], Rank] = {}
        self.replaced: list[Rank] = []
        self.mail: list[Envelope] = []
        self.futures: list[tuple[str, Future[Any]]] = []
        self.cells: list[CellHandle] = []
        self.finished: Counter[int] = Counter()
        self.cannot_connect = False
        self.is_stopped_in_the_end = True
        self.heals_fail_for = ""
        finish = CellHandle.finish

        def count(handle: CellHandle, *arguments: Any) -> object:
            self.finished[handle.number] += 1
            return finish(handle, *arguments)

        self.patch.setattr(CellHandle, "finish", count)

    def make_runtime(self) -> Any:
        if self.cannot_connect:
            raise NO_LUCK
        self.link = SilentLink()
        self.link.on_send = self.is_told
        runtime = hand_turned(self.link)
        self.actor, self.launching, self.watcher = (
            runtime.event_thread,
            runtime.launch_thread,
            runtime.exit_watcher,
        )
        return runtime

    def is_born(self, start: Any) -> None:
        key = start.attempt, start.topology.rank
        if key in self.ranks:  # it may live on for a while, and its messages are dropped
            self.replaced.append(self.ranks[key])
        self.ranks[key] = Rank(*key, self.launcher.handles[key], start.incarnation)

    def is_told(self, attempt: int, rank: int, command: msg.MessageToRank) -> None:
        if isinstance(command, msg.Interrupt):
            self.is_interrupted(self.ranks[attempt, rank])
        else:
            self.ranks[attempt, rank].commands.append(command)

    @property
    def state(self) -> GroupState:
        return self.session.life.state

    # ---- the session's threads

    def turn(self, actor: HandTurnedActor) -> None:
        """Handle one event; the real thread continues after any exception, too."""
        with contextlib.suppress(BadLuckError):
            actor.turn()

    def is_open(self) -> bool:
        return self.session._executor.runtime is not None

    @precondition(lambda self: self.is_open() and (self.actor.inbox or self.actor.first))
    @rule()
    def the_session_does_something(self) -> None:
        self.turn(self.actor)

    @precondition(lambda self: self.is_open() and self.launching.inbox)
    @rule()
    def a_process_is_started(self) -> None:
        self.turn(self.launching)

    @precondition(lambda self: self.is_open() and self.watcher.watched)
    @rule()
    def an_end_is_seen(self) -> None:
        self.watcher.notice()

    @precondition(lambda self: self.is_open() and self.actor.due)
    @rule(number=NUMBER)
    def an_alarm_rings(self, number: int) -> None:
        self.actor.ring(number % len(self.actor.due))

    # ---- the user

    @initialize(
        world_size=st.integers(1, 3),
        comes_to=st.sampled_from(["a heal", "a death", "a cell", "a group", "a start"]),
        is_stopped=st.booleans(),
    )
    def begins(self, world_size: int, comes_to: str, is_stopped: bool) -> None:
        self.is_stopped_in_the_end = is_stopped
        self.asks_for_a_start(world_size)
        if comes_to != "a start":
            self.all_goes_well_for_a_while()
        if comes_to == "a cell":
            self.asks_for_a_cell(is_for_all=True, needs_group=True, is_elastic=True)
            self.all_goes_well_for_a_while()
        if comes_to in ("a death", "a heal"):
            self.ranks[self.session.life.attempt, world_size - 1].handle.end(-9)
            self.the_session_catches_up()
        if comes_to == "a heal" and world_size > 1:
            self.asks_for_new_ranks(is_for_all=True, donor=0)

    def asks(self, what: str, ask: Callable[..., Future[Any]], *arguments: Any) -> None:
        """Make a request as the session's callers do: the session handles earlier events first."""
        self.catch_up()
        with contextlib.suppress(RequestError, StartError):
            self.futures.append((what, ask(*arguments)))

    def catch_up(self) -> None:
        """Handle all queued events: otherwise the next call would raise their faults."""
        while self.is_open() and (self.actor.inbox or self.actor.first):
            self.turn(self.actor)

    @rule(world_size=st.integers(1, 3))
    def asks_for_a_start(self, world_size: int) -> None:
        spec = GroupSpec(nproc=world_size)
        if self.state is GroupState.OFF:
            self.asks("start", self.session._request_start, spec, spec.start_event())
        else:
            self.asks("restart", self.session.request_restart, spec)

    @precondition(lambda self: self.is_open())
    @rule()
    def asks_for_a_stop(self) -> None:
        self.asks("stop", self.session.request_stop)

    @precondition(lambda self: self.is_open())
    @rule(rank=RANK)
    def asks_for_a_kill(self, rank: int) -> None:
        self.asks("kill", self.session.request_kill, rank)

    @precondition(lambda self: self.state is GroupState.BROKEN)
    @rule(is_for_all=st.booleans(), donor=RANK)
    def asks_for_new_ranks(self, is_for_all: bool, donor: int) -> None:
        gone = self.session.life.gone
        self.asks("heal", self.session.request_heal, gone if is_for_all else gone[:1], donor)

    @rule(error=st.sampled_from(["", "", "no"]))
    def heals_go_well_or_not(self, error: str) -> None:
        self.heals_fail_for = error

    @precondition(lambda self: self.is_open())
    @rule(rank=RANK)
    def asks_a_question(self, rank: int) -> None:
        ask = lambda number: Complete(request=number, code="", cursor=0)  # noqa: E731
        self.asks("answer", self.session.send_request, rank, ask)

    @precondition(lambda self: self.state in (GroupState.IDLE, GroupState.BROKEN))
    @rule(is_for_all=st.booleans(), needs_group=st.booleans(), is_elastic=st.booleans())
    def asks_for_a_cell(self, is_for_all: bool, needs_group: bool, is_elastic: bool) -> None:
        ranks = None if is_for_all else tuple(self.session.life.alive)
        request = CellRequest(source="x", ranks=ranks, needs_group=needs_group)
        self.catch_up()
        with contextlib.suppress(RequestError):
            self.cells.append(self.session.submit(request, is_elastic=is_elastic))

    @rule(has_room=st.booleans())
    def a_node_joins(self, has_room: bool) -> None:
        self.launcher.room = has_room
        self.session.on_node_event(NodeJoined(name="far", nproc=1))

    @precondition(lambda self: self.living())
    @rule(numbers=st.sets(NUMBER), comes_first=st.booleans())
    def a_node_is_lost(self, numbers: set[int], comes_first: bool) -> None:
        """With its ranks; the ends of some may be seen before."""
        lost = [each for number, each in enumerate(self.living()) if number in numbers]
        for each in lost:
            each.handle.end(-9)
        if not comes_first:
            self.watcher.notice()
        ranks = tuple(each.rank for each in lost)
        event = NodeLost(name="near", address="10.0.0.7", reason="no sign", ranks=ranks)
        self.session.on_node_event(event)

    @rule()
    def interrupts(self) -> None:
        self.session.interrupt()

    @precondition(lambda self: self.is_open() and self.state is GroupState.OFF)
    @rule()
    def closes(self) -> None:
        self.catch_up()
        while self.launching.inbox:
            self.turn(self.launching)
        if self.state is GroupState.OFF:
            self.catch_up()
            self.session.close()

    # ---- the ranks

    def living(self, can: Callable[[Rank], object] = lambda _rank: True) -> list[Rank]:
        everybody = [*self.ranks.values(), *self.replaced]
        there = [each for each in everybody if each.handle.exitcode is None]
        return [each for each in there if can(each)]

    def posts(self, rank: Rank, message: msg.Message) -> None:
        self.mail.append(Envelope(rank.rank, rank.attempt, 1, message, rank.incarnation))

    @precondition(lambda self: self.living(lambda each: not each.is_ready))
    @rule(number=NUMBER, is_able=st.sampled_from([True, True, True, False]))
    def gets_ready_or_not(self, number: int, is_able: bool) -> None:
        starting = self.living(lambda each: not each.is_ready)
        rank = starting[number % len(starting)]
        rank.is_ready = True
        self.posts(
            rank, ready(rank.rank) if is_able else msg.StartFailed(reason="no", traceback="")
        )

    @precondition(lambda self: self.living(lambda each: each.is_free))
    @rule(number=NUMBER)
    def takes_its_next_command(self, number: int) -> None:
        free = self.living(lambda each: each.is_free)
        self.takes(free[number % len(free)])

    def takes(self, rank: Rank) -> None:
        match rank.commands.popleft():
            case msg.RunCell(cell=cell):
                rank.cell = cell
            case Complete(request=request):
                self.posts(rank, Answer(request=request))
            case msg.Shutdown():
                rank.handle.end(0)
            case SendNamespace(request=request):
                error, payload = self.heals_fail_for, self.link.store_payload(b"")
                given = Answer(request=request, error=error, content=NAMES, payload=payload)
                self.posts(rank, given)
            case JoinGroup(request=request):
                self.posts(rank, Answer(request=request, error=self.heals_fail_for))
            case msg.Regroup() | msg.CancelRequest():
                pass

    def is_interrupted(self, rank: Rank) -> None:
        if rank.cell:
            self.posts(rank, msg.InterruptAcknowledged(cell=rank.cell))

    @precondition(lambda self: self.living(lambda each: each.cell))
    @rule(number=NUMBER, is_ok=st.booleans())
    def ends_its_cell(self, number: int, is_ok: bool) -> None:
        busy = self.living(lambda each: each.cell)
        rank = busy[number % len(busy)]
        failure = {} if is_ok else FAILURE
        self.posts(rank, msg.CellEnded(cell=rank.cell, seconds=0, in_group=is_ok, failure=failure))
        rank.cell = 0

    @precondition(lambda self: self.living())
    @rule(number=NUMBER, exitcode=st.sampled_from([-9, 0, 1]))
    def dies(self, number: int, exitcode: int) -> None:
        living = self.living()
        living[number % len(living)].handle.end(exitcode)

    @precondition(lambda self: self.living(lambda each: each.handle.is_doomed))
    @rule()
    def dies_as_it_was_told(self) -> None:
        for rank in self.living(lambda each: each.handle.is_doomed):
            rank.handle.end(-15)

    @precondition(lambda self: self.is_open() and self.mail)
    @rule(number=NUMBER, comes_first=st.booleans())
    def a_letter_arrives(self, number: int, comes_first: bool) -> None:
        envelope = self.mail.pop(number % len(self.mail))
        tell = self.actor.submit_urgent if comes_first else self.actor.submit
        tell(self.session._executor.messages.handle, envelope)

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        """All ranks do their pending work; no rank dies."""
        for _ in range(3):
            self.the_session_catches_up()
            for rank in self.living():
                if not rank.is_ready:
                    rank.is_ready = True
                    self.posts(rank, ready(rank.rank))
                while rank.is_free:
                    self.takes(rank)
            while self.is_open() and self.mail:
                self.actor.submit(self.session._executor.messages.handle, self.mail.pop(0))

    def the_session_catches_up(self) -> None:
        while self.is_open() and any(self.does_something()):
            pass

    def does_something(self) -> Iterator[bool]:
        for actor in (self.actor, self.launching):
            if actor.inbox or actor.first:
                self.turn(actor)
                yield True
        yield self.watcher.notice()

    # ---- bad luck

    @precondition(lambda self: self.is_open())
    @rule(where=st.sampled_from(["launcher", "watcher", "link"]))
    def something_will_fail_once(self, where: str) -> None:
        getattr(self, where).faults.append(NO_LUCK)

    @precondition(lambda self: self.is_open())
    @rule()
    def the_link_breaks(self) -> None:
        self.link.is_broken = True

    @precondition(lambda self: self.is_open())
    @rule()
    def the_ranks_cannot_be_heard(self) -> None:
        self.actor.submit_urgent(self.session._executor.on_link_lost, NO_LUCK)

    @rule()
    def the_next_link_cannot_be_made(self) -> None:
        self.cannot_connect = True

    @rule()
    def the_disk_is_full(self) -> None:
        self.patch.setattr(run_folder, "_create_folder", self.refuse)

    @rule()
    def what_ranks_leave_behind_cannot_be_ended(self) -> None:
        self.launcher.sweep_fails = NO_LUCK

    @precondition(lambda self: self.living())
    @rule()
    def the_ranks_cannot_be_killed(self) -> None:
        for rank in self.living():
            rank.handle.kill_fails = NO_LUCK

    def refuse(self, *_arguments: object) -> None:
        raise BadLuckError(28, "No space left on device")

    @rule()
    def all_is_well_again(self) -> None:
        self.launcher.faults.clear()
        self.launcher.sweep_fails = None
        self.cannot_connect = False
        self.patch.setattr(run_folder, "_create_folder", BEGIN)
        if self.is_open():
            self.watcher.faults.clear()
            self.link.faults.clear()
            self.link.is_broken = False
        for rank in self.living():
            rank.handle.kill_fails = None

    # ---- the end

    def teardown(self) -> None:
        try:
            if self.is_stopped_in_the_end:
                self.a_stop_ends_in_off()
            else:
                self.all_die()
            self.nobody_waits()
            self.all_is_well_again()
            self.a_start_works()
        finally:
            self.patch.undo()
            self.folder.cleanup()

    def a_stop_ends_in_off(self) -> None:
        """Though all that is broken stays broken, and no rank does more than it must."""
        if self.is_open():
            self.asks_for_a_stop()
            self.goes_on_until_all_is_quiet()
        assert self.state is GroupState.OFF
        assert not self.living(lambda each: not each.is_dealt_with), "left running"

    def all_die(self) -> None:
        while self.is_open() and (self.living() or self.launching.inbox):
            for rank in self.living():
                rank.handle.end(-9)
            self.the_session_catches_up()
        self.goes_on_until_all_is_quiet()
        assert self.state in (GroupState.OFF, GroupState.BROKEN)

    def goes_on_until_all_is_quiet(self) -> None:
        for _ in range(100):
            self.the_session_catches_up()
            doomed = self.living(lambda each: each.handle.is_doomed)
            leaving = self.living(lambda each: each.is_free)
            if not self.is_open() or not (doomed or leaving or self.actor.due):
                return
            for rank in doomed:
                rank.handle.end(-15)
            for rank in leaving:
                if rank.handle.exitcode is None:
                    self.takes(rank)
            due, self.actor.due = self.actor.due, []
            for _, act in due:
                self.actor.submit(act)
        raise AssertionError("it never comes to rest")

    def nobody_waits(self) -> None:
        assert [what for what, future in self.futures if not future.done()] == []
        assert [cell.number for cell in self.cells if cell.result is None] == []
        assert [number for number, count in self.finished.items() if count > 1] == []

    def a_start_works(self) -> None:
        """All faults are repaired."""
        self.asks_for_a_start(2)
        self.all_goes_well_for_a_while()
        assert self.state is GroupState.IDLE
        cell = self.session.submit(HELLO)
        self.all_goes_well_for_a_while()
        for rank in self.living(lambda each: each.cell == cell.number):
            self.posts(rank, msg.CellEnded(cell=cell.number, seconds=0, in_group=True))
        self.all_goes_well_for_a_while()
        assert cell.result is not None
        assert cell.result.is_ok
        self.asks_for_a_stop()
        self.goes_on_until_all_is_quiet()
        assert self.state is GroupState.OFF
        self.session.close()


BEGIN = run_folder._create_folder

TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)
