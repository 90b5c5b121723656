"""Run a cell several times, each time on new ranks next to the ranks of the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbddp.controller.session import Session
from nbddp.errors import CellFailedError, CellInterruptedError, NbddpError
from nbddp.extensions.sweeps.grid import SEED, SweepEntry, SweepState
from nbddp.extensions.sweeps.sweep_view import (
    describe_current,
    describe_failures,
    describe_outcome,
    sweep_report,
)
from nbddp.formatting import plural
from nbddp.group.display import TextDisplay
from nbddp.group.push_pull import push
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.record.cell import CellRequest, CellResult, ReplayEntry
from nbddp.record.replay_log import describe_entries
from nbddp.record.run_events import TrialEnded
from nbddp.sigint import sigint_deferred
from nbddp.wire.group_spec import GroupSpec

ENDED_BY_USER = "ended by you"
SEED_SOURCE = (
    'torch.manual_seed(seed); __import__("random").seed(seed); '
    '__import__("numpy").random.seed(seed)'
)


@dataclass(kw_only=True)
class TrialRunner:
    """Runs one cell several times.

    Each trial has new ranks of its own, on which the replay log of the group is replayed first. A
    trial does not touch the ranks of the group.

    Attributes:
        group: the group of the notebook or script.
        display: shows the trials.
        run_cell: runs a cell on the ranks of a session, shows it, and returns its result.
        request: the cell.
        spec: the spec of the ranks.
        values: pushed to the ranks before the cell runs.
        fresh: replay nothing.
        replay_entries: replayed before the values are pushed.
    """

    group: RankGroup
    display: TextDisplay
    run_cell: Callable[[Session, CellRequest], CellResult]
    request: CellRequest
    spec: GroupSpec
    values: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool
    replay_entries: Sequence[ReplayEntry] = field(init=False)
    _rows: Sequence[SweepEntry] = ()
    _what: str = ""
    _error: NbddpError | None = None  # of the first trial that failed
    _is_ended: bool = False
    _end_requests: int = 0  # the number of requests when the trials started

    def __post_init__(self) -> None:
        self.replay_entries = () if self.fresh else self.group.session.replay_log.all_entries
        self._replayed = describe_entries(self.replay_entries) if self.replay_entries else ""

    def run_all(
        self,
        rows: Sequence[SweepEntry],
        run_one: Callable[[SweepEntry], None],
        describe: Callable[[SweepEntry], str],
        *,
        what: str,
    ) -> None:
        """Run the waiting trials in order and set their states, until the user ends them.

        Args:
            rows: the trials.
            run_one: runs one trial with :meth:`run`.
            describe: describes the result of a trial.
            what: the command, ``sweep`` or ``scale``.

        Raises:
            RequestError: a cell or a script is running.
        """
        self._end_requests = self.group.session.end_requests
        self.group.close_at_exit()
        self.group.scripts.end_previous()
        self._rows, self._what = rows, what
        waiting = [row for row in rows if row.state is SweepState.WAITING]
        again = f", {self._replayed} again" if self._replayed else ""
        self.display.print_unless_quiet(
            f"{plural(len(waiting), 'run')}, each with fresh ranks{again}"
        )
        try:
            for row in waiting:
                row.state = SweepState.RUNNING
                self.display.show_progress(sweep_report(rows, row, what=what))
                run_one(row)
                if row.state is not SweepState.RUNNING and not self.display.has_table:
                    self.display.print_unless_quiet(f"{row.trial}: {describe(row)}")
                if self._is_ended or self.group.session.end_requests > self._end_requests:
                    self._is_ended = True
                    break
        except KeyboardInterrupt:
            self._is_ended = True
        for row in rows:
            row.state = SweepState.ENDED if row.state is SweepState.RUNNING else row.state

    def run(
        self,
        row: SweepEntry,
        spec: GroupSpec,
        *,
        name: str,
        facts: Mapping[str, Any],
        finish: Callable[[Session, CellResult], None],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Run the cell on new ranks, end them, and store the result in ``row``.

        Args:
            row: the trial; it stays ``RUNNING`` if the user ends it.
            spec: the spec of its ranks.
            name: part of the name of its run.
            facts: written to ``run.json``.
            finish: called after a successful cell, while its ranks are idle.
            settings: recorded like ``nbddp.config`` and pushed before the cell; ``seed`` also seeds
                the ranks.
        """
        more = {**facts, **({"config": row.trial.config} if settings else {})}
        spec = replace(spec, name="-".join(filter(None, (spec.name, name))), more=more)
        text = f"{describe_current(self._rows, row, what=self._what)}: starting "
        again = f" and running {self._replayed} again" if self._replayed else ""
        text += f"{plural(spec.nproc, 'rank')}{again} ..."
        session, began, result = self.group.scripts.open(), time.monotonic(), None
        try:
            with self.display.show_starting(text, session):
                session.start(spec)
                self._replay_and_push(session, {**self.values, **(settings or {})})
                result = self.run_cell(session, self.request)
            result.raise_for_failure()
            finish(session, result)
            row.state = SweepState.OK
        except (CellInterruptedError, KeyboardInterrupt):
            self._is_ended = True
        except NbddpError as error:
            if not session.end_requests:
                self._record_failure(row, error, is_shown=result is not None)
        finally:
            with sigint_deferred():
                is_cut_short = result is None and row.state is SweepState.RUNNING
                if is_cut_short and session.life.state.is_live:
                    # otherwise the run would have the outcome of its last replayed cell
                    session.call(session.event_log.record, TrialEnded(outcome=ENDED_BY_USER))
                row.path, row.seconds = session.event_log.path, time.monotonic() - began
                stop_count = session.end_requests
                self.group.scripts.close()  # this also counts as a stop request
                self._is_ended = (
                    self._is_ended or stop_count > 0 or session.end_requests > stop_count + 1
                )

    def _record_failure(self, row: SweepEntry, error: NbddpError, *, is_shown: bool) -> None:
        row.state, row.why = SweepState.FAILED, str(error).partition("\n")[0]
        self._error = self._error or error
        if is_shown:
            return
        if isinstance(error, CellFailedError):
            self.display.print_unless_quiet(error.report)
            row.why = f"an earlier cell (--fresh or fresh=True leaves it out): {row.why}"
        else:
            self.display.print_unless_quiet(str(error))

    def _replay_and_push(self, session: Session, values: Mapping[str, Any]) -> None:
        """Replay earlier cells and pushes, then push the values, which may overwrite variables."""
        seeding: list[ReplayEntry] = []
        if SEED in values:
            seeding.append(CellRequest(source=SEED_SOURCE, execution_count=0, needs_group=None))
            push(session, {SEED: values[SEED]})
        self._replay(session, [*seeding, *self.replay_entries])
        if values:
            push(session, values)
        self._replay(session, seeding)

    def _replay(self, session: Session, entries: Sequence[ReplayEntry]) -> None:
        """Replay cells and pushes without output.

        Raises:
            CellFailedError: a cell failed.
            CellInterruptedError: the user interrupted a cell.
            KeyboardInterrupt: the user interrupted before or after the replay.
        """
        if not self._was_interrupted(session):
            failed = Recovery(session, _Silent()).replay(entries)
            if failed is not None:
                failed.raise_for_failure()
        if self._was_interrupted(session):
            raise KeyboardInterrupt

    def _was_interrupted(self, session: Session) -> bool:
        return session.end_requests > 0 or self.group.session.end_requests > self._end_requests

    def report_outcome(self, *, next_step: str) -> None:
        """Print the failures; raise an error if the user ended the trials or if none succeeded.

        Args:
            next_step: what the user can do after ending the trials.

        Raises:
            CellInterruptedError: the user ended the trials.
            CellFailedError: no trial succeeded.
        """
        for line in describe_failures(self._rows):
            self.display.print_unless_quiet(line)
        if self._is_ended:
            message = f"ended by you: {describe_outcome(self._rows, what=self._what)}; {next_step}"
            raise CellInterruptedError(message, rank=0, report=message)
        if self._error is None or any(row.state.is_done for row in self._rows):
            return
        why = next(row.why for row in self._rows if row.why)
        message = f"none of the {len(self._rows)} runs succeeded; {why}"
        rank, report = 0, message
        if isinstance(self._error, CellFailedError):
            rank, report = self._error.rank, f"{message}\n{self._error.report}"
        raise CellFailedError(message, rank=rank, report=report)


class _Silent(TextDisplay):
    """Prints nothing: a trial reports a failed replay itself."""

    def print_line(self, text: str) -> None:
        pass
