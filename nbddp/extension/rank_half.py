"""The half of an extension on a rank; ``worker/rank_halves.py`` calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import Failure, JsonDict


class RankCell(Frozen):
    """A cell or script before it runs on a rank.

    Attributes:
        options: the options of the extension.
        number: number of the cell in its group.
        is_again: whether a recovery or a replay runs it.
        is_replay: whether it had succeeded, and runs again only for its variables.
    """

    options: Any
    number: int
    is_again: bool
    is_replay: bool


class RankAnswer(Frozen):
    """The answer to a message of the half in the notebook.

    Attributes:
        content: JSON values.
        value: sent as a pickle, if it is not None.
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None


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

    No hook may wait, or start a collective. All are called on the main thread, but after an
    interrupt ``after_cell``, ``facts`` and ``armed`` have a thread of their own.
    """

    def before_cell(self, cell: RankCell) -> None:
        """Prepare for a cell or script that runs now."""

    def after_cell(self, error: BaseException | None) -> Sequence[str]:
        """Return sentences for the user after a cell or script that has run.

        Args:
            error: the exception that has ended it; None if it succeeded.
        """
        del error
        return ()

    def facts(self, cell: EndedCell) -> JsonDict:
        """Return facts for the notebook's side, which has them in the rank's ``CellEnded``."""
        del cell
        return {}

    def answer(self, content: Mapping[str, Any]) -> RankAnswer:
        """Return the answer to a message of the half in the notebook, between two cells."""
        del content
        return RankAnswer()

    def armed(self) -> Sequence[str]:
        """Return the faults that are armed on this rank at the end of a cell."""
        return ()
