"""What extensions know of cells and scripts, with or without a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.extension.guard import Hooks, as_json
from nbddp.record.cell import CellRequest, CellResult
from nbddp.wire.messages import JsonDict


class CellHooks:
    """What an extension knows of cells and scripts; it overrides the hooks that it needs.

    The session's thread waits for them, so no hook may wait.
    """

    def hang_causes(self, cell: CellRequest) -> Sequence[str]:
        """Return sentences on code that may be the cause of a hang, for its notice."""
        del cell
        return ()

    def run_facts(self, cell: CellResult) -> Mapping[str, Any]:
        """Return facts for ``run.json`` after a cell that has made steps."""
        del cell
        return {}


def hang_causes(hooks: Hooks[CellHooks], cell: CellRequest) -> list[str]:
    """Return the sentences of all extensions."""
    found = hooks.call(
        "hang_causes",
        lambda _, each: [str(text) for text in each.hang_causes(cell)],
        is_urgent=True,
    )
    return [text for texts in found.values() for text in texts]


def run_facts(hooks: Hooks[CellHooks], cell: CellResult) -> JsonDict:
    """Return the facts of all extensions."""
    found = hooks.call("run_facts", lambda _, each: as_json(each.run_facts(cell)), is_urgent=True)
    return {name: fact for facts in found.values() for name, fact in facts.items()}


class SessionHooks:
    """What an extension does with a worker group; it overrides the hooks that it needs.

    It is made at the first start of the ranks. The argument is their
    :class:`~nbddp.controller.session.Session`, whose module imports this one.
    """

    def opened(self, session: Any) -> None:
        """Called before each start or restart of the ranks, on the thread that starts them."""
        del session

    def closed(self, session: Any) -> None:
        """Called when the session has ended its ranks and is about to end its threads."""
        del session
