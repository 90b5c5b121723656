"""Check that no order of events and no fault in an action is a dead end.

Hypothesis plays a user, ranks, a clock and faults against a session without a thread. The faults:
the disk is full; a process cannot be started, watched or killed; no message can be sent; ranks of
another notebook cannot connect to the store. After each event it checks the life of the group. In
the end it either stops the group or lets every process exit, and checks that no request is pending.
"""

from functools import partial
from operator import attrgetter
from pathlib import Path

from any_order import HELLO, INJECTED, RANK, WORLD, AnyOrder, InjectedError, Rank
from fakes import FakeHandle, request_start
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from nbddp.controller.surviving_group import SurvivingGroup, SurvivingRank
from nbddp.lifecycle.group_state import GroupState
from nbddp.record import run_folder
from nbddp.wire import messages as msg
from nbddp.wire.group_spec import GroupSpec

BEGIN = run_folder._create_folder


class AnyOrderWithFaults(AnyOrder):
    # ---- the faults

    @precondition(lambda self: self.is_open())
    @rule(where=st.sampled_from(["launcher.faults", "actor.watch_faults", "link.faults"]))
    def one_call_will_fail(self, where: str) -> None:
        attrgetter(where)(self).append(INJECTED)

    @precondition(lambda self: self.is_open())
    @rule()
    def the_link_breaks(self) -> None:
        self.link.is_broken = True

    @precondition(lambda self: self.is_open())
    @rule()
    def the_link_is_lost(self) -> None:
        self.actor.submit_urgent(self.session.actor.executor.on_link_lost, INJECTED)

    @rule()
    def the_next_link_fails(self) -> None:
        self.cannot_connect = True

    @rule()
    def the_disk_is_full(self) -> None:
        self.patch.setattr(run_folder, "_create_folder", self.refuse)

    @rule()
    def the_cleanup_of_processes_fails(self) -> None:
        self.launcher.cleanup_error = INJECTED

    @precondition(lambda self: self.living())
    @rule()
    def the_ranks_cannot_be_killed(self) -> None:
        for rank in self.living():
            rank.handle.kill_error = INJECTED

    def refuse(self, *_arguments: object) -> None:
        raise InjectedError(28, "No space left on device")

    @rule()
    def all_faults_are_repaired(self) -> None:
        self.launcher.faults.clear()
        self.launcher.cleanup_error = None
        self.cannot_connect = False
        self.patch.setattr(run_folder, "_create_folder", BEGIN)
        if self.is_open():
            self.actor.watch_faults.clear()
            self.link.faults.clear()
            self.link.is_broken = False
        for rank in self.living():
            rank.handle.kill_error = None

    # ---- ranks of another notebook

    @precondition(lambda self: self.is_open() and self.state is GroupState.OFF)
    @rule(
        world_size=WORLD,
        ranks=st.sets(RANK, min_size=1),
        incarnation=st.integers(0, 1),
        unwatched=st.integers(0, 3),
        unkillable=st.sets(RANK),
        can_connect=st.sampled_from([True, True, True, False]),
    )
    def takes_back_ranks_of_another_notebook(
        self,
        world_size: int,
        ranks: set[int],
        incarnation: int,
        unwatched: int,
        unkillable: set[int],
        can_connect: bool,
    ) -> None:
        self.catch_up()
        attempt = self.session.life.attempt + 1
        survivors = [
            Rank(attempt, rank, FakeHandle(obeys=False), incarnation)
            for rank in ranks
            if rank < world_size
        ]
        if self.state is not GroupState.OFF or not survivors:
            return
        for survivor in survivors:
            survivor.handle.kill_error = INJECTED if survivor.rank in unkillable else None
        self.actor.watch_faults.extend([INJECTED] * unwatched)
        group = SurvivingGroup(
            ranks={
                survivor.rank: SurvivingRank(survivor.handle, {"incarnation": incarnation})
                for survivor in survivors
            },
            set_store_port=lambda _port: None if can_connect else self.refuse(),
            attempt=attempt,
            world_size=world_size,
            secret=b"",
            folder=Path("gone"),
            options={},
        )
        spec, event = GroupSpec(nproc=world_size), group.rejoin_event()
        start = partial(request_start, self.session, survivors=group)
        self.make_request("start", start, spec, event)
        if self.session.actor.state.ranks.handles:
            self.ranks.update({(attempt, each.rank): each for each in survivors})
        else:  # they run on, for the next try
            assert not [each for each in survivors if each.is_being_killed]

    # ---- the end

    def teardown(self) -> None:
        try:
            if self.stops_in_the_end:
                self.check_that_a_stop_ends_in_off()
            else:
                self.check_that_all_exits_are_handled()
            self.check_that_no_request_is_pending()
            self.all_faults_are_repaired()
            self.check_that_a_start_works()
        finally:
            self.patch.undo()
            self.folder.cleanup()

    def check_that_a_stop_ends_in_off(self) -> None:
        """Check that a stop works while the injected faults remain."""
        if self.is_open():
            self.requests_a_stop()
            self.run_until_idle()
        assert self.state is GroupState.OFF
        assert not self.living(lambda each: not each.is_being_killed), "left running"

    def check_that_all_exits_are_handled(self) -> None:
        while self.is_open() and (self.living() or self.launching.inbox):
            for rank in self.living():
                rank.handle.end(-9)
            self.handle_all_events()
        self.run_until_idle()
        assert self.state in (GroupState.OFF, GroupState.BROKEN)

    def run_until_idle(self) -> None:
        for _ in range(100):
            self.handle_all_events()
            doomed = self.living(lambda each: each.handle.end_requested)
            leaving = self.living(lambda each: each.is_free)
            if not self.is_open() or not (doomed or leaving or self.actor.due):
                return
            for rank in doomed:
                rank.handle.end(-15)
            for rank in leaving:
                if rank.handle.exitcode is None:
                    self.take_command(rank)
            due, self.actor.due = self.actor.due, []
            for _, act in due:
                self.actor.submit(act)
        raise AssertionError("the session never becomes idle")

    def check_that_no_request_is_pending(self) -> None:
        assert [what for what, future in self.futures if not future.done()] == []
        assert [cell.number for cell in self.cells if cell.result is None] == []
        assert [number for number, count in self.finished.items() if count > 1] == []

    def check_that_a_start_works(self) -> None:
        """Check that a group works after all faults are repaired."""
        self.starts_or_restarts(2, joins_group=True)
        self.ranks_work_normally()
        assert self.state is GroupState.IDLE
        cell = self.session.submit(HELLO)
        self.ranks_work_normally()
        for rank in self.living(lambda each: each.cell == cell.number):
            self.post(rank, msg.CellEnded(cell=cell.number, in_group=True))
        self.ranks_work_normally()
        assert cell.result is not None
        assert cell.result.is_ok
        self.requests_a_stop()
        self.run_until_idle()
        assert self.state is GroupState.OFF
        self.session.close()


TestAnyOrder = AnyOrderWithFaults.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)
