"""What torch's profiler has written of one rank, made ready to stand beside other ranks'. Pure."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

RANK_APART = 1000  # process numbers of one rank in the merged file begin this far from the next's
ID_APART = 10**9  # and so do the ids of its arrows
LANES = 900_000_000  # thread numbers of the rows in which collectives lie, above any real one
BACKENDS = ("gloo:", "nccl:", "ucc:", "mpi:", "xccl:")
MOST_MET = 5000  # collectives whose ends are told
MOST_OPERATORS = 150  # that are told
SOON = 500.0  # microseconds by which a span may begin before the recorder has its collective
MEMORY = "[memory]"


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective as the flight recorder has it: ``at`` in nanoseconds of ``time.time_ns()``."""

    group: str
    number: int
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Shaped:
    """Events for the merged file, and what is told of them; times are microseconds since zero."""

    events: list[Event]
    left_out: int
    under: float
    met: list[list[Any]]
    lost: int
    spent: dict[str, tuple[float, int]]
    rest: float
    peak: dict[str, int]


def shape(
    document: Mapping[str, Any], *, rank: int, node: str, zero: int, most: int, begun: list[Begun]
) -> Shaped:
    """Make of a rank's own file what stands in the merged one.

    Args:
        document: the file, as torch's profiler has written it.
        rank: whose it is.
        node: its machine, if there are many.
        zero: the instant of the merged file's 0, in nanoseconds of this machine's clock.
        most: how many events there may be.
        begun: the rank's collectives, in order.
    """
    shift = (int(document.get("baseTimeNanoseconds", 0)) - zero) / 1000
    heads = [each for each in document["traceEvents"] if each["ph"] == "M"]
    processes = _processes(heads)
    main = _main_thread(heads, processes)
    events = list(_moved(document["traceEvents"], shift, processes))
    spent, top = _own_times(events)
    met, lost = _name_collectives(_collectives(events), begun, zero)
    going = [(each["ts"], each["ts"] + each["dur"]) for each in _collectives(events)]
    counters, peak = _counters(events)
    kept, left_out, under = _bounded([*_without_memory(events), *counters], most)
    for each in kept:
        each["pid"] += RANK_APART * rank
        if "id" in each and isinstance(each["id"], int):
            each["id"] += ID_APART * rank
    return Shaped(
        events=[*_heads(heads, kept, processes, rank=rank, node=node), *kept],
        left_out=left_out,
        under=under,
        met=met,
        lost=lost,
        spent=spent,
        rest=_rest(events, [*top.get(main, []), *going]) / 1000,
        peak=peak,
    )


def read(text: bytes) -> dict[str, Any]:
    """What the profiler has written, without what it notes of each operator for itself.

    That would be more than half of what a million of them take in memory.
    """
    found: dict[str, Any] = json.loads(text, object_hook=_without_notes)
    return found


def _without_notes(each: Event) -> Event:
    if each.get("cat") in ("cpu_op", "user_annotation"):
        each.pop("args", None)
    return each


def _moved(events: Iterable[Event], shift: float, processes: Mapping[Any, int]) -> Iterator[Event]:
    """The events with times and processes of the merged file; they are changed in place."""
    for each in events:
        if each["ph"] != "M" and each.get("pid") in processes:
            each["ts"] = round(each["ts"] + shift, 3)
            each["pid"] = processes[each["pid"]]
            yield each


def _processes(events: Iterable[Event]) -> dict[Any, int]:
    """A number for each process: 1 for the rank's own, more for its devices."""
    labels = {
        each["pid"]: each["args"]["labels"]
        for each in events
        if each["ph"] == "M" and each["name"] == "process_labels"
    }
    own = [pid for pid, label in labels.items() if label == "CPU" and isinstance(pid, int)]
    others = [pid for pid, label in labels.items() if label != "CPU" and isinstance(pid, int)]
    return {pid: number for number, pid in enumerate([*own, *others], start=1)}


def _main_thread(events: Iterable[Event], processes: Mapping[Any, int]) -> tuple[int, Any]:
    """Its process here, and its number: on Linux the same as the process has."""
    pid = next(iter(processes), 0)
    threads = {each.get("tid") for each in events if each.get("pid") == pid}
    return 1, pid if pid in threads else next(iter(threads), pid)


# ---- collectives


def _collectives(events: Iterable[Event]) -> list[Event]:
    return [
        each
        for each in events
        if each["ph"] == "X"
        and each.get("cat") == "user_annotation"
        and each["name"].startswith(BACKENDS)
    ]


def _name_collectives(
    spans: list[Event], begun: Sequence[Begun], zero: int
) -> tuple[list[list[Any]], int]:
    """Put spans into rows in which none lies over another, and tell which collective each is.

    Returns:
        ``[group, number, name, thread, begin, end]`` of each, and how many were not recognized.
    """
    spans.sort(key=lambda each: float(each["ts"]))
    ends: list[float] = []  # of each row
    waiting: dict[str, list[Begun]] = defaultdict(list)
    for one in reversed(begun):
        waiting[one.name].append(one)
    met, lost = [], 0
    for span in spans:
        began, end = span["ts"], span["ts"] + span["dur"]
        lane = next((row for row, free in enumerate(ends) if free <= began), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        span["tid"] = LANES + lane
        found = _take(waiting[span["name"]], began, zero)
        if found is None:
            lost += 1
            continue
        of = f" of group {found.group}" if found.group else ""
        span["args"] = {**span.get("args", {}), "collective": f"#{found.number}{of}"}
        met.append([found.group, found.number, span["name"], span["tid"], began, round(end, 3)])
    return met[:MOST_MET], lost + max(0, len(met) - MOST_MET)


def _take(waiting: list[Begun], began: float, zero: int) -> Begun | None:
    """The oldest of this name that has no span yet; None if even that began after this span.

    Gloo's collectives wait in a queue for one of its threads, so a span may begin much later.
    """
    if waiting and (waiting[-1].at - zero) / 1000 <= began + SOON:
        return waiting.pop()
    return None


# ---- where the time went


def _own_times(
    events: Iterable[Event],
) -> tuple[dict[str, tuple[float, int]], dict[Any, list[Interval]]]:
    """Milliseconds and calls of each operator itself; when each thread was in any."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in events:
        if each["ph"] == "X" and each.get("cat") in ("cpu_op", "kernel"):
            threads[each["pid"], each["tid"]].append(each)
    top: dict[Any, list[Interval]] = {}
    for thread, its in threads.items():
        top[thread] = _nest(its, spent, calls)
    going: dict[str, list[Interval]] = defaultdict(list)
    for each in _collectives(events):
        going[each["name"]].append((each["ts"], each["ts"] + each["dur"]))
    for name, spans in going.items():
        spent[name] += _covered(spans)  # type: ignore[assignment]
        calls[name] += len(spans)
    told = spent.most_common(MOST_OPERATORS)
    return {name: (round(us / 1000, 4), calls[name]) for name, us in told}, top


def _nest(events: list[Event], spent: Counter[str], calls: Counter[str]) -> list[Interval]:
    """Count what each of a thread's operators took itself; when it was in any."""
    events.sort(key=lambda each: (each["ts"], -each["dur"]))
    top: list[Interval] = []
    stack: list[tuple[float, str]] = []
    for each in events:
        began, end = each["ts"], each["ts"] + each["dur"]
        while stack and stack[-1][0] <= began:
            stack.pop()
        if stack:
            spent[stack[-1][1]] -= each["dur"]
        else:
            top.append((began, end))
        spent[each["name"]] += each["dur"]
        calls[each["name"]] += 1
        stack.append((end, each["name"]))
    return top


def _covered(spans: Iterable[Interval]) -> float:
    """Microseconds in which at least one of them goes on."""
    whole, free = 0.0, float("-inf")
    for began, end in sorted(spans):
        whole += max(0.0, end - max(began, free))
        free = max(free, end)
    return whole


def _rest(events: Iterable[Event], busy: Iterable[Interval]) -> float:
    """Microseconds of all that was traced that are in none of these."""
    times = [(each["ts"], each["ts"] + each["dur"]) for each in events if each["ph"] == "X"]
    if not times:
        return 0.0
    first, last = min(began for began, _ in times), max(end for _, end in times)
    return max(0.0, float(last - first) - _covered(busy))


# ---- memory


def _without_memory(events: Iterable[Event]) -> Iterator[Event]:
    return (each for each in events if each["name"] != MEMORY)


def _counters(events: Iterable[Event]) -> tuple[list[Event], dict[str, int]]:
    """What tensors hold, as a curve for each device; the most of it."""
    curves: list[Event] = []
    peak: dict[str, int] = {}
    for each in events:
        if each["name"] != MEMORY:
            continue
        told = each["args"]
        index = told.get("Device Id", -1)
        device = "CPU" if told.get("Device Type", 0) == 0 else f"GPU {index}"
        total = int(told.get("Total Allocated", 0))
        peak[device] = max(total, peak.get(device, 0))
        curves.append(
            {
                "ph": "C",
                "name": f"tensors in memory, {device}",
                "pid": each["pid"],
                "ts": each["ts"],
                "args": {"MiB": round(total / 2**20, 3)},
            }
        )
    return curves, peak


# ---- how much of it


def _bounded(events: list[Event], most: int) -> tuple[list[Event], int, float]:
    """No more events than that: what is left out are arrows, then the shortest.

    Returns:
        The rest, how many are not in it, and how many microseconds they took at most.
    """
    if len(events) <= most:
        return events, 0, 0.0
    curves = [each for each in events if each["ph"] == "C"]
    curves = curves[:: max(1, -(-4 * len(curves) // most))]
    spans = [each for each in events if each["ph"] == "X"]
    spans.sort(key=_is_dear, reverse=True)
    kept = spans[: max(0, most - len(curves))]
    under = max((each["dur"] for each in spans[len(kept) :]), default=0.0)
    return [*kept, *curves], len(events) - len(kept) - len(curves), under


def _is_dear(span: Event) -> tuple[bool, float]:
    return span.get("cat") == "user_annotation", span["dur"]


# ---- names


def _heads(
    events: Iterable[Event],
    kept: Iterable[Event],
    processes: Mapping[Any, int],
    *,
    rank: int,
    node: str,
) -> list[Event]:
    """What the viewer shows beside processes and threads."""
    threads = sorted({(each["pid"], each["tid"]) for each in kept if "tid" in each})
    names: dict[Any, str] = {}
    heads: list[Event] = []
    title = f"rank {rank}" + (f" (node {node})" if node else "")
    for each in events:
        if each["ph"] != "M" or each.get("pid") not in processes:
            continue
        pid, kind = processes[each["pid"]] + RANK_APART * rank, each["name"]
        if kind == "thread_name":
            names[pid, each["tid"]] = _thread(each)
        elif kind == "process_labels":
            device = each["args"]["labels"]
            whole = title if device == "CPU" else f"{title}, {device}"
            heads.append(_head(pid, "process_name", name=whole))
            heads.append(_head(pid, "process_sort_index", sort_index=pid))
    for pid, tid in threads:
        is_lane = isinstance(tid, int) and tid >= LANES
        name = "collectives" if is_lane else names.get((pid, tid), str(tid))
        heads.append(_head(pid, "thread_name", tid, name=name))
        heads.append(_head(pid, "thread_sort_index", tid, sort_index=tid))
    return heads


def _thread(head: Event) -> str:
    """As ``thread 19602 (pt_gloo_runloop)`` is called, shorter."""
    name = str(head["args"]["name"])
    inner = name.rpartition("(")[2].rstrip(")") if name.endswith(")") else name
    return "main thread" if head["tid"] == head["pid"] else inner


def _head(pid: int, kind: str, tid: Any = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def as_part(events: Sequence[Event]) -> str:
    """The events as they stand in a list of JSON, without its brackets."""
    return ",\n".join(map(json.JSONEncoder(separators=(",", ":")).encode, events))
