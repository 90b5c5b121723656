"""What extensions know of cells and scripts, with or without a notebook."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nbddp.extension.guard import Guard
from nbddp.extension.installed import installed
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


class AllCellHooks:
    """The hooks of all extensions.

    Args:
        notify: shows a sentence to the user.
        attempt: returns the attempt of the ranks.
    """

    def __init__(self, notify: Callable[[str], None], attempt: Callable[[], int]) -> None:
        self._guard = Guard(notify, attempt)

    def hang_causes(self, cell: CellRequest) -> list[str]:
        """Return the sentences of all extensions."""
        texts: list[str] = []
        for name, hooks in self._hooks():
            texts += self._guard.call(name, hang_causes, hooks, cell, default=[], is_urgent=True)
        return texts

    def run_facts(self, cell: CellResult) -> JsonDict:
        """Return the facts of all extensions."""
        facts: JsonDict = {}
        for name, hooks in self._hooks():
            found: JsonDict = self._guard.call(
                name, run_facts, hooks, cell, default={}, is_urgent=True
            )
            facts |= found
        return facts

    def _hooks(self) -> Iterator[tuple[str, CellHooks]]:
        for name, extension in installed().items():
            if extension.cells:
                yield name, self._guard.make(name, extension.cells, CellHooks)


def hang_causes(hooks: CellHooks, cell: CellRequest) -> list[str]:
    """Call the hook of an extension."""
    return [str(text) for text in hooks.hang_causes(cell)]


def run_facts(hooks: CellHooks, cell: CellResult) -> JsonDict:
    """Call the hook of an extension; facts that are not JSON are its error."""
    facts: JsonDict = json.loads(json.dumps({**hooks.run_facts(cell)}))
    return facts
