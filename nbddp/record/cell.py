"""A run of a cell: its request, its handle while it runs, its result; the router of notices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from nbddp.errors import RequestError
from nbddp.record import run_events
from nbddp.record.log_reader import LogSpan
from nbddp.record.notices import ControllerMessage, InputRequest, Notice, NoticeQueue
from nbddp.record.push_store import PushRecord
from nbddp.record.verdict import ProcessExit, RankFailure, Verdict, failure_of, find_first_cause
from nbddp.sigint import SIGNAL_CHECK_INTERVAL
from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import DEBUGGER, CellEnded, InputReply, JsonDict, RunCell
from nbddp.wire.options.cell_spec import CellSpec

MAX_PENDING_TEXT = 64 << 10  # characters of output kept between two cells


class Purpose(Enum):
    """Why a cell runs."""

    USER = "user"
    REPLAY = "replay"  # it succeeded, and new ranks need its variables
    RETRY = "retry"  # it failed, and continues its work


class CellRequest(CellSpec):
    """A cell to run, with its options.

    Attributes:
        ranks: the ranks to run it on; None for all ranks.
        output_name: the variable of the notebook that gets the values of the last expression; empty
            for none.
        once: never repeat this cell in a recovery or a replay.
        purpose: why the cell runs.
        command: the ``%ddp`` command, with its options, that made the code; "" for the user's code.
        recorded_input: the user's input in the run that succeeded, by rank, for a replay.
        given: the options of extensions, by their class.
    """

    ranks: tuple[int, ...] | None = None
    output_name: str = ""
    once: bool = False
    purpose: Purpose = Purpose.USER
    command: str = ""
    recorded_input: tuple[tuple[int, InputReply], ...] = field(default=(), repr=False)
    given: Mapping[type[Frozen], Any] = field(default_factory=dict, hash=False, repr=False)

    @property
    def is_again(self) -> bool:
        """Whether nbddp runs this cell again, in a recovery or a replay."""
        return self.purpose is not Purpose.USER

    @property
    def is_replay(self) -> bool:
        """Whether the cell had succeeded, and runs again only for its variables."""
        return self.purpose is Purpose.REPLAY

    @property
    def has_own_ranks(self) -> bool:
        """Whether the cell is a script with ranks of its own."""
        return self.script is not None and not self.script.keeps_names


ReplayEntry = CellRequest | PushRecord  # what changes the namespaces of ranks


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The result of a cell on all its ranks.

    Attributes:
        number: number of the cell in the worker group, from 1; restarts do not reset it.
        prompt: number that the notebook shows for the cell.
        ranks: the ranks that ran the cell, in order.
        reports: the final message of each rank; ranks that died have none.
        exits: exit codes of the processes that died during this cell.
        seconds: duration since the cell was sent to the ranks.
        verdict: first cause and consequences of a failure; None on success.
        is_outgrown: whether the cell was ended because a restart can start more ranks.
        fetch: loads a value that a rank sent, for :meth:`values`.
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
        """Whether the cell succeeded on every rank."""
        return self.verdict is None

    @property
    def results(self) -> dict[int, JsonDict]:
        """The MIME bundle of the last expression, by rank; ranks without one are missing."""
        return {
            rank: report.result for rank, report in sorted(self.reports.items()) if report.result
        }

    def facts(self) -> dict[str, Any]:
        """Return the facts for the "cell ended" event in the event log."""
        numbers = {"number": self.prompt, "id": self.number}
        if self.verdict is None:
            return {**numbers, "outcome": "ok"}
        summary, report = self.verdict.summary(), self.verdict.report()
        more = {"interrupted": True} if self.verdict.is_interrupt else {}
        failures = self.verdict.facts()
        return {**numbers, "outcome": summary, "report": report, "failures": failures, **more}

    def values(self) -> list[Any]:
        """Return the value of the last expression of every rank, in rank order.

        Later calls return the same objects.

        Raises:
            RequestError: the cell ran without ``wants_value``, or it failed on a rank.
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
        """Raise an exception if the cell did not succeed.

        Raises:
            CellFailedError: the cell failed on some rank.
            CellInterruptedError: the cell was interrupted.
        """
        if self.verdict is not None:
            raise self.verdict.error()


def is_interrupted(result: CellResult | None) -> bool:
    """Return whether a cell has ended because the user interrupted it."""
    return result is not None and result.verdict is not None and result.verdict.is_interrupt


@dataclass(eq=False, repr=False)
class CellHandle:
    """A running cell. The session adds reports and notices; one reader shows the notices.

    Attributes:
        has_other_ranks: whether ranks that do not run the cell are alive.
        lost: the variables that were lost with earlier ranks; see ReplayLog.
        causes: the causes of deaths that are known before; see RankProcesses.
        describe_name: says how to get a name that the ranks do not have from the notebook.
        ended_by: how the user ended the cell and its ranks; see :func:`find_first_cause`.
        is_rejoined: whether an earlier notebook started it, so that no view may read it yet.
        result: the result; None until all ranks have ended the cell.
    """

    number: int
    request: CellRequest
    ranks: tuple[int, ...]
    fetch: Callable[[JsonDict], Any]
    attempt: int = 1
    run_attempt: int = 1
    has_other_ranks: bool = False
    lost: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[int, str] = field(default_factory=dict)
    describe_name: Callable[[str], str] = lambda _name: ""
    ended_by: str = ""
    is_outgrown: bool = False
    is_rejoined: bool = False
    result: CellResult | None = None
    began_at: float = field(default_factory=time.time)
    notice_queue: NoticeQueue = field(default_factory=NoticeQueue)
    _ended_at: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _reports: dict[int, CellEnded] = field(default_factory=dict)
    _exits: dict[int, ProcessExit] = field(default_factory=dict)
    _in_debugger: set[int] = field(default_factory=set)  # ranks that stopped in a debugger
    _recorded_input: list[tuple[int, InputReply]] = field(default_factory=list)

    # ---- the session's side

    def __post_init__(self) -> None:
        self._started -= time.time() - self.began_at  # an earlier notebook may have started it

    @property
    def prompt(self) -> int:
        """Number that the notebook shows for the cell."""
        return self.request.execution_count or self.number

    def run_message(self) -> RunCell:
        """Return the message that runs this cell on a rank."""
        shared = {item.name: getattr(self.request, item.name) for item in fields(CellSpec)}
        return RunCell(
            cell=self.number,
            ranks=self.ranks,
            is_again=self.request.is_again,
            is_replay=self.request.is_replay,
            **shared,
        )

    def start_event(self, logs: Mapping[str, int]) -> run_events.CellStarted:
        """Return the event of the start; ``logs`` are the bytes in the logs of its ranks."""
        return run_events.CellStarted(
            number=self.prompt,
            id=self.number,
            ranks=self.ranks,
            source=self.request.source,
            began=round(self.began_at, 6),
            again=self.request.is_again,
            replay=self.request.is_replay,
            logs=logs,
        )

    def set_ended_by(self, how: str) -> None:
        """Record that the user ended the cell and its ranks, as a noun."""
        self.ended_by, self._ended_at = how, time.time()

    def record_question(self, question: InputRequest) -> None:
        """Record that a rank asked for input, for a replay."""
        if question.message.what == DEBUGGER:
            self._in_debugger.add(question.rank)

    def record_answer(self, rank: int, answer: InputReply) -> None:
        """Record the user's answer to a rank, for a replay."""
        self._recorded_input.append((rank, answer))

    def replay_entry(self) -> CellRequest:
        """Return the request for a replay: the same ranks stop and get the same answers."""
        ranks = self.request.break_ranks or tuple(sorted(self._in_debugger))
        return replace(self.request, recorded_input=tuple(self._recorded_input), break_ranks=ranks)

    def add_report(self, rank: int, report: CellEnded) -> None:
        """Add the final message of a rank."""
        self._reports[rank] = report

    def add_exit(
        self, rank: int, exitcode: int | None, *, final_output: str = "", hint: str = ""
    ) -> None:
        """Add a process exit: the cell failed on that rank, even if the rank had ended it."""
        report = self._reports.get(rank)
        if rank in self.ranks and (report is None or report.is_ok):
            self._exits[rank] = ProcessExit(exitcode, time.time(), final_output, hint)

    def finish(self, on_result: Callable[[CellResult], None] = lambda _result: None) -> CellResult:
        """Finish the cell: all its ranks ended it or died.

        ``on_result`` gets the result before :attr:`result` is set.
        """
        verdict = find_first_cause(
            self.ranks,
            self._reports,
            self._exits,
            causes=self.causes,
            ended_by=self.ended_by,
            ended_at=self._ended_at,
            has_other_ranks=self.has_other_ranks,
        )
        if verdict is not None:
            is_script = self.request.has_own_ranks
            missing = verdict.first.failure.missing_name if verdict.first.failure else ""
            verdict = replace(
                verdict,
                is_script=is_script,
                is_replay=self.request.is_replay,
                lost=self.lost,
                hint=self.describe_name(missing) if missing and not is_script else "",
            )
        result = CellResult(
            number=self.number,
            prompt=self.prompt,
            ranks=self.ranks,
            reports=self._reports,
            exits=self.exits,
            seconds=time.monotonic() - self._started,
            verdict=verdict,
            fetch=self.fetch,
            is_outgrown=self.is_outgrown,
        )
        try:
            on_result(result)
        finally:  # a failed write to the event log must not block the readers
            self.result = result
            self.notice_queue.close(is_urgent=bool(self.verdict and self.verdict.is_interrupt))
        return result

    # ---- the reader's side

    @property
    def is_finished(self) -> bool:
        """Whether all ranks ended the cell."""
        return self.result is not None

    @property
    def verdict(self) -> Verdict | None:
        """First cause and consequences; None while the cell runs and on success."""
        return self.result.verdict if self.result else None

    @property
    def seconds(self) -> float:
        """Duration until now, or until the end."""
        return self.result.seconds if self.result else time.monotonic() - self._started

    @property
    def exits(self) -> dict[int, int | None]:
        """Exit codes of the processes that died during this cell, by rank."""
        return {rank: process_exit.exitcode for rank, process_exit in tuple(self._exits.items())}

    def has_ended(self, rank: int) -> bool:
        """Return whether the cell ended on this rank, by a report or by the exit of its process."""
        return rank in self._reports or rank in self._exits

    def was_ended_by_user(self, rank: int) -> bool:
        """Return whether the process of a rank exited because the user ended the cell."""
        process_exit = self._exits.get(rank)
        return bool(self.ended_by) and (process_exit is None or process_exit.at >= self._ended_at)

    def failure(self, rank: int) -> RankFailure | None:
        """Return how the cell failed on this rank; None if it did not.

        The verdict on all ranks may change this: some failures turn out to be consequences.
        """
        if self.verdict is not None:
            return self.verdict.for_rank(rank)
        cause = self.causes.get(rank, "")
        return failure_of(rank, self._reports.get(rank), self._exits.get(rank), cause)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices of the cell as they arrive, until it ends. There can be one reader."""
        while not self.notice_queue.is_drained:
            notice = self.notice_queue.get(SIGNAL_CHECK_INTERVAL)
            if notice is not None:
                yield notice


class NoticeRouter:
    """Sends notices to the running cell. Between two cells, keeps them for the next cell.

    Attributes:
        pending: the notices that are kept.
    """

    def __init__(self, last_cell: Callable[[], CellHandle | None]) -> None:
        self._last_cell = last_cell
        self.pending = NoticeQueue(max_text=MAX_PENDING_TEXT)

    def _running(self) -> CellHandle | None:
        cell = self._last_cell()
        return None if cell is None or cell.is_finished else cell

    def publish(self, notice: Notice | LogSpan | None) -> None:
        """Send a notice to the running cell, or keep it; None does nothing."""
        cell = self._running()
        if notice is None:
            return
        if cell is not None and isinstance(notice, InputRequest):
            cell.record_question(notice)
        (cell.notice_queue if cell else self.pending).put(notice)

    def publish_to_running(self, notice: LogSpan | None) -> None:
        """Send the final output of a dead rank to the running cell.

        Without a running cell, the output stays in the log only.
        """
        if self._running() is not None:
            self.publish(notice)

    @property
    def has_reader(self) -> bool:
        """Whether a view reads the notices of the running cell."""
        cell = self._running()
        return cell is not None and cell.notice_queue.has_reader

    def notify(self, text: str) -> None:
        """Send a message of the controller to the user."""
        if text:
            self.publish(ControllerMessage(text))
