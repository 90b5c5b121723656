"""What the session knows of a run that its events do not tell: devices, numbers, the batch."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from nbddp.checks.facts import Loader, RankFacts
from nbddp.record.cell import CellHandle
from nbddp.record.timeline import TimeLine
from nbddp.record.whereabouts import Whereabouts
from nbddp.topology import cores_here
from nbddp.wire.messages import CellEnded, Ready

logger = logging.getLogger(__name__)

PAUSE = 10.0  # seconds between two times that it is written while a cell runs


def describe(
    time_line: TimeLine,
    ready: Mapping[int, Ready],
    whereabouts: Whereabouts,
    cell: CellHandle | None,
    *,
    pause: float = 0.0,
) -> None:
    """Write ``run.json``; whatever goes wrong with a record, no rank is lost for it.

    ``pause``: seconds since the last time that must have passed.
    """
    if time_line.folder is None or time_line.folder.seconds_since_described() < pause:
        return
    try:
        time_line.describe(known_facts(ready, whereabouts, cell))
    except Exception:
        logger.exception("nbddp could not write down what it knows of the run")


def known_facts(
    ready: Mapping[int, Ready], whereabouts: Whereabouts, cell: CellHandle | None
) -> dict[str, Any]:
    """For ``run.json``; what is not known now is not in it, and stays as it was."""
    facts = whereabouts.totals()
    if ready:
        facts |= _places([ready[rank] for rank in sorted(ready)])
        facts["device_names"] = _device_names(ready, whereabouts)
    has_steps = whereabouts.first_step is not None
    if cell is not None and cell.result is not None and has_steps:  # an evaluation has none
        batch = samples_per_step(cell.result.reports.values())
        facts |= {} if batch is None else {"samples_per_step": batch}
    return facts


def _places(ranks: Iterable[Ready]) -> dict[str, Any]:
    known = list(ranks)
    return {
        "backend_used": known[0].backend,
        "devices": [each.device for each in known],
        "hosts": [each.host for each in known],
        "cores": cores_here(),
    }


def _device_names(ready: Mapping[int, Ready], whereabouts: Whereabouts) -> list[str]:
    """By rank; of a GPU that no cell has touched yet it is not known."""
    names = []
    for rank in sorted(ready):
        sign = whereabouts.hangs.signs.get(rank)
        is_cpu = ready[rank].device == "cpu" and ready[rank].host == platform.node()
        names.append(processor() if is_cpu else sign.pulse.gpu_name if sign else "")
    return names


@cache
def processor() -> str:
    """The name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def samples_per_step(reports: Iterable[CellEnded]) -> int | None:
    """The batch that all ranks make together, where one loader of their cell shuffles.

    >>> train = Loader(sampler="dealt", shuffles=True, batch_size=32)
    >>> rank = RankFacts(things={"train": train, "test": Loader(batch_size=100)})
    >>> ended = CellEnded(cell=1, seconds=1.0, in_group=True, facts=rank.json())
    >>> samples_per_step([ended, ended])
    64
    """
    totals: dict[str, int] = {}
    for report in reports:
        for name, batch in _batches(RankFacts.read(report.facts)).items():
            totals[name] = totals.get(name, 0) + batch
    found = set(totals.values())
    return found.pop() if len(found) == 1 else None


def _batches(rank: RankFacts) -> dict[str, int]:
    """Of the loaders that shuffle, as those for training do."""
    loaders = {name: each for name, each in rank.things.items() if isinstance(each, Loader)}
    shuffled = {name: each.batch_size for name, each in loaders.items() if each.shuffles}
    return {name: size for name, size in shuffled.items() if size > 0} | dict(rank.batches)
