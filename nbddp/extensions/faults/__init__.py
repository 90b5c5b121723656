"""Faults: failures that a cell injects on purpose."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="faults",
    needs=("train",),
    public={
        "faults": "nbddp.extensions.faults.arming",
    },
)
