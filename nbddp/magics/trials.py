"""``%%ddp --sweep`` and ``%%ddp --scale``: a cell several times, shown in the notebook."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from nbddp.archive.scaling import LEAST
from nbddp.archive.sweep_grid import grid
from nbddp.controller.session import Session
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.export.script import Omitted
from nbddp.group.scaling import ScalingStudy
from nbddp.group.sweep import Sweep
from nbddp.group.trials import TrialDisplay, TrialRunner
from nbddp.magics.desk import Desk
from nbddp.record.cell import CellRequest
from nbddp.ui.report.blocks import Report


def run_trials(
    desk: Desk,
    request: CellRequest,
    args: Namespace,
    *,
    spec: GroupSpec,
    values: Mapping[str, Any],
) -> None:
    """Run a cell several times, as its options ask.

    Raises:
        RequestError: it cannot run now.
        CellFailedError: no run succeeded.
        CellInterruptedError: the user ended it.
    """
    if args.scale and desk.group.nodes is not None:
        raise RequestError("--scale is for ranks of this machine: `%ddp stop` sends the nodes home")
    deeds = () if args.fresh else desk.group.session.replay_log
    display = NotebookDisplay(desk, args)
    runner = TrialRunner(desk.group.scripts, display, request, spec, values=values, deeds=deeds)
    several: Sweep | ScalingStudy
    if args.scale:
        rounds = args.rounds or LEAST
        several = ScalingStudy(runner, args.scale, rounds=rounds, is_weak=args.weak)
    else:
        trials = grid(args.sweep or (), args.repeat or 0)
        several = Sweep(runner, trials, start_over=args.start_over)
    if not desk.group.is_live:
        desk.group.spec = spec
    desk.note(Omitted(f"cell [{desk.prompt_number}]", "it ran several times, on ranks of its own"))
    several.run()


class NotebookDisplay(TrialDisplay):
    """Shows trials in the output of a notebook cell."""

    def __init__(self, desk: Desk, args: Namespace) -> None:
        super().__init__(partial(desk.run_trial, args=args), quiet=args.quiet)
        self._views = desk.views
        self.has_table = desk.views.shows_panels

    @contextmanager
    def starting(self, text: str, session: Session) -> Iterator[None]:
        """Show it where the next panel appears."""
        announcing = self._views.announcing(text, session, quiet=self.quiet)
        with announcing, self._views.as_one_of_several():
            yield

    def show_progress(self, report: Report) -> None:
        """Show it instead of the progress before."""
        if not self.quiet:
            self._views.show_progress(report)

    def show(self, report: Report) -> None:
        """Show a table, or a picture."""
        self._views.show(report)
