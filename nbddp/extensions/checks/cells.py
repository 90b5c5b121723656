"""What the checks know of any cell: code that may make it hang, and its global batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbddp.controller.cell_hooks import CellHooks
from nbddp.extensions.checks.checker import hang_causes
from nbddp.extensions.checks.facts import LoaderFacts, RankFacts
from nbddp.record.cell import CellRequest, CellResult
from nbddp.wire.messages import CellEnded


class CheckedCells(CellHooks):
    """Looks at the code of a cell that hangs, and at the loaders of a cell that has trained."""

    def hang_causes(self, cell: CellRequest) -> Sequence[str]:
        """Return the headlines of rule ND101, about calls that only some ranks make."""
        if cell.script is not None or cell.ranks is not None:
            return []
        return hang_causes(cell.source, first_line=cell.first_line)

    def run_facts(self, cell: CellResult) -> Mapping[str, Any]:
        """Return the global batch size, if it is known."""
        batch = samples_per_step(cell.reports.values())
        return {} if batch is None else {"samples_per_step": batch}


def samples_per_step(reports: Iterable[CellEnded]) -> int | None:
    """Return the global batch size of the loaders that shuffle; None if they differ or are missing.

    >>> train = LoaderFacts(sampler="dealt", shuffles=True, batch_size=32)
    >>> rank = RankFacts(objects={"train": train, "test": LoaderFacts(batch_size=100)})
    >>> ended = CellEnded(cell=1, in_group=True, facts={"checks": rank.to_json()})
    >>> samples_per_step([ended, ended])
    64
    """
    totals = Counter[str]()
    for report in reports:
        totals.update(_batch_sizes(RankFacts.from_reported(report.facts)))
    found = set(totals.values())
    return found.pop() if len(found) == 1 else None


def _batch_sizes(rank: RankFacts) -> dict[str, int]:
    """Return the batch sizes of the loaders that shuffle, as training loaders do."""
    loaders = {name: each for name, each in rank.objects.items() if isinstance(each, LoaderFacts)}
    shuffled = {name: each.batch_size for name, each in loaders.items() if each.shuffles}
    return {name: size for name, size in shuffled.items() if size > 0} | dict(rank.batches)
