"""Events that extensions hear of, and that no file of a run has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.wire.frozen import Frozen

if TYPE_CHECKING:
    from nbddp.controller.session import Session
    from nbddp.record.cell import CellHandle, CellRequest
    from nbddp.ui.report.blocks import Block


class NotebookEvent(Frozen):
    """Something that the user did in the notebook."""


class PushAsked(NotebookEvent):
    """Variables are about to be pushed; ``names`` has all variables of the notebook."""

    names: Mapping[str, Any]


class ValuePulled(NotebookEvent):
    """A value was fetched from a rank, or from all if None."""

    expression: str
    rank: int | None


class CellShown(NotebookEvent):
    """The output of a cell that has ended was shown; ``add`` shows blocks below it.

    Quiet cells have no such event.
    """

    session: Session
    handle: CellHandle
    add: Callable[[Sequence[Block]], None]


class CellLeftOut(NotebookEvent):
    """A cell or script has ended that no replay runs again, for this reason."""

    request: CellRequest
    reason: str


class CellRanOnOtherRanks(NotebookEvent):
    """A cell, by the number of its prompt, does not run on the ranks of the cells."""

    number: int
