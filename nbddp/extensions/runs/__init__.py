"""Stored runs: find, list, compare, summarize and remove them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from nbddp.charts.axes import AxisScale
from nbddp.extension.manifest import Command, Extension
from nbddp.wire.options.option import argument, flag, option
from nbddp.wire.options.option_values import picture_file, positive_int

SHOWN_RUNS = 50  # by default
SCHEMA = 1  # of state.json, and of all that --json of a terminal prints
STATE_FILE = "state.json"
LIVE = "your live runs in all folders of this machine"
_SCALE = "y axis (default: {default}, log for values of many magnitudes)"
_SCALES = [each.value for each in AxisScale]
RUN_NAME = "a name, a part of one, or a path (default: the run of this notebook, else the newest)"


def run_names() -> list[str]:
    """Return the names of the runs of this folder, for Tab."""
    from nbddp.extensions.runs.find import runs_below

    return [path.name for path in runs_below(Path.cwd())]


class XAxis(Enum):
    """The horizontal axis of curves."""

    STEP = "step"
    SAMPLES = "samples"
    TIME = "time"


class ShowArguments(Command, example="show", before="push"):
    """Show a run from its folder: cells, charts, failures, last lines."""

    run: str | None = option("run", RUN_NAME, None, nargs="?", complete=run_names)
    cell: int | None = option("--cell N", "one of its cells", None, positive_int)
    metrics: str = option(
        "--metrics NAME,...", "the charts of these: names, or patterns like val/*", ""
    )
    scale: str = option("--scale", _SCALE, "auto", choices=_SCALES)


class RunsArguments(Command, example="runs", before="push"):
    """List the runs of this folder, newest first; remove some, or write a note."""

    run: Sequence[str] = option(
        "run",
        "lr=0.1, loss<0.5, a part of a name; rm NAME; note NAME",
        (),
        nargs="*",
        metavar="WORD",
        complete=run_names,
    )
    sort: str = option("--sort NAME", "by a setting, a metric or a column", "")
    down: bool = flag("--down", "from the highest to the lowest")
    number: int = option(
        "-n --number NUMBER", "how many (default: {default})", SHOWN_RUNS, positive_int
    )
    off: bool = flag("--off", "with note: remove it")
    live: bool = flag("--live", LIVE)


class CompareArguments(Command, example="compare first second", before="push"):
    """Compare runs: their settings, curves and last values."""

    run: list[str] = argument(
        "run",
        "names, parts of names, or paths; 2 to 8",
        nargs="+",
        metavar="RUN",
        complete=run_names,
    )
    metrics: str = option("--metrics NAME,...", "only these, or patterns like val/*", "")
    over: str = option(
        "--over",
        "x axis of the curves (default: {default})",
        "step",
        choices=[each.value for each in XAxis],
    )
    smooth: bool = flag("--smooth", "smooth lines in front of the faint raw ones")
    scale: str = option("--scale", _SCALE, "auto", choices=_SCALES)
    save: Path | None = option(
        "--save FILE", "save the charts as .pdf, .png or .svg", None, picture_file
    )


EXTENSION = Extension(
    name="runs",
    commands=(ShowArguments, RunsArguments, CompareArguments),
    notebook="nbddp.extensions.runs.notebook:StoredRuns",
    public={
        "Run": "nbddp.extensions.runs.api:Run",
        "compare": "nbddp.extensions.runs.api:compare",
        "runs": "nbddp.extensions.runs.api:runs",
    },
)
