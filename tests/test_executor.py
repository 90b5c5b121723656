"""The executor does what the lifecycle wants, one thing after the other; without thread or process.

Whatever fails meanwhile, the disk, the launcher, the link, a process: whoever waits is told.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest
from fakes import FakeLauncher, FakeLink, HandTurnedActor, HandTurnedWatcher, hand_turned, ready

from nbddp.controller.executor import Executor
from nbddp.controller.ranks import Ranks
from nbddp.controller.requests import Requests
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.lifecycle.events import InterruptAsked, RestartAsked
from nbddp.lifecycle.states import GroupState
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.finished import RecordedRun
from nbddp.record.notices import Said, Wrote
from nbddp.wire.messages import Answer, CellEnded, Command, Interrupt, Message, Output, RunCell
from nbddp.wire.name_messages import Complete

TWO = GroupSpec(nproc=2)
HELLO = CellRequest(source="print('hello')")


class Stage:
    """An executor with fakes around it."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher()
        self.link = FakeLink()
        self.executor = Executor(self.launcher, colors="")
        self.asks = Requests(self.executor)
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
        while self.turn_once():
            pass

    def turn_once(self) -> bool:
        """One thing that can happen; whether there was one."""
        for actor in (self.actor, self.means.launching):
            if actor.inbox:
                actor.turn()
                return True
        return self.watcher.notice()

    def start(self, spec: GroupSpec = TWO) -> None:
        """Start a group and see it ready."""
        started = self.asks.ask_start(spec, spec.start_event())
        self.turn()
        for rank in range(spec.nproc):
            self.say(rank, ready(rank))
        assert started.result() is None

    def run(self, request: CellRequest = HELLO) -> CellHandle:
        handle = self.asks.begin_cell(request)
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


def test_what_a_rank_writes_the_moment_it_is_sent_a_cell_is_the_cells(stage: Stage) -> None:
    stage.start()
    folder = stage.executor.time_line.folder
    assert folder is not None

    def write(_attempt: int, rank: int, _command: Command) -> None:
        with folder.log(rank).open("a") as log:
            log.write(f"hello from {rank}\n")

    stage.link.on_send = write
    stage.end(stage.run(), 0, 1)
    stage.end(stage.run(), 0, 1)
    run = RecordedRun(folder.path)
    for cell in run.cells:
        assert [run.tail(rank, 10, cell) for rank in (0, 1)] == ["hello from 0", "hello from 1"]


def test_what_a_rank_wrote_before_it_died_between_cells_is_not_heard_in_a_later_one(
    stage: Stage,
) -> None:
    stage.start()
    stage.end(stage.run(), 0, 1)
    folder = stage.executor.time_line.folder
    assert folder is not None
    folder.log(1).write_text("Fatal Python error: Segmentation fault\n")
    stage.launcher.handles[1, 1].end(-11)
    stage.turn()
    handle = stage.run(CellRequest(source="1", ranks=(0,)))
    stage.end(handle, 0)
    assert [each for each in handle.notices() if isinstance(each, Wrote)] == []
    assert folder.last_words(1).startswith("Fatal Python error")


def test_what_ranks_write_between_cells_the_next_one_hears_but_not_after_a_restart(
    stage: Stage,
) -> None:
    stage.start()
    stage.say(0, Output(start=0, end=6, text="a line"))
    stage.end(handle := stage.run(), 0, 1)
    assert list(handle.notices()) == [Wrote(0, "a line")]
    stage.say(0, Output(start=6, end=13, text=" and on"))
    stage.asks.ask_stop()
    for rank in (0, 1):
        stage.launcher.handles[1, rank].end(0)
    stage.turn()
    stage.start()
    stage.end(handle := stage.run(), 0, 1)
    assert [each for each in handle.notices() if isinstance(each, Wrote)] == []


# ---- the disk fails


def test_a_run_that_cannot_be_recorded_anywhere_is_no_start_and_the_next_one_works(
    stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_disk(patch)
        started = stage.asks.ask_start(TWO, TWO.start_event())
        stage.turn()
        assert stage.state is GroupState.OFF
    error = started.exception()
    assert str(error) == (
        f"the run cannot be recorded, neither in {folder} (No space left on device) nor in "
        "a temporary folder (No space left on device); make room, or start in another folder"
    )
    assert not stage.launcher.handles
    stage.start()
    stage.end(stage.run(), 0, 1)


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """No folder can be made anywhere."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    patch.setattr("pathlib.Path.mkdir", refuse)
    patch.setattr("tempfile.mkdtemp", refuse)


@pytest.mark.parametrize("asks", ["stop", "restart"])
def test_after_a_start_for_which_there_was_no_room_a_stop_and_a_restart_work(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    with monkeypatch.context() as patch:
        fill_disk(patch)
        stage.asks.ask_start(TWO, TWO.start_event())
    if asks == "stop":
        stopped = stage.asks.ask_stop()
        stage.turn()
        assert stopped.result() is None
        assert stage.state is GroupState.OFF
        return
    event = RestartAsked(start=TWO.start_event())
    started = stage.asks.ask_start(TWO, event)
    stage.turn()
    stage.say(0, ready(0))
    stage.say(1, ready(1))
    assert started.result() is None


def test_a_restart_for_which_there_is_no_room_ends_the_old_ranks_and_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.start()
    (stage.executor.time_line.folder.path / "events.jsonl").unlink()
    for path in stage.executor.time_line.folder.path.iterdir():
        path.unlink()
    stage.executor.time_line.folder.path.rmdir()
    with monkeypatch.context() as patch:
        fill_disk(patch)
        started = stage.asks.ask_start(TWO, RestartAsked(start=TWO.start_event()))
        stage.turn()
        for handle in stage.launcher.living():
            handle.end(0)
        stage.turn()
    assert str(started.exception()).startswith("the run cannot be recorded")
    assert stage.state is GroupState.OFF
    stage.start()


# ---- processes cannot be started, or not yet


def test_a_rank_that_cannot_be_started_is_named_and_the_others_are_ended(stage: Stage) -> None:
    stage.launcher.faults.extend([None, OSError(errno.EAGAIN, "Resource temporarily unavailable")])
    started = stage.asks.ask_start(TWO, TWO.start_event())
    stage.turn()
    assert str(started.exception()) == (
        "rank 1 could not be started: Resource temporarily unavailable"
    )
    assert stage.state is GroupState.OFF
    assert not stage.launcher.living()
    stage.start()


def test_a_process_whose_end_would_not_be_seen_is_no_rank(stage: Stage) -> None:
    stage.watcher.faults.append(OSError(errno.EMFILE, "Too many open files"))
    started = stage.asks.ask_start(TWO, TWO.start_event())
    stage.turn()
    assert str(started.exception()) == "rank 0 could not be started: Too many open files"
    assert stage.state is GroupState.OFF
    assert not stage.launcher.living()


def test_while_the_helper_imports_a_stop_works_and_nothing_is_started_later(stage: Stage) -> None:
    started = stage.asks.ask_start(TWO, TWO.start_event())
    stopped = stage.asks.ask_stop()
    stage.actor.turn_all()  # the launching thread still waits
    assert stopped.result() is None
    assert str(started.exception()) == "stopped while it started"
    assert stage.state is GroupState.OFF
    stage.turn()
    assert not stage.launcher.handles


def test_while_the_helper_imports_a_start_ends_in_time(stage: Stage) -> None:
    started = stage.asks.ask_start(TWO, TWO.start_event())
    stage.actor.ring()
    stage.actor.turn_all()
    assert str(started.exception()) == "ranks 0-1 did not get ready in 90 s"
    assert stage.state is GroupState.OFF


def test_a_process_that_comes_late_is_ended_and_disturbs_nobody(stage: Stage) -> None:
    stage.asks.ask_start(TWO, TWO.start_event())
    stage.means.launching.turn()  # rank 0 was being started when the stop came
    stopped = stage.asks.ask_stop()
    stage.actor.turn_all()
    assert stopped.done()
    late = stage.launcher.handles[1, 0]
    stage.start()
    assert late.exitcode == -9
    assert late.is_joined
    assert list(stage.launcher.handles) == [(1, 0), (2, 0), (2, 1)]
    asked = stage.asks.send(0, lambda number: Complete(request=number, code="", cursor=0))
    stage.turn()
    assert not asked.done()


def test_what_a_rank_says_before_its_process_is_known_is_heard_then(stage: Stage) -> None:
    started = stage.asks.ask_start(TWO, TWO.start_event())
    stage.say(0, ready(0))
    stage.say(1, ready(1))
    assert not started.done()
    assert stage.executor.process_ids() == {}
    stage.turn()
    assert started.result() is None
    assert set(stage.executor.process_ids()) == {0, 1}


def test_ranks_that_are_interrupted_get_a_signal_before_the_message(stage: Stage) -> None:
    stage.start()
    handle = stage.run()
    seen: list[tuple[int, int]] = []
    stage.link.on_send = lambda attempt, rank, _command: seen.append(
        (rank, stage.launcher.handles[attempt, rank].interrupts)
    )
    stage.executor.step(InterruptAsked())
    assert seen == [(0, 1), (1, 1)]
    assert stage.link.sent[-2:] == [(rank, Interrupt(cell=handle.number)) for rank in (0, 1)]


# ---- ranks cannot be told


def test_a_cell_that_cannot_be_sent_to_a_rank_has_failed_there_and_nobody_is_ended(
    stage: Stage,
) -> None:
    stage.start()
    stage.link.faults.extend([None, ConnectionError("the store is gone")])
    handle = stage.run()
    assert handle.result is None
    stage.actor.ring(-1)  # the other rank is not waited for longer than after any failure
    assert stage.link.sent[-1] == (0, Interrupt(cell=handle.number))
    stage.end(handle, 0)
    assert handle.result is not None
    assert handle.result.verdict is not None
    assert handle.result.verdict.summary() == (
        "rank 1: RequestError: the cell could not be sent: ConnectionError: the store is gone"
    )
    assert stage.state is GroupState.IDLE
    stage.end(stage.run(), 0, 1)


def test_a_cell_that_can_be_sent_to_nobody_ends_at_once(stage: Stage) -> None:
    stage.start()
    stage.link.is_broken = True
    handle = stage.run()
    assert handle.result is not None
    assert not handle.result.is_ok
    stage.link.is_broken = False
    again = stage.run()
    stage.end(again, 0, 1)
    assert again.result is not None
    assert again.result.is_ok


def test_a_rank_that_cannot_be_interrupted_is_killed_and_the_user_is_told(stage: Stage) -> None:
    stage.start()
    handle = stage.run()
    stage.link.faults.extend([None, ConnectionError("the store is gone")])
    stage.executor.step(InterruptAsked())
    stage.end(handle, 0)
    stage.turn()
    assert handle.result is not None
    assert handle.result.exits == {1: -9}
    assert Said("rank 1 cannot be told anything: killed (ConnectionError: the store is gone)") in (
        list(handle.notices())
    )
    assert stage.state is GroupState.BROKEN


def test_ranks_that_cannot_be_told_to_leave_are_killed(stage: Stage) -> None:
    stage.start()
    stage.link.is_broken = True
    stopped = stage.asks.ask_stop()
    stage.turn()
    assert stopped.result() is None
    assert stage.state is GroupState.OFF


def test_a_rank_that_cannot_even_be_killed_is_given_up(stage: Stage) -> None:
    stage.start()
    stage.launcher.handles[1, 1].kill_fails = PermissionError(errno.EPERM, "not permitted")
    handle = stage.run()
    killed = stage.asks.ask_kill(1)
    stage.turn()
    assert killed.result() is None
    stage.end(handle, 0)
    said = list(handle.notices())
    assert said[0] == Said("rank 1 cannot be killed: given up (not permitted)")
    assert stage.executor.life.alive == [0]
    stage.launcher.handles[1, 1].end(3)
    stage.turn()
    assert stage.executor.life.ranks[1].exitcode is None
    stage.asks.ask_stop()
    stage.launcher.handles[1, 0].end(0)
    stage.turn()
    assert stage.state is GroupState.OFF


def test_a_question_that_cannot_be_sent_is_refused_and_the_next_one_is_not(stage: Stage) -> None:
    stage.start()
    stage.link.faults.append(ConnectionError("the store is gone"))
    with pytest.raises(RequestError) as caught:
        stage.asks.send(1, lambda number: Complete(request=number, code="", cursor=0))
    assert str(caught.value) == "rank 1 cannot be asked: ConnectionError: the store is gone"
    answer = stage.asks.send(1, lambda number: Complete(request=number, code="", cursor=0))
    question = stage.link.sent[-1][1]
    assert isinstance(question, Complete)
    stage.say(1, Answer(request=question.request))
    assert answer.result().error == ""


# ---- ranks cannot be heard, or their last words not be read


def test_when_the_ranks_cannot_be_heard_any_more_they_are_ended_and_the_cell_is_over(
    stage: Stage,
) -> None:
    stage.start()
    handle = stage.run()
    stage.executor.lose_link(ConnectionError("the store is gone"))
    stage.turn()
    assert handle.result is not None
    assert handle.result.exits == {0: -9, 1: -9}
    assert Said(
        "the ranks cannot be heard any more: killed (ConnectionError: the store is gone)"
    ) in list(handle.notices())
    assert stage.state is GroupState.BROKEN


def test_a_start_whose_ranks_cannot_be_heard_fails_and_says_why(stage: Stage) -> None:
    started = stage.asks.ask_start(TWO, TWO.start_event())
    stage.executor.lose_link(ConnectionError("the store is gone"))
    stage.turn()
    assert str(started.exception()) == (
        "the ranks could not be started: ConnectionError: the store is gone"
    )
    assert stage.state is GroupState.OFF


@pytest.mark.parametrize("what", ["sweep", "log", "join"])
def test_an_end_is_seen_whatever_cannot_be_done_about_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stage.start()
    handle = stage.run()
    match what:
        case "sweep":
            stage.launcher.sweep_fails = PermissionError("no")
        case "log":
            monkeypatch.setattr(Ranks, "last_output", refuse_all)
        case "join":
            monkeypatch.setattr("fakes.FakeHandle.join", refuse_all)
    asked = stage.asks.ask_kill(1)
    stage.end(handle, 0)
    with contextlib.suppress(OSError):  # the actor logs it and goes on
        stage.turn()
    assert asked.done()
    assert handle.result is not None
    assert handle.result.verdict is not None
    assert stage.state is GroupState.BROKEN


def refuse_all(*_arguments: object) -> None:
    raise OSError("no")


# ---- what makes no sense


def test_a_cell_for_no_rank_at_all_is_refused(stage: Stage) -> None:
    stage.start()
    with pytest.raises(RequestError) as caught:
        stage.run(CellRequest(source="1 / 0", ranks=()))
    assert str(caught.value) == "a cell needs at least one rank, and each only once"
    assert stage.state is GroupState.IDLE
    assert not stage.link.sent


def test_a_record_that_cannot_be_made_costs_no_rank_and_no_result(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such number")

    stage.start()
    monkeypatch.setattr(stage.executor.whereabouts.tally, "facts", fail)
    handle = stage.run()
    stage.end(handle, 0, 1)
    stage.turn()
    assert handle.result is not None
    assert handle.result.is_ok
    assert stage.state is GroupState.IDLE
    assert "nbddp could not write down what it knows of the run" in caplog.text
