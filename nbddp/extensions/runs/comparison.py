"""Compare runs: their final values, their curves, and their differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from nbddp.charts.palette import LETTERS
from nbddp.errors import ArgumentError
from nbddp.extensions.runs import XAxis
from nbddp.extensions.runs.find import short_names
from nbddp.extensions.runs.stored_run import StoredCell, StoredRun
from nbddp.extensions.runs.summary import summarize
from nbddp.formatting import list_some
from nbddp.record.metrics import Curve, Pairs
from nbddp.record.run_events import Resumed
from nbddp.ui.wording import format_last

MAX_RUNS = 8  # as many as there are distinct colours
SWEEP = "sweep"  # in `run.json`: the sweep to which a run belongs
MAX_LABEL = 24  # characters of the values of a sweep
DEFAULT_CHARTS = 6  # if no metrics are chosen
MAX_CHARTS = 64  # if metrics are chosen
MAX_NAMED_METRICS = 40  # metrics in a message
COMPARED_FACTS = ("backend_used", "devices", "device_names", "hosts", "cores", "threads")
FACTS_BY_RANK = frozenset({"devices", "device_names", "hosts"})  # shown without repeats


class ComparedRun(StoredRun):
    """One of the compared runs.

    Args:
        path: its folder.
        wanted: the metrics to read; None for the first 64.
        current: the folder of this kernel's running run.

    Attributes:
        summary: the summary of the run.
        source: the lines of its cells.

    Raises:
        RequestError: the run is damaged, or the folder holds no run.
    """

    def __init__(
        self,
        path: Path,
        *,
        wanted: Callable[[str], bool] | None = None,
        current: Path | None = None,
    ) -> None:
        super().__init__(path, wanted)
        self.summary = summarize(path, current=current)
        self.source = _source(self.cells)
        self._curves: dict[str, dict[int, Curve]] = {}

    @property
    def samples_per_step(self) -> float | None:
        """The global batch size; None if unknown."""
        batch = self.facts.get("samples_per_step")
        return float(batch) if isinstance(batch, int | float) and batch > 0 else None

    def resume_marks(self, over: XAxis) -> Iterator[tuple[float, bool]]:
        """Yield the positions on this axis at which the run resumed, and whether after a heal."""
        for event in self.events:
            if isinstance(event, Resumed):
                seconds = event.time - self.metrics().began
                position = seconds if over is XAxis.TIME else self._x(event.step, over)
                yield position, event.healed is not None

    def curves(self, name: str, over: XAxis) -> dict[int, Curve]:
        """Return the curve of each rank; over samples only if the batch size is known.

        Steps that a restart repeated appear once, and loops follow each other. Over time, ``steps``
        of a curve are seconds since the first number of the run. Over samples, they are samples.
        """
        if name not in self._curves:  # each axis and Comparison.drawn use it
            self._curves[name] = self.metrics().curves(name)
        curves = self._curves[name]
        if over is XAxis.STEP:
            return curves
        if over is XAxis.SAMPLES and self.samples_per_step is None:
            return {}
        curves_on_axis = {}
        for rank, curve in curves.items():
            positions = tuple(self._x(step, over) for step in curve.steps)
            if over is XAxis.TIME:
                positions = tuple(at - self.metrics().began for at in curve.times)
            curves_on_axis[rank] = replace(curve, steps=positions, resume_points=())
        return curves_on_axis

    def _x(self, step: float, over: XAxis) -> float:
        """Return the samples after a step, or the step."""
        return step if over is XAxis.STEP else (step + 1) * (self.samples_per_step or 0.0)

    def coarse_curve(self, name: str) -> Pairs:
        """Return the lowest and highest values along the run, of its first rank."""
        curves = self.curves(name, XAxis.STEP)
        return curves[min(curves)].coarse() if curves else ()


def _source(cells: Iterable[StoredCell]) -> list[str]:
    """Return the lines of cells in order, without cells that nbddp ran again."""
    lines: list[str] = []
    for number, cell in enumerate((cell for cell in cells if not cell.is_again), start=1):
        lines += [f"# cell {number}", *cell.source.rstrip().splitlines(), ""]
    return lines


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs.

    Attributes:
        runs: the runs, in the requested order.
        metrics: the metrics that are shown.
        left_out: number of other metrics.
    """

    runs: tuple[ComparedRun, ...]
    metrics: tuple[str, ...]
    left_out: int = 0

    @cached_property
    def drawn(self) -> tuple[str, ...]:
        """The metrics drawn as lines; a number that was reported once is only in the table."""
        return tuple(filter(self._is_line, self.metrics)) or self.metrics

    def _is_line(self, metric: str) -> bool:
        curves = (run.curves(metric, XAxis.STEP) for run in self.runs)
        return any(len(curve.steps) > 1 for by_rank in curves for curve in by_rank.values())

    @cached_property
    def names(self) -> list[str]:
        """The names of the runs, without the start time if they differ without it."""
        return short_names([run.name for run in self.runs])

    @cached_property
    def labels(self) -> list[str]:
        """The labels of the lines: the values of a sweep if it made all runs, else letters."""
        sweeps = [run.facts.get(SWEEP) for run in self.runs]
        found = [sweep for sweep in sweeps if isinstance(sweep, dict)]
        settings = [sweep.get("settings", {}) for sweep in found]
        names = {name for each in settings for name in each}
        swept = sorted(n for n in names if len({str(each.get(n)) for each in settings}) > 1)
        labels = [", ".join(f"{n}={each.get(n)}" for n in swept) for each in settings]
        is_one = len(found) == len(self.runs) and len({sweep.get("key") for sweep in found}) == 1
        is_short = len({*labels}) == len(labels) and max(map(len, labels), default=0) <= MAX_LABEL
        return labels if is_one and is_short else list(LETTERS[: len(self.runs)])

    @property
    def legend(self) -> list[str]:
        """The label and the name of each run."""
        pairs = zip(self.labels, self.names, strict=True)
        return [f"{label}  {name}" for label, name in pairs]

    @property
    def axes(self) -> list[XAxis]:
        """The axes on which all runs can be drawn."""
        has_batch = all(run.samples_per_step for run in self.runs)
        return [axis for axis in XAxis if axis is not XAxis.SAMPLES or has_batch]

    def differences(self) -> list[tuple[str, list[str]]]:
        """Return the name and the values, by run, of each fact that differs, without the code."""
        columns = [dict(_comparable_facts(run)) for run in self.runs]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, [column.get(name, "") for column in columns]) for name in names]
        return [(name, values) for name, values in rows if len(set(values)) > 1]

    @cached_property
    def code_diffs(self) -> list[list[str]]:
        """A diff from the cells of the first run to those of each run.

        It is empty for a run without cells, because its cells may not have been recorded.
        """
        first = self.runs[0]
        return [
            [*unified_diff(first.source, run.source, first.name, run.name, lineterm="", n=2)]
            if first.cells and run.cells
            else []
            for run in self.runs
        ]

    def final_values(self, run: ComparedRun) -> list[str]:
        """Return the last value of each metric in a run: mean, and range over ranks."""
        return [format_last(run.metrics().last(name)) for name in self.metrics]


def compare(paths: Sequence[Path], metrics: str = "", *, current: Path | None = None) -> Comparison:
    """Compare runs.

    Args:
        paths: their folders.
        metrics: the metrics to show, as for :func:`metric_filter`; empty for the first few that
            most runs have.
        current: the folder of this kernel's running run.

    Raises:
        ArgumentError: there are too few or too many runs, or none has such a metric.
        RequestError: a run is damaged, or a folder holds no run.
    """
    if not 1 < len(paths) <= MAX_RUNS:
        raise ArgumentError(f"compare takes 2 to {MAX_RUNS} runs, got {len(paths)}")
    wanted = metric_filter(metrics) if metrics else None
    runs = tuple(ComparedRun(path, wanted=wanted, current=current) for path in paths)
    counts = Counter(name for run in runs for name in run.metrics().names())
    if metrics and not counts:
        names = (name for path in paths for name in StoredRun(path).metrics().names())
        raise no_such_metric(metrics, [*dict.fromkeys(names)], of="runs")
    ordered = [name for name, _ in counts.most_common()]
    shown = tuple(ordered[: MAX_CHARTS if metrics else DEFAULT_CHARTS])
    dropped = max(run.metrics().dropped_names for run in runs)
    return Comparison(runs, shown, len(ordered) - len(shown) + dropped)


def metric_filter(text: str) -> Callable[[str], bool]:
    """Return a function that tells whether a metric matches names or patterns, separated by commas.

    >>> [metric_filter("val/*, lr[0]")(name) for name in ("val/loss", "loss", "lr[0]", "lr0")]
    [True, False, True, True]
    """
    names = [text, *map(str.strip, text.split(","))]
    return lambda name: name in names or any(fnmatchcase(name, pattern) for pattern in names[1:])


def no_such_metric(
    patterns: str, metrics: Sequence[str], *, of: str, more: int = 0
) -> ArgumentError:
    """Return the error for patterns that match no metric.

    Args:
        patterns: the requested patterns.
        metrics: the existing metrics.
        of: the owner of these metrics, such as ``"run"``.
        more: number of other metrics.
    """
    names = list_some(metrics, MAX_NAMED_METRICS, more=more) or "none"
    return ArgumentError(f"there is no metric {patterns}; the metrics of the {of} are: {names}")


def _comparable_facts(run: ComparedRun) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact that may differ, settings first."""
    facts = run.facts
    for name, value in run.summary.config.items():
        yield name, f"{value:.6g}" if isinstance(value, float) else str(value)
    yield "world size", str(run.summary.ranks or "")
    for name in COMPARED_FACTS:
        value = facts.get(name)
        if isinstance(value, list) and name in FACTS_BY_RANK:
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
