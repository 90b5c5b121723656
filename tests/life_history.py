"""Checks that hold for the life of a worker group after any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace

from life_states import INTERRUPT, OFF, START, STOP, died, ended

from nbddp.lifecycle import events as ev
from nbddp.lifecycle.group_state import GroupState, Life, RankState
from nbddp.lifecycle.transitions import advance
from nbddp.wire.messages import Regroup


@dataclass
class History:
    """A life, and counters of its actions that must balance in the end."""

    life: Life = OFF
    sent: Counter[int] = field(default_factory=Counter)
    finished: Counter[int] = field(default_factory=Counter)
    stopped: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[int] = field(default_factory=Counter)
    handed: dict[int, int] = field(default_factory=dict)
    arrived: Counter[str] = field(default_factory=Counter)  # nodes, in this attempt
    deadlines: list[ev.DeadlinePassed] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    # ---- each step

    def step(self, event: ev.Event) -> None:
        self.follow(event, *advance(self.life, event))

    def follow(self, event: ev.Event, life: Life, actions: list[ev.Action]) -> None:
        before, self.life = self.life, life
        match event:
            case ev.ProcessExited(attempt=before.attempt, rank=rank):
                self.handed.pop(rank, None)
                self.killed.discard(rank)
            case ev.RankEndedCell(attempt=before.attempt, rank=rank, cell=cell):
                if self.handed.get(rank) == cell:
                    del self.handed[rank]
            case ev.NodeJoined(name=name) if before.state.is_live:
                self.arrived[name] += 1
            case ev.DeadlinePassed():
                deadline = replace(event, working=(), stopped=())
                if deadline in self.deadlines:
                    self.deadlines.remove(deadline)
        if any(isinstance(action, ev.Refuse) for action in actions):
            assert len(actions) == 1
            assert life == before
        gone = event.rank if isinstance(event, ev.ProcessExited) else None
        alive = [rank for rank in before.alive if rank != gone]
        for action in actions:
            self._check_action(action, before, alive)

    def _check_action(  # noqa: C901 - one short case per action
        self, action: ev.Action, before: Life, alive: list[int]
    ) -> None:
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
            case ev.SetDeadline(event=deadline):
                self.deadlines.append(deadline)
            case ev.Kill(ranks=ranks) | ev.Terminate(ranks=ranks):
                self.killed |= {*ranks}
            case ev.StartReplacements(ranks=ranks):
                self.killed -= {*ranks}
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
                for numbers in (self.handed, self.arrived, self.killed):
                    numbers.clear()

    # ---- what may follow

    def imagine(self, *events: ev.Event) -> History:
        """Return this history as it would continue with these events."""
        imagined = History(self.life, *(copy(each) for each in [*vars(self).values()][1:]))
        for event in events:
            imagined.step(event)
        return imagined

    def expire(self, *kinds: ev.Deadline) -> None:
        while due := [each for each in self.deadlines if each.deadline in (kinds or ev.Deadline)]:
            self.step(due[0])

    def exit(self, ranks: Iterable[int]) -> None:
        attempt = self.life.attempt
        for rank in set(ranks) & set(self.life.alive):
            self.step(died(rank, attempt=attempt))

    def check(self) -> None:
        """Check the state, and that no further order of events is a dead end."""
        self._check_state()
        self._check_that_a_stop_leads_to_off()
        self._check_that_a_restarted_group_runs_cells()
        if self.life.state in (GroupState.IDLE, GroupState.BROKEN):
            self._check_that_living_ranks_run_cells()
        if self.life.state is GroupState.HEALING:
            self._check_that_an_interrupt_ends_a_heal()
        if self.life.state.is_busy:
            self._check_that_a_second_interrupt_ends_a_cell()
        self._check_that_deadlines_end_everything()

    def _check_state(self) -> None:
        life, cell = self.life, self.life.cell
        assert life.state.is_live is bool(life.ranks)
        assert [each.rank for each in life.ranks] == list(range(len(life.ranks)))
        if life.state.is_busy:
            assert cell is not None
            assert cell.waiting, "a cell without ranks never ends"
            assert cell.waiting <= set(life.alive)
            is_ended = life.state is not GroupState.RUNNING
            assert is_ended or not cell.is_outgrown, "an elastic cell continues on too few ranks"
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

    def _check_that_a_stop_leads_to_off(self) -> None:
        imagined = self.imagine(STOP)
        imagined.exit(imagined.life.alive)
        assert imagined.life.state is GroupState.OFF
        assert imagined.sent == imagined.finished
        attempts = range(1, imagined.life.attempt + 1)
        assert all(imagined.stopped[attempt] == 1 for attempt in attempts)

    @property
    def _next_cell(self) -> int:
        return max(self.sent, default=0) + 1

    def _check_that_a_restarted_group_runs_cells(self) -> None:
        imagined = self.imagine(ev.RestartAsked(start=START))
        if imagined.life.attempt == self.life.attempt:
            imagined.exit(imagined.life.alive)
        for rank in range(2):
            imagined.step(ev.RankReady(attempt=imagined.life.attempt, rank=rank))
        imagined.step(ev.RunAsked(cell=self._next_cell, ranks=(0, 1)))
        assert imagined.life.state is GroupState.RUNNING

    def _check_that_living_ranks_run_cells(self) -> None:
        alive, number = tuple(self.life.alive), self._next_cell
        if alive:
            imagined = self.imagine(ev.RunAsked(cell=number, ranks=alive))
            for rank in alive:
                assert imagined.life.state is GroupState.RUNNING
                imagined.step(ended(rank, cell=number, attempt=imagined.life.attempt))
            assert imagined.finished[number] == 1

    def _check_that_an_interrupt_ends_a_heal(self) -> None:
        assert self.life.heal is not None
        survivors = set(self.life.alive) - set(self.life.heal.replacements)
        imagined = self.imagine(INTERRUPT)
        imagined.expire(ev.Deadline.CANCEL)
        assert imagined.life.state is GroupState.BROKEN
        assert set(imagined.life.alive) == survivors

    def _check_that_a_second_interrupt_ends_a_cell(self) -> None:
        imagined = self.imagine(INTERRUPT)
        imagined.expire(ev.Deadline.STUCK)
        imagined.step(INTERRUPT)
        imagined.exit(imagined.killed)
        assert imagined.life.cell is None

    def _check_that_deadlines_end_everything(self) -> None:
        """Check that starts, stops, failed heals and ending cells end if no rank answers."""
        state, heal, cell = self.life.state, self.life.heal, self.life.cell
        later = self.imagine()
        later.expire()
        later.exit(later.killed)
        if state is GroupState.STARTING:
            assert later.life.state is not GroupState.STARTING
        if state is GroupState.STOPPING:
            assert later.life.state in (GroupState.OFF, GroupState.STARTING)
        if heal is not None and heal.failures:
            assert later.life.heal is None
        if state is GroupState.INTERRUPTING or (state.is_busy and cell and cell.has_failed):
            assert later.life.cell is None
