"""The numbers of the notebook's prompts, as tracebacks name its cells."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def prompt_numbers() -> Mapping[str, int]:
    """By the names that cells have in code objects; empty without IPython, and with IPython 7."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(getattr(shell, "compile", None), "_filename_map", {})
