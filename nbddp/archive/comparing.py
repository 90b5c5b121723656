"""Several runs beside each other: in what they differ, their curves, and what they came to."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from nbddp.archive.find import short_names
from nbddp.archive.summary import DAMAGE, Summary, summarize
from nbddp.errors import ArgumentError, RequestError
from nbddp.record.finished import RecordedCell, RecordedRun
from nbddp.record.metrics import Curve, MetricStore, Pairs

MOST = 8  # runs: there are so many colours that can be told apart
CHARTS = 6  # unless others are asked for
MOST_CHARTS = 64  # if they are
MOST_NAMED = 40  # metrics, in a message
FACTS = ("world_size", "backend_used", "devices", "device_names", "hosts", "cores", "threads")
ONCE = frozenset({"devices", "device_names", "hosts"})  # lists by rank, each thing once


class Over(Enum):
    """What curves are drawn over."""

    STEP = "step"
    SAMPLES = "samples"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Mark:
    """A restart or a heal: where it is on the axis of steps (None if unknown), and in seconds."""

    kind: str
    step: float | None
    seconds: float


class Compared:
    """One of the runs.

    Args:
        path: its folder.
        wanted: which metrics to read, None for the first 64.
        current: the run of this kernel that goes on.

    Raises:
        RequestError: it is damaged, or no run.
    """

    def __init__(
        self,
        path: Path,
        *,
        wanted: Callable[[str], bool] | None = None,
        current: Path | None = None,
    ) -> None:
        try:
            self.run = RecordedRun(path, wanted)
            self.cells: tuple[RecordedCell, ...] = self.run.cells
            self.summary: Summary = summarize(path, current=current)
        except (*DAMAGE, RequestError) as error:
            raise RequestError(f"{path.name} is damaged, or no run of nbddp's ({error})") from None
        self._curves: dict[str, dict[int, Curve]] = {}

    @property
    def name(self) -> str:
        """The folder's."""
        return self.run.name

    @property
    def samples_per_step(self) -> float | None:
        """The batch of all ranks together, if it is known."""
        batch = self.run.facts.get("samples_per_step")
        return float(batch) if isinstance(batch, int | float) and batch > 0 else None

    @property
    def source(self) -> list[str]:
        """The lines of its cells in their order, without those that ran again by themselves."""
        lines: list[str] = []
        for number, cell in enumerate((each for each in self.cells if not each.is_again), start=1):
            lines += [f"# cell {number}", *cell.source.rstrip().splitlines(), ""]
        return lines

    @property
    def metrics(self) -> MetricStore:
        """The numbers that its ranks reported."""
        return self.run.metrics()

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """Where it was taken up again."""
        return tuple(self._marks())

    def _marks(self) -> Iterator[Mark]:
        for event in self.run.events:
            if event.kind == "resumed":
                kind = "heal" if "healed" in event.facts else "restart"
                step = event.facts.get("step")
                known = float(step) if isinstance(step, int | float) else None
                yield Mark(kind, known, event.at - self.metrics.began)

    def curves(self, name: str, over: Over) -> dict[int, Curve]:
        """Return the curve of each rank; over samples only where the batch is known.

        What a restart did again is there once, and loops follow each other. Over time and samples,
        the ``steps`` of a curve are seconds since the first number, or samples.
        """
        if name not in self._curves:  # asked for by each axis, and to see whether it is a line
            self._curves[name] = self.metrics.curves(name)
        curves, batch = self._curves[name], self.samples_per_step
        if over is Over.STEP:
            return curves
        if over is Over.SAMPLES and batch is None:
            return {}
        return {rank: self._moved(curve, over) for rank, curve in curves.items()}

    def _moved(self, curve: Curve, over: Over) -> Curve:
        if over is Over.TIME:
            began = self.metrics.began
            return replace(curve, steps=tuple(at - began for at in curve.times), resume_points=())
        batch = self.samples_per_step or 1.0
        steps = tuple((step + 1) * batch for step in curve.steps)  # what a step ends with
        return replace(curve, steps=steps, resume_points=())

    def small_curve(self, name: str) -> Pairs:
        """Return the lowest and highest values along the run, on its first rank."""
        curves = self.curves(name, Over.STEP)
        return curves[min(curves)].coarse() if curves else ()


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other.

    Attributes:
        runs: in the order that was asked for.
        metrics: those that are shown.
        left_out: how many metrics are not.
    """

    runs: tuple[Compared, ...]
    metrics: tuple[str, ...]
    left_out: int = 0

    @cached_property
    def drawn(self) -> tuple[str, ...]:
        """Those of the metrics that are lines: a number that was reported once is in the table."""
        lines = tuple(filter(self._is_line, self.metrics))
        return lines or self.metrics

    def _is_line(self, metric: str) -> bool:
        curves = (run.curves(metric, Over.STEP) for run in self.runs)
        return any(len(curve.steps) > 1 for each in curves for curve in each.values())

    @cached_property
    def names(self) -> list[str]:
        """Of the runs: without the time before them, where that tells them apart."""
        return short_names([run.name for run in self.runs])

    @property
    def axes(self) -> list[Over]:
        """Over what all of the runs can be drawn."""
        has_batch = all(run.samples_per_step for run in self.runs)
        return [each for each in Over if each is not Over.SAMPLES or has_batch]

    def differences(self) -> list[tuple[str, list[str]]]:
        """In what they differ, but for the code: of each thing what it is in each run."""
        columns = [dict(_facts(run)) for run in self.runs]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, [column.get(name, "") for column in columns]) for name in names]
        return [(name, values) for name, values in rows if len(set(values)) > 1]

    def code(self, index: int) -> list[str]:
        """How the cells of a run differ from those of the first one, as a diff.

        A run without cells has none, or could not write them down: there is nothing to compare.
        """
        return self._diffs[index]

    @cached_property
    def _diffs(self) -> list[list[str]]:
        return [_diff(self.runs[0], other) for other in self.runs]

    def finals(self, run: Compared) -> list[str]:
        """The last values of a run: the mean over ranks, and how far they lie apart."""
        return [say_last(run.metrics.last(name)) for name in self.metrics]


def compare(
    paths: Sequence[Path],
    metrics: str = "",
    *,
    current: Path | None = None,
) -> Comparison:
    """Put runs beside each other.

    Args:
        paths: their folders.
        metrics: the names, or patterns of names, of those to draw, with commas between them; empty
            for the first few that most runs have.
        current: the run of this kernel that goes on.

    Raises:
        ArgumentError: there are too few, or too many, or none has such a metric.
        RequestError: one of them is damaged, or no run.
    """
    if not 1 < len(paths) <= MOST:
        raise ArgumentError(f"compare takes 2 to {MOST} runs, got {len(paths)}")
    wanted = Pattern(metrics).fits if metrics else None
    runs = tuple(Compared(path, wanted=wanted, current=current) for path in paths)
    counts = Counter(name for run in runs for name in run.metrics.names())
    if metrics and not counts:
        names = (name for path in paths for name in RecordedRun(path).metrics().names())
        raise no_such_metric(metrics, [*dict.fromkeys(names)], of="runs")
    known = [name for name, _ in counts.most_common()]
    shown = tuple(known[: MOST_CHARTS if metrics else CHARTS])
    dropped = max(run.metrics.dropped_names for run in runs)
    return Comparison(runs, shown, len(known) - len(shown) + dropped)


class Pattern:
    """Names, or patterns of names, with commas between them.

    >>> [Pattern("val/*, lr[0]").fits(name) for name in ("val/loss", "loss", "lr[0]", "lr0")]
    [True, False, True, True]
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._each = [part.strip() for part in text.split(",")]

    def fits(self, name: str) -> bool:
        """Whether it is asked for."""
        is_said = name == self._text or name in self._each
        return is_said or any(fnmatchcase(name, each) for each in self._each)


def no_such_metric(patterns: str, known: Sequence[str], *, of: str, more: int = 0) -> ArgumentError:
    """Return the error for patterns that fit no metric.

    Args:
        patterns: what was asked for.
        known: the metrics that there are.
        of: what has these metrics, as ``"run"``.
        more: number of other metrics.
    """
    others = max(0, len(known) - MOST_NAMED) + more
    there = [*known[:MOST_NAMED], *([f"{others:,} more"] if others else [])]
    names = ", ".join(there) or "none"
    return ArgumentError(f"there is no metric {patterns}; the metrics of the {of} are: {names}")


def _diff(first: Compared, other: Compared) -> list[str]:
    if not (first.cells and other.cells):
        return []
    diff = difflib.unified_diff(
        first.source, other.source, first.name, other.name, lineterm="", n=2
    )
    return list(diff)


def _facts(run: Compared) -> Iterator[tuple[str, str]]:
    """Name by name what may differ, as text: settings first."""
    facts = run.run.facts
    for name, value in run.summary.config.items():
        yield name, _say(value)
    yield "world size", str(run.summary.ranks or "")
    for name in FACTS[1:]:
        value = facts.get(name)
        if isinstance(value, list) and name in ONCE:
            value = ", ".join(dict.fromkeys(map(str, value)))
        yield name.replace("_", " "), "" if value is None else str(value)
    yield "python", str(facts.get("python", ""))
    versions = facts.get("versions")
    for name, version in versions.items() if isinstance(versions, Mapping) else ():
        yield str(name), str(version)
    git = facts.get("git")
    if isinstance(git, Mapping):
        dirty = " with changes" if git.get("dirty") else ""
        yield "git", f"{str(git.get('commit', ''))[:10]}{dirty}"


def _say(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def say_last(values: Mapping[int, float]) -> str:
    """The mean over ranks, and the lowest and highest where they differ.

    >>> say_last({0: 1.0, 1: 2.0}), say_last({0: 0.5}), say_last({}), say_last({0: math.nan})
    ('1.5 (1 to 2)', '0.5', '', 'nan')
    """
    if not values:
        return ""
    lost = [value for value in values.values() if not math.isfinite(value)]
    if lost:
        return f"{lost[0]}"
    low, high = min(values.values()), max(values.values())
    mean = sum(value / len(values) for value in values.values())
    spread = f" ({low:.4g} to {high:.4g})" if f"{low:.4g}" != f"{high:.4g}" else ""
    return f"{mean:.4g}{spread}"
