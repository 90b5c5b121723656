"""Run a cell several times, each time on fresh ranks next to those of the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbddp.archive.comparing import Comparison
from nbddp.archive.run_list import Listing
from nbddp.archive.scaling import Scaling
from nbddp.archive.sweeps import SEED, Row, State
from nbddp.controller.session import Session
from nbddp.controller.spec import GroupSpec
from nbddp.errors import CellFailedError, CellInterruptedError, NbddpError
from nbddp.formatting import plural
from nbddp.group.push_pull import push
from nbddp.group.recovery import Recovery
from nbddp.group.script_ranks import ScriptRanks
from nbddp.interrupts import interrupt_held_back
from nbddp.record.cell import CellHandle, CellRequest, CellResult, Deed
from nbddp.record.deeds import say_deeds
from nbddp.record.timeline import CONFIG
from nbddp.ui.report.blocks import Report
from nbddp.ui.report.sweep import describe_current, describe_outcome, sweep_report
from nbddp.ui.screen import StreamScreen
from nbddp.ui.text.compare import compare_text
from nbddp.ui.text.runs import runs_text
from nbddp.ui.text.scaling import scaling_text

SEEDING = (
    'torch.manual_seed(seed); __import__("random").seed(seed); '
    '__import__("numpy").random.seed(seed)'
)
_OF_CELLS = ("steps", "steps_per_second", "samples_per_step")  # in ``run.json``


class TrialDisplay(Protocol):
    """Runs a cell where the user sees it, and shows what all trials come to."""

    @property
    def has_table(self) -> bool:
        """Whether the progress is a table: then no trial needs a line of its own."""

    def run_cell(self, session: Session, request: CellRequest) -> CellResult:
        """Run a cell on these ranks and show it; raise nothing if it fails."""

    def starting(self, text: str, session: Session) -> AbstractContextManager[None]:
        """Say in the context that ranks start for the next cell."""

    def show_progress(self, report: Report) -> None:
        """Show which trial begins, or in the end how many went well."""

    def show(self, results: Listing | Comparison | Scaling) -> None:
        """Show what the trials came to."""

    def say(self, text: str) -> None:
        """Tell the user something."""


class TextDisplay:
    """Shows trials as text, for a script.

    Args:
        run_cell: runs a cell on the ranks of a session, and shows it.
        quiet: show nothing of the trials.
    """

    has_table = False

    def __init__(
        self, run_cell: Callable[[Session, CellRequest], CellResult], *, quiet: bool
    ) -> None:
        self.run_cell = run_cell
        self._quiet = quiet

    def starting(self, text: str, session: Session) -> AbstractContextManager[None]:
        """Say nothing."""
        del text, session
        return nullcontext()

    def show_progress(self, report: Report) -> None:
        """Print a line."""
        self.say(str(report.title))

    def show(self, results: Listing | Comparison | Scaling) -> None:
        """Print a table."""
        match results:
            case Listing():
                text = runs_text(results, most=len(results.runs))
            case Comparison():
                text = compare_text(results)
            case Scaling():
                text = scaling_text(results)
        self._write(text)

    def say(self, text: str) -> None:
        """Print a line."""
        self._write(f"nbddp: {text}")

    def _write(self, text: str) -> None:
        if not self._quiet:
            StreamScreen().write(f"{text}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What came of one trial.

    Attributes:
        path: the run's folder; None if the ranks could not start.
        is_ok: whether the cell went well on all ranks.
        why: the failure in one line; empty if all went well.
        report: the same with its traceback.
        rank: the rank that is the first cause.
        is_last: whether the user asked for an end while the cell ran to its end.
    """

    path: Path | None
    is_ok: bool = False
    why: str = ""
    report: str = ""
    rank: int = 0
    is_last: bool = False


class SweepCancelledError(Exception):
    """The user ended a trial; ``path`` is the folder of its run."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path


class TrialRunner:
    """Runs one cell several times.

    Each trial has ranks of its own, which do again what was done on the ranks of the group. The
    ranks of the group are left alone: whatever becomes of a trial, their names stay.

    Args:
        ranks: opens the session of each trial.
        display: shows the trials.
        request: the cell.
        spec: of the ranks.
        values: pushed each time before the cell.
        deeds: what each trial does before that.
    """

    def __init__(
        self,
        ranks: ScriptRanks,
        display: TrialDisplay,
        request: CellRequest,
        spec: GroupSpec,
        *,
        values: Mapping[str, Any],
        deeds: Sequence[Deed],
    ) -> None:
        self.display = display
        self.request = request
        self.spec = spec
        self.values = values
        self.deeds = deeds
        self._ranks = ranks
        self._rows: Sequence[Row] = ()
        self._what = ""
        self._failed: TrialResult | None = None  # the first one
        self._is_ended = False

    def run_all(
        self,
        rows: Sequence[Row],
        run_one: Callable[[Row], TrialResult],
        tell: Callable[[Row], None],
        *,
        what: str,
    ) -> None:
        """Run the trials that wait, one after the other, until the user asks for an end.

        Args:
            rows: the trials; what becomes of each is noted there.
            run_one: runs one with :meth:`run`.
            tell: called after each trial that has come to its end.
            what: the command, ``sweep`` or ``scale``.

        Raises:
            RequestError: a cell or a script runs.
        """
        self._ranks.make_way()
        self._rows, self._what = rows, what
        left = [row for row in rows if row.state is State.WAITING]
        again = f", {say_deeds(self.deeds)} again" if self.deeds else ""
        self.display.say(f"{plural(len(left), 'run')}, each with fresh ranks{again}")
        self._is_ended = any(self._ends(row, run_one, tell) for row in left)

    def _ends(
        self, row: Row, run_one: Callable[[Row], TrialResult], tell: Callable[[Row], None]
    ) -> bool:
        """Run one trial; return whether the user asked for an end."""
        row.state, began = State.RUNNING, time.monotonic()
        try:
            self.display.show_progress(sweep_report(self._rows, row, what=self._what))
            result = run_one(row)
            row.state, row.why = (State.OK if result.is_ok else State.FAILED), result.why
            row.seconds, row.path = time.monotonic() - began, result.path
            if not result.is_ok:
                self._failed = self._failed or result
            tell(row)
        except (SweepCancelledError, KeyboardInterrupt) as ended:
            if row.state is State.RUNNING:
                row.state, row.path = State.ENDED, getattr(ended, "path", None)
                row.seconds = time.monotonic() - began
            return True
        return result.is_last

    def run(
        self,
        row: Row,
        spec: GroupSpec,
        *,
        facts: Mapping[str, Any],
        finish: Callable[[Session, CellResult], None],
        settings: Mapping[str, Any] | None = None,
    ) -> TrialResult:
        """Run the cell on fresh ranks, and end them.

        Args:
            row: the trial.
            spec: of its ranks.
            facts: for ``run.json``.
            finish: called after a cell that went well, while its ranks are idle.
            settings: recorded as by ``nbddp.config``, and pushed before the cell; ``seed`` seeds
                the ranks, too.

        Raises:
            SweepCancelledError: the user ended it.
        """
        head = describe_current(self._rows, row, what=self._what)
        text = f"{head}: starting {plural(spec.nproc, 'rank')} ..."
        session = self._ranks.open()
        try:
            with self.display.starting(text, session):
                session.start(spec)
                _describe(session, facts)
                if settings:
                    values = {"values": row.trial.config}
                    session.call(session.time_line.note, 0, CONFIG, values)
                self._prepare(session, {**self.values, **(settings or {})})
                result = self.display.run_cell(session, self.request)
            if result.is_ok:
                finish(session, result)
            return _came_of(result, session)
        except (CellInterruptedError, KeyboardInterrupt):
            raise SweepCancelledError(session.time_line.path) from None
        except NbddpError as error:
            if session.times_ended:
                raise SweepCancelledError(session.time_line.path) from None
            return self._not_run(session.time_line.path, error)
        finally:
            with interrupt_held_back():
                self._ranks.close()

    def _prepare(self, session: Session, values: Mapping[str, Any]) -> None:
        """Do what earlier cells did, then set the names, whatever those cells made of them."""
        seeding: list[Deed] = []
        if SEED in values:
            seeding.append(CellRequest(source=SEEDING, execution_count=0, needs_group=None))
            push(session, {SEED: values[SEED]})
        _replay(session, [*seeding, *self.deeds])
        if self.deeds:  # what earlier cells report again is not what this run comes to
            session.call(session.whereabouts.tally.clear)
            _describe(session, dict.fromkeys(_OF_CELLS) | {"last": {}, "curves": {}})
        if values:
            push(session, values)
        _replay(session, seeding)

    def _not_run(self, path: Path | None, error: NbddpError) -> TrialResult:
        report, what = str(error), ""
        if isinstance(error, CellFailedError):
            report, what = error.report, "an earlier cell, done again: "
        self.display.say(report)
        return TrialResult(path=path, why=what + str(error).partition("\n")[0], report=report)

    def conclude(self, *, way_on: str) -> None:
        """Raise what a cell raises of which the user ended a part, or nothing went well.

        Args:
            way_on: what the user can do then.

        Raises:
            CellInterruptedError: the user ended it.
            CellFailedError: no trial went well.
        """
        if self._is_ended:
            raised = f"ended by you: {describe_outcome(self._rows, what=self._what)}; {way_on}"
            raise CellInterruptedError(raised, rank=0, report=raised)
        failed = self._failed
        if failed is not None and not any(row.state.is_done for row in self._rows):
            said = f"none of the {len(self._rows)} runs went well; {failed.why}"
            raise CellFailedError(said, rank=failed.rank, report=f"{said}\n{failed.report}")


def _describe(session: Session, facts: Mapping[str, Any]) -> None:
    session.call(session.time_line.describe, facts)


def _replay(session: Session, deeds: Sequence[Deed]) -> None:
    """Do again what was done.

    Raises:
        CellFailedError: a cell failed this time.
        CellInterruptedError: the user asked for an end.
        SweepCancelledError: the same, before or after all of it.
    """
    _check_wanted(session)
    failed = Recovery(session, show=_show_no_replay, say=_say_nothing).replay(deeds)
    if failed is not None:
        failed.raise_for_failure()
    _check_wanted(session)


def _check_wanted(session: Session) -> None:
    if session.times_ended:
        raise SweepCancelledError(session.time_line.path)


def _show_no_replay(_handle: CellHandle) -> CellResult:
    raise RuntimeError("a replayed cell is not shown")


def _say_nothing(_text: str) -> None:
    """The trial tells what came of its replay."""


def _came_of(result: CellResult, session: Session) -> TrialResult:
    verdict, path = result.verdict, session.time_line.path
    is_last = session.times_ended > 0
    if verdict is None:
        return TrialResult(path=path, is_ok=True, is_last=is_last)
    if verdict.is_interrupt or verdict.ended_by or is_last:
        raise SweepCancelledError(path)
    why, report = verdict.summary(), verdict.report()
    return TrialResult(path=path, why=why, report=report, rank=verdict.first.rank)
