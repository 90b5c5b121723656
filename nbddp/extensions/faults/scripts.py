"""Faults that are armed in the ranks of the cells fire in a script, too, but only once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.faults.kinds import FAULTS_VARIABLE
from nbddp.group.push_pull import pull
from nbddp.group.script_ranks import ScriptHooks

logger = logging.getLogger(__name__)

DISARM_EXPRESSION = "__import__('nbddp').faults.disarm({!r})"


class FaultsInScripts(ScriptHooks):
    """Arms faults in the ranks of a script, and disarms those that fired there."""

    def environment(self, cells: Session) -> Mapping[str, str]:
        """Pass on the faults that are armed in the ranks of the cells."""
        faults = ";".join(cells.armed_now)
        return {FAULTS_VARIABLE: faults} if faults else {}

    def after_script(self, script: Session, cells: Session) -> None:
        """Disarm in the cells' ranks the faults that fired in a script: a fault fires once."""
        fired = script.fired_faults
        if not fired:
            return
        cells.record_fired(fired)
        if cells.life.state.is_ready and cells.life.alive:
            try:
                pull(cells, DISARM_EXPRESSION.format(sorted(fired)))
            except RequestError as error:
                logger.warning("%s may fire again in a cell: %s", ", ".join(fired), error)
