"""Sweeps: run a cell for each combination of values, seeds or world sizes."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="sweeps",
    needs=("runs", "timeline"),
)
