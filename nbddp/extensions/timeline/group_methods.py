"""The method of ``WorkerGroup`` that returns the timeline of a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.extensions.timeline.collective_timeline import Timeline
from nbddp.extensions.timeline.notebook import timeline_of

if TYPE_CHECKING:
    from nbddp.group.worker_group import WorkerGroup


def timeline(self: WorkerGroup, last: int | None = None) -> Timeline:
    """Return which rank waited for which in the last cell, or in its last steps."""
    return timeline_of(self._group.scripts.last_session, last)
