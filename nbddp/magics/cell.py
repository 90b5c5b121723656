"""``%%ddp``: run a cell on the ranks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class

from nbddp.errors import CellFailedError, RequestError
from nbddp.magics.desk import Desk
from nbddp.magics.parser import CELL, parse
from nbddp.magics.stopped import interrupted
from nbddp.magics.syntax import check_syntax
from nbddp.magics.trials import run_trials
from nbddp.magics.views import SHOWN_STEPS
from nbddp.record.cell import CellRequest, CellResult
from nbddp.ui.report.timeline import timeline_report


@magics_class
class CellMagics(Magics):
    """The cell magics."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk.shell)
        self._desk = desk

    @cell_magic
    def ddp(self, line: str, cell: str) -> None:
        """Run the cell on every rank of the worker group."""
        before = self._desk.group.life
        try:
            args = parse(CELL, line)
            self._run_cell(args, cell, first_line=1 if args.auto else 2)
        except RequestError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            raise interrupted("%%ddp", before, self._desk.group.life) from None

    ddp.__doc__ = CELL.format_help()  # `%%ddp?` shows it

    def _run_cell(self, args: Namespace, cell: str, first_line: int) -> None:
        desk = self._desk
        check_syntax(desk.shell, cell, first_line)
        desk.check_ranks(args)
        values = desk.values(args.push or ())
        spec = replace(desk.asked_spec(args), joins_group=not args.no_init)
        if args.sweep or args.repeat or args.scale:
            request = self._request(args, cell, first_line)
            run_trials(desk, request, args, spec=spec, values=values)
            return
        with desk.ready_for_cell(spec, args):
            if values:
                desk.group.push(values)
            try:
                result = self._run_ready(args, cell, first_line)
            except CellFailedError:
                self._show_timeline(args)
                raise
        self._show_timeline(args)
        if args.out and result is not None:
            desk.shell.user_ns[args.out] = result.values()

    def _show_timeline(self, args: Namespace) -> None:
        """Who waited for whom, if that was asked for: of a cell that hung, above all."""
        if args.timeline:
            self._desk.views.show(timeline_report(self._desk.group.timeline(SHOWN_STEPS)))

    def _run_ready(self, args: Namespace, cell: str, first_line: int) -> CellResult | None:
        return self._desk.run(self._request(args, cell, first_line), args)

    def _request(self, args: Namespace, cell: str, first_line: int) -> CellRequest:
        return CellRequest(
            source=cell,
            ranks=args.ranks,
            first_line=first_line,
            execution_count=self._desk.prompt_number,
            wants_value=bool(args.out),
            needs_group=not args.no_init,
            once=args.once,
        )

    @cell_magic
    def local(self, line: str, cell: str) -> None:  # noqa: ARG002 - IPython fixes the signature
        """Run the cell in the notebook's kernel, also while `%ddp auto on`."""
        self._desk.shell.run_cell(cell).raise_error()
