"""``%%ddp --sweep``: the cell once for each combination, each as a run of its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbddp.archive.comparing import MOST, Over, compare
from nbddp.archive.run_list import Listing
from nbddp.archive.sameness import digest_or_bytes_of
from nbddp.archive.summary import Summary, summarize
from nbddp.archive.sweeps import Row, State, done_before, facts_of, grid, key_of
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.magics.desk import Desk
from nbddp.magics.syntax import set_unread
from nbddp.magics.trials import Trials, Tried, run_rows
from nbddp.record.cell import CellRequest
from nbddp.record.push_store import naming_unpicklable
from nbddp.ui.report.sweep import (
    describe_current,
    describe_done,
    describe_failures,
    describe_row,
    sweep_report,
)


class Sweep:
    """One sweep.

    Args:
        desk: of the notebook.
        request: the cell.
        args: its options.
        spec: of the ranks.
        values: pushed each time before it.

    Raises:
        RequestError: one of them cannot be pushed, or the cell sets what is swept.
    """

    def __init__(
        self,
        desk: Desk,
        request: CellRequest,
        args: Namespace,
        *,
        spec: GroupSpec,
        values: Mapping[str, Any],
    ) -> None:
        self._desk = desk
        self._request = request
        self._args = args
        self._spec = spec
        self._values = values
        self._trials = Trials(desk, spec, replays=not args.fresh)
        self._rows = [Row(trial) for trial in grid(args.sweep or (), args.repeat or 0)]
        self._check_unset()
        with naming_unpicklable(values):
            pushed = digest_or_bytes_of(dict(values))
        self._key = key_of(
            *(request.source, self._trials.deeds),
            *(spec.nproc, spec.backend, request.ranks, sorted(spec.env.items())),
            pushed,
        )

    def _check_unset(self) -> None:
        """A cell of which all combinations are the same would run for nothing."""
        code = self._desk.shell.transform_cell(self._request.source)
        for name in self._rows[0].trial.settings:
            if line := set_unread(code, name):
                raise RequestError(
                    f"{name} is swept, and line {line + self._request.first_line - 1} of the cell "
                    "sets it before it is used: take that line out"
                )

    def run(self) -> None:
        """Run what is not done yet; show all in one table, and beside each other.

        Raises:
            RequestError: the ranks cannot be had, or hold what would be lost.
            CellFailedError: none of them went well.
            CommandInterruptedError: the user has ended it.
        """
        self._spec.check_gpus()
        if not self._args.start_over:
            self._find_done()
        left = [row for row in self._rows if row.state is State.WAITING]
        if left:
            self._trials.check_nothing_is_lost()
        self._say(describe_done(self._rows))
        is_ended = False
        if left:
            self._say(f"{plural(len(left), 'run')}, each with {self._trials.said_before()}")
            is_ended = run_rows(self._trials, left, self._run_one, self._tell)
            said = self._trials.finish(is_ended=is_ended)
        self._show(said if left else "nothing was left to run; the ranks are as they were")
        self._trials.conclude(
            self._rows, is_ended=is_ended, what="sweep", way_on="goes on where it was"
        )

    def _find_done(self) -> None:
        found = done_before(self._spec.cwd(), self._key, [row.trial for row in self._rows])
        for row in self._rows:
            if (path := found.get(row.trial.number)) is not None:
                row.state, row.path = State.BEFORE, path

    def _tell(self, row: Row) -> None:
        if not self._desk.views.shows_panels:
            self._say(f"{row.trial}: {describe_row(row)}")

    def _run_one(self, row: Row) -> Tried:
        trial, args = row.trial, self._args
        said = describe_current(self._rows, row)
        if not args.quiet:
            self._desk.views.show_progress(sweep_report(self._rows, row))
        name = "-".join(filter(None, (self._spec.name, trial.name)))
        count = len(self._rows)
        tried = self._trials.run(
            self._request,
            args,
            replace(self._spec, name=name),
            announced=f"{said}: starting {plural(self._spec.nproc, 'rank')} ...",
            values={**self._values, **trial.settings},
            config=trial.config,
            facts=facts_of(self._key, trial, count, is_done=False),
        )
        if tried.is_ok:
            self._trials.note(facts_of(self._key, trial, count, is_done=True))
        return tried

    def _say(self, text: str) -> None:
        if text and not self._args.quiet:
            self._desk.views.say(f"nbddp: {text}")

    def _show(self, said: str) -> None:
        """The table of all, those that are done beside each other, and what is to be said."""
        views, runs = self._desk.views, self._summaries()
        views.show_progress(sweep_report(self._rows))
        if runs:
            listing = Listing(tuple(runs), total=len(runs), size=sum(run.size for run in runs))
            views.show_runs(listing, most=len(runs))
        paths = [row.path for row in self._rows if row.state.is_done and row.path is not None]
        known = {run.path for run in runs}
        paths = [path for path in paths if path in known]
        if len(paths) > 1:
            how: dict[str, Any] = {"over": Over.STEP, "scale": "auto", "is_smooth": False}
            views.show_comparison(compare(paths[:MOST]), **how)
        more = len(paths) - MOST
        if more > 0:
            self._say(f"the comparison has the first {MOST}; `%ddp compare A B` takes any of them")
        for each in describe_failures(self._rows):
            self._say(each)
        self._say(said)

    def _summaries(self) -> list[Summary]:
        found = []
        for row in self._rows:
            if row.path is None:
                continue
            try:
                found.append(summarize(row.path))
            except RequestError as error:  # the user's limit, or his hand, took it away meanwhile
                self._say(f"{row.path.name} is left out: {error}")
        return found
