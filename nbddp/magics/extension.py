"""What one shell has of nbddp, and where it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.magics.desk import Desk

ATTRIBUTE = "_nbddp"


def desk_of(shell: InteractiveShell) -> Desk | None:
    """The desk of a shell in which nbddp is loaded; None of any other."""
    desk: Desk | None = getattr(getattr(shell, ATTRIBUTE, None), "desk", None)
    return desk
