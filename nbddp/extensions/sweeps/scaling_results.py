"""A scaling study: one cell on several world sizes, its speed-up, and where the time goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from nbddp.extensions.runs.stored_run import NOT_METRICS
from nbddp.extensions.timeline.collective_timeline import Timeline
from nbddp.formatting import plural

SCALE = "scale"  # in ``run.json``
WARM_UP_DIVISOR = 5  # the first fifth of the steps is not measured
MAX_SPREAD = 0.1  # repetitions that differ by more do not measure a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The measurements of one run of the cell.

    Attributes:
        rate: steps per second after the warm-up; cells per second if the cell reports no steps.
        counts_steps: whether ``rate`` counts steps.
        batch: samples of all ranks in a step; None if unknown.
        waiting: fraction of the ranks' time in which they waited for another rank in a collective.
        loading: fraction of their time in which they waited for a batch of a DataLoader.
        communication: fraction of a step that is communication, as measured by DDP; None without
            a DDP model.
        exposed: fraction of a step that is communication without computation; None without a DDP
            model.
        memory: bytes of the largest rank at the end.
        gpu_memory: bytes of its tensors on a GPU.
    """

    rate: float
    counts_steps: bool = True
    batch: int | None = None
    waiting: float | None = None
    loading: float | None = None
    communication: float | None = None
    exposed: float | None = None
    memory: int = 0
    gpu_memory: int = 0


@dataclass(frozen=True, slots=True)
class WorldSizeResult:
    """A world size and its repetitions; there is at least one."""

    ranks: int
    rounds: tuple[Repetition, ...]

    @property
    def rate(self) -> float:
        """Median rate of the repetitions."""
        return median(repetition.rate for repetition in self.rounds)

    @property
    def batch(self) -> int | None:
        """The batch size if it is equal in all repetitions; else None."""
        batches = {repetition.batch for repetition in self.rounds}
        return batches.pop() if len(batches) == 1 else None

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of all ranks; None if unknown."""
        return None if self.batch is None or not self.counts_steps else self.rate * self.batch

    @property
    def counts_steps(self) -> bool:
        """Whether the rate counts steps."""
        return all(repetition.counts_steps for repetition in self.rounds)

    @property
    def spread(self) -> float:
        """Range of the rates of the repetitions, as a fraction of their median."""
        rates = [repetition.rate for repetition in self.rounds]
        return (max(rates) - min(rates)) / self.rate

    def share(self, name: str) -> float | None:
        """Return the median of a fraction or of the memory; None if no repetition has it."""
        values = [getattr(repetition, name) for repetition in self.rounds]
        numbers = [value for value in values if value is not None]
        return median(numbers) if numbers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The results of a cell on several world sizes.

    Attributes:
        sizes: the measured world sizes, the smallest first.
        is_weak: whether the work of each rank stays the same (weak scaling), or the total work.
        cores: number of cores of this machine.
        devices: the devices of the largest world size, by rank.
    """

    sizes: tuple[WorldSizeResult, ...]
    is_weak: bool = False
    cores: int = 1
    devices: tuple[str, ...] = ()

    @property
    def counts_steps(self) -> bool:
        """Whether all rates count steps."""
        return all(size.counts_steps for size in self.sizes)

    @property
    def has_samples(self) -> bool:
        """Whether the samples per second of all world sizes are known."""
        return self.counts_steps and all(size.samples_per_second for size in self.sizes)

    def speed_up(self, size: WorldSizeResult) -> float:
        """Return the work per second, relative to the smallest world size."""
        first = self.sizes[0]
        if self.has_samples and size.samples_per_second and first.samples_per_second:
            return size.samples_per_second / first.samples_per_second
        growth = size.ranks / first.ranks if self.is_weak else 1.0
        return size.rate / first.rate * growth

    def efficiency(self, size: WorldSizeResult) -> float:
        """Return the speed-up as a fraction of the ideal speed-up of this number of ranks."""
        return self.speed_up(size) * self.sizes[0].ranks / size.ranks

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of each world size by name; None for unknown numbers."""
        rate = "steps_per_second" if self.counts_steps else "cells_per_second"
        shares = ("waiting", "loading", "communication", "exposed", "memory", "gpu_memory")
        return [
            {"ranks": size.ranks, rate: size.rate, "samples_per_second": size.samples_per_second}
            | {"speed_up": self.speed_up(size), "efficiency": self.efficiency(size)}
            | {name: size.share(name) for name in shares}
            for size in self.sizes
        ]

    @property
    def noisy(self) -> list[WorldSizeResult]:
        """World sizes with repetitions that differ by more than a tenth."""
        return [size for size in self.sizes if size.spread > MAX_SPREAD]

    @property
    def oversubscribed(self) -> str:
        """World sizes with too few cores or GPUs, such as "4 ranks on 2 cores"; empty if none."""
        gpus = len({device for device in self.devices if device != "cpu"})
        available, unit = (gpus, "GPU") if gpus else (self.cores, "core")
        sizes = [str(size.ranks) for size in self.sizes if size.ranks > available]
        return f"{', '.join(sizes)} ranks on {plural(available, unit)}" if sizes else ""


def run_json_entry(ranks: int, number: int, of: int, *, is_weak: bool) -> dict[str, Any]:
    """Return the entry of a repetition in ``run.json``."""
    return {SCALE: {"ranks": ranks, "round": number, "of": of, "is_weak": is_weak}}


def steady_rate(rows: Sequence[Mapping[str, Any]], began: float) -> tuple[float, int] | None:
    """Return the steps per second after the warm-up, and the number of steps; None if too few.

    Args:
        rows: reports of the ranks, as in ``metrics.jsonl``.
        began: start of the cell, in ``time.time()``.

    >>> steady_rate([{"time": t / 10, "rank": 0, "step": t, "loss": 1.0} for t in range(11)], 0.0)
    (10.0, 8)
    """
    loops: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        name = next((key for key in row if key not in NOT_METRICS), "")
        if name and row["time"] >= began:
            loops.setdefault(row["rank"], {}).setdefault(name, []).append(row)
    rates, counts = [], []
    for by_name in loops.values():
        loop = max(by_name.values(), key=len)
        warm = loop[max(1, len(loop) // WARM_UP_DIVISOR) :]
        if len(warm) > 1 and (seconds := warm[-1]["time"] - warm[0]["time"]) > 0:
            numbers = [row.get("step", math.nan) for row in warm]
            ascends = all(one < other for one, other in itertools.pairwise(numbers))
            rates.append((numbers[-1] - numbers[0] if ascends else len(warm) - 1) / seconds)
            counts.append(len(warm) - 1)
    return (fmean(rates), min(counts)) if rates else None


def time_shares(timeline: Timeline, rate: float) -> dict[str, float | None]:
    """Return the fractions of the time of the steps, by the field names of :class:`Repetition`."""
    if not timeline.meetings:
        return {}
    # a long cell keeps only its last collectives: start with the first of these
    began = max(timeline.span[0], min(timeline.meetings[0].arrivals.values()))
    total = (timeline.span[1] - began) * len(timeline.ranks)
    if not total > 0:
        return {}
    waited = sum(each.total_wait for each in timeline.meetings)
    loads = itertools.chain.from_iterable(timeline.loads.values())
    loading = sum(max(0.0, end - max(begin, began)) for begin, end in loads)
    shares: dict[str, float | None] = {
        "waiting": min(1.0, waited / total),
        "loading": min(1.0, loading / total),
    }
    ranks = {each.rank for each in timeline.overlaps}
    if ranks:  # DDP averages over other steps than the rate
        for name in ("communication", "exposed"):
            seconds = sum(getattr(each, name) for each in timeline.overlaps) / len(ranks)
            shares[name] = min(1.0, seconds * rate)
    return shares
