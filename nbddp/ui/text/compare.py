"""Runs beside each other, as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbddp.archive.comparing import Compared, Comparison
from nbddp.charts.sparkline import block_characters
from nbddp.formatting import plural
from nbddp.ui.text.runs import middles, say_outcome, say_pace
from nbddp.ui.words import aligned, say_seconds

LETTERS = "ABCDEFGH"
DIFF_LINES = 40  # of each run, as text
SAME = "the code of all cells is the same"


def compare_text(comparison: Comparison) -> str:
    """Final values, differences, and the code as a diff."""
    lines = aligned([final_head(comparison), *final_rows(comparison)])
    for name in comparison.drawn:
        lines += _curves(comparison, name)
    rows = difference_rows(comparison)
    if rows:
        lines += ["", *aligned([["differs", *letters(comparison)], *rows])]
    return "\n".join([*lines, "", *_code(comparison), *notes(comparison)])


def letters(comparison: Comparison) -> list[str]:
    """By which the runs go."""
    return list(LETTERS[: len(comparison.runs)])


def final_head(comparison: Comparison) -> list[str]:
    """The titles of the table of final values."""
    return ["line", "run", *comparison.metrics, "steps", "pace", "time", "outcome"]


def final_rows(comparison: Comparison) -> list[list[str]]:
    """What each run came to, a row for each."""
    named = zip(LETTERS, comparison.names, comparison.runs, strict=False)
    return [[letter, name, *comparison.finals(run), *_sums(run)] for letter, name, run in named]


def _sums(run: Compared) -> list[str]:
    one = run.summary
    steps = "" if one.steps is None else f"{one.steps:,}"
    seconds = run.metrics.ended - run.metrics.began
    return [steps, say_pace(one), say_seconds(seconds) if seconds > 0 else "", say_outcome(one)]


def difference_rows(comparison: Comparison) -> list[list[str]]:
    """In what the runs differ: what it is, and how it is in each."""
    return [[name, *values] for name, values in comparison.differences()]


def code_titles(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    """Of each run whose code is not the first one's: how much of it, and the diff."""
    for index in range(1, len(comparison.runs)):
        diff = comparison.code(index)
        added = sum(line.startswith("+") for line in diff[2:])
        removed = sum(line.startswith("-") for line in diff[2:])
        if diff:
            counts = f"{plural(added, 'line')} added, {removed} removed"
            yield f"code from A to {LETTERS[index]}: {counts}", diff


def notes(comparison: Comparison) -> list[str]:
    """What has to be said below."""
    said = [
        f"no cell of {name} is on record: its code is not compared"
        for name, run in zip(comparison.names, comparison.runs, strict=True)
        if not run.cells
    ]
    is_compared = comparison.runs[0].cells and len(said) < len(comparison.runs) - 1
    if is_compared and not any(code_titles(comparison)):
        said.append(SAME if not said else "the code of the others is the same")
    if any(run.marks for run in comparison.runs):
        said.append("marks in a chart: orange is a restart, green a heal")
    if comparison.left_out:
        said.append(
            f"{plural(comparison.left_out, 'metric')} more: --metrics NAME,... chooses them"
        )
    torn = [run.name for run in comparison.runs if run.run.unreadable]
    return [*said, *(f"not all lines of {name} could be read" for name in torn)]


def _curves(comparison: Comparison, name: str) -> list[str]:
    rows = [
        [letter, block_characters(middles(run.small_curve(name)))]
        for letter, run in zip(LETTERS, comparison.runs, strict=False)
    ]
    return ["", name, *aligned(rows)]


def _code(comparison: Comparison) -> Sequence[str]:
    lines: list[str] = []
    for title, diff in code_titles(comparison):
        more = len(diff) - DIFF_LINES
        lines += [title, *diff[:DIFF_LINES], *([f"... {more} lines more"] if more > 0 else []), ""]
    return lines
