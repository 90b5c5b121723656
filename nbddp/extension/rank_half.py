"""The half of an extension on a rank; ``worker/rank_halves.py`` calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import Failure, JsonDict


class RankCell(Frozen):
    """A cell or script before it runs on a rank.

    Attributes:
        options: the options of the extension.
        is_again: whether a recovery or a replay runs it.
    """

    options: Any
    is_again: bool


class EndedCell(Frozen):
    """A cell or script that has ended on a rank.

    Attributes:
        names: the variables of all cells.
        source: its code; None between two cells, if the notebook asks for the facts then.
        failure: what ended it; None if it succeeded.
    """

    names: Mapping[str, Any]
    source: str | None = None
    failure: Failure | None = None


class RankHalf:
    """Made when a rank starts, before the process group forms; overrides the hooks that it needs.

    No hook may wait, or start a collective.
    """

    def before_cell(self, cell: RankCell) -> None:
        """Prepare for a cell or script."""

    def after_cell(self) -> Sequence[str]:
        """Return sentences for the user after a cell or script that has run."""
        return ()

    def facts(self, cell: EndedCell) -> JsonDict:
        """Return facts for the notebook's side, which has them in the rank's ``CellEnded``."""
        del cell
        return {}

    def armed(self) -> Sequence[str]:
        """Return the faults that are armed on this rank at the end of a cell."""
        return ()
