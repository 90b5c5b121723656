"""``%%ddp``: run a cell on the ranks."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class

from nbddp.archive.scaling import MIN_ROUNDS
from nbddp.archive.sweep_grid import sweep_points
from nbddp.controller.group_spec import GroupSpec
from nbddp.errors import CellFailedError, RequestError
from nbddp.export.script import Omitted
from nbddp.group.find_script import describe_syntax_error
from nbddp.group.scaling import ScalingStudy
from nbddp.group.sweep import Sweep
from nbddp.group.trials import TrialRunner
from nbddp.magics.interrupt_message import interrupt_error
from nbddp.magics.notebook_state import NotebookState
from nbddp.magics.parser import CELL, parse_line
from nbddp.magics.presenter import SHOWN_STEPS, NotebookDisplay
from nbddp.magics.usage_error import usage_error
from nbddp.record.cell import CellRequest
from nbddp.ui.report.timeline import timeline_report

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST


@magics_class
class CellMagics(Magics):
    """The cell magics."""

    def __init__(self, notebook: NotebookState) -> None:
        super().__init__(notebook.shell)
        self._notebook = notebook

    @cell_magic
    def ddp(self, line: str, cell: str) -> None:
        """Run the cell on every rank of the worker group."""
        before = self._notebook.group.life
        try:
            args = parse_line(CELL, line)
            self._run_cell(args, cell, first_line=1 if args.auto else 2)
        except (RequestError, UsageError) as error:
            raise usage_error(error) from None
        except KeyboardInterrupt:
            raise interrupt_error("%%ddp", before, self._notebook.group.life) from None

    ddp.__doc__ = CELL.format_help()  # `%%ddp?` shows it

    def _run_cell(self, args: Namespace, cell: str, first_line: int) -> None:
        notebook = self._notebook
        self._check_syntax(cell, first_line)
        notebook.check_ranks(args)
        values = notebook.notebook_values(args.push or ())
        spec = replace(notebook.requested_spec(args), joins_group=not args.no_init)
        request = CellRequest(
            source=cell,
            ranks=args.ranks,
            first_line=first_line,
            execution_count=notebook.prompt_number,
            wants_value=bool(args.out),
            output_name=args.out or "",
            needs_group=not args.no_init,
            once=args.once,
        )
        if args.sweep or args.repeat or args.scale:
            self._run_trials(request, args, spec, values)
            return
        with notebook.started_for_cell(spec, args):
            if values:
                notebook.group.push(values)
            try:
                result = notebook.run(request, args)
            except CellFailedError:
                self._show_timeline(args)
                raise
        self._show_timeline(args)
        if args.out and result is not None:
            notebook.shell.user_ns[args.out] = result.values()

    def _check_syntax(self, cell: str, first_line: int) -> None:
        if not cell.strip():
            raise UsageError("the cell is empty: there is nothing to run")
        source = "\n" * (first_line - 1) + self._notebook.shell.transform_cell(cell)
        try:
            compile(source, "cell", "exec", _FLAGS)
        except SyntaxError as error:
            raise UsageError(describe_syntax_error(error)) from None

    def _show_timeline(self, args: Namespace) -> None:
        """Show which rank waited for which, if requested; useful above all for a cell that hung."""
        if args.timeline:
            timeline = self._notebook.group.timeline(SHOWN_STEPS)
            self._notebook.presenter.show(timeline_report(timeline))

    def _run_trials(
        self, request: CellRequest, args: Namespace, spec: GroupSpec, values: Mapping[str, Any]
    ) -> None:
        """Run a cell several times, each time on new ranks."""
        notebook, group = self._notebook, self._notebook.group
        if args.scale and group.nodes is not None:
            raise RequestError(
                "--scale runs on this machine only: release the nodes with `%ddp stop`"
            )
        display = NotebookDisplay(notebook.presenter, quiet=args.quiet, has_pictures=False)
        runner = TrialRunner(
            group=group,
            display=display,
            run_cell=partial(notebook.run_trial, args=args, display=display),
            request=request,
            spec=spec,
            values=values,
            fresh=args.fresh,
        )
        study: Sweep | ScalingStudy
        if args.scale:
            rounds = args.rounds or MIN_ROUNDS
            study = ScalingStudy(runner, args.scale, rounds=rounds, is_weak=args.weak)
        else:
            trials = sweep_points(args.sweep or (), args.repeat or 0)
            study = Sweep(runner, trials, start_over=args.start_over)
        if not group.is_live:
            group.spec = spec
        cell = f"cell [{notebook.prompt_number}]"
        notebook.export_log.add(Omitted(cell, "it ran several times, on its own ranks"))
        study.run()

    @cell_magic
    def local(self, line: str, cell: str) -> None:  # noqa: ARG002 - IPython fixes the signature
        """Run the cell in the notebook's kernel, even after `%ddp auto on`."""
        self._notebook.shell.run_cell(cell).raise_error()
