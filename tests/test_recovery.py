"""A replay does again what was done, until a cell fails or the user asks for an end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLauncher, FakeLink, make_willing, with_threads

from nbddp.controller.session import Session
from nbddp.controller.spec import GroupSpec
from nbddp.errors import CellInterruptedError, RequestError
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.comeback import Retries
from nbddp.lifecycle.states import GroupState
from nbddp.record.cell import CellHandle, CellRequest, CellResult
from nbddp.record.pushes import Pushed
from nbddp.wire.messages import CellEnded, Command, Interrupt, RunCell

TWO = GroupSpec(nproc=2)
DEEDS = tuple(
    CellRequest(source=f"step {number}", execution_count=number + 4) for number in range(3)
)
ENDED_EARLY = (
    "the replay did not come to its end; done again: {}; not done again: {}; "
    "`%ddp restart --replay` does all of it again"
)
FAILURE = {"name": "ValueError", "text": "no", "traceback": "ValueError: no", "at": 1.0}


def again(deeds: tuple[CellRequest, ...]) -> tuple[CellRequest, ...]:
    return tuple(replace(deed, is_again=True) for deed in deeds)


class Play:
    """A session with willing ranks, of whose cells some do not end by themselves."""

    def __init__(self, launcher: FakeLauncher | None = None) -> None:
        self.launcher: Any = launcher or FakeLauncher()
        self.link = FakeLink()
        make_willing(self.launcher, self.link)
        self.session = Session(self.launcher, make_means=lambda: with_threads(self.link))
        self.said: list[str] = []
        self.sources: list[str] = []
        self.hung = threading.Event()
        self.hangs_in = self.fails_in = ""
        self.on_cell: Callable[[str], None] = lambda _source: None
        self.obey, self.link.on_send = self.link.on_send, self.receive
        self.recovery = Recovery(self.session, show=self.show, push=self.push, say=self.said.append)

    def receive(self, attempt: int, rank: int, command: Command) -> None:
        if isinstance(command, RunCell):
            if rank == 0:
                self.sources.append(command.source)
                self.on_cell(command.source)
            if command.source == self.hangs_in:
                self.hung.set()
                return
            if command.source == self.fails_in:
                self.end(attempt, rank, command.cell, is_interrupted=False)
                return
        if isinstance(command, Interrupt):
            self.end(attempt, rank, command.cell, is_interrupted=True)
        self.obey(attempt, rank, command)

    def end(self, attempt: int, rank: int, cell: int, *, is_interrupted: bool) -> None:
        """A rank ends a cell badly."""
        report = CellEnded(
            cell=cell, seconds=0, in_group=True, is_interrupted=is_interrupted, failure=FAILURE
        )
        self.link.say(rank, report, attempt=attempt)

    def show(self, handle: CellHandle) -> CellResult:
        for _ in handle.notices():
            pass
        assert handle.result is not None
        return handle.result

    def push(self, pushed: Pushed) -> None:
        self.sources.append(f"push {pushed.names}")

    def interrupt_when_it_hangs(self) -> None:
        def press() -> None:
            self.hung.wait(20)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=press).start()


@pytest.fixture
def play(folder: Path) -> Iterator[Play]:  # noqa: ARG001 - where the run is recorded
    play = Play()
    play.session.start(TWO)
    yield play
    play.session.close()


def test_a_replay_does_again_what_was_done_in_its_order(play: Play) -> None:
    assert play.recovery.replay(DEEDS) is None
    assert play.sources == ["step 0", "step 1", "step 2"]


def test_an_interrupt_in_a_replay_reaches_the_ranks_and_ends_it_there(play: Play) -> None:
    play.hangs_in = "step 1"
    play.interrupt_when_it_hangs()
    result = play.recovery.replay(DEEDS)
    assert result is not None
    with pytest.raises(CellInterruptedError):
        result.raise_for_failure()
    assert play.sources == ["step 0", "step 1"]
    assert play.session.life.state is GroupState.IDLE
    assert len(play.session.deeds) == 1
    assert play.said == [ENDED_EARLY.format("cell 4", "cells 5-6")]
    assert play.session.undone == DEEDS[1:]
    play.hangs_in = ""
    assert play.show(play.session.submit(CellRequest(source="next"))).is_ok


def test_an_interrupt_between_two_cells_of_a_replay_is_not_lost(play: Play) -> None:
    play.on_cell = lambda source: play.session.interrupt() if source == "step 1" else None
    # too late for the cell itself, whose ranks have ended it when the interrupt is read
    with pytest.raises(CellInterruptedError) as caught:
        play.recovery.replay(DEEDS)
    assert str(caught.value) == "the replay was ended when 2 of 3 cells and pushes were done"
    assert caught.value.report.splitlines()[1] == (
        "Every rank that lives keeps its names; the next cell works."
    )
    assert play.session.life.state is GroupState.IDLE


def test_a_stop_during_a_replay_ends_it_and_the_ranks(play: Play) -> None:
    play.hangs_in = "step 1"

    def stop() -> None:
        play.hung.wait(20)
        play.session.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    result = play.recovery.replay(DEEDS)
    thread.join()
    assert result is not None
    assert result.verdict is not None
    assert result.verdict.is_interrupt
    assert play.sources == ["step 0", "step 1"]
    assert play.session.life.state is GroupState.OFF


def test_a_cell_that_fails_in_a_replay_ends_it_and_is_said(play: Play) -> None:
    play.fails_in = "step 1"
    result = play.recovery.replay(DEEDS)
    assert result is not None
    assert not result.is_ok
    assert play.sources == ["step 0", "step 1"]
    assert play.said == [
        "a cell that had gone well failed when it was replayed",
        ENDED_EARLY.format("cell 4", "cells 5-6"),
    ]


def test_what_a_replay_left_undone_is_done_by_the_next_one_unless_other_things_were(
    play: Play,
) -> None:
    play.fails_in = "step 1"
    play.recovery.replay(DEEDS, restart=play.session.restart)
    assert (play.session.deeds, play.session.undone) == (again(DEEDS[:1]), DEEDS[1:])
    play.fails_in = ""
    play.recovery.replay((*play.session.deeds, *play.session.undone), restart=play.session.restart)
    assert (play.session.deeds, play.session.undone) == (again(DEEDS), ())
    play.fails_in = "step 1"
    play.recovery.replay(DEEDS, restart=play.session.restart)
    assert play.show(play.session.submit(CellRequest(source="other"))).is_ok
    assert play.session.undone == ()


def test_a_restart_that_is_stopped_before_its_replay_leaves_all_to_do(play: Play) -> None:
    def stopped() -> None:
        play.session.restart()
        play.session.stop()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play.recovery.replay(DEEDS, restart=stopped)
    assert play.said == [ENDED_EARLY.format("nothing", "cells 4-6")]
    assert (play.session.deeds, play.session.undone) == ((), DEEDS)
    play.session.start(TWO)  # for a cell that misses their names
    assert (play.session.deeds, play.session.undone) == ((), DEEDS)


def test_a_restart_that_is_refused_says_nothing_of_a_replay(play: Play) -> None:
    def refused() -> None:
        raise RequestError("no")

    with pytest.raises(RequestError):
        play.recovery.replay(DEEDS, restart=refused)
    assert play.said == []
    assert play.session.undone == ()


def test_an_interrupt_in_a_recovery_ends_it_and_nothing_is_started_again(play: Play) -> None:
    assert play.show(play.session.submit(DEEDS[0])).is_ok
    play.fails_in, play.hangs_in = "fails", ""

    def hang_from_now_on(source: str) -> None:
        if source == "fails":
            play.hangs_in = "step 0"

    play.on_cell = hang_from_now_on
    play.interrupt_when_it_hangs()
    result = play.recovery.run(CellRequest(source="fails"), Retries(restarts=3))
    with pytest.raises(CellInterruptedError):
        result.raise_for_failure()
    assert play.session.life.attempt == 2
    assert play.sources == ["step 0", "fails", "step 0"]
    assert play.session.life.state is GroupState.IDLE


def test_a_cell_that_fails_while_the_user_asks_for_its_end_is_not_started_again(
    play: Play,
) -> None:
    play.fails_in = "fails"
    play.on_cell = lambda _source: play.session.interrupt()
    result = play.recovery.run(CellRequest(source="fails"), Retries(restarts=3))
    assert not result.is_ok
    assert play.said == ["not started again: you asked to end it"]
    assert play.session.life.attempt == 1


class Roomy(FakeLauncher):
    """Nodes come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = 2
        self.on_room: Callable[[], None] | None = None

    def world_size(self, asked: int) -> int:
        return max(asked, self.ranks)

    def has_room(self) -> bool:
        return self.ranks > max((rank for _, rank in self.handles), default=1) + 1

    def watch_room(self, on_room: Callable[[], None] | None) -> None:
        self.on_room = on_room

    def bring(self, ranks: int) -> None:
        """A node comes; on a thread of its own, as from the door."""
        self.ranks = ranks
        coming = threading.Thread(target=self.on_room or (lambda: None))
        coming.start()
        coming.join()


@pytest.fixture
def roomy(folder: Path) -> Iterator[Play]:  # noqa: ARG001 - where the run is recorded
    play = Play(Roomy())
    play.session.start(TWO)
    assert play.show(play.session.submit(DEEDS[0])).is_ok
    yield play
    play.session.close()


def test_an_elastic_cell_begins_with_the_nodes_that_came_before(roomy: Play) -> None:
    roomy.launcher.bring(3)
    result = roomy.recovery.run(CellRequest(source="trains"), Retries(is_elastic=True))
    assert result.is_ok
    assert roomy.sources == ["step 0", "step 0", "trains"]
    assert roomy.said == ["3 ranks now, 2 before"]
    assert roomy.session.life.alive == [0, 1, 2]


def test_an_elastic_cell_begins_again_when_a_node_comes(roomy: Play) -> None:
    roomy.hangs_in = "trains"

    def come() -> None:
        roomy.hung.wait(20)
        roomy.hangs_in = ""
        roomy.launcher.bring(4)

    coming = threading.Thread(target=come)
    coming.start()
    result = roomy.recovery.run(CellRequest(source="trains"), Retries(is_elastic=True))
    coming.join()
    assert result.is_ok
    assert roomy.sources == ["step 0", "trains", "step 0", "trains"]
    assert roomy.said == ["4 ranks now, 2 before"]
    assert roomy.session.times_ended == 0
    assert roomy.launcher.on_room is None


def test_what_is_replayed_for_one_node_is_not_ended_for_the_next(roomy: Play) -> None:
    roomy.hangs_in = "trains"

    def come(source: str) -> None:
        if source == "step 0" and roomy.sources.count(source) == 2:
            roomy.launcher.bring(4)
        elif source == "step 0":
            roomy.hangs_in = ""

    roomy.on_cell = come
    roomy.launcher.bring(3)
    result = roomy.recovery.run(CellRequest(source="trains"), Retries(is_elastic=True))
    assert result.is_ok
    assert roomy.said == ["3 ranks now, 2 before", "4 ranks now, 3 before"]
    assert roomy.sources == ["step 0", "step 0", "trains", "step 0", "trains"]


def test_an_elastic_cell_that_the_user_ends_stays_ended(roomy: Play) -> None:
    roomy.hangs_in = "trains"
    roomy.interrupt_when_it_hangs()
    result = roomy.recovery.run(CellRequest(source="trains"), Retries(is_elastic=True))
    with pytest.raises(CellInterruptedError):
        result.raise_for_failure()
    assert roomy.sources == ["step 0", "trains"]


def test_a_cell_that_is_not_elastic_leaves_a_node_waiting(roomy: Play) -> None:
    roomy.launcher.bring(3)
    assert roomy.recovery.run(CellRequest(source="trains")).is_ok
    assert roomy.session.life.alive == [0, 1]
