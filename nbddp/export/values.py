"""Pushed values that a script can have without a file: as an argument, or written out."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

SIMPLE = (bool, int, str, type(None))
MOST = 20  # entries that are written out


def is_argument(name: str, value: Any) -> bool:
    """Whether the script takes it as an argument."""
    is_kind = type(value) in (int, str) or isinstance(value, PurePath) or _is_number(value)
    return is_kind and name != "help"  # argparse has one


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def literal(value: Any) -> str:
    """Python for a simple value.

    >>> literal(0.5), literal(float("inf"))
    ('0.5', "float('inf')")
    """
    is_odd = type(value) is float and not math.isfinite(value)
    return f"float({str(value)!r})" if is_odd else repr(value)


def argument(name: str, value: Any, *, path: str = "Path") -> str:
    """How the script's parser is told of one; ``path`` is what it calls ``pathlib.Path``.

    >>> argument("lr_max", 0.1)
    "add_argument('--lr-max', dest='lr_max', type=float, default=0.1)"
    >>> from pathlib import PurePosixPath
    >>> argument("folder", PurePosixPath("runs"))
    "add_argument('--folder', dest='folder', type=Path, default='runs')"
    """
    kind, default = type(value).__name__, value
    if isinstance(value, PurePath):
        kind, default = path, str(value)
    flag = "--" + name.replace("_", "-")
    return f"add_argument({flag!r}, dest={name!r}, type={kind}, default={default!r})"


def is_simple(value: Any) -> bool:
    """Whether it is made again by its :func:`literal`."""
    return type(value) is float or _is_plain(value)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set) and len(value) <= MOST:
        return all(_is_plain(each) for each in value)
    if type(value) is dict and len(value) <= MOST:
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return _is_number(value) if type(value) is float else type(value) in SIMPLE
