"""What ranks hold that no replay makes: of cells that did not go well, and of another notebook."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.record.cell import CellRequest, Deed
from nbddp.record.names import bound_names
from nbddp.record.verdict import Verdict

BEFORE = "the ranks were taken back, with what another notebook's cells made"
_SHOWN = 4
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
_COMPOUND = (ast.For, ast.While, ast.With, ast.Try, ast.If, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Unmade:
    """One of those cells, or, with None, all of another notebook.

    Attributes:
        request: the cell.
        is_interrupt: whether the user has ended it; else it failed.
    """

    request: CellRequest | None = None
    is_interrupt: bool = False

    def __str__(self) -> str:
        if self.request is None:
            return BEFORE
        how = "was interrupted" if self.is_interrupt else "failed"
        return f"cell [{self.request.execution_count}] {how}"

    def is_made_by(self, deed: Deed) -> bool:
        """Whether the next cell that went well has done it over: the same, or one that mends it."""
        mine = self.request
        if mine is None or not isinstance(deed, CellRequest):
            return False
        if deed.ranks is not None and not {*(mine.ranks or (-1,))} <= {*deed.ranks}:
            return False
        if mine.source == deed.source:
            return True
        names = set() if self.is_interrupt else _bound(mine.source)
        return bool(names) and names <= _bound(deed.source)


def unmade_by(request: CellRequest, verdict: Verdict) -> tuple[Unmade, ...]:
    """What is to be remembered of a cell that did not go well: nothing if it has done nothing."""
    if verdict.ended_by or not verdict.has_survivors or request.script is not None:
        return ()
    if _has_done_nothing(request.source, verdict):
        return ()
    return (Unmade(request, verdict.is_interrupt),)


def say_unmade(unmade: Sequence[Unmade]) -> str:
    """Name them in a line, the last ones if they are many.

    >>> cells = [CellRequest(source="", execution_count=number) for number in (3, 5)]
    >>> say_unmade([Unmade(cells[0], True), Unmade(cells[1])])
    'cell [3] was interrupted, cell [5] failed'
    """
    said = [*dict.fromkeys(map(str, unmade))]
    return ", ".join(["..."] * (len(said) > _SHOWN) + said[-_SHOWN:])


def _bound(source: str) -> set[str]:
    try:
        return bound_names(source)
    except SyntaxError:  # it has a magic in it
        return set()


def _has_done_nothing(source: str, verdict: Verdict) -> bool:
    """Whether its first statement has a name in it that does not exist."""
    troubles = [verdict.first, *(each for _, each in verdict.others)]
    texts = {each.failure.text if each.failure else "" for each in troubles}
    found = [_UNDEFINED.search(text) for text in texts]
    try:
        first = ast.parse(source).body[:1]
    except SyntaxError:  # it has a magic in it
        return False
    if any(isinstance(each, _COMPOUND) for each in first):
        return False
    names = {node.id for each in first for node in ast.walk(each) if isinstance(node, ast.Name)}
    return all(match is not None and match[1] in names for match in found)
