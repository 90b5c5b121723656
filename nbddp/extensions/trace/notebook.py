"""``%ddp trace``, ``--trace``: fetch the traces of a cell, and merge them in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nbddp.controller.rank_requests import ask_each
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.trace import TraceArguments, TraceOptions, TraceSteps
from nbddp.extensions.trace.merge import MAX_EVENTS, Trace, write_merged
from nbddp.extensions.trace.messages import SendTrace, TraceSent
from nbddp.extensions.trace.view import trace_report
from nbddp.group.notebook_half import CellToRun, CellWithResult, Notebook, NotebookHalf
from nbddp.private_files import make_private_folders
from nbddp.record.cell import CellResult
from nbddp.record.run_events import CellStarted
from nbddp.record.run_folder import replace_file
from nbddp.ui.report.blocks import Report
from nbddp.wire.request_messages import Answer, ExtensionMessage

RANK_DIED = "it died"
RANKS_STOPPED = "the ranks have ended, and their traces are lost"
NO_TRACE = "no trace is requested: `%ddp trace --steps 10:15` traces these steps of the next cell"


class Tracing(NotebookHalf):
    """Traces cells and scripts, and shows their traces."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(notebook)
        self._next: TraceSteps | None = None  # what the next cell traces

    def trace(self, args: TraceArguments) -> None:
        """Set or cancel the steps to trace."""
        self.notebook.print_line(f"nbddp: {self._set_steps(args)}")

    def _set_steps(self, args: TraceArguments) -> str:
        if args.off:
            before, self._next = self._next, None
            return NO_TRACE if before is None else "the next cell is not traced"
        if args.steps is not None:
            self._next = replace(args.steps, with_memory=args.memory)
            return _describe_steps(self._next)
        if self._next is None:
            return NO_TRACE
        return f"{_describe_steps(self._next)}; `%ddp trace --off` cancels it"

    def before_cell(self, cell: CellToRun) -> TraceOptions | None:
        """Return the steps to trace, if there are some: those of the line, or of the command."""
        steps = cell.options(TraceOptions).trace or self._next
        if not self.notebook.group.scripts.active_session.life.state.is_busy:
            self._next = None  # while another cell runs, this one is refused
        return TraceOptions(trace=steps) if steps else None

    def after_cell(self, cell: CellWithResult) -> Sequence[Report]:
        """Collect the traces of a cell, and report them."""
        steps = cell.options(TraceOptions).trace
        return [trace_report(collect_trace(cell.session, cell.result, steps))] if steps else ()


def _describe_steps(steps: TraceSteps) -> str:
    memory = ", with memory" if steps.with_memory else ""
    return f"the next cell is traced: {steps}{memory}"


def collect_trace(session: Session, result: CellResult, asked: TraceSteps) -> Trace:
    """Return the traces of a cell that has ended, merged into one file if there are any.

    Errors do not raise: ``missing`` gives the reason for each rank without a trace.
    """
    folder = session.event_log.folder
    gone = [rank for rank in result.ranks if rank not in session.life.alive]
    trace = Trace(cell=result.prompt, asked=asked, ranks={}, missing=dict.fromkeys(gone, RANK_DIED))
    ranks = [rank for rank in result.ranks if rank not in gone]
    if folder is None or not ranks or not session.life.state.is_ready:
        return replace(trace, missing=dict.fromkeys(result.ranks, RANKS_STOPPED))
    trace_folder = folder / "traces" / f"cell{result.prompt}"
    try:
        make_private_folders(folder, "traces", trace_folder.name)
        return _collect(session, result, trace, trace_folder, ranks)
    except OSError as error:
        why = f"the trace cannot be written to {trace_folder}: {error.strerror or error}"
        return replace(trace, missing={**dict.fromkeys(ranks, why), **trace.missing})
    finally:
        _remove_parts(trace_folder)


def _cell_start(session: Session, result: CellResult) -> int:
    """Return the start of the cell in nanoseconds, from which the times in the file count."""
    event = session.event_log.of_cell(CellStarted, result.number)
    began = (event and event.began) or time.time() - result.seconds
    return int(began * 1e6) * 1000


def _collect(
    session: Session, result: CellResult, trace: Trace, trace_folder: Path, ranks: Sequence[int]
) -> Trace:
    """Ask all ranks at once for their traces, and merge them."""
    nodes, zero = session.launcher.nodes(), _cell_start(session, result)

    def request_for(rank: int) -> ExtensionMessage:
        ahead, _ = session.launcher.clock_offset(rank)
        command = SendTrace(
            cell=result.number,
            rank=rank,
            folder="" if rank in nodes else str(trace_folder.resolve()),
            start_ns=zero + int(ahead * 1e9),
            max_events=MAX_EVENTS // len(result.ranks),
            node=nodes.get(rank, ""),
        )
        return ExtensionMessage(extension="trace", content=asdict(command))

    outcomes = ask_each(session, {rank: request_for(rank) for rank in ranks})
    missing, traced = dict(trace.missing), dict[int, TraceSent]()
    for rank, outcome in sorted(outcomes.items()):
        if not isinstance(outcome, Answer):
            missing[rank] = str(outcome)
            continue
        sent = TraceSent(**outcome.content["trace"])
        try:
            if not sent.reason:
                _write_files(session, trace_folder, rank, outcome)
        except RequestError as problem:
            sent = replace(sent, reason=str(problem))
        if sent.reason:
            missing[rank] = sent.reason
        else:
            traced[rank] = sent
    trace = replace(trace, missing=dict(sorted(missing.items())))
    if not traced:
        return trace
    error = max(session.launcher.clock_offset(rank)[1] for rank in traced)
    parts = {rank: trace_folder / f"rank{rank}.part" for rank in traced}
    facts = {"baseTimeNanoseconds": zero, "clockErrorMilliseconds": 1000 * error}
    path = write_merged(parts, trace_folder.parent, trace_folder.name, facts)
    size = path.stat().st_size
    return replace(trace, ranks=traced, path=path, folder=trace_folder, size=size, error=error)


def _write_files(session: Session, trace_folder: Path, rank: int, answer: Answer) -> None:
    """Write the trace files that a rank of another machine sent."""
    if not answer.payload:
        return
    files: Any = session.require_link().load_payload(answer.payload)
    names = (f"rank{rank}.json.gz", f"rank{rank}.part")
    for name, data in zip(names, files, strict=True):
        with replace_file(trace_folder / name) as file:
            file.write(data)


def _remove_parts(trace_folder: Path) -> None:
    """Remove temporary files and keep the ranks' own traces."""
    with suppress(OSError):  # the folder may be deleted at the same time
        for part in [*trace_folder.glob("*.part"), *trace_folder.glob("*.tmp")]:
            part.unlink(missing_ok=True)
        if not any(trace_folder.iterdir()):
            trace_folder.rmdir()
