"""Find mistakes early: rules over the syntax of a cell, and over facts that the ranks report."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.group.notebook_events import CellShown
from nbddp.wire.options.option import flag, option


class CheckArguments(Command, example="check", before="timeline trace logs"):
    """Look for mistakes in the last cell, or in a script."""

    script: str | None = option(
        "script", "a script (default: the last cell)", None, nargs="?", metavar="FILE"
    )
    strict: bool = flag("--strict", "raise an error if there are findings")
    explain: str | None = option(
        "--explain ND101", "show a rule, or the checklist", None, nargs="?", const=""
    )


EXTENSION = Extension(
    name="checks",
    commands=(CheckArguments,),
    events=(CellShown,),
    notebook="nbddp.extensions.checks.notebook:Checks",
    rank="nbddp.extensions.checks.rank:Facts",
    cells="nbddp.extensions.checks.cells:CheckedCells",
)
