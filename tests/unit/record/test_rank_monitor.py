"""The rank monitor: the last report of each rank, and figures derived from it."""

import pytest

from nbddp.record.cell import Purpose
from nbddp.record.hang_detector import Heartbeat
from nbddp.record.rank_monitor import LoopProgress, RankMonitor
from nbddp.wire.collective import Collective
from nbddp.wire.messages import Metrics, Progress, RankStatus


@pytest.fixture
def rank_monitor() -> RankMonitor:
    rank_monitor = RankMonitor(is_stopped=lambda _rank: False)
    rank_monitor.reset_for_cell([0, 1], now=0.0)
    return rank_monitor


def pulse(seconds: float = 0.0) -> RankStatus:
    call = Collective("all_reduce", 7)
    return RankStatus(
        cell=5, line=3, function="step", collective=call, seconds=seconds, memory=1 << 20
    )


def numbers(*steps: int, missed: int = 0) -> Metrics:
    rows = [[100.0 + step, step, {"loss": 1.0 / (1 + step)}] for step in steps]
    return Metrics(rows=rows, missed=missed)


def test_a_progress_bar_estimates_its_rate_and_its_time_left() -> None:
    for done, total, seconds, rate, seconds_left in (
        (20, 80, 4.0, 5.0, 12.0),
        (80, 80, 4.0, 20.0, 0.0),
        (20, 0, 4.0, 5.0, None),
        (0, 80, 4.0, 0.0, None),
        (20, 80, 0.0, 0.0, None),
        (90, 80, 4.5, 20.0, 0.0),  # longer than announced
    ):
        bar = LoopProgress("", done, total, seconds)
        assert (bar.per_second, bar.seconds_left) == (rate, seconds_left)


def test_the_last_heartbeat_is_kept_until_the_ranks_are_cleared(rank_monitor: RankMonitor) -> None:
    for rank, seconds in ((0, 1.0), (1, 1.0), (1, 2.0)):
        rank_monitor.add(rank, pulse(seconds), now=4.0)
    assert rank_monitor.hangs.heartbeats[1] == Heartbeat(pulse(2.0), 4.0)
    assert rank_monitor.hangs.memory_used() == 2 << 20
    rank_monitor.add(1, numbers(0), now=4.0)
    rank_monitor.reset_for_cell([0], now=5.0)
    assert rank_monitor.hangs.heartbeats[1] == Heartbeat(pulse(2.0), 4.0)
    assert rank_monitor.hangs.heartbeats[0].status.cell == 0
    rank_monitor.add(0, numbers(0), now=6.0)
    rank_monitor.clear_ranks()
    assert rank_monitor.hangs.heartbeats == {}
    assert rank_monitor.metrics.names() == ["loss"]


def test_the_version_changes_with_every_message(rank_monitor: RankMonitor) -> None:
    seen = {rank_monitor.version}
    for message in (pulse(), numbers(0), Progress(bars=[]), pulse()):
        rank_monitor.add(0, message, now=1.0)
        seen.add(rank_monitor.version)
    assert len(seen) == 5


def test_a_new_cell_clears_metrics_and_progress_bars(rank_monitor: RankMonitor) -> None:
    rank_monitor.add(0, numbers(0, missed=2), now=1.0)
    for bar in (["x", 1, 2, 1.0], ["y", 10, 0, 2.5]):
        rank_monitor.add(0, Progress(bars=[bar]), now=1.0)
    assert rank_monitor.progress_bars == {0: (LoopProgress("y", 10, 0, 2.5),)}
    assert (rank_monitor.first_step, rank_monitor.last_step) == (0, 0)
    rank_monitor.reset_for_cell([0, 1], now=2.0)
    assert rank_monitor.missed_rows == 0
    assert rank_monitor.metrics.names() == []
    assert rank_monitor.progress_bars == {}
    assert rank_monitor.first_step is rank_monitor.last_step is None


@pytest.mark.parametrize("purpose", [Purpose.RETRY, Purpose.USER])
def test_retries_continue_curves_and_replays_do_not(
    rank_monitor: RankMonitor, purpose: Purpose
) -> None:
    rank_monitor.add(0, numbers(0, 1, 2), now=0.0)
    rank_monitor.reset_for_cell([0], now=1.0, purpose=Purpose.REPLAY)
    rank_monitor.add(0, numbers(100, 101), now=1.0)
    rank_monitor.reset_for_cell([0], now=2.0, purpose=purpose)
    rank_monitor.add(0, numbers(1, 2, 3), now=2.0)
    curve = rank_monitor.metrics.curves("loss")[0]
    is_retry = purpose is Purpose.RETRY
    assert curve.steps == ((0.0, 1.0, 2.0, 3.0) if is_retry else (1.0, 2.0, 3.0))
    assert curve.resume_points == ((1.0,) if is_retry else ())
