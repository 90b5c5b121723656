"""What the buttons under the record of a failed cell do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbddp.errors import NbddpError

if TYPE_CHECKING:
    from nbddp.magics.desk import Desk


class RetryActions:
    """What can be done after a cell has failed; each method returns a text for the user."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def heal(self) -> str:
        """Replace the dead ranks with new ones."""
        return _try(lambda: str(self._desk.heal()))

    def restart(self) -> str:
        """Restart all ranks."""
        return _try(self._restart)

    def _restart(self) -> str:
        group = self._desk.group
        self._desk.make_ready(group.spec, fresh=True)
        return f"the ranks were restarted: attempt {group.life.attempt}"


def _try(act: Callable[[], str]) -> str:
    try:
        return act()
    except NbddpError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted"
