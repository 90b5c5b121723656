"""Which colours tracebacks have."""

from __future__ import annotations

import os
import sys


def default_colors() -> str:
    """IPython's theme for tracebacks: none where escape sequences would be read as they are."""
    return "" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else "nocolor"
