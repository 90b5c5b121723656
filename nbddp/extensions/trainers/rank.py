"""Let the trainers of other libraries report on a rank."""

from __future__ import annotations

from nbddp.extension.rank_half import EndedCell, RankCell, RankHalf
from nbddp.extensions.trainers.attach import attach_to_libraries
from nbddp.extensions.trainers.reporting import begin_cell, trainers_of_cell
from nbddp.wire.messages import JsonDict


class Trainers(RankHalf):
    """Attaches to the libraries, and reports their trainers unless a cell says not to."""

    def __init__(self) -> None:
        attach_to_libraries()

    def before_cell(self, cell: RankCell) -> None:
        """Forget the trainers of the earlier cell."""
        begin_cell(is_enabled=not cell.options.no_trainer_metrics)

    def facts(self, cell: EndedCell) -> JsonDict:
        """Return the facts of the trainers of this cell, for the rules of ``checks``."""
        del cell
        return trainers_of_cell()
