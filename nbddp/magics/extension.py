"""``nbddp.timeline()``, and where a shell keeps what it has of nbddp."""

from __future__ import annotations

from IPython.core.getipython import get_ipython

from nbddp.errors import RequestError
from nbddp.record.waiting.collective_timeline import Timeline

ATTRIBUTE = "_nbddp"  # of a shell in which nbddp is loaded: its extension


def timeline(last: int | None = None) -> Timeline:
    """Who waited for whom in the last cell, or so far in the one that runs.

    Args:
        last: look at the last so many steps, or collectives where no steps were reported; None for
            all of the cell.

    Returns:
        The collectives with the time at which each rank came (``meetings``, or ``frame()`` as a
        table, of pandas where that is installed), seconds that one rank waited for another
        (``waits``), and seconds of waiting by line (``lines``).

    Raises:
        RequestError: there is no notebook with nbddp loaded here; a worker group of a script has a
            method of this name.
    """
    shell = get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
    extension = getattr(shell, ATTRIBUTE, None)
    if extension is None:
        raise RequestError(
            "timeline() is for the notebook in which nbddp is loaded (`%load_ext nbddp`), outside "
            "of the ranks; a script asks its worker group: group.timeline()"
        )
    found: Timeline = extension.notebook.group.timeline(last)
    return found
