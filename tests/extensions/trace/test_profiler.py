"""Which steps a rank traces: start, end, discarded traces, and messages about missing steps."""

import gzip
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from nbddp.extensions.trace import TraceSteps
from nbddp.extensions.trace import rank as profiler
from nbddp.extensions.trace.messages import SendTrace, TraceSent
from nbddp.extensions.trace.rank import (
    MAX_SECONDS,
    OWN_PROFILER,
    CellProfiler,
    build_merged_part,
    idle_time,
    operator_times,
)
from nbddp.reporting import log_and_track


class FakeProfile:
    """Writes down when it was started and stopped, and each step."""

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.document = json.dumps({"baseTimeNanoseconds": 0, "traceEvents": []})
        self.error: Exception | None = None
        self.step_num = 0

    def start(self) -> None:
        if self.error:
            raise self.error
        self._story += ["start", f"({self.step_num}"]

    def step(self) -> None:
        self._story.append(f"{self.step_num})")
        self.step_num += 1
        self._story.append(f"({self.step_num}")

    def stop(self) -> None:
        self._story += [f"{self.step_num})", "stop"]

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(gzip.compress(self.document.encode()))

    def events(self) -> list[Any]:
        return []

    key_averages = events


class Rank:
    """A rank whose cell is traced; ``story`` has the profiler's calls, ``folder`` its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.story = folder, list[str]()
        self.profile = FakeProfile(self.story)
        self.profiler: CellProfiler

    def begin(self, first: int, last: int) -> None:
        """Begin a cell of which these steps are asked for."""
        self.profiler = CellProfiler(TraceSteps(first=first, last=last), 3)
        self.profiler.begin_cell()

    def end(self, *, is_ok: bool = True) -> TraceSent:
        self.profiler.end_cell(is_ok=is_ok)
        return self.give()

    def give(self) -> TraceSent:
        return self.profiler.export(command_to_give(self.folder))[0]


def command_to_give(folder: Path | str) -> SendTrace:
    return SendTrace(cell=3, rank=0, folder=str(folder), start_ns=0, max_events=100)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank(tmp_path)
    monkeypatch.setattr(profiler, "profile", lambda **_options: rank.profile)
    monkeypatch.setattr(log_and_track, "_on_step", [])
    return rank


def log(*steps: int, sources: Sequence[str] = ("log",)) -> None:
    for step, source in itertools.product(steps, sources):
        log_and_track.report_step(step, source=source)


load, load_and_log = (partial(log, sources=each) for each in (["loader"], ["loader", "log"]))


@pytest.mark.parametrize(
    ("first", "last", "loop", "steps"),
    [
        pytest.param(10, 12, log, range(20), id="a step that is logged ends there"),
        pytest.param(10, 12, load, range(20), id="a step of a loader begins there"),
        pytest.param(3, 4, load_and_log, range(9), id="a logged step counts, not the loader's"),
        pytest.param(0, 2, log, range(5), id="from the beginning of the cell"),
        pytest.param(1, 2, log, range(5), id="the trace of step 0 is thrown away"),
        pytest.param(1, 2, log, range(1, 5), id="a loop that counts from 1"),
        pytest.param(0, 1, load, range(3), id="from the first batch of a loader"),
    ],
)
def test_the_profiler_traces_exactly_the_requested_steps(
    first: int, last: int, loop: Callable[..., None], steps: range, rank: Rank
) -> None:
    rank.begin(first, last)
    loop(*steps)
    assert rank.end().steps == [first, last]
    began = len(rank.story) - rank.story[::-1].index("start")
    calls = [word for step in range(first, last + 1) for word in (f"({step}", f"{step})")]
    assert rank.story[began:] == [*calls, "stop"]


@pytest.mark.parametrize(
    ("loop", "is_ok", "told"),
    [(log, True, [3, 5]), (load, True, [3, 5]), (log, False, [3, 6])],
    ids=["logged", "loaded", "interrupted in a part of a step"],
)
def test_a_loop_that_ends_early_keeps_the_steps_traced_so_far(
    loop: Callable[..., None], is_ok: bool, told: list[int], rank: Rank
) -> None:
    rank.begin(3, 100)
    loop(*range(6))
    found = rank.end(is_ok=is_ok)
    assert (found.steps, rank.story[-1]) == (told, "stop")


def test_missing_and_different_steps_are_reported(rank: Rank, snapshot: Any) -> None:
    reasons = {}
    for name, asked, steps in (
        ("none", (0, 5), ()),
        ("too few", (10, 15), (0, 1, 2, 3)),
        ("a training that goes on from a checkpoint", (0, 5), (100,)),
    ):
        rank.begin(*asked)
        log(*steps)
        reasons[name] = rank.end().reason
    assert "nbddp.log(" in reasons["none"]
    assert reasons == snapshot
    assert list(rank.folder.iterdir()) == []


def test_step_numbers_that_restart_end_the_trace_and_gaps_are_recorded(rank: Rank) -> None:
    rank.begin(3, 9)
    log(0, 1, 2, 3, 4, 0, 1, 2, 3, 4)  # two epochs, each counts from 0
    assert rank.end().steps == [3, 4]
    assert rank.story.count("start") == 1
    rank.profile = FakeProfile(rank.story)
    rank.begin(10, 30)
    log(0, 10, 20, 30)
    assert rank.give().steps == [11, 30]


def test_a_trace_ends_with_the_step_that_exceeds_the_time_limit(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rank.begin(1, 10**6)
    log(0, 1, 2)
    now[0] = MAX_SECONDS + 1
    log(3, 4, 5)
    assert rank.give().steps == [1, 3]


def test_no_trace_with_another_active_profiler_or_on_other_threads(rank: Rank) -> None:
    rank.begin(3, 4)
    thread = threading.Thread(target=log, args=range(9))
    thread.start()
    thread.join()
    with torch.autograd.profiler.profile():
        log(*range(9))
    assert rank.end().reason == OWN_PROFILER
    assert rank.story == []


def test_profiler_errors_and_truncated_traces_are_reported(rank: Rank) -> None:
    rank.profile.error = RuntimeError("no CUPTI\nand a stack")
    rank.begin(3, 4)
    log(*range(9))
    assert rank.end().reason.endswith(": no CUPTI")
    rank.profile = FakeProfile(rank.story)
    rank.profile.document = '{"traceEvents": ['
    rank.begin(0, 1)
    log(0, 1)
    assert str(rank.folder) in rank.give().reason
    assert list(rank.folder.iterdir()) == []


def test_trace_files_are_returned_as_bytes_if_no_folder_is_given(rank: Rank) -> None:
    rank.begin(0, 1)
    log(0, 1)
    told, files = rank.profiler.export(command_to_give(""))
    assert not told.reason
    assert json.loads(gzip.decompress(files[0])) == json.loads(rank.profile.document)
    assert files[1:] == [b""]


# ---- beside other ranks

PID = 77
HEADS = [
    {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_labels", "pid": PID, "tid": 0, "args": {"labels": "CPU"}},
    {"ph": "M", "name": "process_sort_index", "pid": PID, "tid": 0, "args": {"sort_index": PID}},
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"ph": "M", "name": "thread_name", "pid": PID, "tid": PID, "args": {"name": "thread 77 (py)"}},
    {"ph": "M", "name": "thread_name", "pid": PID, "tid": 8, "args": {"name": "thread 8 (pt_x)"}},
]


def span(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": PID, "tid": PID, "ts": ts, "dur": dur, **more}


def test_a_merged_trace_has_times_from_the_start_and_process_ids_of_the_rank() -> None:
    spans = [span("aten::add", 5.0, 2.0), span("copy", 8.0, 1.0, pid=0, id=7)]
    of_no_process = span("PyTorch Profiler (0)", 0.0, 9.0, pid="Spans")
    document = {"baseTimeNanoseconds": 4_000, "traceEvents": [*HEADS, of_no_process, *spans]}
    command = replace(command_to_give(""), rank=2, start_ns=1_000, node="alpha")
    events, _ = build_merged_part(json.loads(json.dumps(document)), command)
    heads = {(each["pid"], each["name"]): each["args"] for each in events[: len(HEADS)]}
    assert heads[20_000_077, "process_name"]["name"] == "rank 2 (node alpha)"
    assert heads[20_000_077, "process_sort_index"]["sort_index"] == 20_000_077
    assert heads[20_000_000, "process_name"]["name"] == "rank 2 (node alpha), GPU 0"
    names = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert names == ["main thread", "thread 8 (pt_x)"]
    add, copy = events[len(HEADS) :]
    assert (add["ts"], add["pid"], copy["pid"]) == (8.0, 20_000_077, 20_000_000)
    assert copy["id"] == 2_000_000_007


def test_the_shortest_of_too_many_events_are_dropped_and_counted() -> None:
    events = [span("op", 10.0 * n, float(n)) for n in range(1, 11)]
    document = {"traceEvents": [*HEADS, *events]}
    events, left_out = build_merged_part(document, replace(command_to_give(""), max_events=3))
    assert [each["dur"] for each in events[len(HEADS) :]] == [10.0, 9.0, 8.0]
    assert left_out == 7


def event(name: str, begin: float, end: float, *, thread: int = 1, is_mark: bool = False) -> Any:
    """As torch's profiler has one, in microseconds."""
    time = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, time_range=time, thread=thread, is_user_annotation=is_mark)


def test_operators_count_their_self_time_and_collectives_count_overlapping_time_once() -> None:
    def average(key: str, seconds: float, *, is_mark: bool = False, on_cpu: bool = True) -> Any:
        kind = DeviceType.CPU if on_cpu else DeviceType.CUDA
        return SimpleNamespace(
            key=key,
            count=3,
            device_type=kind,
            self_cpu_time_total=seconds if on_cpu else 0.0,
            self_device_time_total=0.0 if on_cpu else seconds,
            is_user_annotation=is_mark,
        )

    averages = [
        average("aten::mm", 2000.0),
        average("ProfilerStep*", 500.0, is_mark=True),
        average("gloo:all_reduce", 0.0, is_mark=True),
        average("sgemm", 4000.0, on_cpu=False),
    ]
    events = [
        event("ProfilerStep*", 0, 9000, is_mark=True),
        event("aten::mm", 1000, 3000),
        event("aten::add", 1500, 2000),
        event("aten::mm", 0, 9000, thread=5),
        event("gloo:all_reduce", 2000, 4000, thread=2, is_mark=True),
        event("gloo:all_reduce", 3000, 6000, thread=3, is_mark=True),
    ]
    assert operator_times(averages, events) == {
        "gloo:all_reduce": [4.0, 2],
        "sgemm": [4.0, 3],
        "aten::mm": [2.0, 3],
    }
    assert idle_time(events, 9000.0) == 4000.0
