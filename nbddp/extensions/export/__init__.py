"""Export cells as a script for ``torchrun``, in plain Python."""

from __future__ import annotations

from nbddp.extension.manifest import Extension

EXTENSION = Extension(name="export")
