"""Source text for ranks, kernels and scripts that uses names that are not public.

A tool that moves or renames modules does not find a module path in a string. So the import lines
are made from the objects themselves.
"""

from pathlib import Path
from types import ModuleType
from typing import Any


def imported(*what: Any) -> str:
    lines = [_line(each) for each in what]
    if any(line.startswith("from drivers.") for line in lines):  # a script does not find these
        lines.insert(0, f"import sys\nsys.path.append({str(Path(__file__).parents[1])!r})\n")
    return "".join(lines)


def _line(what: Any) -> str:
    if isinstance(what, ModuleType):
        package, _, name = what.__name__.rpartition(".")
        return f"from {package} import {name}\n"
    return f"from {what.__module__} import {what.__name__}\n"
