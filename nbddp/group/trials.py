"""Run a cell several times, each time on fresh ranks next to those of the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


class TrialDisplay:
    """Shows trials as text, for a script; a notebook has its own.

    Args:
        run_cell: runs a cell on the ranks of a session, shows it, and raises nothing if it fails.
        quiet: show nothing of the trials.
    """

    has_table = False  # of the progress: then no trial needs a line of its own
    fresh = "fresh=True"  # the option that runs a cell without the earlier ones

    def __init__(
        self, run_cell: Callable[[Session, CellRequest], CellResult], *, quiet: bool
    ) -> None:
        self.run_cell = run_cell
        self.quiet = quiet

    def starting(self, text: str, session: Session) -> AbstractContextManager[None]:
        """Say in the context that ranks start for the next cell."""
        del text, session  # the line of the progress says it
        return nullcontext()

    def show_progress(self, report: Report) -> None:
        """Show which trial begins, or in the end how many went well."""
        self.say(str(report.title))

    def show(self, results: Listing | Comparison | Scaling) -> None:
        """Show what the trials came to."""
        match results:
            case Listing():
                text = runs_text(results, most=len(results.runs))
            case Comparison():
                text = compare_text(results)
            case Scaling():
                text = scaling_text(results)
        self.write(text)

    def say(self, text: str) -> None:
        """Tell the user something in a line of its own."""
        self.write(f"nbddp: {text}")

    def write(self, text: str) -> None:
        """Print a text."""
        if not self.quiet:
            screen = StreamScreen()
            screen.write(f"{text}\n")
            screen.flush()


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
        self._first: NbddpError | None = None  # of those that failed
        self._is_ended = False

    def run_all(
        self,
        rows: Sequence[Row],
        run_one: Callable[[Row], None],
        describe: Callable[[Row], str],
        *,
        what: str,
    ) -> None:
        """Run the trials that wait, one after the other, until the user asks for an end.

        Args:
            rows: the trials; what becomes of each is noted there.
            run_one: runs one with :meth:`run`.
            describe: says what came of it.
            what: the command, ``sweep`` or ``scale``.

        Raises:
            RequestError: a cell or a script runs.
        """
        self._ranks.make_way()
        self._rows, self._what = rows, what
        left = [row for row in rows if row.state is State.WAITING]
        again = f", {say_deeds(self.deeds)} again" if self.deeds else ""
        self.display.say(f"{plural(len(left), 'run')}, each with fresh ranks{again}")
        try:
            while left and not self._is_ended:
                row = left.pop(0)
                row.state = State.RUNNING
                self.display.show_progress(sweep_report(rows, row, what=what))
                run_one(row)
                if row.state is not State.ENDED and not self.display.has_table:
                    self.display.say(f"{row.trial}: {describe(row)}")
        except KeyboardInterrupt:
            self._is_ended = True
            for row in rows:
                row.state = State.ENDED if row.state is State.RUNNING else row.state

    def run(
        self,
        row: Row,
        spec: GroupSpec,
        *,
        facts: Mapping[str, Any],
        finish: Callable[[Session, CellResult], None],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Run the cell on fresh ranks, end them, and note in ``row`` what came of it.

        Args:
            row: the trial.
            spec: of its ranks.
            facts: for ``run.json``.
            finish: called after a cell that went well, while its ranks are idle.
            settings: recorded as by ``nbddp.config``, and pushed before the cell; ``seed`` seeds
                the ranks, too.
        """
        head = describe_current(self._rows, row, what=self._what)
        session, began = self._ranks.open(), time.monotonic()
        is_shown = False
        try:
            text = f"{head}: starting {plural(spec.nproc, 'rank')} ..."
            with self.display.starting(text, session):
                session.start(spec)
                _describe(session, facts)
                if settings:
                    values = {"values": row.trial.config}
                    session.call(session.time_line.note, 0, CONFIG, values)
                self._prepare(session, {**self.values, **(settings or {})})
                result = self.display.run_cell(session, self.request)
            is_shown = True
            result.raise_for_failure()
            finish(session, result)
            row.state = State.OK
        except (CellInterruptedError, KeyboardInterrupt):
            row.state, self._is_ended = State.ENDED, True
        except NbddpError as error:
            self._note_failure(row, error, session, is_shown=is_shown)
        finally:
            with interrupt_held_back():
                self._is_ended = self._is_ended or session.times_ended > 0
                row.path, row.seconds = session.time_line.path, time.monotonic() - began
                self._ranks.close()

    def _note_failure(
        self, row: Row, error: NbddpError, session: Session, *, is_shown: bool
    ) -> None:
        if session.times_ended:
            row.state = State.ENDED
            return
        self._first = self._first or error
        row.state, row.why = State.FAILED, str(error).partition("\n")[0]
        if not is_shown:
            is_cell = isinstance(error, CellFailedError)
            self.display.say(error.report if isinstance(error, CellFailedError) else str(error))
            if is_cell:
                fresh = self.display.fresh
                row.why = f"an earlier cell ({fresh} leaves it out): {row.why}"

    def _prepare(self, session: Session, values: Mapping[str, Any]) -> None:
        """Do what earlier cells did, then set the names, whatever those cells made of them."""
        seeding: list[Deed] = []
        if SEED in values:
            seeding.append(CellRequest(source=SEEDING, execution_count=0, needs_group=None))
            push(session, {SEED: values[SEED]})
        _replay(session, [*seeding, *self.deeds])
        if self.deeds:  # what earlier cells report again is not what this run comes to
            session.call(session.whereabouts.begin_run)
            _describe(session, dict.fromkeys(_OF_CELLS) | {"last": {}, "curves": {}})
        if values:
            push(session, values)
        _replay(session, seeding)

    def conclude(self, *, way_on: str) -> None:
        """Raise what a cell raises of which the user ended a part, or nothing went well.

        Args:
            way_on: what the user can do then.

        Raises:
            CellInterruptedError: the user ended it.
            CellFailedError: no trial went well.
        """
        if self._is_ended:
            said = f"ended by you: {describe_outcome(self._rows, what=self._what)}; {way_on}"
            raise CellInterruptedError(said, rank=0, report=said)
        if self._first is None or any(row.state.is_done for row in self._rows):
            return
        why = next(row.why for row in self._rows if row.why)
        said = f"none of the {len(self._rows)} runs went well; {why}"
        if not isinstance(self._first, CellFailedError):
            raise CellFailedError(said, rank=0, report=said)
        report = f"{said}\n{self._first.report}"
        raise CellFailedError(said, rank=self._first.rank, report=report)


def _describe(session: Session, facts: Mapping[str, Any]) -> None:
    session.call(session.time_line.describe, facts)


def _replay(session: Session, deeds: Sequence[Deed]) -> None:
    """Do again what was done.

    Raises:
        CellFailedError: a cell failed this time.
        CellInterruptedError: the user asked for an end.
        KeyboardInterrupt: the same, before or after all of it.
    """
    _check_wanted(session)
    failed = Recovery(session, show=_show_no_replay, say=_say_nothing).replay(deeds)
    if failed is not None:
        failed.raise_for_failure()
    _check_wanted(session)


def _check_wanted(session: Session) -> None:
    if session.times_ended:
        raise KeyboardInterrupt


def _show_no_replay(_handle: CellHandle) -> CellResult:
    raise RuntimeError("a replayed cell is not shown")


def _say_nothing(_text: str) -> None:
    """The trial tells what came of its replay."""
