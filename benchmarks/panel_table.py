"""Turn samples into a table: a row for each measure and each contender."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import engine
import report
from panel_trials import FLOODING, PANEL, Samples, Sizes

PACKAGES = ("ipywidgets", "jupyterlab")
HEADER = ("measure", "how", "median", "95 % within", "least", "most", "n", "x panel", "limit", "")
NOTES = (
    "x panel: the median divided by the panel's. A limit applies to the median; where nothing may "
    "be lost, to every sample. A page that was not done in time counts with its whole time. "
    "jupyter_server drops output above 1 MB/s: a text view then ends with its warning."
)
ENOUGH = 20  # samples that a 95th percentile needs
_SCALE = {"s": 1.0, "ms": 1000.0, "MiB": 1.0, "%": 100.0, "": 1.0}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Rows of the table, and the limit of the panel: ``most`` or at ``least``."""

    samples: str
    title: str
    unit: str
    most: float | None = None
    least: float | None = None


MEASURES = (
    Measure(samples="print", title="a rank's print to DOM", unit="ms", most=10),
    Measure(samples="first", title="a cell's first print to DOM", unit="ms"),
    Measure(samples="handler", title="Interrupt to handler", unit="ms", most=100),
    Measure(samples="interrupt", title="stop to last KeyboardInterrupt", unit="ms", most=100),
    Measure(samples="kill", title="Kill to exit event", unit="ms", most=100),
    Measure(samples="choose", title="log selector to handler", unit="ms", most=100),
    Measure(samples="chosen", title="log selector to that log in DOM", unit="ms", most=200),
    Measure(samples="hold", title="Hold to handler", unit="ms", most=100),
    Measure(samples="kernel", title="kernel's CPU, of one core", unit="%", most=10),
    Measure(samples="crowd", title="64 ranks: kernel's CPU, of one core", unit="%", most=15),
    Measure(samples="browser", title="browser's CPU, of one core", unit="%"),
    Measure(samples="lag", title="page is done after the cell's end", unit="s", most=1),
    Measure(samples="flood", title="flood: 4 x {flood_lines:,} lines", unit="s"),
    Measure(samples="flood lag", title="flood: page is done after its end", unit="s", most=1),
    Measure(samples="rss", title="flood: kernel's RSS grows by", unit="MiB", most=100),
    Measure(samples="frame", title="flood: longest time without a frame", unit="ms", most=500),
    Measure(samples="shown", title="flood: lines on the page at the end", unit=""),
    Measure(samples="logs", title="flood: lines in rank*.log", unit="%", least=100),
    Measure(samples="metrics", title="flood: rows in metrics.jsonl", unit="%", least=100),
)


def machine() -> dict[str, Any]:
    """Return the facts of the machine and the versions."""
    return engine.machine() | {name: version(name) for name in PACKAGES}


def caption(facts: dict[str, Any], rounds: int) -> str:
    """Return the line above the table."""
    names = ", ".join(f"{name} {facts[name]}" for name in PACKAGES)
    return f"{engine.caption(facts, rounds)}; {names}; load {facts['load'][0]:.1f} at the start"


def records(samples: Samples, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the table as plain values for JSON."""
    return [
        _record(measure, how, samples, sizes)
        for measure in MEASURES
        for name, how in samples
        if name == measure.samples
    ]


def _record(measure: Measure, how: str, samples: Samples, sizes: Sizes) -> dict[str, Any]:
    values = [value * _SCALE[measure.unit] for value in samples[measure.samples, how]]
    panel = samples.get((measure.samples, PANEL))
    middle = median(values)
    base = median(panel) * _SCALE[measure.unit] if panel else 0.0
    is_ours = how.startswith(PANEL) and how != FLOODING  # there the ranks occupy all cores
    return {
        "measure": measure.title.format(flood_lines=sizes.flood_lines),
        "how": how,
        "unit": measure.unit,
        "median": middle,
        "p95": report.p95(values) if len(values) >= ENOUGH else None,
        "least": min(values),
        "most": max(values),
        "count": len(values),
        "ratio": middle / base if base and how != PANEL and measure.unit else None,
        "limit": (measure.least or measure.most) if is_ours else None,
        "is_kept": _is_kept(measure, values) if is_ours else None,
    }


def _is_kept(measure: Measure, values: Sequence[float]) -> bool | None:
    if measure.least is not None:
        return min(values) >= measure.least
    return None if measure.most is None else median(values) <= measure.most


def as_text(found: Iterable[dict[str, Any]]) -> str:
    """Return the table for a terminal."""
    return report.as_text([HEADER, *map(_row, found)])


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    unit = record["unit"]
    figures = [_figure(record[name], unit) for name in ("median", "p95", "least", "most")]
    ratio = "" if record["ratio"] is None else f"{_digits(record['ratio'])} x"
    verdict = {None: "", True: "kept", False: "MISSED"}[record["is_kept"]]
    facts = (str(record["count"]), ratio, _figure(record["limit"], unit), verdict)
    return (record["measure"], record["how"], *figures, *facts)


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
