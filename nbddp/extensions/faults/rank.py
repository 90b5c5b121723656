"""Arm faults when a rank starts, and tell them which cell runs."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.extension.rank_half import RankCell, RankHalf
from nbddp.extensions.faults import arming


class FaultsOnRank(RankHalf):
    """Arms the faults that the ranks of a script get, and reports the armed ones."""

    def __init__(self) -> None:
        arming.arm_from_environment()

    def before_cell(self, cell: RankCell) -> None:
        """Start a cell."""
        arming.begin_cell(is_again=cell.is_again)

    def after_cell(self, error: BaseException | None) -> Sequence[str]:  # noqa: ARG002
        """Disarm faults that still wait for a target."""
        return arming.end_cell()

    def armed(self) -> Sequence[str]:
        """Return the faults that have not fired yet."""
        return [str(fault) for fault in arming.armed()]
