"""A snapshot: the activity of each rank, from the lifecycle and the reports of the ranks."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from arrivals import arrival_messages

from nbddp.formatting import BY_USER
from nbddp.lifecycle.group_state import GroupState, Life, RankLife, RankState
from nbddp.record.cell import CellHandle, CellRequest
from nbddp.record.event_log import EventLog
from nbddp.record.hang_detector import HANG_AFTER
from nbddp.record.rank_monitor import LoopProgress, RankMonitor
from nbddp.record.run_events import RankExited, RankFailed, RanksStarted
from nbddp.record.snapshot import RankSnapshot, Snapshot, build_snapshot
from nbddp.wire.collective import Collective
from nbddp.wire.messages import CellEnded, Failure, Metrics, Progress, RankStatus, Ready
from nbddp.wire.rank_start import Script

OFF = Life(state=GroupState.OFF, attempt=2)
RUNNING = Life(
    state=GroupState.RUNNING,
    attempt=2,
    ranks=(RankLife(0, RankState.RUNNING), RankLife(1, RankState.RUNNING)),
)
IDLE_RANKS = (RankLife(0, RankState.IDLE), RankLife(1, RankState.IDLE))
IDLE = replace(RUNNING, state=GroupState.IDLE, ranks=IDLE_RANKS)
ANEW = replace(RUNNING, attempt=3, ranks=tuple(RankLife(rank) for rank in range(4)))
PULSE = RankStatus(
    cell=7,
    line=3,
    code="loss.backward()",
    function="backward",
    last=Collective("all_reduce", 4, shape="float [8]"),
    last_cell=7,
    cpu=97.5,
    memory=5 << 20,
    gpu="8f2a",
    gpu_name="NVIDIA T4",
    gpu_memory=3 << 30,
    gpu_reserved=4 << 30,
)
WELL = CellEnded(cell=7, in_group=True)
FAILURE = Failure(name="ValueError", text="no", traceback="Traceback", line=3, at=1.0)
BADLY = replace(WELL, failure=asdict(FAILURE))


def cell_on(*ranks: int) -> CellHandle:
    return CellHandle(7, CellRequest(source="x"), ranks, lambda _: None, attempt=2)


class Group:
    def __init__(self) -> None:
        self.cell = cell_on(0, 1)
        self.rank_monitor = RankMonitor(is_stopped=lambda _rank: False)
        self.rank_monitor.reset_for_cell([0, 1], now=time.monotonic())
        self.event_log = EventLog(lambda _text: None)

    def look(self, life: Life, cell: CellHandle | None = None, **more: Any) -> Snapshot:
        arguments = {"ready": {}, "rank_monitor": self.rank_monitor, "event_log": self.event_log}
        return build_snapshot(life, cell=cell, **(arguments | more))

    def note(self, rank: int, *messages: Any, ago: float = 0.0) -> None:
        for message in messages:
            self.rank_monitor.add(rank, message, time.monotonic() - ago)

    def rank(self, rank: int, life: Life = RUNNING, **more: Any) -> RankSnapshot:
        return self.look(life, self.cell, **more).ranks[rank]

    def shows(self, *names: str, rank: int = 1) -> tuple[Any, ...]:
        return tuple(getattr(self.rank(rank), name) for name in names)


@pytest.fixture
def group() -> Group:
    return Group()


def with_rank_1(life: Life, rank: RankLife) -> Life:
    return replace(life, ranks=(life.ranks[0], rank))


# ---- the state of a rank


def ended_by_restart(cell: CellHandle) -> None:
    cell.ended_by = "restart"
    cell.add_exit(1, -15)


RUNS, IS_IDLE = RankLife(1, RankState.RUNNING), RankLife(1, RankState.IDLE)


def gone(code: int, cause: str = "") -> RankLife:
    return RankLife(1, RankState.GONE, code, cause)


Act = Callable[[CellHandle], object]
FAILED = "ValueError: no, line 3"
ENDS: dict[str, tuple[RankLife, Act, tuple[str, bool, bool]]] = {
    "in the cell": (RUNS, lambda _: None, ("running", True, False)),
    "through": (IS_IDLE, lambda cell: cell.add_report(1, WELL), ("done", True, False)),
    "failed": (IS_IDLE, lambda cell: cell.add_report(1, BADLY), (FAILED, False, True)),
    "interrupted": (
        IS_IDLE,
        lambda cell: cell.add_report(1, replace(BADLY, is_interrupted=True)),
        ("interrupted, line 3", False, False),
    ),
    "died": (gone(-9), lambda cell: cell.add_exit(1, -9), ("was killed by SIGKILL", False, True)),
    "killed by the user": (gone(-9, BY_USER), lambda _: None, ("was killed by you", False, True)),
    "ended by the user": (gone(-15), ended_by_restart, ("ended by the restart", False, False)),
}


@pytest.mark.parametrize(("rank", "act", "told"), ENDS.values(), ids=ENDS)
def test_the_state_of_a_rank_in_a_cell(
    group: Group, rank: RankLife, act: Act, told: tuple[str, bool, bool]
) -> None:
    act(group.cell)
    snapshot = group.look(with_rank_1(RUNNING, rank), group.cell)
    other, shown = snapshot.ranks
    assert (
        shown.state,
        shown.is_healthy,
        shown.is_first_cause,
    ) == told
    assert (other.rank, other.state, other.is_healthy) == (0, "running", True)
    assert snapshot.alive == ([0] if rank.state is RankState.GONE else [0, 1])


def test_the_state_of_a_rank_says_which_module_it_imports(group: Group) -> None:
    importing = replace(PULSE, importing="torch._dynamo")
    for status, state in ((importing, "importing torch._dynamo"), (PULSE, "running")):
        group.note(1, status)
        assert group.shows("state", "importing") == (state, status.importing)
    group.note(1, replace(importing, cell=6))
    assert group.shows("state", "importing") == ("running", "")


def test_the_state_of_a_rank_without_a_cell(group: Group) -> None:
    for rank, told in (
        (IS_IDLE, ("ready", True, False)),
        (gone(0), ("exited with code 0", True, False)),
        (gone(3), ("exited with code 3", False, True)),
    ):
        shown = group.look(with_rank_1(IDLE, rank)).ranks[1]
        assert (
            shown.state,
            shown.is_healthy,
            shown.is_first_cause,
        ) == told


def test_a_rank_that_has_ended_the_cell_is_not_active_and_has_no_cpu_usage(group: Group) -> None:
    group.note(1, PULSE)
    group.cell.add_report(1, WELL)
    life = with_rank_1(RUNNING, IS_IDLE)
    for is_for_cell in (True, False):
        snapshot = group.look(life, group.cell, is_for_cell=is_for_cell)
        assert [each.is_active for each in snapshot.ranks] == [True, False]
    assert group.rank(1, life).cpu < 0
    group.note(1, replace(PULSE, cell=0, cpu=0.5))
    assert group.rank(1, life).cpu == 0.5


def test_only_a_snapshot_of_a_cell_has_its_outcome_and_its_first_error_once(group: Group) -> None:
    group.cell.add_report(0, WELL)
    group.cell.add_report(1, BADLY)
    of_group = group.look(IDLE, group.cell, is_for_cell=False)
    assert [(each.state, each.is_healthy) for each in of_group.ranks] == [("ready", True)] * 2
    assert group.rank(1, IDLE).state == FAILED
    group.cell.finish()
    assert group.rank(1, IDLE).state == "failed"
    alone = cell_on(1)
    alone.add_report(1, WELL)
    assert group.look(IDLE, alone).ranks[0].state == "ready"


def test_a_snapshot_after_a_restart_has_the_ranks_of_the_cell_or_the_group(group: Group) -> None:
    group.cell.add_exit(1, -9)
    for life, states in ((ANEW, ["starting"] * 4), (OFF, [])):
        snapshot = group.look(life, group.cell)
        assert [(each.state, each.is_alive, each.is_healthy) for each in snapshot.ranks] == [
            ("disappeared", False, False),
            ("was killed by SIGKILL", False, False),
        ]
        assert snapshot.attempt == life.attempt
        asked = group.look(life, group.cell, is_for_cell=False)
        assert [each.state for each in asked.ranks] == states


# ---- facts about a rank


def test_a_snapshot_of_a_rank_has_the_facts_of_its_last_heartbeat(group: Group) -> None:
    group.note(1, PULSE, ago=5.0)
    shown = group.rank(
        1,
        ready={
            1: Ready(pid=4711, device="cuda:1", backend="nccl", host="here", cores=2, threads=1)
        },
    )
    assert (shown.line, shown.code, shown.seconds) == (
        3,
        "loss.backward()",
        0.0,
    )
    assert shown.collective == "all_reduce #4 float [8]"
    assert (shown.cpu, shown.memory) == (97.5, 5 << 20)
    assert (shown.gpu, shown.gpu_memory, shown.gpu_reserved) == (
        "NVIDIA T4",
        3 << 30,
        4 << 30,
    )
    assert (shown.pid, shown.device) == (4711, "cuda:1")
    group.note(1, replace(PULSE, seconds=2.0), ago=5.0)
    assert 7.0 <= group.rank(1).seconds < 12.0  # it has not moved since
    idle = group.look(IDLE).ranks[1]
    assert (idle.state, idle.line, idle.code, idle.seconds) == ("ready", 0, "", 0.0)
    assert idle.memory == 5 << 20


def test_a_snapshot_shows_only_collectives_of_the_current_cell(group: Group) -> None:
    group.note(1, replace(PULSE, cell=6, collective=PULSE.last))
    assert group.shows("state", "line", "code") == ("running", 0, "")
    group.note(1, replace(PULSE, collective=PULSE.last, seconds=2.0))
    assert group.shows("state", "is_healthy") == ("waiting", True)
    assert group.shows("state", rank=0) == ("running",)
    group.note(1, replace(PULSE, cell=0, last_cell=6))
    assert group.shows("collective") == ("",)
    group.note(1, replace(PULSE, cell=0, last_cell=7))
    assert group.shows("collective") == (str(PULSE.last),)


def rows(*steps: int, pause: float = 0.1) -> Metrics:
    return Metrics(rows=[[1000 + step * pause, step, {"loss": 1.0}] for step in steps], missed=3)


def test_a_snapshot_has_steps_and_bars_only_from_the_current_attempt(group: Group) -> None:
    group.note(0, rows(0, 10, 20, 30, 40), Progress(bars=[["epoch", 1, 2, 4.0]]))
    bars = (LoopProgress("epoch", 1, 2, 4.0),)
    names = ("step", "steps_per_second", "progress_bars")
    assert group.shows(*names, rank=0) == (40.0, pytest.approx(10.0), bars)
    assert group.shows(*names, rank=1) == (None, 0.0, ())
    assert group.look(RUNNING, group.cell).missed_rows == 3
    group.event_log.record(RanksStarted(attempt=3, world_size=2))
    other = group.look(replace(IDLE, attempt=3), group.cell, is_for_cell=False)
    assert (other.ranks[0].step, other.ranks[0].progress_bars, other.missed_rows) == (None, (), 0)
    assert [event.kind for event in other.events] == ["start"]


# ---- the group


def test_the_step_and_the_collective_of_a_rank_come_from_the_same_heartbeat(group: Group) -> None:
    group.note(0, rows(0, 10, 20, 30, 40))
    group.note(0, replace(PULSE, steps={"loss": 31}))
    assert group.shows("step", "collective", rank=0) == (31, str(PULSE.last))
    group.note(0, replace(PULSE, cell=0, last_cell=6, steps={"loss": 31}))
    assert group.shows("step", "collective", rank=0) == (40, "")


@pytest.mark.parametrize("seconds", [0.0, 7.0])
def test_the_last_heartbeat_of_a_killed_rank_counts_only_if_the_rank_stood_still(
    group: Group, seconds: float
) -> None:
    group.note(1, rows(0, 10, 20, 30, 40))
    group.note(1, replace(PULSE, steps={"loss": 31}, seconds=seconds))
    group.cell.add_exit(1, -9)
    rank = group.rank(1, with_rank_1(RUNNING, gone(-9)))
    assert (rank.step, rank.collective) == ((31, str(PULSE.last)) if seconds else (40, ""))


def test_a_snapshot_has_the_facts_of_the_group_its_run_and_its_script(group: Group) -> None:
    waits = replace(PULSE, collective=PULSE.last, seconds=HANG_AFTER)
    for rank in (0, 1):
        group.note(rank, waits)
    alarm = group.rank_monitor.hangs.check(7, [0, 1], [0, 1], now=time.monotonic())
    ready = {
        1: Ready(pid=2, device="cuda:1", backend="nccl", host="here", cores=2, threads=1),
        0: Ready(pid=1, device="cuda:0", backend="nccl", host="here", cores=2, threads=1),
    }
    group.event_log.folder = Path("/a/b/2025-first")
    snapshot = group.look(RUNNING, ready=ready, rejected_messages=3)
    assert (snapshot.backend, snapshot.devices) == ("nccl", ("cuda:0", "cuda:1"))
    assert (snapshot.state, snapshot.attempt) == (GroupState.RUNNING, 2)
    assert (snapshot.rejected_messages, snapshot.alarm) == (3, alarm)
    assert alarm
    assert (snapshot.folder, snapshot.run) == ("/a/b/2025-first", "2025-first")
    group.event_log.folder = None
    snapshot = group.look(RUNNING)
    assert (snapshot.backend, snapshot.folder, snapshot.run) == ("", "", "")
    assert group.look(RUNNING, group.cell).script == ""
    script = Script(name="train.py", path="/a/train.py", arguments=["--lr", "1"], folder="/a")
    group.cell.request = replace(group.cell.request, script=script)
    snapshot = group.look(RUNNING, group.cell)
    assert (snapshot.script, snapshot.start_of) == ("train.py", "train.py")


def test_the_time_of_a_cell_stops_at_its_end(group: Group) -> None:
    first = group.look(RUNNING, group.cell).seconds
    assert group.look(RUNNING, group.cell).seconds > first
    group.cell.finish()
    ended = group.look(RUNNING, group.cell).seconds
    assert group.look(RUNNING, group.cell).seconds == ended


def test_a_snapshot_has_events_since_the_start_of_the_cell_or_attempt(group: Group) -> None:
    nothing = group.look(Life())
    assert (nothing.events, nothing.seconds, nothing.began) == ((), 0.0, nothing.at)
    for attempt in (1, 2):
        group.event_log.record(RanksStarted(attempt=attempt, world_size=2))
        group.event_log.record(RankExited(attempt=attempt, rank=attempt, how="died"))
        time.sleep(0.002)
    of_attempt = group.look(IDLE)
    assert [event.kind for event in of_attempt.events] == ["start", "exit"]
    assert (of_attempt.began, of_attempt.start_of) == (of_attempt.events[0].time, "the ranks")
    assert 0 <= of_attempt.seconds < 60
    cell = cell_on(0, 1)
    group.event_log.record(RankFailed(rank=1, what="no"))
    of_cell = group.look(RUNNING, cell)
    assert [event.kind for event in of_cell.events] == ["failure"]
    assert of_cell.began == cell.began_at <= of_cell.at
    assert of_cell.start_of == "cell [1]"


def test_a_straggler_has_a_lag_while_it_is_alive(group: Group) -> None:
    for rank, late in ((0, 0.0), (1, 0.1)):
        group.note(rank, *arrival_messages([step * 0.3 + late for step in range(100)], cell=5))
    assert group.rank(0).lag is None
    lag, awaited = group.rank(1).lag, group.look(RUNNING, group.cell).straggler
    assert lag is not None
    assert awaited is not None
    assert (round(lag.share, 2), lag.is_waited_for) == (0.33, True)
    assert (awaited.rank, awaited.title) == (1, "all_reduce float [72]")
    assert group.look(RUNNING).ranks[1].lag is None, "there is no cell"
    assert group.rank(1, with_rank_1(RUNNING, gone(-9))).lag is None


def test_without_collectives_a_straggler_is_found_by_its_step_rate(group: Group) -> None:
    for rank, pause in ((0, 0.3), (1, 0.4)):
        group.note(rank, rows(*range(50), pause=pause))
    assert group.rank(0).lag is None
    lag = group.rank(1).lag
    assert lag is not None
    assert (round(lag.share, 2), lag.is_waited_for) == (0.25, False)
