"""The metric sink of a rank: the file has every line, messages are bounded, both are in order."""

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from processes import in_child

from nbddp.reporting.log_and_track import ProgressBar
from nbddp.wire.messages import (
    ConfigReported,
    EventReported,
    MessageFromRank,
    Metrics,
    Progress,
    decode,
    encode,
)
from nbddp.worker.output import metric_sink as metric_sink_module
from nbddp.worker.output.metric_sink import MAX_BARS, MetricSink

Make = Callable[..., MetricSink]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    """Makes meters of a rank, all on one file, and closes it."""
    made: list[MetricSink] = []

    def build(rank: int = 0, attempt: int = 1) -> MetricSink:
        made.append(MetricSink(path, Mock(), rank=rank, attempt=attempt))
        return made[-1]

    yield build
    for sink in made:
        os.close(sink._fd)


@pytest.fixture
def sink(make: Make) -> MetricSink:
    return make()


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def read_all(sink: MetricSink) -> list[MessageFromRank]:
    return list(iter(sink.read, None))


def labels(sink: MetricSink) -> list[str]:
    """Return the labels of the bars in the newest message, which is about bars."""
    return [label for label, _, _, _ in read_all(sink)[-1].bars]


def bar(label: str = "", total: int = 0) -> ProgressBar:
    return ProgressBar(label=label, total=total)


# ---- the file


def test_each_metrics_line_is_written_at_once_and_its_values_are_read_once(
    make: Make, path: Path
) -> None:
    path.write_text('{"step": 0}\n')
    sink = make(rank=3, attempt=2)
    assert sink.read() is None
    values = {"loss": 0.5, "two\nlines": float("inf"), "\ud800": 1.0}
    sink.log(7, values)
    sink.log(None, {"loss": 0.25})
    before, *written = lines(path)
    assert before == {"step": 0}, "a file that is there is gone on with"
    first, second = (line.pop("time") for line in written)
    assert 1e9 < first <= second
    assert written == [
        {"rank": 3, "attempt": 2, "step": 7, **values},
        {"rank": 3, "attempt": 2, "loss": 0.25},
    ]
    rows = [[first, 7, values], [second, None, {"loss": 0.25}]]
    assert read_all(sink) == [Metrics(rows=rows, missed=0)]


def test_only_the_owner_can_read_the_metrics_file(make: Make, path: Path) -> None:
    before = os.umask(0)
    try:
        make()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ranks_share_a_file_and_no_line_is_torn(make: Make, path: Path) -> None:
    def work(sink: MetricSink) -> None:
        for step in range(200):
            sink.log(step, {"x" * 300: 1.0})

    threads = [threading.Thread(target=work, args=(make(rank=rank),)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(path)
    assert len(found) == 400
    for rank in range(2):
        assert [line["step"] for line in found if line["rank"] == rank] == list(range(200))


def test_a_full_disk_is_reported_once_and_metrics_are_still_sent(
    sink: MetricSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        sink.log(1, {"loss": 1.0})
        sink.log(2, {"loss": 1.0})
    [[remark]] = [call.args for call in sink._outbox.post.call_args_list]  # type: ignore[attr-defined]
    assert "No space left on device" in remark.data["text/plain"]
    [metrics] = read_all(sink)
    assert [step for _, step, _ in metrics.rows] == [1, 2]


def test_a_metrics_line_cut_by_a_full_disk_does_not_corrupt_the_next_line(
    sink: MetricSink, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
    sink.log(1, {"loss": 1.0})
    monkeypatch.setattr(os, "write", write)
    sink.log(2, {"loss": 2.0})
    sink.log(3, {"loss": 3.0})
    torn, *whole = path.read_text().splitlines()
    assert len(torn) == 9
    assert [json.loads(line)["step"] for line in whole] == [2, 3]


# ---- messages


def test_the_oldest_rows_beyond_the_queue_limit_are_omitted_and_counted(
    sink: MetricSink, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sink_module, "MAX_QUEUED_ROWS", 10)
    monkeypatch.setattr(metric_sink_module, "MAX_ROWS", 4)
    for step in range(13):
        sink.log(step, {})
    messages = [each for each in read_all(sink) if isinstance(each, Metrics)]
    assert [each.missed for each in messages] == [3, 0, 0]
    steps = [[step for _, step, _ in each.rows] for each in messages]
    assert steps == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12]]
    assert len(lines(path)) == 13


def test_events_are_sent_before_metrics_and_metrics_before_bars(sink: MetricSink) -> None:
    sink.open_bar(bar("\ud800", total=3))
    sink.log(10**30, {"loss": 1.0, "\ud800": 2.0})
    sink.record_event("checkpoint", {"path": Path("a"), "count": 1})
    sink.record_event("checkpoint", {"path": "b"})
    found = read_all(sink)
    assert found[:2] == [
        EventReported(kind="checkpoint", facts={"path": "a", "count": 1}),
        EventReported(kind="checkpoint", facts={"path": "b"}),
    ]
    assert [type(each) for each in found[2:]] == [Metrics, Progress]
    assert [decode(encode(each)) for each in found] == found


def report(sink: MetricSink) -> None:
    outer, inner = bar("outer"), bar("inner")
    sink.log(5, {"loss": 1.0})
    sink.open_bar(outer)
    sink.open_bar(inner)
    sink.update_bar(inner)
    sink.record_event("checkpoint", {})
    sink.close_bar(inner)
    sink.close_bar(outer)


def test_every_report_is_counted_and_those_of_each_step_wait_for_the_next_poll(
    sink: MetricSink,
) -> None:
    counts: list[int] = []
    sink._outbox = Mock(notify=lambda: counts.append(sink.report_count))
    report(sink)
    assert sink.report_count == 7
    assert counts == [2, 3, 5, 6, 7], "not for the metrics, nor for the changed bar"


# ---- bars


def test_a_progress_bar_is_read_only_after_it_has_changed(sink: MetricSink) -> None:
    loop = bar("epoch 1", total=8)
    sink.open_bar(loop)
    assert labels(sink) == ["epoch 1"]
    assert sink.read() is None
    loop.done = 3
    sink.update_bar(loop)
    [progress] = read_all(sink)
    assert progress.bars[0][:3] == ["epoch 1", 3, 8]


def test_nested_bars_are_read_outermost_first_and_the_outermost_stays_until_a_new_one(
    sink: MetricSink,
) -> None:
    outer, inner = bar("outer"), bar("inner")
    sink.open_bar(outer)
    sink.open_bar(inner)
    assert labels(sink) == ["outer", "inner"]
    sink.close_bar(inner)
    assert labels(sink) == ["outer"]
    sink.close_bar(outer)
    assert not outer.is_open
    assert labels(sink) == ["outer"]
    for depth in range(MAX_BARS + 3):
        sink.open_bar(bar(f"{depth}"))
    assert labels(sink) == [f"{depth}" for depth in range(MAX_BARS)]


def test_a_new_cell_drops_the_bars_of_the_previous_cell_and_keeps_its_queued_rows(
    sink: MetricSink,
) -> None:
    old = bar("old")
    sink.open_bar(old)
    sink.log(1, {})
    sink.begin_cell()
    assert [type(each) for each in read_all(sink)] == [Metrics]
    sink.update_bar(old)
    sink.close_bar(old)
    assert not old.is_open
    sink.open_bar(bar("new"))
    sink.close_bar(old)
    assert labels(sink) == ["new"]


def test_values_of_a_replayed_cell_are_sent_and_not_written(sink: MetricSink, path: Path) -> None:
    for is_recorded in (False, True):
        sink.begin_cell(is_recorded=is_recorded)
        sink.log(1, {"loss": float(is_recorded)})
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0]
    (message,) = read_all(sink)
    assert isinstance(message, Metrics)
    assert [row[2]["loss"] for row in message.rows] == [0.0, 1.0]


# ---- in a child


def test_a_forked_child_writes_the_file_and_sends_nothing(sink: MetricSink, path: Path) -> None:
    def act() -> None:
        report(sink)
        assert not [*sink._rows, *sink._events]

    assert in_child(act) == 0
    assert [line["step"] for line in lines(path)] == [5]


# ---- what happened


def test_recording_events_too_fast_waits_for_the_outbox_to_flush(
    sink: MetricSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sink_module, "MAX_QUEUED_EVENTS", 10)
    mailed: list[int] = []
    sink._outbox = Mock(flush=lambda: mailed.append(len(read_all(sink))))
    for number in range(95):
        sink.record_event("mine", {"number": number})
    assert mailed == [10] * 9
    assert len(read_all(sink)) == 5


def test_consecutive_queued_config_events_are_merged(sink: MetricSink) -> None:
    sink.record_config({"step": 0})
    sink.record_event("checkpoint", {})
    for step in range(10):
        sink.record_config({"step": step, "name": f"run {step}"})
    assert read_all(sink) == [
        ConfigReported(kind="config", facts={"values": {"step": 0}}),
        EventReported(kind="checkpoint", facts={}),
        ConfigReported(kind="config", facts={"values": {"step": 9, "name": "run 9"}}),
    ]
