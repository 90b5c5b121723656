"""A cell on its way: what it was asked to do, what it says while it runs, what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from nbddp.errors import RequestError
from nbddp.record.log_reader import LogSpan
from nbddp.record.notices import ControllerMessage, InputRequest, Notice, NoticeQueue
from nbddp.record.push_store import PushRecord
from nbddp.record.verdict import ProcessExit, RankFailure, Verdict, failure_of, find_first_cause
from nbddp.sigint import SIGNAL_CHECK_INTERVAL
from nbddp.wire.messages import DEBUGGER, CellEnded, InputReply, JsonDict, RunCell
from nbddp.wire.rank_start import Script
from nbddp.wire.trace_messages import TraceSteps

MAX_PENDING_TEXT = 64 << 10  # characters of output kept from between two cells


class Purpose(Enum):
    """Why a cell runs."""

    USER = "user"
    REPLAY = "replay"  # it went well before, and new ranks need its names
    RETRY = "retry"  # it failed, and goes on with its work


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """What a cell was asked to do.

    Attributes:
        source: Python, or whatever IPython takes.
        ranks: where to run it; None for all.
        first_line: the notebook's line that ``source`` begins on, for tracebacks.
        execution_count: the number in the notebook's prompt.
        wants_value: whether the last expression's value comes back, pickled.
        needs_group: true forms the default process group if there is none, false destroys the
            one that there is, None leaves everything as it is.
        once: never run it again by itself, in a recovery or a replay.
        purpose: why it runs.
        script: what to run in the source's place.
        break_ranks: whom ``breakpoint()`` stops; the first that comes to one if it is empty.
        answers: what is typed before anybody is asked.
        recorded_input: the user's answers in the run that succeeded, by rank, for a replay.
        trace: the steps that torch's profiler traces, if any.
    """

    source: str
    ranks: tuple[int, ...] | None = None
    first_line: int = 1
    execution_count: int = 1
    wants_value: bool = False
    needs_group: bool | None = True
    once: bool = False
    purpose: Purpose = Purpose.USER
    script: Script | None = None
    break_ranks: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    recorded_input: tuple[tuple[int, InputReply], ...] = field(default=(), repr=False)
    trace: TraceSteps | None = None

    @property
    def is_again(self) -> bool:
        """Whether it is run again by itself, in a recovery or a replay."""
        return self.purpose is not Purpose.USER

    @property
    def has_own_ranks(self) -> bool:
        """Whether it is a script that runs in other ranks than the cells."""
        return self.script is not None and not self.script.keeps_names


ReplayEntry = CellRequest | PushRecord  # what makes the ranks' namespaces what they are


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What came of a cell.

    Attributes:
        number: of the cell, from 1, through all attempts of a group.
        prompt: the number that the notebook shows for the cell.
        ranks: where it ran, in order.
        reports: what each rank said at its end; a rank whose process died is missing.
        exits: exit codes of ranks whose process died in this cell.
        seconds: from the moment it was handed to the ranks.
        verdict: first cause and consequences; None if all went well.
        is_outgrown: whether it was ended because a restart would make more ranks.
        fetch: collects a value that a rank has sent, for :meth:`values`.
    """

    number: int
    prompt: int
    ranks: tuple[int, ...]
    reports: dict[int, CellEnded] = field(repr=False)
    exits: dict[int, int | None]
    seconds: float
    verdict: Verdict | None
    fetch: Callable[[JsonDict], Any] = field(repr=False)
    is_outgrown: bool = False
    _values: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_ok(self) -> bool:
        """Whether every rank ran the cell to its end."""
        return self.verdict is None

    @property
    def results(self) -> dict[int, JsonDict]:
        """The MIME bundle of the last expression, for each rank that has one."""
        return {
            rank: report.result for rank, report in sorted(self.reports.items()) if report.result
        }

    def facts(self) -> dict[str, Any]:
        """What the record of a run says of it."""
        numbers = {"number": self.prompt, "id": self.number}
        if self.verdict is None:
            return {**numbers, "outcome": "ok"}
        summary, report = self.verdict.summary(), self.verdict.report()
        more = {"interrupted": True} if self.verdict.is_interrupt else {}
        return {**numbers, "outcome": summary, "report": report, **more}

    def values(self) -> list[Any]:
        """The last expression's value of every rank, in order of rank; the same when asked again.

        Raises:
            RequestError: it was not asked for, or a rank has none.
        """
        for rank in self.ranks:
            report = self.reports.get(rank)
            if report is None or not report.is_ok:
                raise RequestError(f"there is no value of rank {rank}: the cell failed there")
            if not report.payload:
                raise RequestError(
                    "the values were not asked for: run the cell with wants_value=True"
                )
            if rank not in self._values:
                self._values[rank] = self.fetch(report.payload)
        return [self._values[rank] for rank in self.ranks]

    def raise_for_failure(self) -> None:
        """Do nothing if all went well.

        Raises:
            CellFailedError: it failed on some rank.
            CellInterruptedError: it was interrupted.
        """
        if self.verdict is not None:
            raise self.verdict.error()


class CellHandle:
    """A cell that runs; fed by the session, read by whoever shows it."""

    def __init__(
        self,
        number: int,
        request: CellRequest,
        ranks: Sequence[int],
        fetch: Callable[[JsonDict], Any],
        *,
        attempt: int = 1,
        has_other_ranks: bool = False,
    ) -> None:
        self.number = number
        self.prompt = request.execution_count or number
        self.attempt = attempt
        self.has_other_ranks = has_other_ranks  # whether ranks live that do not run it
        self.began_at = time.time()
        self.ended_by = ""
        self.is_outgrown = False
        self._ended_at = 0.0
        self.request = request
        self.ranks = tuple(ranks)
        self.result: CellResult | None = None
        self._fetch = fetch
        self._started = time.monotonic()
        self.notice_queue = NoticeQueue()
        self._reports: dict[int, CellEnded] = {}
        self._exits: dict[int, ProcessExit] = {}
        self._in_debugger: set[int] = set()  # ranks that were in a debugger
        self._recorded_input: list[tuple[int, InputReply]] = []

    # ---- the session's side

    def run_message(self) -> RunCell:
        """What the ranks are told."""
        return RunCell(
            cell=self.number,
            source=self.request.source,
            first_line=self.request.first_line,
            execution_count=self.request.execution_count,
            wants_value=self.request.wants_value,
            is_replay=self.request.is_again,
            needs_group=self.request.needs_group,
            ranks=list(self.ranks),
            script=asdict(self.request.script) if self.request.script else {},
            break_ranks=list(self.request.break_ranks),
            answers=list(self.request.answers),
            trace=asdict(self.request.trace) if self.request.trace else {},
        )

    def facts(self) -> dict[str, Any]:
        """What the record of a run says of its beginning."""
        return {
            "number": self.prompt,
            "id": self.number,
            "ranks": self.ranks,
            "source": self.request.source,
            "began": round(self.began_at, 6),
            **({"again": True} if self.request.is_again else {}),
        }

    def put(self, notice: Notice) -> None:
        """Hand a notice to the reader; never waits."""
        self.notice_queue.put(notice)

    def set_ended_by(self, how: str) -> None:
        """The user ends the cell with its ranks, by a "restart" or a "stop"."""
        self.ended_by, self._ended_at = how, time.time()

    def record_question(self, question: InputRequest) -> None:
        """Note a question of a rank, for a replay."""
        if question.message.what == DEBUGGER:
            self._in_debugger.add(question.rank)

    def record_answer(self, rank: int, answer: InputReply) -> None:
        """Note an answer to a rank, for a replay."""
        self._recorded_input.append((rank, answer))

    def replay_entry(self) -> CellRequest:
        """Return the request for a replay: the same ranks stop and get the same answers."""
        ranks = self.request.break_ranks or tuple(sorted(self._in_debugger))
        return replace(
            self.request, recorded_input=tuple(self._recorded_input), break_ranks=ranks, trace=None
        )

    def add_report(self, rank: int, report: CellEnded) -> None:
        """A rank is through."""
        self._reports[rank] = report

    def add_exit(
        self, rank: int, exitcode: int | None, *, final_output: str = "", hint: str = ""
    ) -> None:
        """A rank's process has ended: the cell failed there, even if the rank had ended it."""
        report = self._reports.get(rank)
        if rank in self.ranks and (report is None or report.is_ok):
            self._exits[rank] = ProcessExit(exitcode, time.time(), final_output, hint)

    def finish(self, on_result: Callable[[CellResult], None] = lambda _result: None) -> CellResult:
        """All ranks are through, or gone; ``on_result`` gets the result before anybody else."""
        result = CellResult(
            number=self.number,
            prompt=self.prompt,
            ranks=self.ranks,
            reports=self._reports,
            exits=self.exits,
            seconds=time.monotonic() - self._started,
            verdict=find_first_cause(
                self.ranks,
                self._reports,
                self._exits,
                ended_by=self.ended_by,
                ended_at=self._ended_at,
                is_script=self.request.has_own_ranks,
                has_other_ranks=self.has_other_ranks,
            ),
            fetch=self._fetch,
            is_outgrown=self.is_outgrown,
        )
        try:
            on_result(result)
        finally:  # whatever becomes of the record, nobody waits for a cell that is over
            self.result = result
            self.notice_queue.close(is_urgent=bool(self.verdict and self.verdict.is_interrupt))
        return result

    # ---- the reader's side

    @property
    def is_finished(self) -> bool:
        """Whether all ranks are through."""
        return self.result is not None

    @property
    def verdict(self) -> Verdict | None:
        """First cause and consequences; None while it runs, and if all went well."""
        return self.result.verdict if self.result else None

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return self.result.seconds if self.result else time.monotonic() - self._started

    @property
    def exits(self) -> dict[int, int | None]:
        """Exit codes of the ranks whose process died in this cell."""
        return {rank: process_exit.exitcode for rank, process_exit in tuple(self._exits.items())}

    def has_ended(self, rank: int) -> bool:
        """Whether this rank is through with it, one way or the other."""
        return rank in self._reports or rank in self._exits

    def was_ended_by_user(self, rank: int) -> bool:
        """Whether its process ended because the user had asked for it."""
        process_exit = self._exits.get(rank)
        return bool(self.ended_by) and (process_exit is None or process_exit.at >= self._ended_at)

    def failure(self, rank: int) -> RankFailure | None:
        """How it ended badly on this rank; None if it did not.

        When all have ended that is known best: some trouble is then seen to come from another rank.
        """
        if self.verdict is not None:
            return self.verdict.for_rank(rank)
        return failure_of(rank, self._reports.get(rank), self._exits.get(rank))

    @property
    def is_drained(self) -> bool:
        """Whether the reader knows that it is over."""
        return self.notice_queue.is_drained

    def notices(self) -> Iterator[Notice]:
        """What the cell says, as it says it, until it ends; for one reader."""
        while not self.notice_queue.is_drained:
            notice = self.notice_queue.get(SIGNAL_CHECK_INTERVAL)
            if notice is not None:
                yield notice

    def next_notice(self, timeout: float, *, batch_text: bool = False) -> Notice | None:
        """The next thing it says, for one reader; None when nothing came, or it is over.

        When it is over, ``is_drained`` is true. ``batch_text``: see :meth:`NoticeQueue.get`.
        """
        return self.notice_queue.get(timeout, batch_text=batch_text)

    def detach_reader(self) -> None:
        """Nobody reads any more; the files go on."""
        self.notice_queue.detach_reader()


class NoticeRouter:
    """Who hears what is said: the cell that runs or, between two cells, the one that comes next.

    What ranks say that are gone by then, that one does not hear.
    """

    def __init__(self, last_cell: Callable[[], CellHandle | None]) -> None:
        self._last_cell = last_cell
        self._pending = NoticeQueue(max_text=MAX_PENDING_TEXT)

    def _running(self) -> CellHandle | None:
        cell = self._last_cell()
        return None if cell is None or cell.is_finished else cell

    def publish(self, notice: Notice | LogSpan | None) -> None:
        """Hand on a notice, if there is one, or keep it."""
        cell = self._running()
        if notice is None:
            return
        if cell is not None and isinstance(notice, InputRequest):
            cell.record_question(notice)
        (cell.notice_queue if cell else self._pending).put(notice)

    def publish_to_running(self, notice: LogSpan | None) -> None:
        """Hand on the last words of a rank that is gone: no later cell is to hear them.

        Between two cells they are left to its log.
        """
        if self._running() is not None:
            self.publish(notice)

    def drop_rank_output(self) -> None:
        """Other ranks come: what the last ones have said between two cells is left to the logs."""
        self._pending.drop_rank_output()

    @property
    def has_reader(self) -> bool:
        """Whether somebody reads what the cell that runs says."""
        cell = self._running()
        return cell is not None and cell.notice_queue.has_reader

    def notify(self, text: str) -> None:
        """Hand on a word of our own."""
        if text:
            self.publish(ControllerMessage(text))

    def deliver_pending(self, cell: CellHandle) -> None:
        """A cell has begun: it hears what was kept."""
        self._pending.move_to(cell.notice_queue)
