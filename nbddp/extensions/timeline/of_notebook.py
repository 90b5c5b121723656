"""``nbddp.timeline()``: the timeline of the last cell of the notebook."""

from __future__ import annotations

from IPython.core.getipython import get_ipython

from nbddp.errors import RequestError
from nbddp.extensions.timeline.collective_timeline import Timeline
from nbddp.extensions.timeline.notebook import timeline_of
from nbddp.magics.load import ATTRIBUTE


def timeline(last: int | None = None) -> Timeline:
    """Return which rank waited for which in the last or running cell.

    Args:
        last: look at the last so many steps, or collectives if no steps were reported; None for the
            whole cell.

    Returns:
        The collectives with the arrival time of each rank (``meetings``, or ``frame()`` as a table,
        which is a pandas one if pandas is installed), the seconds that one rank waited for another
        (``waits``), and the seconds of waiting by line (``lines``).

    Raises:
        RequestError: nbddp is not loaded in a notebook here. In a script, a worker group has a
            method of this name.
    """
    shell = get_ipython()  # type: ignore[no-untyped-call, unused-ignore]
    loaded = getattr(shell, ATTRIBUTE, None)
    if loaded is None:
        raise RequestError(
            "timeline() works in a notebook in which nbddp is loaded (`%load_ext nbddp`), not on "
            "the ranks; in a script, call group.timeline() of the worker group"
        )
    return timeline_of(loaded.notebook.group.scripts.last_session, last)
