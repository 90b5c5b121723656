"""Check that no order of events leaves the worker group in a dead end.

Hypothesis plays a user, a few processes and a clock against the lifecycle. A process obeys, exits
or reports late. An exit may be reported before an earlier message of the same process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from life_states import INTERRUPT, OFF, START, STOP, died, ended

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life, RankState
from nbddp.lifecycle.transitions import advance
from nbddp.wire.messages import Regroup, Shutdown

WORLD = st.integers(1, 3)
RANK = st.integers(0, 2)
ENDINGS = st.one_of(  # from mild to harsh: hypothesis tries the first most
    st.just(INTERRUPT),
    st.builds(ev.KillAsked, rank=st.integers(-1, 3)),
    st.just(START),
    st.just(STOP),
    st.builds(
        ev.RestartAsked,
        start=st.builds(ev.StartAsked, world_size=WORLD, joins_group=st.booleans()),
    ),
)


@dataclass
class Process:
    """The real state of one rank; the lifecycle learns of it later."""

    attempt: int
    rank: int
    is_ready: bool = False
    end_requested: bool = False
    cell: int = 0
    is_interrupted: bool = False
    heals: ev.RequestNamespace | ev.RequestJoin | None = None
    commands: deque[ev.Action] = field(default_factory=deque)
    mail: deque[ev.AttemptEvent] = field(default_factory=deque)

    @property
    def is_free(self) -> bool:
        """Return whether the process can take its next command."""
        return self.is_ready and not (self.cell or self.heals) and bool(self.commands)

    @property
    def is_asked(self) -> bool:
        """Return whether the cell of the process was interrupted and still runs."""
        return bool(self.cell) and self.is_interrupted


@dataclass
class Ledger:
    """Counters that must balance in the end; every action checks them."""

    sent: Counter[int] = field(default_factory=Counter)
    finished: Counter[int] = field(default_factory=Counter)
    stopped: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[int] = field(default_factory=Counter)
    handed: dict[int, int] = field(default_factory=dict)
    arrived: Counter[str] = field(default_factory=Counter)  # nodes, in this attempt

    def follow(self, before: Life, event: ev.Event, life: Life, actions: list[ev.Action]) -> None:
        """Check one step of the lifecycle and count it."""
        match event:
            case ev.ProcessExited(attempt=before.attempt, rank=rank):
                self.handed.pop(rank, None)
            case ev.RankEndedCell(attempt=before.attempt, rank=rank, cell=cell):
                if self.handed.get(rank) == cell:
                    del self.handed[rank]
            case ev.NodeJoined(name=name) if before.state.is_live:
                self.arrived[name] += 1
        if any(isinstance(action, ev.Refuse) for action in actions):
            assert len(actions) == 1
            assert life == before
        gone = event.rank if isinstance(event, ev.ProcessExited) else None
        alive = [rank for rank in before.alive if rank != gone]
        for action in actions:
            self._check_action(action, before, alive)

    def _check_action(self, action: ev.Action, before: Life, alive: list[int]) -> None:
        attempt = before.attempt
        if isinstance(action, ev.RankAction) and not isinstance(action, ev.StartReplacements):
            assert action.ranks, f"{action} has no ranks"
            assert set(action.ranks) <= set(alive), f"{action} has dead ranks"
            assert len(set(action.ranks)) == len(action.ranks)
        match action:
            case ev.Notify(text=text) if text.startswith("node far"):
                self.arrived[text.split()[1]] -= 1
                assert min(self.arrived.values()) == 0, "shown twice, or to other ranks"
            case ev.Send(ranks=ranks, message=Regroup(form=True)):
                assert len(ranks) == len(before.ranks), "a process group of some ranks"
            case ev.SendCell(cell=cell, ranks=ranks):
                assert not set(ranks) & set(self.handed), "a rank has two cells"
                self.handed.update(dict.fromkeys(ranks, cell))
                self.sent[cell] += 1
            case ev.CellFinished(cell=cell):
                self.finished[cell] += 1
                assert self.sent[cell] == self.finished[cell] == 1
            case ev.GroupStarted() | ev.GroupStartFailed():
                self.outcomes[attempt] += 1
                assert self.outcomes[attempt] == 1, "a start has one outcome"
            case ev.GroupStopped():
                self.stopped[attempt] += 1
                assert self.stopped[attempt] == 1, "an attempt stops once"
            case ev.RejoinRanks() | ev.StartRanks():
                assert attempt == 0 or self.stopped[attempt] == 1, "the old attempt never stopped"
                self.handed.clear()
                self.arrived.clear()

    def check_balance(self, life: Life) -> None:
        """Check that no cell and no attempt is unfinished when the group is off."""
        assert self.sent == self.finished
        assert all(self.stopped[attempt] == 1 for attempt in range(1, life.attempt + 1))


class AnyOrder(RuleBasedStateMachine):
    """A user, processes and a clock that act in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.life = OFF
        self.ledger = Ledger()
        self.processes: dict[int, Process] = {}
        self.exits: list[tuple[Process, int]] = []
        self.late: list[ev.AttemptEvent] = []
        self.deadlines: list[ev.SetDeadline] = []
        self.cells = self.nodes = 0

    # ---- the session

    def step(self, event: ev.Event) -> None:
        before = self.life
        self.life, actions = advance(before, event)
        self.ledger.follow(before, event, self.life, actions)
        for action in actions:
            self.act(action)

    def act(self, action: ev.Action) -> None:  # noqa: C901 - one short case per action
        match action:
            case ev.StartRanks():
                self.spawn()
            case ev.RejoinRanks():
                for rank in self.life.alive:
                    self.processes[rank] = Process(self.life.attempt, rank)
            case ev.StartReplacements(ranks=ranks):
                for rank in ranks:
                    self.revive(rank)
            case ev.SetDeadline() as deadline:
                self.deadlines.append(deadline)
            case ev.Kill(ranks=ranks) | ev.Terminate(ranks=ranks):
                for process in self.living(ranks):
                    process.end_requested = True
            case ev.SendInterrupt(cell=cell, ranks=ranks):
                for process in self.living(ranks):
                    process.is_interrupted |= process.cell == cell
            case ev.RequestNamespace() if self.life.heal is not None:
                for process in self.living((self.life.heal.donor,)):
                    process.commands.append(action)
            case ev.SendCell() | ev.Send() | ev.RequestJoin():
                for process in self.living(action.ranks):
                    process.commands.append(action)

    def spawn(self) -> None:
        left = [*self.processes.values(), *(process for process, _ in self.exits)]
        assert all(each.end_requested for each in left), "processes of the old attempt are left"
        self.processes.clear()  # replacement ranks of a failed heal were killed
        self.exits.clear()
        for rank in range(len(self.life.ranks)):
            self.processes[rank] = Process(self.life.attempt, rank)

    def revive(self, rank: int) -> None:
        """Start a replacement process; drop messages of the old one, as the session does."""
        self.exits = [each for each in self.exits if each[0].rank != rank]
        self.late = [each for each in self.late if getattr(each, "rank", None) != rank]
        self.processes[rank] = Process(self.life.attempt, rank)

    def living(self, ranks: tuple[int, ...]) -> list[Process]:
        return [self.processes[rank] for rank in ranks if rank in self.processes]

    # ---- the user

    @initialize(world_size=WORLD, joins_group=st.booleans(), is_up=st.booleans())
    def starts_the_first_group(self, world_size: int, joins_group: bool, is_up: bool) -> None:
        self.starts_a_group(world_size, joins_group)
        if is_up:
            self.processes_work_normally()

    @precondition(lambda self: not self.life.state.is_live)
    @rule(world_size=WORLD, joins_group=st.booleans())
    def starts_a_group(self, world_size: int, joins_group: bool) -> None:
        self.step(ev.StartAsked(world_size=world_size, joins_group=joins_group))

    @precondition(lambda self: not (self.life.state.is_live or self.processes or self.exits))
    @rule(world_size=WORLD, living=st.sets(RANK, min_size=1))
    def adopts_ranks_of_another_notebook(self, world_size: int, living: set[int]) -> None:
        ranks = tuple((rank, 0) for rank in sorted(living) if rank < world_size)
        if ranks:
            attempt = self.life.attempt + 1
            self.step(ev.RejoinAsked(attempt=attempt, world_size=world_size, survivors=ranks))

    @precondition(lambda self: self.life.alive)
    @rule(
        ranks=st.lists(RANK, min_size=1, unique=True),
        needs_group=st.booleans(),
        is_elastic=st.booleans(),
    )
    def runs_a_cell(self, ranks: list[int], needs_group: bool, is_elastic: bool) -> None:
        self.cells += 1
        asked = ev.RunAsked(
            cell=self.cells, ranks=tuple(ranks), needs_group=needs_group, is_elastic=is_elastic
        )
        self.step(asked)

    @precondition(lambda self: self.life.state in (GroupState.IDLE, GroupState.BROKEN))
    @rule(needs_group=st.booleans(), is_elastic=st.booleans())
    def runs_a_cell_on_all_living_ranks(self, needs_group: bool, is_elastic: bool) -> None:
        if self.life.alive:
            self.runs_a_cell(self.life.alive, needs_group, is_elastic)

    @precondition(lambda self: self.life.state is GroupState.BROKEN)
    @rule(is_for_all=st.booleans(), donor=RANK)
    def heals_ranks(self, is_for_all: bool, donor: int) -> None:
        gone = self.life.gone
        self.step(ev.HealAsked(ranks=gone if is_for_all else gone[:1], donor=donor))

    @precondition(lambda self: self.life.state.is_live)
    @rule(event=ENDINGS)
    def interrupts_kills_stops_or_restarts(self, event: ev.Event) -> None:
        self.step(event)

    # ---- the processes

    def choose_process(self, rank: int, condition: Callable[[Process], object]) -> Process | None:
        """Return one of the processes that satisfy the condition, or None."""
        able = [each for _, each in sorted(self.processes.items()) if condition(each)]
        return able[rank % len(able)] if able else None

    @precondition(lambda self: any(not each.is_ready for each in self.processes.values()))
    @rule(rank=RANK, is_able=st.sampled_from([True, True, True, False]))
    def becomes_ready_or_fails(self, rank: int, is_able: bool) -> None:
        process = self.choose_process(rank, lambda each: not each.is_ready)
        if process and is_able:
            self.becomes_ready(process)
        elif process:
            news = ev.RankStartFailed(attempt=process.attempt, rank=process.rank, reason="no")
            process.mail.append(news)
            self.exit_process(process, 1)

    def becomes_ready(self, process: Process) -> None:
        process.is_ready = True
        process.mail.append(ev.RankReady(attempt=process.attempt, rank=process.rank))

    @precondition(lambda self: any(each.is_free for each in self.processes.values()))
    @rule(rank=RANK)
    def takes_next_command(self, rank: int) -> None:
        if process := self.choose_process(rank, lambda each: each.is_free):
            self.take_command(process)

    def take_command(self, process: Process) -> None:
        match process.commands.popleft():
            case ev.Send(message=Shutdown()):
                self.exit_process(process, 0)
            case ev.SendCell(cell=cell):
                process.cell, process.is_interrupted = cell, False
            case ev.RequestNamespace() | ev.RequestJoin() as asked:
                process.heals = asked

    @precondition(lambda self: any(each.heals for each in self.processes.values()))
    @rule(rank=RANK, reason=st.sampled_from(["", "", "no"]), is_not_loaded=st.booleans())
    def answers_a_heal_request(self, rank: int, reason: str, is_not_loaded: bool) -> None:
        if process := self.choose_process(rank, lambda each: each.heals):
            self.answer_heal_request(process, reason, ("name",) if reason and is_not_loaded else ())

    def answer_heal_request(
        self, process: Process, reason: str = "", not_loaded: tuple[str, ...] = ()
    ) -> None:
        asked, process.heals = process.heals, None
        news: ev.AttemptEvent
        match asked:
            case ev.RequestNamespace(generation=generation):
                news = ev.NamespaceSent(
                    attempt=process.attempt, generation=generation, reason=reason
                )
            case ev.RequestJoin(generation=generation):
                news = ev.GroupJoined(
                    attempt=process.attempt,
                    generation=generation,
                    rank=process.rank,
                    reason=reason,
                    not_loaded=not_loaded,
                )
        process.mail.append(news)

    @precondition(lambda self: any(each.cell for each in self.processes.values()))
    @rule(rank=RANK, is_ok=st.booleans(), in_group=st.booleans(), sequence=st.integers(0, 1))
    def reports_the_end_of_its_cell(self, rank: int, **facts: Any) -> None:
        if process := self.choose_process(rank, lambda each: each.cell):
            report = ended(process.rank, cell=process.cell, attempt=process.attempt, **facts)
            process.mail.append(report)
            process.cell = 0

    @precondition(lambda self: any(each.is_asked for each in self.processes.values()))
    @rule(rank=RANK)
    def acknowledges_an_interrupt(self, rank: int) -> None:
        if process := self.choose_process(rank, lambda each: each.is_asked):
            news = ev.RankAcknowledged(
                attempt=process.attempt, rank=process.rank, cell=process.cell
            )
            process.mail.append(news)

    @precondition(lambda self: self.processes)
    @rule(rank=RANK, exitcode=st.sampled_from([-9, -11, 0, 1]))
    def exits_unasked(self, rank: int, exitcode: int) -> None:
        if process := self.choose_process(rank, lambda each: True):  # noqa: ARG005
            self.exit_process(process, exitcode)

    @precondition(lambda self: any(each.end_requested for each in self.processes.values()))
    @rule()
    def exits_after_kill_or_terminate(self) -> None:
        for process in list(self.processes.values()):
            if process.end_requested:
                self.exit_process(process, -15)

    @precondition(lambda self: self.processes)
    @rule()
    def processes_work_normally(self) -> None:
        """Let every process become ready, start its cell and report it."""
        for process in list(self.processes.values()):
            if not process.is_ready:
                self.becomes_ready(process)
            while process.is_free:
                self.take_command(process)
                if process.heals:
                    self.answer_heal_request(process)
            while process.mail:
                self.step(process.mail.popleft())

    # ---- the nodes

    @rule(has_room=st.booleans())
    def a_node_joins(self, has_room: bool) -> None:
        self.nodes += 1
        self.step(ev.NodeJoined(name=f"far{self.nodes}", nproc=1, adds_capacity=has_room))
        if has_room:
            self.step(ev.CapacityChanged())

    @rule(ranks=st.sets(RANK), is_first=st.booleans())
    def a_node_is_lost(self, ranks: set[int], is_first: bool) -> None:
        """Lose a node with its ranks; an exit may be reported before."""
        for rank in ranks & self.processes.keys():
            self.exit_process(self.processes[rank], -9)
        if self.exits and not is_first:
            self.an_exit_is_reported(0, is_first=False)
        lost = ev.NodeLost(
            name="near", address="10.0.0.7", reason="no sign", ranks=(*sorted(ranks),)
        )
        self.step(lost)

    def exit_process(self, process: Process, exitcode: int) -> None:
        process.commands.clear()
        del self.processes[process.rank]
        self.exits.append((process, exitcode))

    # ---- the messages and the clock

    @precondition(lambda self: any(each.mail for each in self.processes.values()))
    @rule(rank=RANK)
    def a_message_arrives(self, rank: int) -> None:
        if process := self.choose_process(rank, lambda each: each.mail):
            self.step(process.mail.popleft())

    @precondition(lambda self: self.exits)
    @rule(number=st.integers(0, 9), is_first=st.booleans())
    def an_exit_is_reported(self, number: int, is_first: bool) -> None:
        process, exitcode = self.exits.pop(number % len(self.exits))
        while process.mail and not is_first:
            self.step(process.mail.popleft())
        self.late += process.mail
        self.step(ev.ProcessExited(attempt=process.attempt, rank=process.rank, exitcode=exitcode))

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 9))
    def a_late_message_arrives(self, number: int) -> None:
        self.step(self.late.pop(number % len(self.late)))

    @precondition(lambda self: self.deadlines)
    @rule(number=st.integers(0, 9), working=st.sets(RANK))
    def a_deadline_expires(self, number: int, working: set[int]) -> None:
        deadline = self.deadlines.pop(number % len(self.deadlines))
        self.step(replace(deadline.event, working=tuple(sorted(working))))

    # ---- the invariants

    @invariant()
    def the_state_is_consistent(self) -> None:
        life, cell = self.life, self.life.cell
        assert life.state.is_live is bool(life.ranks)
        assert [each.rank for each in life.ranks] == list(range(len(life.ranks)))
        if life.state.is_busy:
            assert cell is not None
            assert cell.waiting, "a cell without ranks never ends"
            assert cell.waiting <= set(life.alive)
        if life.state in (GroupState.OFF, GroupState.STARTING, GroupState.IDLE):
            assert cell is None
        if life.state is GroupState.IDLE:
            assert all(each.state is RankState.IDLE for each in life.ranks)
        assert (life.heal is not None) is (life.state is GroupState.HEALING)
        if life.heal is not None:
            assert life.heal.joining <= set(life.alive)
            assert not life.heal.failures or life.heal.joining, "a failed heal never ends"
        if life.state is GroupState.BROKEN:
            assert len(life.alive) < len(life.ranks)
        if life.state is GroupState.STOPPING:
            assert life.alive
        assert not life.pending_notices or (life.state.is_live and not life.state.is_busy)
        assert not self.has_outgrown(), "an elastic cell continues with fewer ranks than possible"

    def has_outgrown(self) -> bool:
        cell = self.life.cell
        is_ended = self.life.state is not GroupState.RUNNING
        return cell is not None and cell.is_outgrown and not is_ended

    @invariant()
    def a_stop_leads_to_off(self) -> None:
        imagined = Imagined(self)
        imagined.step(STOP)
        imagined.exit(imagined.life.alive)
        assert imagined.life.state is GroupState.OFF
        imagined.ledger.check_balance(imagined.life)

    @invariant()
    def a_restarted_group_runs_cells(self) -> None:
        imagined = Imagined(self)
        imagined.step(ev.RestartAsked(start=START))
        if imagined.life.attempt == self.life.attempt:
            imagined.exit(imagined.life.alive)
        for rank in range(2):
            imagined.step(ev.RankReady(attempt=imagined.life.attempt, rank=rank))
        imagined.step(ev.RunAsked(cell=self.cells + 1, ranks=(0, 1)))
        assert imagined.life.state is GroupState.RUNNING

    @invariant()
    def living_ranks_run_cells_unless_the_group_is_busy(self) -> None:
        alive, number = self.life.alive, self.cells + 1
        if alive and self.life.state in (GroupState.IDLE, GroupState.BROKEN):
            imagined = Imagined(self)
            imagined.step(ev.RunAsked(cell=number, ranks=tuple(alive)))
            for rank in alive:
                assert imagined.life.state is GroupState.RUNNING
                imagined.step(ended(rank, cell=number, attempt=imagined.life.attempt))
            assert imagined.ledger.finished[number] == 1

    @invariant()
    def an_interrupt_ends_a_heal_and_kills_no_surviving_rank(self) -> None:
        if self.life.state is GroupState.HEALING:
            assert self.life.heal is not None
            before = set(self.life.alive) - set(self.life.heal.replacements)
            imagined = Imagined(self)
            imagined.step(INTERRUPT)
            imagined.expire([], ev.Deadline.CANCEL)
            assert imagined.life.state is GroupState.BROKEN
            assert set(imagined.life.alive) == before

    @invariant()
    def a_second_interrupt_after_the_stuck_message_ends_the_cell(self) -> None:
        if self.life.state.is_busy:
            imagined = Imagined(self)
            imagined.step(INTERRUPT)
            imagined.expire(self.deadlines, ev.Deadline.STUCK)
            imagined.step(INTERRUPT)
            imagined.exit(imagined.killed)
            assert imagined.life.cell is None

    def life_after_all_deadlines(self) -> Life:
        """Return the life after all deadlines expired and no rank answered."""
        imagined = Imagined(self)
        imagined.killed = {each.rank for each in self.processes.values() if each.end_requested}
        imagined.killed |= {process.rank for process, _ in self.exits}
        imagined.expire(self.deadlines)
        imagined.exit(imagined.killed)
        return imagined.life

    @invariant()
    def starts_stops_failed_heals_and_ending_cells_end_in_time(self) -> None:
        state, heal, cell = self.life.state, self.life.heal, self.life.cell
        later = self.life_after_all_deadlines()
        if state is GroupState.STARTING:
            assert later.state is not GroupState.STARTING
        if state is GroupState.STOPPING:
            assert later.state in (GroupState.OFF, GroupState.STARTING)
        if heal is not None and heal.failures:
            assert later.heal is None
        if state is GroupState.INTERRUPTING or (state.is_busy and cell and cell.has_failed):
            assert later.cell is None


class Imagined:
    """A copy of the life to try events on; the real life does not change."""

    def __init__(self, world: AnyOrder) -> None:
        self.life = world.life
        self.ledger = Ledger(*(each.copy() for each in vars(world.ledger).values()))
        self.killed: set[int] = set()
        self.deadlines: list[ev.SetDeadline] = []

    def step(self, event: ev.Event) -> None:
        before = self.life
        self.life, actions = advance(before, event)
        self.ledger.follow(before, event, self.life, actions)
        for action in actions:
            match action:
                case ev.Kill(ranks=ranks):
                    self.killed |= set(ranks)
                case ev.SetDeadline() as deadline:
                    self.deadlines.append(deadline)

    def expire(self, deadlines: list[ev.SetDeadline], *kinds: ev.Deadline) -> None:
        """Expire deadlines of these kinds (default: all), including deadlines that they set."""
        self.deadlines += deadlines
        while due := [
            each for each in self.deadlines if each.event.deadline in (kinds or ev.Deadline)
        ]:
            self.deadlines.remove(due[0])
            self.step(due[0].event)

    def exit(self, ranks: Iterable[int]) -> None:
        """End the living processes of these ranks."""
        attempt = self.life.attempt
        for rank in set(ranks) & set(self.life.alive):
            self.step(died(rank, attempt=attempt))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)
