"""Calls the halves of extensions on a rank.

An interrupt ends a hook that is called from here, as it ends the code of a cell.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nbddp.errors import RequestError
from nbddp.extension.guard import Guard
from nbddp.extension.installed import installed, load
from nbddp.extension.rank_half import EndedCell, RankAnswer, RankCell, RankHalf
from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import JsonDict, RunCell

logger = logging.getLogger(__name__)


def _load_classes() -> dict[str, type[RankHalf]]:
    classes: dict[str, type[RankHalf]] = {}
    for extension in installed().values():
        if extension.rank:
            try:
                classes[extension.name] = load(extension.rank)
            except Exception:
                logger.exception("ranks work without the extension %s", extension.name)
    return classes


CLASSES = _load_classes()  # the forkserver imports this module, so that forked ranks have them


class RankHalves:
    """The halves of all extensions on one rank.

    Args:
        notify: shows a sentence to the user, with the number of the rank.
        attempt: the attempt of the ranks.
        was_interrupted: whether the cell was interrupted.
    """

    def __init__(
        self, notify: Callable[[str], None], attempt: int, was_interrupted: Callable[[], bool]
    ) -> None:
        self._was_interrupted = was_interrupted
        self._guard = Guard(notify, lambda: attempt)
        made = {name: self._guard.call(name, kind, default=None) for name, kind in CLASSES.items()}
        self._halves = {name: half for name, half in made.items() if half is not None}
        self._given: Mapping[str, Any] = {}  # the options in the line of the cell, by extension

    def before_cell(self, command: RunCell) -> None:
        """Call each half with its options."""
        self._given = command.options
        for name, half in self._halves.items():
            kind: type[Frozen] = installed()[name].options or Frozen
            cell = RankCell(
                options=self._given.get(name, {}),
                number=command.cell,
                is_again=command.is_again,
                is_replay=command.is_replay,
            )
            may_be_slow = name in self._given  # the user waits for an extension with options
            self._guard.call(
                name, before_cell, half, kind, cell, default=None, may_be_slow=may_be_slow
            )

    def after_cell(self, error: BaseException | None) -> list[str]:
        """Call each half with the error of the cell; return their sentences for the user."""
        return self._texts(after_cell, error)

    def facts(self, cell: EndedCell) -> JsonDict:
        """Return the facts of each half that has some, by extension."""
        is_asked = cell.source is None
        is_urgent = self._was_interrupted() and not is_asked
        found: dict[str, JsonDict] = {
            name: self._guard.call(
                *(name, facts, half, cell), default={}, may_be_slow=is_asked, is_urgent=is_urgent
            )
            for name, half in self._halves.items()
        }
        return {name: each for name, each in found.items() if each}

    def armed(self) -> list[str]:
        """Return the faults that are armed on this rank."""
        return self._texts(armed)

    def answer(self, name: str, content: Mapping[str, Any]) -> RankAnswer:
        """Return the answer of a half to a message of the notebook.

        Raises:
            RequestError: it has failed, or this rank does not have it.
        """
        half = self._halves.get(name)
        found: RankAnswer | None = None
        if half is not None:
            found = self._guard.call(name, answer, half, content, default=None, may_be_slow=True)
        if found is None:
            raise RequestError(f"the extension {name} failed there; the log of the rank says why")
        return found

    def _texts(self, hook: Callable[..., list[str]], *args: Any) -> list[str]:
        texts: list[str] = []
        for name, half in self._halves.items():
            may_be_slow = name in self._given
            is_urgent = self._was_interrupted() and not may_be_slow
            texts += self._guard.call(
                *(name, hook, half, *args),
                default=[],
                may_be_slow=may_be_slow,
                is_urgent=is_urgent,
            )
        return texts


def before_cell(half: RankHalf, kind: type[Frozen], cell: RankCell) -> None:
    """Call the hook of a half; another version of its extension may not know all options."""
    half.before_cell(replace(cell, options=kind(**cell.options)))


def after_cell(half: RankHalf, error: BaseException | None) -> list[str]:
    """Call the hook of a half, whose result may be no list of texts."""
    return [str(text) for text in half.after_cell(error)]


def armed(half: RankHalf) -> list[str]:
    """Call the hook of a half, whose result may be no list of texts."""
    return [str(text) for text in half.armed()]


def facts(half: RankHalf, cell: EndedCell) -> JsonDict:
    """Call the hook of a half; facts that are not JSON are its error, not one of the message."""
    found: JsonDict = json.loads(json.dumps(half.facts(cell)))
    return found


def answer(half: RankHalf, content: Mapping[str, Any]) -> RankAnswer:
    """Call the hook of a half; content that is not JSON is its error, not one of the message."""
    found = half.answer(content)
    return replace(found, content=json.loads(json.dumps(found.content)))
