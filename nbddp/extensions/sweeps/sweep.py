"""Run a cell once for each combination of some values, each time as a separate run."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from IPython.core.inputtransformer2 import TransformerManager

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.runs.comparison import MAX_RUNS, compare
from nbddp.extensions.runs.comparison_view import comparison_report
from nbddp.extensions.runs.run_list import Listing
from nbddp.extensions.runs.run_list_view import run_list_report
from nbddp.extensions.runs.summary import Summary, summarize
from nbddp.extensions.sweeps.grid import (
    SweepEntry,
    SweepPoint,
    SweepState,
    completed_runs,
    run_json_entry,
    sweep_key,
    value_key,
)
from nbddp.extensions.sweeps.sweep_view import describe_done, describe_row, sweep_report
from nbddp.extensions.sweeps.trials import TrialRunner
from nbddp.group.push_pull import prompt_numbers
from nbddp.record.cell import CellResult
from nbddp.record.push_store import pickle_values


class Sweep:
    """Runs a cell for each combination that has no finished run yet.

    Args:
        runner: runs the cell.
        trials: the combinations.
        start_over: also run combinations that an earlier sweep finished.

    Raises:
        RequestError: a value cannot be pushed, or the cell sets a swept name.
    """

    def __init__(
        self, runner: TrialRunner, trials: Sequence[SweepPoint], *, start_over: bool
    ) -> None:
        self.rows = [SweepEntry(trial) for trial in trials]
        self._runner = runner
        self._display = runner.display
        self._start_over = start_over
        request, spec = runner.request, runner.spec
        for name in trials[0].settings:
            if line := assigned_before_use(request.source, name):
                raise RequestError(
                    f"{name} is swept, and line {line + request.first_line - 1} of the cell "
                    "sets it before it is used: remove that line"
                )
        swept = {name: [each.settings[name] for each in trials] for name in trials[0].settings}
        self._key = sweep_key(
            *(request.source, runner.replay_entries, spec.nproc, spec.backend, request.ranks),
            sorted(spec.env.items()),
            value_key(pickle_values(runner.values, prompt_numbers())),
            value_key(pickle_values(swept, prompt_numbers()), if_plain=""),
        )

    def run(self) -> None:
        """Run the waiting combinations, list all runs, and compare the successful ones.

        Raises:
            RequestError: the ranks cannot be started.
            CellFailedError: no run succeeded.
            CellInterruptedError: the user ended the sweep.
        """
        self._runner.group.session.check_gpus(self._runner.spec)
        if not self._start_over:
            trials = [row.trial for row in self.rows]
            found = completed_runs(self._runner.spec.cwd(), self._key, trials)
            for row in self.rows:
                if (path := found.get(row.trial.number)) is not None:
                    row.state, row.path = SweepState.ALREADY_DONE, path
        if done := describe_done(self.rows):
            self._display.print_unless_quiet(done)
        if any(row.state is SweepState.WAITING for row in self.rows):
            self._runner.run_all(self.rows, self._run_one, describe_row, what="sweep")
        else:
            self._display.print_unless_quiet("all runs were done before")
        self._show()
        self._runner.report_outcome(next_step="run again, the sweep continues")

    def _run_one(self, row: SweepEntry) -> None:
        trial, count = row.trial, len(self.rows)

        def note_done(session: Session, _result: CellResult) -> None:
            done = run_json_entry(self._key, trial, count, is_done=True)
            session.call(session.event_log.add_facts, done)

        self._runner.run(
            row,
            self._runner.spec,
            name=trial.name,
            facts=run_json_entry(self._key, trial, count, is_done=False),
            finish=note_done,
            settings=trial.settings,
        )

    def _show(self) -> None:
        """List all runs, compare the successful ones, and name the failures."""
        self._display.show_progress(sweep_report(self.rows))
        runs: list[Summary] = []
        for path in (row.path for row in self.rows if row.path is not None):
            try:
                runs.append(summarize(path))
            except RequestError as error:  # its folder was deleted in the meantime
                self._display.print_unless_quiet(f"left out: {error}")
        if runs:
            size = sum(run.size for run in runs)
            listing = Listing(tuple(runs), total=len(runs), size=size)
            self._display.show(run_list_report(listing, most=len(runs)))
        done = {row.path for row in self.rows if row.state.is_done}
        paths = [run.path for run in runs if run.path in done]
        if len(paths) > 1:
            self._display.show(comparison_report(compare(paths[:MAX_RUNS])))
        if len(paths) > MAX_RUNS:
            self._display.print_unless_quiet(f"the comparison has the first {MAX_RUNS}")


def assigned_before_use(source: str, name: str) -> int:
    r"""Return the line, from 1, that assigns a name before the cell reads it; 0 if none does.

    >>> assigned_before_use("import os\nlr = 0.1\ntrain(lr)", "lr")
    2
    >>> assigned_before_use("lr = lr * 2", "lr"), assigned_before_use("train(lr)\nlr = 1", "lr")
    (0, 0)
    """
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError:  # the user may have input transformers that accept it
        return 0
    for statement in tree.body:
        nodes = ast.walk(statement)
        uses = [each.ctx for each in nodes if isinstance(each, ast.Name) and each.id == name]
        if uses:
            is_set = isinstance(statement, ast.Assign) or (
                isinstance(statement, ast.AnnAssign) and statement.value is not None
            )
            is_unread = all(isinstance(each, ast.Store) for each in uses)
            return statement.lineno if is_set and is_unread else 0
    return 0
