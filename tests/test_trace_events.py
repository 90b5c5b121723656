"""What a rank's own trace becomes beside others': clocks, names, collectives, what is left out."""

from __future__ import annotations

import json
from typing import Any

from nbddp.worker.trace_events import LANES, Begun, Shaped, as_part, read, shape

PID = 77
ZERO = 1_000_000_000  # nanoseconds
BASE = 400_000_000
SUM = "gloo:all_reduce"


def span(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = PID) -> dict[str, Any]:
    """``ts`` is in microseconds since ZERO."""
    at = ts + (ZERO - BASE) / 1000
    return {"ph": "X", "cat": cat, "name": name, "pid": PID, "tid": tid, "ts": at, "dur": dur}


def collective(ts: float, dur: float, name: str = SUM) -> dict[str, Any]:
    return span(name, ts, dur, "user_annotation", tid=9)


HEADS = [
    {"ph": "M", "name": "process_labels", "pid": PID, "tid": 0, "args": {"labels": "CPU"}},
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"ph": "M", "name": "thread_name", "pid": PID, "tid": PID, "args": {"name": "thread 77 (py)"}},
    {"ph": "M", "name": "thread_name", "pid": PID, "tid": 8, "args": {"name": "thread 8 (pt_x)"}},
]


def shaped(
    *events: dict[str, Any], begun: list[Begun] | None = None, most: int = 1000, node: str = ""
) -> Shaped:
    document = {"baseTimeNanoseconds": BASE, "traceEvents": [*HEADS, *events]}
    return shape(document, rank=2, node=node, zero=ZERO, most=most, begun=begun or [])


def spans(told: Shaped) -> list[dict[str, Any]]:
    return [each for each in told.events if each["ph"] == "X"]


def test_times_are_those_since_zero_and_processes_the_ranks_own() -> None:
    of_no_process = {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x"}
    told = shaped(
        span("aten::add", 5.0, 2.0),
        span("py", 0.0, 9.0, tid=8),
        {**of_no_process, "ts": 1.0, "dur": 5.0},
        node="alpha",
    )
    (add, _) = spans(told)
    assert (add["ts"], add["pid"]) == (5.0, 2001)
    names = {(each["pid"], each["tid"]): each["args"] for each in told.events if each["ph"] == "M"}
    assert names[2001, PID]["sort_index"] == PID
    heads = [each["args"].get("name") for each in told.events if each["ph"] == "M"]
    assert {"rank 2 (node alpha)", "rank 2 (node alpha), GPU 0", "pt_x"} <= {*heads}
    assert json.loads(f"[{as_part(told.events)}]") == told.events


def test_collectives_are_named_by_the_recorders_number() -> None:
    begun = [
        Begun("", 7, SUM, ZERO + 10_000),
        Begun("[0, 2]", 1, SUM, ZERO + 30_000),
        Begun("", 8, "gloo:barrier", ZERO + 20_000),
    ]
    told = shaped(
        collective(11.0, 5.0),
        collective(21.0, 5.0, "gloo:barrier"),
        collective(31.0, 5.0),
        begun=begun,
    )
    assert [each[:3] for each in told.met] == [
        ["", 7, SUM],
        ["", 8, "gloo:barrier"],
        ["[0, 2]", 1, SUM],
    ]
    assert told.met[0][4:] == [11.0, 16.0]
    assert spans(told)[2]["args"]["collective"] == "#1 of group [0, 2]"
    assert told.lost == 0


def test_a_collective_keeps_its_number_and_takes_none_of_another_that_is_forgotten() -> None:
    forgotten = [Begun("", 9, SUM, ZERO + 50_000_000)]
    told = shaped(collective(11.0, 5.0), collective(50_001.0, 5.0), begun=forgotten)
    assert ([each[1] for each in told.met], told.lost) == ([9], 1)
    queued = [Begun("", n, SUM, ZERO + n * 1000) for n in (1, 2, 3)]
    told = shaped(*(collective(at, 5.0) for at in (1.0, 2.0, 90_000.0)), begun=queued)
    assert [each[1] for each in told.met] == [1, 2, 3]


def test_collectives_that_go_on_together_lie_in_rows_of_their_own_and_count_once() -> None:
    told = shaped(collective(0.0, 10_000.0), collective(5000.0, 8000.0), collective(12_000.0, 5.0))
    assert [each["tid"] - LANES for each in spans(told)] == [0, 1, 0]
    titles = [each["args"].get("name") for each in told.events if each["ph"] == "M"]
    assert titles.count("collectives") == 2
    assert told.spent[SUM] == (13.0, 3)


def test_an_operators_own_time_is_without_those_that_it_calls() -> None:
    told = shaped(
        span("aten::linear", 0.0, 1000.0),
        span("aten::addmm", 100.0, 600.0),
        span("aten::addmm", 2000.0, 400.0),
    )
    assert told.spent == {"aten::addmm": (1.0, 2), "aten::linear": (0.4, 1)}


def test_the_rest_is_when_the_main_thread_does_nothing_and_no_collective_goes_on() -> None:
    told = shaped(
        span("ProfilerStep#1", 0.0, 10_000.0, "user_annotation"),
        span("aten::mm", 1000.0, 2000.0),
        collective(2000.0, 5000.0),
        span("aten::add", 8000.0, 1000.0, tid=8),  # of another thread
    )
    assert told.rest == 4.0
    assert told.spent[SUM] == (5.0, 1)


def test_memory_is_a_curve_and_its_peak_is_told() -> None:
    def held(total: int) -> dict[str, Any]:
        args = {"Total Allocated": total, "Device Type": 0, "Device Id": -1}
        return {**span("[memory]", 1.0, 0.0), "ph": "i", "args": args}

    told = shaped(held(2**20), held(3 * 2**20), held(2**20))
    curve = [each["args"]["MiB"] for each in told.events if each["ph"] == "C"]
    assert curve == [1.0, 3.0, 1.0]
    assert told.peak == {"CPU": 3 * 2**20}


def test_the_shortest_are_left_out_and_collectives_are_not() -> None:
    told = shaped(
        *(span(f"op{number}", 10.0 * number, float(number)) for number in range(1, 21)),
        collective(300.0, 0.5),
        most=5,
    )
    assert sorted(each["name"] for each in spans(told)) == [*(SUM, "op17", "op18", "op19", "op20")]
    assert (told.left_out, told.under) == (16, 16.0)
    assert told.spent["op1"] == (0.001, 1), "what is told is told of all"


def test_what_the_profiler_notes_for_itself_is_not_read() -> None:
    noted = {**span("aten::add", 5.0, 2.0), "args": {"Ev Idx": 3}}
    kernel = {**span("sum_kernel", 5.0, 2.0, "kernel"), "args": {"stream": 7}}
    found = read(json.dumps({"traceEvents": [*HEADS, noted, kernel]}).encode())["traceEvents"]
    assert [each.get("args") for each in found[-2:]] == [None, {"stream": 7}]
    assert found[0]["args"] == {"labels": "CPU"}
