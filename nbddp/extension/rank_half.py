"""The half of an extension on a rank; ``worker/rank_halves.py`` calls it."""

from __future__ import annotations

from typing import Any


class RankHalf:
    """Made when a rank starts, before the process group forms; overrides the hooks that it needs.

    No hook may wait, or start a collective.
    """

    def before_cell(self, options: Any) -> None:
        """Prepare for a cell or script with the options of this extension."""
