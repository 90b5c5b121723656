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
