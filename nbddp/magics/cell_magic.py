"""``%%ddp``: run a cell on the ranks."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial

from IPython.core.error import UsageError

from nbddp.group.find_script import describe_syntax_error
from nbddp.group.notebook_half import UnstartedCell
from nbddp.magics.magic_errors import reporting_errors
from nbddp.magics.notebook_state import NotebookState
from nbddp.magics.parser import CELL, parse_line
from nbddp.magics.presenter import NotebookDisplay
from nbddp.record.cell import CellRequest

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST


def run_cell(notebook: NotebookState, line: str, cell: str) -> None:
    """Run a cell on the ranks, with the options in ``line``."""
    with reporting_errors("%%ddp", notebook.group):
        args = parse_line(CELL, line)
        first_line = 1 if args.auto else 2
        _check_syntax(notebook, cell, first_line)
        notebook.ranks.check_ranks(args)
        values = notebook.notebook_values(args.push)
        spec = replace(notebook.ranks.requested_spec(args), joins_group=not args.no_init)
        request = CellRequest(
            source=cell,
            ranks=args.ranks,
            first_line=first_line,
            execution_count=notebook.prompt_number,
            wants_value=bool(args.out),
            output_name=args.out,
            needs_group=not args.no_init,
            once=args.once,
        )
        display = NotebookDisplay(notebook.presenter, quiet=args.quiet, has_pictures=False)
        unstarted = UnstartedCell(
            given=args.extensions,
            request=request,
            spec=spec,
            values=values,
            fresh=args.fresh,
            display=display,
            run=partial(notebook.run_trial, args=args, display=display),
        )
        if notebook.extensions.run_cell(unstarted):
            return
        notebook.extensions.before_start(spec, args.extensions)
        with notebook.ranks.started_for_cell(spec, args):
            if values:
                notebook.group.push(values)
            result = notebook.run(request, args)
        if args.out and result is not None:
            notebook.shell.user_ns[args.out] = result.values()


def _check_syntax(notebook: NotebookState, cell: str, first_line: int) -> None:
    if not cell.strip():
        raise UsageError("the cell is empty: there is nothing to run")
    source = "\n" * (first_line - 1) + notebook.shell.transform_cell(cell)
    try:
        compile(source, "cell", "exec", _FLAGS)
    except SyntaxError as error:
        raise UsageError(describe_syntax_error(error)) from None
