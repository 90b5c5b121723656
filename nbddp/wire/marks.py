"""Marks: short strings for comparing values between ranks.

The mark of a plain value is its ``repr``. The mark of any other value is a fingerprint: different
marks mean different values, equal marks may not mean equal values.
"""

from __future__ import annotations

import ast
import math
from typing import Any

LONGEST = 200  # characters of a plain value's mark
DEVICE, OTHER = "device ", "other "  # prefixes of marks that are no literals
_PLAIN = (bool, int, str, float, type(None))


def plain_mark(value: object) -> str:
    """Return the mark of a bool, int, str, float or None; empty for all other values.

    >>> plain_mark(True), plain_mark(1), plain_mark("a"), plain_mark([1])
    ('True', '1', "'a'", '')
    >>> plain_mark("a" * 1000), plain_mark(1 << 10_000), plain_mark(float("nan"))
    ('', '', '')
    """
    kind = type(value)
    if kind not in _PLAIN or (kind is str and len(value) > LONGEST):  # type: ignore[arg-type]
        return ""
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]
        return ""  # its repr is no literal
    if kind is int and value.bit_length() > LONGEST:  # type: ignore[attr-defined]
        return ""
    return repr(value)


def is_other(mark: str) -> bool:
    """Return whether the value cannot be read from its mark."""
    return mark.startswith(OTHER)


def read_plain(mark: str) -> Any:
    """Return the value of a plain mark.

    >>> read_plain(plain_mark("cuda:1"))
    'cuda:1'
    """
    return ast.literal_eval(mark)
