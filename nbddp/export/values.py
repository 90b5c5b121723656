"""Pushed values that a script can have without a file: as an argument, or written out."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

SIMPLE = (bool, int, float, str, type(None))


def is_argument(name: str, value: Any) -> bool:
    """Whether the script takes it as an argument."""
    is_kind = type(value) in (int, float, str) or isinstance(value, PurePath)
    return is_kind and name.isidentifier()


def argument(name: str, value: Any) -> str:
    """How the script's parser is told of one.

    >>> argument("lr_max", 0.1)
    "add_argument('--lr-max', dest='lr_max', type=float, default=0.1)"
    >>> from pathlib import PurePosixPath
    >>> argument("folder", PurePosixPath("runs"))
    "add_argument('--folder', dest='folder', type=Path, default='runs')"
    """
    kind, default = type(value).__name__, value
    if isinstance(value, PurePath):
        kind, default = "Path", str(value)
    flag = "--" + name.replace("_", "-")
    return f"add_argument({flag!r}, dest={name!r}, type={kind}, default={default!r})"


def is_simple(value: Any) -> bool:
    """Whether its repr() makes it again."""
    if type(value) in (list, tuple, set) and len(value) <= 20:
        return all(is_simple(each) for each in value)
    if type(value) is dict and len(value) <= 20:
        return all(is_simple(each) for pair in value.items() for each in pair)
    is_number = (isinstance(value, float) and value != value) or value in (
        float("inf"),
        -float("inf"),
    )
    return type(value) in SIMPLE and not is_number
