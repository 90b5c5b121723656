"""The executor does what the lifecycle wants, one thing after the other; without thread or process.

Whatever fails meanwhile, the disk, the launcher, the link, a process: whoever waits is told.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLauncher, FakeLink, HandTurnedActor, HandTurnedWatcher, hand_turned, ready

from nbddp.controller.cell import CellHandle, CellRequest
from nbddp.controller.executor import Executor
from nbddp.controller.spec import GroupSpec
from nbddp.controller.states import GroupState
from nbddp.wire.messages import CellEnded, Message, RunCell

TWO = GroupSpec(nproc=2)
HELLO = CellRequest(source="print('hello')")


class Stage:
    """An executor with fakes around it."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher()
        self.link = FakeLink()
        self.executor = Executor(self.launcher, colors="")
        self.executor.means = self.means = hand_turned(self.link)

    @property
    def actor(self) -> HandTurnedActor:
        assert isinstance(self.means.actor, HandTurnedActor)
        return self.means.actor

    @property
    def watcher(self) -> HandTurnedWatcher:
        assert isinstance(self.means.watcher, HandTurnedWatcher)
        return self.means.watcher

    @property
    def state(self) -> GroupState:
        return self.executor.life.state

    def say(self, rank: int, message: Message) -> None:
        """A rank says something, and it is read."""
        self.executor.read(self.link.say(rank, message))

    def turn(self) -> None:
        """Let everything happen that can."""
        self.actor.turn_all()
        while self.watcher.notice():
            self.actor.turn_all()

    def start(self, spec: GroupSpec = TWO) -> None:
        """Start a group and see it ready."""
        started = self.executor.ask_start(spec, spec.start_event())
        self.turn()
        for rank in range(spec.nproc):
            self.say(rank, ready(rank))
        assert started.result(0) is None

    def run(self, request: CellRequest = HELLO) -> CellHandle:
        handle = self.executor.run(request)
        self.turn()
        return handle

    def end(self, handle: CellHandle, *ranks: int) -> None:
        """These ranks end the cell well."""
        for rank in ranks:
            self.say(rank, CellEnded(cell=handle.number, seconds=0.1, in_group=True))


@pytest.fixture
def stage(folder: Path) -> Stage:  # noqa: ARG001 - where the run is recorded
    return Stage()


def test_a_cell_goes_to_all_ranks_and_is_over_when_all_have_ended_it(stage: Stage) -> None:
    stage.start()
    handle = stage.run()
    assert [(rank, type(command)) for rank, command in stage.link.sent] == [
        (0, RunCell),
        (1, RunCell),
    ]
    stage.end(handle, 0)
    assert handle.result is None
    stage.end(handle, 1)
    assert handle.result is not None
    assert handle.result.is_ok
