"""Stored runs: find, list, compare, summarize and remove them."""

from __future__ import annotations

from pathlib import Path

from nbddp.extension.manifest import Extension

RUN_NAME = "a name, a part of one, or a path (default: the run of this notebook, else the newest)"


def run_names() -> list[str]:
    """Return the names of the runs of this folder, for Tab."""
    from nbddp.extensions.runs.find import runs_below

    return [path.name for path in runs_below(Path.cwd())]


EXTENSION = Extension(
    name="runs",
    public={
        "Run": "nbddp.extensions.runs.api:Run",
        "compare": "nbddp.extensions.runs.api:compare",
        "runs": "nbddp.extensions.runs.api:runs",
    },
)
