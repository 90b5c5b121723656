"""The half on a rank: it reloads modules, and undoes that if another rank fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nbddp.extension.rank_half import EndedCell, RankAnswer, RankHalf
from nbddp.extensions.autoreload.modules import UserModules
from nbddp.wire.messages import JsonDict
from nbddp.worker.lazy_preload import imported_modules


class AutoreloadOnRank(RankHalf):
    """Reloads the user's modules of this rank."""

    def __init__(self) -> None:
        self._modules = UserModules()
        self._count = 0

    def facts(self, cell: EndedCell) -> JsonDict:
        """Record the versions of the modules that the cell has imported."""
        del cell
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            self._modules.note(reversed(imported_modules()))
        return {}

    def answer(self, content: Mapping[str, Any]) -> RankAnswer:
        """Reload edited modules, or undo the last reload."""
        if content["undo"]:
            self._modules.undo()
            return RankAnswer()
        only, skip = content["only"], content["skip"]
        found = self._modules.reload(lambda name: name in only if only else name not in skip)
        return RankAnswer(content=asdict(found))
