"""Calls the halves of extensions on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nbddp.errors import RequestError
from nbddp.extension.guard import Guard, Hooks, as_json
from nbddp.extension.installed import installed, load
from nbddp.extension.rank_half import EndedCell, RankAnswer, RankCell, RankHalf
from nbddp.wire.frozen import Frozen
from nbddp.wire.messages import JsonDict, RunCell

# the forkserver imports this module, so that forked ranks have their modules
for _extension in installed().values():
    if _extension.rank:
        with suppress(Exception):  # each rank reports it
            load(_extension.rank)


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
        self._hooks: Hooks[RankHalf] = Hooks("rank", Guard(notify, lambda: attempt))
        self._was_interrupted = was_interrupted
        self._is_preparing = False
        self._given: Mapping[str, Any] = {}  # the options in the line of the cell, by extension
        self._hooks.call("load", lambda _name, _half: None)

    def before_cell(self, command: RunCell) -> None:
        """Call each half with its options."""
        self._given = command.options

        def call(name: str, half: RankHalf) -> None:
            kind: type[Frozen] = installed()[name].options or Frozen
            # another version of its extension may not know all options
            options = kind(**self._given.get(name, {}))
            cell = RankCell(
                options=options,
                number=command.cell,
                is_again=command.is_again,
                is_replay=command.is_replay,
            )
            half.before_cell(cell)

        self._is_preparing = True
        try:  # the user waits for an extension with options
            self._hooks.call("before_cell", call, slow=self._given)
        finally:
            self._is_preparing = False

    def is_in_hook(self, filename: str) -> bool:
        """Return whether an interrupt ends a hook that is called from this file.

        It ends ``before_cell``, as it ends the code of the cell. It does not end ``answer``, which
        may do the same on all ranks.
        """
        return self._is_preparing and filename == __file__

    def after_cell(self, error: BaseException | None) -> list[str]:
        """Call each half with the error of the cell; return their sentences for the user."""
        return self._texts("after_cell", lambda half: half.after_cell(error))

    def facts(self, cell: EndedCell) -> JsonDict:
        """Return the facts of each half that has some, by extension."""
        found = self._hooks.call(
            "facts",
            lambda _, half: as_json(half.facts(cell)),
            slow=self._hooks.names if cell.source is None else (),
            is_urgent=self._was_interrupted(),
        )
        return {name: facts for name, facts in found.items() if facts}

    def armed(self) -> list[str]:
        """Return the faults that are armed on this rank."""
        return self._texts("armed", lambda half: half.armed())

    def answer(self, name: str, content: Mapping[str, Any]) -> RankAnswer:
        """Return the answer of a half to a message of the notebook.

        Raises:
            RequestError: it has failed, or this rank does not have it.
        """

        def call(_: str, half: RankHalf) -> RankAnswer:
            answer = half.answer(content)
            return replace(answer, content=as_json(answer.content))

        names = {name}.intersection(self._hooks.names)
        found = self._hooks.call("answer", call, names, slow=names)
        if not found:
            raise RequestError(f"the extension {name} failed there; the log of the rank says why")
        return found[name]

    def _texts(self, hook: str, act: Callable[[RankHalf], Sequence[str]]) -> list[str]:
        found = self._hooks.call(
            hook,
            lambda _, half: [str(text) for text in act(half)],
            slow=self._given,
            is_urgent=self._was_interrupted(),
        )
        return [text for texts in found.values() for text in texts]
