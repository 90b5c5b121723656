"""Traces of the profiler: begin them, collect them and merge them into one file."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="trace",
    public={
        "Trace": "nbddp.extensions.trace.merge:Trace",
    },
)
