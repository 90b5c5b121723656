"""Trace some steps of a cell with torch's profiler, and write the trace files of a rank.

``nbddp.log`` ends a step when it reports it. In a cell that logs nothing, a step begins when an
``nbddp.loader`` yields its batch. The rank keeps the trace until the notebook requests it.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, profile

from nbddp.extension.rank_half import RankAnswer, RankCell, RankHalf
from nbddp.extensions.trace import TraceSteps, format_steps
from nbddp.extensions.trace.messages import SendTrace, TraceSent
from nbddp.private_files import open_private_folder, path_through
from nbddp.reporting import log_and_track
from nbddp.sigint import sigint_deferred
from nbddp.worker.wrapping import wrap

Interval = tuple[float, float]

MAX_SECONDS = 60.0  # a longer trace ends after the step, because it is kept in memory
MAX_OPERATORS = 150  # the number of operators with times to send
BACKENDS = ("gloo:", "nccl:", "nccl2:", "ucc:", "mpi:", "xccl:")
PID_RANGE = 10_000_000  # offset of a rank's process ids in the merged file, above any of Linux
ID_RANGE = 10**9  # the same for the ids of arrows
NO_STEPS = (
    "no step was reported, so nothing was traced: call nbddp.log(step=step, ...) in the loop, or "
    "take its batches from an nbddp.loader"
)
OWN_PROFILER = "the cell runs its own profiler, and torch can run only one at a time"
CELL_GONE = "the cell had not begun on this rank, or the rank has a new process since then"


class TraceOnRank(RankHalf):
    """Traces the cells that ask for it. A trace stays until the next cell."""

    def __init__(self) -> None:
        self._profiler: CellProfiler | None = None

    def before_cell(self, cell: RankCell) -> None:
        """Start to trace the requested steps, but not in a replay."""
        self._profiler = None
        if cell.options.trace is None or cell.is_replay:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its log appears in the cell's output
        importlib.import_module(
            "torch._inductor.config"
        )  # else the profiler imports it at its start
        self._profiler = CellProfiler(cell.options.trace, cell.number)
        self._profiler.begin_cell()

    def after_cell(self, error: BaseException | None) -> Sequence[str]:
        """End the trace. torch may need several seconds for it."""
        if self._profiler is not None:
            self._profiler.end_cell(is_ok=error is None)
        return ()

    def answer(self, content: Mapping[str, Any]) -> RankAnswer:
        """Write the trace of the last cell, and describe it."""
        command = SendTrace(**content)
        if self._profiler is None or self._profiler.cell != command.cell:
            return RankAnswer(content=asdict(TraceSent(reason=CELL_GONE)))
        traced, files = self._profiler.export(command)
        return RankAnswer(content=asdict(traced), value=files or None)


class CellProfiler:
    """Trace some steps of one cell, and keep the trace.

    Args:
        steps: the steps to trace.
        cell: the number of the cell.
    """

    def __init__(self, steps: TraceSteps, cell: int) -> None:
        self.cell = cell
        self._steps = steps
        self._pid = os.getpid()
        self._profile: Any = None
        self._is_tracing = False
        self._has_logged = False
        self._reason = ""  # why there is no trace
        self._restore: Callable[[], None] = lambda: None
        self._stop_watching: Callable[[], None] = lambda: None
        self._reported: list[int] = []  # the lowest and the highest step
        self._first = self._current = steps.first
        self._traced: list[int] = []  # the first and the last step in the trace
        self._seconds = self._started_at = 0.0

    def begin_cell(self) -> None:
        """Start to watch the steps of the cell."""
        if self._steps.first <= 1:  # steps count from 0 or 1: none is reported before the first
            self._start(self._steps.first)
        self._stop_watching = log_and_track.on_step(self.on_step)

    def end_cell(self, *, is_ok: bool) -> None:
        """End the trace, which has the step that a loader began, or in which the cell failed."""
        self._stop_watching()
        with sigint_deferred():
            has_begun_step = not is_ok or (self._reported and not self._has_logged)
            if self._is_tracing and has_begun_step:
                self._traced = [self._first, self._current]
            self._stop()

    def on_step(self, step: int, source: str) -> None:
        """Handle a reported step. ``log`` reports its end, a loader reports its start."""
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return  # a DataLoader worker, or a thread that is not profiled
        self._has_logged |= source == "log"
        if source != "log" and self._has_logged:
            return
        self._reported = [min([step, *self._reported]), max([step, *self._reported])]
        with sigint_deferred():  # else an interrupt could leave a profiler running
            self._advance(step + 1 if source == "log" else step)

    def _advance(self, step: int) -> None:
        """Handle the end of the step before ``step``."""
        is_early = step <= self._steps.first or self._reported[0] > self._steps.last
        if self._is_tracing and not self._traced and is_early:
            self._stop()  # the trace has no requested step
            self._profile, self._seconds = None, 0.0
        if self._is_tracing:
            has_gone_back = step <= self._current
            if not has_gone_back:
                self._traced = [max(self._first, self._reported[0]), step - 1]
            is_long = time.monotonic() - self._started_at > MAX_SECONDS
            if step > self._steps.last or has_gone_back or is_long:
                self._stop()
            else:
                self._profile.step_num = step - 1
                self._profile.step()
                self._current = step
        elif self._profile is None and self._steps.first <= step <= self._steps.last:
            self._start(step)

    def _start(self, step: int) -> None:
        if not self._reason and torch.autograd._profiler_enabled():
            self._reason = OWN_PROFILER  # torch would end the first profiler
        if self._reason:
            return
        try:
            self._profile = profile(
                profile_memory=self._steps.with_memory, schedule=lambda _: ProfilerAction.RECORD
            )
            self._profile.step_num = step
            self._profile.start()
        except RuntimeError as error:  # from torch: another profiler runs, or none can
            self._profile, self._reason = None, _torch_error(error)
            return
        self._is_tracing, self._started_at = True, time.monotonic()
        self._first = self._current = step
        module, name = torch.autograd.profiler, "_prepare_profiler"
        self._restore = partial(setattr, module, name, wrap(module, name, self._yield_to_cell))

    def _yield_to_cell(self, prepare: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Stop, because the cell starts its own profiler and torch would end this one silently."""
        self._stop()
        self._profile, self._reason = None, OWN_PROFILER
        return prepare(*args, **options)

    def _stop(self) -> None:
        if not self._is_tracing:
            return
        self._restore()
        self._is_tracing = False
        self._seconds = time.monotonic() - self._started_at
        try:
            self._profile.stop()
        except RuntimeError as error:  # the cell has stopped the profiler
            self._profile, self._reason = None, _torch_error(error)

    def export(self, command: SendTrace) -> tuple[TraceSent, list[bytes]]:
        """Write the trace file of the rank, and its part of the merged file, to the folder.

        Returns:
            A description of the files, and their contents if the command names no folder.
        """
        reason = self._reason or self._explain_missing()
        if reason:
            return TraceSent(reason=reason), []
        if command.folder:
            return self._write(command, Path(command.folder)), []
        with tempfile.TemporaryDirectory(prefix="nbddp-trace-") as folder:
            traced = self._write(command, Path(folder))
            files = () if traced.reason else _trace_files(command.rank, Path(folder))
            return traced, [each.read_bytes() for each in files]

    def _explain_missing(self) -> str:
        if self._profile is not None and self._traced:
            return ""
        if not self._reported:
            return NO_STEPS
        were = "was" if self._reported[0] == self._reported[1] else "were"
        return f"{format_steps(*self._reported)} {were} reported, none of {self._steps}"

    def _write(self, command: SendTrace, folder: Path) -> TraceSent:
        try:
            with open_private_folder(folder) as opened:
                events, left_out = self._write_files(command, path_through(opened, folder))
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: the JSON is cut off
            reason = getattr(error, "strerror", None) or "the disk may be full"
            if isinstance(error, RuntimeError):
                reason = _torch_error(error)
            return TraceSent(reason=f"its trace could not be written to {folder}: {reason}")
        return TraceSent(
            steps=self._traced,
            seconds=round(self._seconds, 6),
            events=len(events),
            left_out=left_out,
            operator_times=operator_times(self._profile.key_averages(), self._profile.events()),
            idle_ms=round(idle_time(self._profile.events(), 1e6 * self._seconds) / 1000, 4),
        )

    def _write_files(self, command: SendTrace, folder: Path) -> tuple[list[dict[str, Any]], int]:
        trace_file, part_file = _trace_files(command.rank, folder)
        try:
            self._profile.export_chrome_trace(str(trace_file))  # torch compresses it
            document = json.loads(gzip.decompress(trace_file.read_bytes()))
            events, left_out = build_merged_part(document, command)
            text = ",\n".join(json.dumps(each, separators=(",", ":")) for each in events)
            part_file.write_text(text)
        except BaseException:
            trace_file.unlink(missing_ok=True)
            raise
        return events, left_out


def _trace_files(rank: int, folder: Path) -> tuple[Path, Path]:
    """Return a rank's trace file, which torch writes, and its part of the merged file."""
    return folder / f"rank{rank}.json.gz", folder / f"rank{rank}.part"


def build_merged_part(
    document: Mapping[str, Any], command: SendTrace
) -> tuple[list[dict[str, Any]], int]:
    """Convert a rank's events to the times, process ids and names of the merged file.

    Args:
        document: the trace of the rank. Its events are changed in place.
        command: the request, with the rank and the start time of the merged file.

    Returns:
        The events for the merged file, and the number of the shortest events left out.
    """
    trace_events = [each for each in document["traceEvents"] if isinstance(each.get("pid"), int)]
    shift = (int(document.get("baseTimeNanoseconds", 0)) - command.start_ns) / 1000
    for event in trace_events:
        event["pid"] += PID_RANGE * command.rank
        if isinstance(event.get("id"), int):
            event["id"] += ID_RANGE * command.rank
        if event["ph"] != "M":
            event["ts"] = round(event["ts"] + shift, 3)
    metadata = [each for each in trace_events if each["ph"] == "M"]
    _name_rows(metadata, command)
    events = [each for each in trace_events if each["ph"] != "M"]
    events.sort(key=lambda event: event.get("dur", 0.0), reverse=True)
    longest = events[: command.max_events]
    return [*metadata, *longest], len(events) - len(longest)


def _name_rows(metadata: Iterable[dict[str, Any]], command: SendTrace) -> None:
    """Name the processes "rank 1" and "rank 1, GPU 0", and sort them by rank."""
    labelled = [each for each in metadata if each["name"] == "process_labels"]
    labels = {each["pid"]: each["args"]["labels"] for each in labelled}
    title = f"rank {command.rank}" + (f" (node {command.node})" if command.node else "")
    for row in metadata:
        label = labels.get(row["pid"], "CPU")
        if row["name"] == "process_name":
            row["args"]["name"] = title if label == "CPU" else f"{title}, {label}"
        elif row["name"] == "process_sort_index":
            row["args"]["sort_index"] = row["pid"]
        elif row["name"] == "thread_name" and row["tid"] == row["pid"] % PID_RANGE:
            row["args"]["name"] = "main thread"


def operator_times(averages: Iterable[Any], events: Iterable[Any]) -> dict[str, list[float]]:
    """Return the own milliseconds and the calls of each operator and kind of collective.

    Args:
        averages: ``profile.key_averages()``, where collectives have no time of their own.
        events: ``profile.events()``.
    """
    spent: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for op in averages:
        if not op.is_user_annotation:  # an annotation; its operators are counted
            on_cpu = op.device_type == torch.autograd.DeviceType.CPU
            spent[op.key] += op.self_cpu_time_total if on_cpu else op.self_device_time_total
            calls[op.key] += op.count
    for name, intervals in _collectives(events).items():
        spent[name], calls[name] = _covered_time(intervals), len(intervals)
    most = sorted(spent, key=lambda name: -spent[name])[:MAX_OPERATORS]
    return {name: [round(spent[name] / 1000, 4), calls[name]] for name in most}


def idle_time(events: Iterable[Any], whole: float) -> float:
    """Return the microseconds of ``whole`` without a collective or main-thread operator."""
    steps = {each.thread for each in events if each.name.startswith("ProfilerStep")}
    operators = (each for each in events if not each.is_user_annotation)
    busy = [_interval(each) for each in operators if each.thread in steps]
    for intervals in _collectives(events).values():
        busy += intervals
    return max(0.0, whole - _covered_time(busy))


def _collectives(events: Iterable[Any]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for event in events:
        if event.is_user_annotation and event.name.startswith(BACKENDS):
            found.setdefault(event.name, []).append(_interval(event))
    return found


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _covered_time(intervals: Iterable[Interval]) -> float:
    """Return the time covered by at least one interval."""
    length, end = 0.0, float("-inf")
    for begin, last in sorted(intervals):
        length += max(0.0, last - max(begin, end))
        end = max(end, last)
    return length


def _torch_error(error: BaseException) -> str:
    return "torch's profiler says: " + str(error).partition("\n")[0]
