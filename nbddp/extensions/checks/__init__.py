"""Find mistakes early: rules over the syntax of a cell, and over facts that the ranks report."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(
    name="checks",
    rank="nbddp.extensions.checks.rank:Facts",
    cells="nbddp.extensions.checks.cells:CheckedCells",
)
