"""No order of events leaves the worker group in a dead end.

Hypothesis plays a user, a handful of processes and a clock against the lifecycle. The processes
obey, or die, or report late; a death may be seen before a report that preceded it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lives import INTERRUPT, OFF, START, STOP, died, ended

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life, RankState
from nbddp.lifecycle.transitions import advance

WORLD = st.integers(1, 3)
RANK = st.integers(0, 2)
ENDINGS = st.one_of(  # the harshest last: hypothesis tries the first most
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
    """One rank as it really is, which the lifecycle learns later."""

    attempt: int
    rank: int
    is_ready: bool = False
    is_doomed: bool = False
    cell: int = 0
    is_interrupted: bool = False
    heals: ev.RequestNamespace | ev.RequestJoin | None = None
    commands: deque[ev.Action] = field(default_factory=deque)
    mail: deque[ev.AttemptEvent] = field(default_factory=deque)

    @property
    def is_free(self) -> bool:
        """Whether it can take its next command."""
        return self.is_ready and not (self.cell or self.heals) and bool(self.commands)

    @property
    def is_asked(self) -> bool:
        """Whether its cell was interrupted and still runs."""
        return bool(self.cell) and self.is_interrupted


@dataclass
class Ledger:
    """What must balance in the end, and is checked at every action."""

    sent: Counter[int] = field(default_factory=Counter)
    finished: Counter[int] = field(default_factory=Counter)
    stopped: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[int] = field(default_factory=Counter)
    handed: dict[int, int] = field(default_factory=dict)
    arrived: Counter[str] = field(default_factory=Counter)  # nodes, in this attempt

    def follow(self, before: Life, event: ev.Event, life: Life, actions: list[ev.Action]) -> None:
        """Check one step of the lifecycle and keep book of it."""
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
            assert action.ranks, f"{action} is for nobody"
            assert set(action.ranks) <= set(alive), f"{action} is for the dead"
            assert len(set(action.ranks)) == len(action.ranks)
        match action:
            case ev.Notify(text=text) if text.startswith("node far"):
                self.arrived[text.split()[1]] -= 1
                assert min(self.arrived.values()) == 0, "told twice, or to other ranks"
            case ev.SendRegroup(ranks=ranks, form=True):
                assert len(ranks) == len(before.ranks), "a group of a part of the world"
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
                assert isinstance(action, ev.RejoinRanks) or action.attempt == attempt + 1
                assert attempt == 0 or self.stopped[attempt] == 1, "the old attempt never stopped"
                self.handed.clear()
                self.arrived.clear()

    def check_balance(self, life: Life) -> None:
        """Nothing may be open when the group is off."""
        assert self.sent == self.finished
        assert all(self.stopped[attempt] == 1 for attempt in range(1, life.attempt + 1))


class AnyOrder(RuleBasedStateMachine):
    """A user, processes and a clock that do not wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.life = OFF
        self.ledger = Ledger()
        self.processes: dict[int, Process] = {}
        self.exits: list[tuple[Process, int]] = []
        self.late: list[ev.AttemptEvent] = []
        self.alarms: list[ev.SetDeadline] = []
        self.cells = self.nodes = 0

    # ---- the session

    def step(self, event: ev.Event) -> None:
        before = self.life
        self.life, actions = advance(before, event)
        self.ledger.follow(before, event, self.life, actions)
        for action in actions:
            self.act(action)

    def act(self, action: ev.Action) -> None:  # noqa: C901 - a table, a line or two a case
        match action:
            case ev.StartRanks():
                self.spawn(action)
            case ev.RejoinRanks():
                for rank in self.life.alive:
                    self.processes[rank] = Process(self.life.attempt, rank)
            case ev.StartReplacements(ranks=ranks):
                for rank in ranks:
                    self.revive(rank)
            case ev.SetDeadline() as deadline_set:
                self.alarms.append(deadline_set)
            case ev.Kill(ranks=ranks) | ev.Terminate(ranks=ranks):
                for process in self.living(ranks):
                    process.is_doomed = True
            case ev.SendInterrupt(cell=cell, ranks=ranks):
                for process in self.living(ranks):
                    process.is_interrupted |= process.cell == cell
            case ev.RequestNamespace(donor=donor):
                for process in self.living((donor,)):
                    process.commands.append(action)
            case ev.SendCell() | ev.SendRegroup() | ev.SendShutdown() | ev.RequestJoin():
                for process in self.living(action.ranks):
                    process.commands.append(action)

    def spawn(self, action: ev.StartRanks) -> None:
        left = [*self.processes.values(), *(process for process, _ in self.exits)]
        assert all(each.is_doomed for each in left), "processes of the old attempt are left"
        self.processes.clear()  # new ranks of a failed heal: they were killed
        self.exits.clear()
        for rank in range(action.world_size):
            self.processes[rank] = Process(action.attempt, rank)

    def revive(self, rank: int) -> None:
        """Drop messages of the previous attempt, as the session does."""
        self.exits = [each for each in self.exits if each[0].rank != rank]
        self.late = [each for each in self.late if getattr(each, "rank", None) != rank]
        self.processes[rank] = Process(self.life.attempt, rank)

    def living(self, ranks: tuple[int, ...]) -> list[Process]:
        return [self.processes[rank] for rank in ranks if rank in self.processes]

    # ---- the user

    @initialize(world_size=WORLD, joins_group=st.booleans(), is_up=st.booleans())
    def begins(self, world_size: int, joins_group: bool, is_up: bool) -> None:
        self.asks_for_a_start(world_size, joins_group)
        if is_up:
            self.all_goes_well_for_a_while()

    @precondition(lambda self: not self.life.state.is_live)
    @rule(world_size=WORLD, joins_group=st.booleans())
    def asks_for_a_start(self, world_size: int, joins_group: bool) -> None:
        self.step(ev.StartAsked(world_size=world_size, joins_group=joins_group))

    @precondition(lambda self: not (self.life.state.is_live or self.processes or self.exits))
    @rule(world_size=WORLD, living=st.sets(RANK, min_size=1))
    def takes_back_what_another_has_left(self, world_size: int, living: set[int]) -> None:
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
    def asks_for_a_cell(self, ranks: list[int], needs_group: bool, is_elastic: bool) -> None:
        self.cells += 1
        asked = ev.RunAsked(
            cell=self.cells, ranks=tuple(ranks), needs_group=needs_group, is_elastic=is_elastic
        )
        self.step(asked)

    @precondition(lambda self: self.life.state in (GroupState.IDLE, GroupState.BROKEN))
    @rule(needs_group=st.booleans(), is_elastic=st.booleans())
    def asks_for_a_cell_on_all_that_live(self, needs_group: bool, is_elastic: bool) -> None:
        if self.life.alive:
            self.asks_for_a_cell(self.life.alive, needs_group, is_elastic)

    @precondition(lambda self: self.life.state is GroupState.BROKEN)
    @rule(is_for_all=st.booleans(), donor=RANK)
    def asks_for_new_ranks(self, is_for_all: bool, donor: int) -> None:
        gone = self.life.gone
        self.step(ev.HealAsked(ranks=gone if is_for_all else gone[:1], donor=donor))

    @precondition(lambda self: self.life.state.is_live)
    @rule(event=ENDINGS)
    def asks_for_an_end(self, event: ev.Event) -> None:
        self.step(event)

    # ---- the processes

    def one_that(self, rank: int, can: Callable[[Process], object]) -> Process | None:
        """One of the processes that can do it, if any can."""
        able = [each for _, each in sorted(self.processes.items()) if can(each)]
        return able[rank % len(able)] if able else None

    @precondition(lambda self: any(not each.is_ready for each in self.processes.values()))
    @rule(rank=RANK, is_able=st.sampled_from([True, True, True, False]))
    def gets_ready_or_not(self, rank: int, is_able: bool) -> None:
        process = self.one_that(rank, lambda each: not each.is_ready)
        if process and is_able:
            self.gets_ready(process)
        elif process:
            news = ev.RankStartFailed(attempt=process.attempt, rank=process.rank, reason="no")
            process.mail.append(news)
            self.dies(process, 1)

    def gets_ready(self, process: Process) -> None:
        process.is_ready = True
        process.mail.append(ev.RankReady(attempt=process.attempt, rank=process.rank))

    @precondition(lambda self: any(each.is_free for each in self.processes.values()))
    @rule(rank=RANK)
    def takes_its_next_command(self, rank: int) -> None:
        if process := self.one_that(rank, lambda each: each.is_free):
            self.takes_a_command(process)

    def takes_a_command(self, process: Process) -> None:
        match process.commands.popleft():
            case ev.SendShutdown():
                self.dies(process, 0)
            case ev.SendCell(cell=cell):
                process.cell, process.is_interrupted = cell, False
            case ev.RequestNamespace() | ev.RequestJoin() as asked:
                process.heals = asked

    @precondition(lambda self: any(each.heals for each in self.processes.values()))
    @rule(rank=RANK, reason=st.sampled_from(["", "", "no"]), is_unmade=st.booleans())
    def does_its_part_in_a_heal(self, rank: int, reason: str, is_unmade: bool) -> None:
        if process := self.one_that(rank, lambda each: each.heals):
            self.answers(process, reason, ("name",) if reason and is_unmade else ())

    def answers(self, process: Process, reason: str = "", unmade: tuple[str, ...] = ()) -> None:
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
                    not_loaded=unmade,
                )
        process.mail.append(news)

    @precondition(lambda self: any(each.cell for each in self.processes.values()))
    @rule(rank=RANK, is_ok=st.booleans(), in_group=st.booleans(), sequence=st.integers(0, 1))
    def ends_its_cell(self, rank: int, is_ok: bool, in_group: bool, sequence: int) -> None:
        if process := self.one_that(rank, lambda each: each.cell):
            report = ev.RankEndedCell(
                attempt=process.attempt,
                rank=process.rank,
                cell=process.cell,
                is_ok=is_ok,
                in_group=in_group,
                sequence=sequence,
            )
            process.mail.append(report)
            process.cell = 0

    @precondition(lambda self: any(each.is_asked for each in self.processes.values()))
    @rule(rank=RANK)
    def notices_its_interrupt(self, rank: int) -> None:
        if process := self.one_that(rank, lambda each: each.is_asked):
            news = ev.RankAcknowledged(
                attempt=process.attempt, rank=process.rank, cell=process.cell
            )
            process.mail.append(news)

    @precondition(lambda self: self.processes)
    @rule(rank=RANK, exitcode=st.sampled_from([-9, -11, 0, 1]))
    def dies_of_itself(self, rank: int, exitcode: int) -> None:
        if process := self.one_that(rank, lambda each: True):  # noqa: ARG005
            self.dies(process, exitcode)

    @precondition(lambda self: any(each.is_doomed for each in self.processes.values()))
    @rule()
    def dies_as_it_was_told(self) -> None:
        for process in list(self.processes.values()):
            if process.is_doomed:
                self.dies(process, -15)

    @precondition(lambda self: self.processes)
    @rule()
    def all_goes_well_for_a_while(self) -> None:
        """Every process becomes ready, begins its cell, and reports it."""
        for process in list(self.processes.values()):
            if not process.is_ready:
                self.gets_ready(process)
            while process.is_free:
                self.takes_a_command(process)
                if process.heals:
                    self.answers(process)
            while process.mail:
                self.step(process.mail.popleft())

    # ---- the nodes

    @rule(has_room=st.booleans())
    def a_node_joins(self, has_room: bool) -> None:
        self.nodes += 1
        self.step(ev.NodeJoined(name=f"far{self.nodes}", nproc=1, adds_capacity=has_room))
        if has_room:
            self.step(ev.CapacityChanged())

    @rule(ranks=st.sets(RANK), comes_first=st.booleans())
    def a_node_is_lost(self, ranks: set[int], comes_first: bool) -> None:
        """With all its ranks; an exit may be seen before."""
        for rank in ranks & self.processes.keys():
            self.dies(self.processes[rank], -9)
        if self.exits and not comes_first:
            self.an_exit_is_seen(0, comes_first=False)
        lost = ev.NodeLost(
            name="near", address="10.0.0.7", reason="no sign", ranks=(*sorted(ranks),)
        )
        self.step(lost)

    def dies(self, process: Process, exitcode: int) -> None:
        process.commands.clear()
        del self.processes[process.rank]
        self.exits.append((process, exitcode))

    # ---- the wires and the clock

    @precondition(lambda self: any(each.mail for each in self.processes.values()))
    @rule(rank=RANK)
    def a_letter_arrives(self, rank: int) -> None:
        if process := self.one_that(rank, lambda each: each.mail):
            self.step(process.mail.popleft())

    @precondition(lambda self: self.exits)
    @rule(number=st.integers(0, 9), comes_first=st.booleans())
    def an_exit_is_seen(self, number: int, comes_first: bool) -> None:
        process, exitcode = self.exits.pop(number % len(self.exits))
        while process.mail and not comes_first:
            self.step(process.mail.popleft())
        self.late += process.mail
        self.step(ev.ProcessExited(attempt=process.attempt, rank=process.rank, exitcode=exitcode))

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 9))
    def a_letter_arrives_late(self, number: int) -> None:
        self.step(self.late.pop(number % len(self.late)))

    @precondition(lambda self: self.alarms)
    @rule(number=st.integers(0, 9), working=st.sets(RANK))
    def an_alarm_rings(self, number: int, working: set[int]) -> None:
        deadline_set = self.alarms.pop(number % len(self.alarms))
        self.step(replace(deadline_set.event, working=tuple(sorted(working))))

    # ---- what always holds

    @invariant()
    def what_is_known_fits_together(self) -> None:
        life, cell = self.life, self.life.cell
        assert life.state.is_live is bool(life.ranks)
        assert [each.rank for each in life.ranks] == list(range(len(life.ranks)))
        if life.state.is_busy:
            assert cell is not None
            assert cell.waiting, "a cell that nobody runs never ends"
            assert cell.waiting <= set(life.alive)
        if life.state in (GroupState.OFF, GroupState.STARTING, GroupState.IDLE):
            assert cell is None
        if life.state is GroupState.IDLE:
            assert all(each.state is RankState.IDLE for each in life.ranks)
        assert (life.heal is not None) is (life.state is GroupState.HEALING)
        if life.heal is not None:
            assert life.heal.joining <= set(life.alive)
            assert not life.heal.failures or life.heal.joining, "a heal that failed never ends"
        if life.state is GroupState.BROKEN:
            assert len(life.alive) < len(life.ranks)
        if life.state is GroupState.STOPPING:
            assert life.alive
        assert not life.pending_notices or (life.state.is_live and not life.state.is_busy)
        assert not self.has_outgrown(), "an elastic cell goes on with fewer ranks than there may be"

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
    def a_restart_leads_to_a_group_that_runs_cells(self) -> None:
        imagined = Imagined(self)
        imagined.step(ev.RestartAsked(start=START))
        if imagined.life.attempt == self.life.attempt:
            imagined.exit(imagined.life.alive)
        for rank in range(2):
            imagined.step(ev.RankReady(attempt=imagined.life.attempt, rank=rank))
        imagined.step(ev.RunAsked(cell=self.cells + 1, ranks=(0, 1)))
        assert imagined.life.state is GroupState.RUNNING

    @invariant()
    def whoever_lives_runs_cells_unless_the_group_is_busy(self) -> None:
        alive, number = self.life.alive, self.cells + 1
        if alive and self.life.state in (GroupState.IDLE, GroupState.BROKEN):
            imagined = Imagined(self)
            imagined.step(ev.RunAsked(cell=number, ranks=tuple(alive)))
            for rank in alive:
                assert imagined.life.state is GroupState.RUNNING
                imagined.step(ended(rank, cell=number, attempt=imagined.life.attempt))
            assert imagined.ledger.finished[number] == 1

    @invariant()
    def an_interrupt_ends_healing_and_whoever_lived_lives(self) -> None:
        if self.life.state is GroupState.HEALING:
            assert self.life.heal is not None
            before = set(self.life.alive) - set(self.life.heal.replacements)
            imagined = Imagined(self)
            imagined.step(INTERRUPT)
            imagined.ring([], ev.Deadline.CANCEL)
            assert imagined.life.state is GroupState.BROKEN
            assert set(imagined.life.alive) == before

    @invariant()
    def an_interrupt_after_the_user_was_told_ends_the_cell(self) -> None:
        if self.life.state.is_busy:
            imagined = Imagined(self)
            imagined.step(INTERRUPT)
            imagined.ring(self.alarms, ev.Deadline.STUCK)
            imagined.step(INTERRUPT)
            imagined.exit(imagined.killed)
            assert imagined.life.cell is None

    def once_all_alarms_rang(self) -> Life:
        """Return what becomes of the life if no rank ever answers."""
        imagined = Imagined(self)
        imagined.killed = {each.rank for each in self.processes.values() if each.is_doomed}
        imagined.killed |= {process.rank for process, _ in self.exits}
        imagined.ring(self.alarms)
        imagined.exit(imagined.killed)
        return imagined.life

    @invariant()
    def a_start_ends_in_time(self) -> None:
        if self.life.state is GroupState.STARTING:
            assert self.once_all_alarms_rang().state is not GroupState.STARTING

    @invariant()
    def a_heal_that_failed_ends_in_time(self) -> None:
        if self.life.heal is not None and self.life.heal.failures:
            assert self.once_all_alarms_rang().heal is None

    @invariant()
    def a_stop_ends_in_time(self) -> None:
        if self.life.state is GroupState.STOPPING:
            assert self.once_all_alarms_rang().state in (GroupState.OFF, GroupState.STARTING)

    @invariant()
    def an_interrupted_or_failed_cell_ends_in_time(self) -> None:
        cell = self.life.cell
        is_ending = self.life.state is GroupState.INTERRUPTING
        if self.life.state.is_busy and cell is not None and (is_ending or cell.has_failed):
            assert self.once_all_alarms_rang().cell is None


class Imagined:
    """What would follow from here on; the real life stays as it is."""

    def __init__(self, world: AnyOrder) -> None:
        self.life = world.life
        self.ledger = Ledger(*(each.copy() for each in vars(world.ledger).values()))
        self.killed: set[int] = set()
        self.alarms: list[ev.SetDeadline] = []

    def step(self, event: ev.Event) -> None:
        before = self.life
        self.life, actions = advance(before, event)
        self.ledger.follow(before, event, self.life, actions)
        for action in actions:
            match action:
                case ev.Kill(ranks=ranks):
                    self.killed |= set(ranks)
                case ev.SetDeadline() as deadline_set:
                    self.alarms.append(deadline_set)

    def ring(self, alarms: list[ev.SetDeadline], *kinds: ev.Deadline) -> None:
        """Let alarms of these kinds ring, of all kinds by default, those too that they set."""
        self.alarms += alarms
        while due := [
            each for each in self.alarms if each.event.deadline in (kinds or ev.Deadline)
        ]:
            self.alarms.remove(due[0])
            self.step(due[0].event)

    def exit(self, ranks: Iterable[int]) -> None:
        """End the processes of these ranks, if they live."""
        attempt = self.life.attempt
        for rank in set(ranks) & set(self.life.alive):
            self.step(died(rank, attempt=attempt))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)
