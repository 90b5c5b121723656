"""After a failure: what the buttons under its record do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbddp.errors import NbddpError
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.comeback import Retries
from nbddp.record.cell import CellRequest, CellResult

if TYPE_CHECKING:
    from nbddp.magics.desk import Desk


class Again:
    """A cell that failed, and what may be done about it.

    Args:
        desk: of the notebook.
        recovery: ran the cell, and knows its views.
        request: the cell.
        retries: as the cell was asked to run.
        conclude: told what came of it this time.
    """

    def __init__(
        self,
        desk: Desk,
        recovery: Recovery,
        request: CellRequest,
        retries: Retries,
        *,
        conclude: Callable[[CellResult], None],
    ) -> None:
        self._desk = desk
        self._recovery = recovery
        self._request = request
        self._retries = retries
        self._conclude = conclude

    @property
    def is_of_script(self) -> bool:
        """Whether it is a script, whose ranks hold nothing that a heal or a restart gives back."""
        return self._request.has_own_ranks

    def heal(self) -> str:
        """Put new ranks in the places of those that died; what to say of it."""
        return self._try(lambda: str(self._desk.heal()))

    def restart(self) -> str:
        """Start the ranks anew; what to say of it."""
        return self._try(self._restart)

    def _restart(self) -> str:
        self._desk.make_ready(self._desk.group.spec, fresh=True)
        return self._is_anew()

    def _is_anew(self) -> str:
        return f"the ranks were restarted: attempt {self._recovery.session.life.attempt}"

    def run_again(self) -> str:
        """Start them anew, replay, and run the cell once more."""
        return self._try(self._run_again)

    def _run_again(self) -> str:
        if self.is_of_script:
            self._desk.group.scripts.open(self._recovery.session)
        self._desk.views.start_over()
        result = self._recovery.run_again(self._request, self._retries)
        self._conclude(result)
        return self._is_anew()

    def _try(self, act: Callable[[], str]) -> str:
        try:
            return act()
        except NbddpError as error:
            return str(error)
        except KeyboardInterrupt:
            return "interrupted"
