"""Turn samples into a table: medians, ratios, targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from contenders import Samples

RIVALS = ("spawn", "torchrun")
TARGET_RANKS = 4  # the targets apply to this many
HEADER = ("measure", "ranks", "nbddp", *RIVALS, "best rival / nbddp", "target", "verdict")


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return quantiles(values, n=20)[-1]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A row of the table: its samples, how to reduce them, and its target."""

    title: str
    samples: str
    rivals: str = ""  # the name of their samples, if it differs
    unit: str
    target: float | None = None
    boil: Callable[[Sequence[float]], float] = median

    def value(self, samples: Samples, contender: str, ranks: int) -> float | None:
        """Return one figure in the unit of the row."""
        name = self.samples if contender == "nbddp" else self.rivals or self.samples
        values = samples.get((name, contender, ranks))
        return self.boil(values) * _SCALE[self.unit] if values else None


_SCALE = {"s": 1.0, "ms": 1000.0, "MiB": 1.0, "%": 100.0}

MEASURES = (
    Measure(title="`%load_ext nbddp` itself", samples="load", unit="s", target=0.3),
    Measure(title="first cell, `%load_ext` 5 s ago", samples="first", unit="s", target=0.15),
    Measure(title="first cell right after `%load_ext`", samples="fresh", unit="s", target=1.5),
    Measure(title="`import torch.distributed`, plain kernel", samples="import", unit="s"),
    Measure(title="warm empty `%%ddp` cell", samples="warm", unit="ms", target=8.0),
    Measure(title="empty plain cell, same kernel", samples="plain", unit="ms"),
    Measure(title="restart to barrier", samples="restart", rivals="first", unit="s", target=0.2),
    Measure(title="print to client, median", samples="print", unit="ms", target=5.0),
    Measure(title="print to client, 95 % within", samples="print", unit="ms", boil=p95),
    Measure(title="{lines:,} lines from each rank", samples="burst", unit="s", target=0.4),
    Measure(title="of them whole and in order", samples="intact", unit="%", boil=min),
    Measure(title="memory of ranks and helpers", samples="memory", unit="MiB", target=230.0),
)


def records(samples: Samples, ranks: Iterable[int], lines: int) -> list[dict[str, Any]]:
    """Return the table as plain values for JSON."""
    return [
        _record(measure, samples, count, lines)
        for count in ranks
        for measure in MEASURES
        if measure.value(samples, "nbddp", count) is not None
    ]


def _record(measure: Measure, samples: Samples, ranks: int, lines: int) -> dict[str, Any]:
    ours = measure.value(samples, "nbddp", ranks)
    rivals = {name: measure.value(samples, name, ranks) for name in RIVALS}
    values = [value for value in rivals.values() if value is not None]
    best = min(values, default=None)
    target = measure.target if ranks == TARGET_RANKS else None
    return {
        "measure": measure.title.format(lines=lines),
        "ranks": ranks,
        "unit": measure.unit,
        "nbddp": ours,
        **rivals,
        "ratio": best / ours if best and ours and measure.unit != "%" else None,
        "target": target,
        "met": None if target is None or ours is None else ours <= target,
    }


def rows(found: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table as text, with its header."""
    return [HEADER, *(_row(record) for record in found)]


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    unit = record["unit"]
    figures = [_figure(record[name], unit) for name in ("nbddp", *RIVALS)]
    ratio = "" if record["ratio"] is None else f"{record['ratio']:.3g} x"
    verdict = {None: "", True: "met", False: "MISSED"}[record["met"]]
    title, ranks = record["measure"], str(record["ranks"])
    return (title, ranks, *figures, ratio, _figure(record["target"], unit), verdict)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "%":
        return f"{value:.4g} %"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """Return the table in Markdown, for docs/performance.md."""
    header, *body = table
    rule = ["---"] * 2 + ["--:"] * (len(header) - 3) + ["---"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *body))


def as_text(table: Sequence[Sequence[str]]) -> str:
    """Return the table for a terminal."""
    plain = [[cell.replace("`", "") for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    )
