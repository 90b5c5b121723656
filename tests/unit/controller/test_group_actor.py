"""The executor carries out the actions of the lifecycle in order, without threads or processes.

If the disk, the launcher, the link or a process fails, every pending request gets an error.
"""

import errno
import json
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

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
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.group_actor import start_event
from nbddp.controller.surviving_group import SurvivingGroup, SurvivingRank
from nbddp.errors import RequestError
from nbddp.launch.memory import MemoryWatch
from nbddp.lifecycle.events import InterruptAsked
from nbddp.lifecycle.group_state import GroupState
from nbddp.record.cell import CellHandle, CellRequest, CellResult
from nbddp.record.log_reader import LogReader
from nbddp.record.notices import ControllerMessage, OutputText
from nbddp.sigint import Future
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.messages import CellEnded, EventReported, Interrupt, Message, MessageToRank, Output
from nbddp.wire.request_messages import Answer, Complete

TWO = GroupSpec(nproc=2)
HELLO = CellRequest(source="print('hello')")
GONE = ConnectionError("the store is gone")
TOO_MANY_FILES = OSError(errno.EMFILE, "Too many open files")
RANK_START = {"incarnation": 0}  # as far as the controller reads it


class Driver:
    """A session with fakes around it, and the exact texts that a test expects."""

    def __init__(self, expected: SnapshotAssertion) -> None:
        self.expected = expected
        self.launcher = FakeLauncher()
        self.link = SilentLink()
        self.runtime = manual_runtime(self.link)
        self.session = manual_session(self.launcher, lambda: self.runtime)

    @property
    def actor(self) -> ManualEventThread:
        assert isinstance(self.runtime.event_thread, ManualEventThread)
        return self.runtime.event_thread

    @property
    def state(self) -> GroupState:
        return self.session.life.state

    def deliver(self, rank: int, message: Message) -> None:
        self.session.actor.messages.handle(self.link.deliver(rank, message))

    def handle_all_events(self) -> None:
        threads = (self.actor, self.runtime.launch_thread)
        while (busy := [each for each in threads if each.inbox]) or self.actor.report_exit():
            if busy:
                busy[0].run_next()

    def ask_start(self) -> Future[None]:
        return request_start(self.session, TWO, start_event(TWO))

    def ask_rank(self, rank: int) -> Future[Answer]:
        request = self.session.numbered(Complete(code="", cursor=0))
        return self.session.send_request(rank, request)

    def get_ready(self, started: Future[None]) -> None:
        self.handle_all_events()
        for rank in (0, 1):
            self.deliver(rank, ready(rank))
        assert started.result() is None

    def run(self, request: CellRequest = HELLO) -> CellHandle:
        handle = self.session.submit(request)
        self.handle_all_events()
        return handle

    def end(self, handle: CellHandle, *ranks: int) -> None:
        for rank in ranks:
            self.deliver(rank, CellEnded(cell=handle.number, in_group=True))

    def finish(self, handle: CellHandle, *ranks: int) -> CellResult:
        self.end(handle, *ranks)
        assert handle.result is not None
        return handle.result

    def works(self) -> bool:
        return self.finish(self.run(), 0, 1).is_ok


@pytest.fixture
def empty(folder: Path, snapshot: SnapshotAssertion) -> Iterator[Driver]:  # noqa: ARG001 - of the run
    driver = Driver(snapshot)
    yield driver
    driver.link.close()


@pytest.fixture
def driver(empty: Driver) -> Driver:
    empty.get_ready(empty.ask_start())
    return empty


def output_of(handle: CellHandle) -> list[OutputText]:
    return [each for each in handle.notices() if isinstance(each, OutputText)]


def test_output_written_as_soon_as_a_cell_is_sent_belongs_to_that_cell(driver: Driver) -> None:
    [folder] = Path(".nbddp/runs").iterdir()

    def write(_attempt: int, rank: int, _command: MessageToRank) -> None:
        with (folder / f"rank{rank}.log").open("a") as log:
            log.write(f"hello from {rank}\n")

    driver.link.on_send = write
    assert driver.works()
    assert driver.works()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    logs = [event["logs"] for event in events if event["kind"] in ("cell", "cell ended")]
    assert logs == [{"0": size, "1": size} for size in (0, 13, 13, 26)]


def test_the_last_output_of_a_rank_that_died_between_cells_is_not_shown_in_a_later_cell(
    driver: Driver,
) -> None:
    driver.works()
    [folder] = Path(".nbddp/runs").iterdir()
    (folder / "rank1.log").write_text("Fatal Python error: Segmentation fault\n")
    driver.launcher.handles[1, 1].end(-11)
    driver.handle_all_events()
    handle = driver.run(CellRequest(source="1", ranks=(0,)))
    driver.end(handle, 0)
    assert output_of(handle) == []
    assert driver.session.event_log.final_output([1]).startswith("Fatal Python error")


def test_output_between_cells_is_shown_in_the_next_cell_unless_the_group_restarts(
    driver: Driver,
) -> None:
    driver.deliver(0, Output(start=0, end=6, text="a line"))
    driver.end(handle := driver.run(), 0, 1)
    assert list(handle.notices()) == [OutputText(0, "a line")]
    driver.deliver(0, Output(start=6, end=6, text="\n"))  # not in the file: its disk is full
    driver.end(handle := driver.run(), 0, 1)
    assert list(handle.notices()) == [OutputText(0, "\n")]
    driver.deliver(0, Output(start=6, end=13, text=" and on"))
    restarted = driver.session.request_restart(TWO)
    for rank in (0, 1):
        driver.launcher.handles[1, rank].end(0)
    driver.get_ready(restarted)
    driver.end(handle := driver.run(), 0, 1)
    assert output_of(handle) == []


# ---- the disk fails


def test_after_a_run_that_cannot_be_recorded_a_stop_and_a_start_work(
    empty: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "somewhere"))
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.mkdir", full)
        patch.setattr("tempfile.mkdtemp", full)
        started = empty.ask_start()
        empty.handle_all_events()
    assert str(started.exception()).replace(str(Path.cwd()), "FOLDER") == empty.expected
    assert not empty.launcher.handles
    stopped = empty.session.request_stop()
    empty.handle_all_events()
    assert stopped.result() is None
    assert empty.state is GroupState.OFF
    empty.get_ready(empty.ask_start())
    assert empty.works()


# ---- ranks of another notebook cannot be taken back


class LeftRanks:
    """Two ranks that another notebook left, with the folder of their run."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.handles = {rank: FakeHandle() for rank in (0, 1)}
        self.group = SurvivingGroup(
            ranks={rank: SurvivingRank(each, RANK_START) for rank, each in self.handles.items()},
            set_store_port=lambda _port: None,
            attempt=3,
            world_size=2,
            secret=b"",
            folder=Path("left").absolute(),
            options={},
        )
        self.group.folder.mkdir()

    def take_back(self) -> Future[None]:
        started = request_start(
            self.driver.session, TWO, self.group.rejoin_event(), survivors=self.group
        )
        self.driver.handle_all_events()
        return started

    @property
    def alive(self) -> list[int]:
        return [rank for rank, each in self.handles.items() if each.exitcode is None]


@pytest.fixture
def left_ranks(empty: Driver) -> LeftRanks:
    return LeftRanks(empty)


def test_ranks_run_on_if_their_run_cannot_be_recorded_until_the_next_try(
    left_ranks: LeftRanks,
) -> None:
    events = left_ranks.group.folder / "events.jsonl"
    events.mkdir()  # as if it could not be opened
    started = left_ranks.take_back()
    assert str(started.exception()).replace(str(Path.cwd()), "FOLDER") == left_ranks.driver.expected
    assert left_ranks.driver.state is GroupState.OFF
    assert left_ranks.alive == [0, 1]
    events.rmdir()
    started = left_ranks.take_back()
    left_ranks.driver.actor.run_delayed()  # the deadline of the first try
    left_ranks.driver.handle_all_events()
    assert left_ranks.alive == [0, 1]
    left_ranks.driver.get_ready(started)
    assert left_ranks.driver.works()


def test_a_rank_that_cannot_be_watched_is_killed_and_the_others_are_taken_back(
    left_ranks: LeftRanks,
) -> None:
    left_ranks.driver.actor.watch_faults.extend([None, TOO_MANY_FILES])
    started = left_ranks.take_back()
    assert not started.done()
    left_ranks.driver.deliver(0, ready(0))
    assert started.result() is None
    assert left_ranks.driver.state is GroupState.BROKEN
    assert left_ranks.driver.session.life.gone == (1,)
    assert left_ranks.alive == [0]
    handle = left_ranks.driver.run(CellRequest(source="1", ranks=(0,)))
    left_ranks.driver.end(handle, 0)
    assert said_in(handle) == left_ranks.driver.expected


def test_a_rejoin_fails_with_the_reason_if_no_rank_can_be_watched(left_ranks: LeftRanks) -> None:
    left_ranks.driver.actor.watch_faults.extend([TOO_MANY_FILES, TOO_MANY_FILES])
    assert str(left_ranks.take_back().exception()) == left_ranks.driver.expected
    assert left_ranks.driver.state is GroupState.OFF
    assert left_ranks.alive == []
    left_ranks.driver.get_ready(left_ranks.driver.ask_start())


def test_facts_of_earlier_ranks_of_the_notebook_are_forgotten_at_a_rejoin(
    left_ranks: LeftRanks,
) -> None:
    driver = left_ranks.driver
    driver.get_ready(driver.ask_start())
    driver.session.request_stop()
    for handle in driver.launcher.living():
        handle.end(0)
    driver.handle_all_events()
    left_ranks.take_back()
    driver.deliver(0, ready(0))
    left_ranks.handles[1].end(-9)
    driver.handle_all_events()
    assert driver.state is GroupState.BROKEN
    assert set(driver.session.actor.state.ready) == {0}


# ---- processes cannot be started, or not yet


@pytest.mark.parametrize(
    ("faults", "fault"),
    [
        ("launcher.faults", OSError(errno.EAGAIN, "Resource temporarily unavailable")),
        ("actor.watch_faults", TOO_MANY_FILES),
    ],
    ids=["not started", "not watched"],
)
def test_a_rank_that_cannot_be_started_is_named_and_the_others_are_ended(
    empty: Driver, faults: str, fault: OSError
) -> None:
    attrgetter(faults)(empty).extend([None, fault])
    started = empty.ask_start()
    empty.handle_all_events()
    assert str(started.exception()) == empty.expected
    assert empty.state is GroupState.OFF
    assert not empty.launcher.living()
    empty.get_ready(empty.ask_start())


@pytest.mark.parametrize("ends_by", ["stop", "patience"])
def test_a_start_that_ends_while_the_launcher_imports_starts_no_rank_later(
    empty: Driver, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (48.2, 5.0, 5.0))
    started = empty.ask_start()
    if ends_by == "stop":
        stopped = empty.session.request_stop()
    else:
        empty.actor.run_delayed()
    empty.actor.run_all()  # the launching thread still waits
    assert str(started.exception()) == empty.expected
    assert empty.state is GroupState.OFF
    assert ends_by != "stop" or stopped.result() is None
    path = empty.session.event_log.path
    assert path is not None
    assert json.loads((path / "run.json").read_text())["interrupted"] == (ends_by == "stop")
    empty.handle_all_events()
    assert not empty.launcher.handles


def test_a_process_that_starts_after_the_stop_is_killed_and_ignored(empty: Driver) -> None:
    empty.ask_start()
    stops: list[Future[None]] = []
    empty.launcher.on_launch = lambda _start: stops.append(empty.session.request_stop())
    empty.runtime.launch_thread.run_next()  # rank 0 was being started when the stop came
    empty.launcher.on_launch = lambda _start: None
    empty.actor.run_all()
    assert stops[0].done()
    late = empty.launcher.handles[1, 0]
    empty.get_ready(empty.ask_start())
    assert late.exitcode == -9
    assert late.is_joined
    assert list(empty.launcher.handles) == [(1, 0), (2, 0), (2, 1)]
    asked = empty.ask_rank(0)
    empty.handle_all_events()
    assert not asked.done()


def test_a_start_that_a_restart_replaces_fails_with_the_reason(empty: Driver) -> None:
    first = empty.ask_start()
    second = empty.session.request_restart(TWO)
    assert str(first.exception()) == empty.expected
    empty.get_ready(second)


def test_messages_of_a_rank_are_handled_once_its_process_is_known(empty: Driver) -> None:
    started = empty.ask_start()
    empty.deliver(0, ready(0))
    empty.deliver(1, ready(1))
    assert not started.done()
    assert empty.session.actor.state.pids() == {}
    empty.handle_all_events()
    assert started.result() is None
    assert set(empty.session.actor.state.pids()) == {0, 1}


def test_interrupted_ranks_get_the_signal_before_the_message(driver: Driver) -> None:
    handle = driver.run()
    seen: list[tuple[int, int]] = []
    driver.link.on_send = lambda attempt, rank, _command: seen.append(
        (rank, driver.launcher.handles[attempt, rank].interrupts)
    )
    driver.session.actor.state.step(InterruptAsked())
    assert seen == [(0, 1), (1, 1)]
    command = Interrupt(cell=handle.number, ranks=[0, 1])
    assert driver.link.sent[-2:] == [(rank, command) for rank in (0, 1)]
    driver.session.actor.state.step(InterruptAsked())
    assert driver.link.ended_waits == [(1, handle.number)]


# ---- ranks cannot be reached


def test_a_cell_that_cannot_be_sent_to_a_rank_fails_there_and_all_ranks_survive(
    driver: Driver,
) -> None:
    driver.link.faults.extend([None, GONE])
    handle = driver.run()
    assert handle.result is None
    driver.actor.run_delayed(-1)  # the other rank is not waited for longer than after any failure
    assert driver.link.sent[-1] == (0, Interrupt(cell=handle.number))
    verdict = driver.finish(handle, 0).verdict
    assert verdict is not None
    assert verdict.summary() == driver.expected
    assert driver.state is GroupState.IDLE
    assert driver.works()


def said_in(handle: CellHandle) -> list[str]:
    return [each.text for each in handle.notices() if isinstance(each, ControllerMessage)]


def test_a_rank_that_cannot_be_interrupted_is_killed_with_a_message_to_the_user(
    driver: Driver,
) -> None:
    handle = driver.run()
    driver.link.faults.extend([None, GONE])
    driver.session.actor.state.step(InterruptAsked())
    driver.end(handle, 0)
    driver.handle_all_events()
    assert driver.finish(handle).exits == {1: -9}
    assert said_in(handle) == driver.expected
    assert driver.state is GroupState.BROKEN


def test_a_rank_that_cannot_be_killed_counts_as_gone(driver: Driver) -> None:
    driver.launcher.handles[1, 1].kill_error = PermissionError(errno.EPERM, "not permitted")
    handle = driver.run()
    killed = driver.session.request_kill(1)
    driver.handle_all_events()
    assert killed.result() is None
    driver.end(handle, 0)
    assert said_in(handle) == driver.expected
    assert driver.session.life.alive == [0]
    driver.launcher.handles[1, 1].end(3)
    driver.handle_all_events()
    assert driver.session.life.ranks[1].exitcode is None
    driver.session.request_stop()
    driver.launcher.handles[1, 0].end(0)
    driver.handle_all_events()
    assert driver.state is GroupState.OFF


def test_an_exit_is_handled_before_orphans_are_killed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[list[int]] = []
    kill = Mock(side_effect=lambda _handle: alive.append(driver.session.life.alive))
    monkeypatch.setattr(driver.launcher, "kill_orphans", kill)
    driver.launcher.handles[1, 1].end(-9)
    driver.handle_all_events()
    assert alive == [[0]]


@pytest.mark.parametrize(
    ("owner", "method"), [(SilentLink, "open_incarnation"), (FakeLauncher, "launch")]
)
def test_a_heal_that_cannot_start_a_replacement_fails_at_once_with_the_reason(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    driver.launcher.handles[1, 1].end(-9)
    driver.handle_all_events()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, Mock(side_effect=OSError("no")))
        healed = driver.session.request_heal()
        driver.handle_all_events()
    assert str(healed.exception()) == driver.expected(name="not started")
    assert driver.session.life.gone == (1,)
    driver.session.request_heal()
    driver.handle_all_events()
    assert driver.launcher.handles[1, 1].exitcode is None


def test_a_request_that_cannot_be_sent_is_refused_and_the_next_one_is_answered(
    driver: Driver,
) -> None:
    driver.link.faults.append(GONE)
    assert refusal(RequestError, driver.ask_rank, 1) == driver.expected
    answer = driver.ask_rank(1)
    question = driver.link.sent[-1][1]
    assert isinstance(question, Complete)
    driver.deliver(1, Answer(request=question.request))
    assert answer.result().error == ""


# ---- messages of ranks are lost, or their last output cannot be read


def test_a_lost_link_ends_the_cell_and_kills_the_ranks(driver: Driver) -> None:
    handle = driver.run()
    driver.session.actor.executor.on_link_lost(GONE)
    driver.handle_all_events()
    assert driver.finish(handle).exits == {0: -9, 1: -9}
    assert said_in(handle) == driver.expected
    assert driver.state is GroupState.BROKEN


def test_a_start_fails_with_the_reason_if_the_link_is_lost(empty: Driver) -> None:
    started = empty.ask_start()
    empty.session.actor.executor.on_link_lost(GONE)
    empty.handle_all_events()
    assert str(started.exception()) == empty.expected
    assert empty.state is GroupState.OFF


def test_a_start_without_capacity_fails_with_the_reason_and_logs_no_traceback(
    empty: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = Mock(side_effect=RequestError("no room for two ranks"))
    monkeypatch.setattr(empty.launcher, "assign", refuse)
    started = empty.ask_start()
    empty.handle_all_events()
    assert "no room for two ranks" in str(started.exception())
    assert empty.state is GroupState.OFF
    assert not caplog.records


@pytest.mark.parametrize(
    ("owner", "method"),
    [(FakeLauncher, "kill_orphans"), (LogReader, "remaining"), (FakeHandle, "join")],
)
def test_an_exit_is_handled_even_if_the_cleanup_fails(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    handle = driver.run()
    monkeypatch.setattr(owner, method, Mock(side_effect=OSError("no")))
    asked = driver.session.request_kill(1)
    driver.end(handle, 0)
    with suppress(OSError):  # the actor logs it and goes on
        driver.handle_all_events()
    assert asked.done()
    assert driver.finish(handle).verdict is not None
    assert driver.state is GroupState.BROKEN


@pytest.mark.parametrize("by_user", [False, True])
def test_a_kill_is_explained_with_memory_unless_the_user_asked_for_it(
    driver: Driver, tmp_path: Path, by_user: bool
) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("oom_kill 0\n")
    driver.session.actor.messages._memory = MemoryWatch([counter], [])
    handle = driver.run()
    counter.write_text("oom_kill 1\n")
    driver.session.request_kill(1) if by_user else driver.launcher.handles[1, 1].end(-9)
    driver.handle_all_events()
    verdict = driver.finish(handle, 0).verdict
    assert verdict is not None
    assert ("ran out of memory" in verdict.report()) is not by_user
    assert ("killed by you" in verdict.summary()) is by_user
    assert verdict.summary() == f"rank 1 {driver.session.life.ranks[1].how_it_ended}"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_death_is_explained_by_the_fault_before_it(driver: Driver, is_late: bool) -> None:
    fired = EventReported(kind="fault", facts={"fault": "kill@rank=1,step=3"})
    handle = driver.run()
    acts = [lambda: driver.deliver(1, fired), lambda: driver.launcher.handles[1, 1].end(-9)]
    for act in reversed(acts) if is_late else acts:
        act()
        driver.handle_all_events()
    verdict = driver.finish(handle, 0).verdict
    assert verdict is not None
    assert verdict.summary() == "rank 1 was killed by SIGKILL after the fault kill@rank=1,step=3"


def test_the_record_of_a_kill_by_the_user_says_so_also_between_cells(driver: Driver) -> None:
    driver.session.request_kill(1)
    driver.handle_all_events()
    exits = [each.describe() for each in driver.session.event_log.since(0.0) if each.kind == "exit"]
    assert exits == ["rank 1 was killed by you"]


def test_an_error_while_recording_affects_no_rank_and_no_result(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = Mock(side_effect=ValueError("no such number"))
    monkeypatch.setattr(driver.session.rank_monitor, "totals", fail)
    assert driver.works()
    driver.handle_all_events()
    assert driver.state is GroupState.IDLE
    assert "no such number" in caplog.text
