"""Warnings that point at the line of the user, however deep in the kit they come from."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_KIT = str(Path(__file__).parent)


def warn_user(text: str) -> None:
    """Warn, at the innermost line outside of the kit."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_KIT):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
