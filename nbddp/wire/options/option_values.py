"""Types of options: each converts a text, or raises an error that says what was expected."""

from __future__ import annotations

import ast
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from nbddp.accelerator import GPU_NAME

MAX_SECONDS = 365 * 86400
ALL_RANKS = (-1,)  # stands for all ranks
MAX_STEP = 10**12
MAX_NUMBER = 9999  # so that a typing error cannot make a list of a billion
_PICTURES = (".pdf", ".png", ".svg")

T = TypeVar("T")


def option_type(
    what: str, read: Callable[[str], T], is_valid: Callable[[T], bool] = lambda _value: True
) -> Callable[[str], T]:
    """Return a type that reads a text with ``read``, which may raise ValueError, and checks it."""

    def convert(text: str) -> T:
        with suppress(ValueError):
            value = read(text)
            if is_valid(value):
                return value
        raise ArgumentTypeError(f"expected {what}, got {text!r}")

    return convert


def _whole_number(text: str) -> int:
    """Read a number without sign, spaces and underscores."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def whole_number(least: int, most: int = MAX_STEP) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``."""
    bounds = f", {least} or more" if most == MAX_STEP else f" from {least} to {most}"
    return option_type(
        f"a whole number{bounds}", _whole_number, lambda value: least <= value <= most
    )


count = whole_number(0)
positive_int = whole_number(1)
port_number = whole_number(1, 65535)
seconds = option_type(
    "seconds above 0 and up to a year", float, lambda value: 0 < value <= MAX_SECONDS
)


def pair(text: str, separator: str) -> tuple[int, int]:
    """Read two numbers, or one number as both."""
    first, found, last = text.partition(separator)
    return _whole_number(first), _whole_number(last if found else first)


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        low, high = pair(part, "-")
        if not low <= high <= MAX_NUMBER:
            raise ValueError
        found += range(low, high + 1)
    return tuple(dict.fromkeys(found))


numbers = option_type("numbers like 0,2 or 0-3", _numbers)
world_sizes = option_type(
    "two or more numbers of ranks like 1,2,4",
    _numbers,
    lambda found: 0 not in found and len(found) > 1,
)


def numbers_or_all(text: str) -> tuple[int, ...]:
    """Read numbers and ranges, or ``all``."""
    return ALL_RANKS if text == "all" else numbers(text)


def _gpus(text: str) -> tuple[int | str, ...]:
    """Read numbers and ranges, or UUIDs and MIG devices, but not both."""
    parts = tuple(dict.fromkeys(text.split(",")))
    return parts if all(map(GPU_NAME.fullmatch, parts)) else _numbers(text)


gpus = option_type("GPUs like 0,2 or 0-3, or names like GPU-8f2a or MIG-3b1c", _gpus)


node_range = option_type(
    "a number of nodes, or MIN:MAX with MIN up to MAX",
    lambda text: pair(text, ":"),
    lambda least_most: 1 <= least_most[0] <= least_most[1],
)

name = option_type("a name like losses", str, str.isidentifier)
names = option_type(
    "names like a,b",
    lambda text: tuple(part.strip() for part in text.split(",")),
    lambda found: all(map(str.isidentifier, found)),
)


def _variable(text: str) -> tuple[str, str]:
    name, value = text.split("=", 1)
    return name, value


variable = option_type("NAME=VALUE", _variable, lambda pair: pair[0].isidentifier())
picture_file = option_type(
    "a file like figure.pdf, .png or .svg",
    lambda text: Path(text).expanduser(),
    lambda path: path.suffix.lower() in _PICTURES,
)


def _swept(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read a name and its values as Python. If that fails, split at commas and read each part."""
    name, values = text.split("=", 1)
    read = _literal(f"[{values}]")
    if not isinstance(read, list):
        read = [_literal(part.strip()) for part in values.split(",") if part.strip()]
    return name, tuple({repr(value): value for value in read}.values())


def _literal(text: str) -> Any:
    """Read a Python literal; return the text if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


swept = option_type("a name and values like lr=0.1,0.01", _swept, all)


def without_quotes(expression: str) -> str:
    """Strip the quotes that a shell would have removed, and IPython's semicolon.

    >>> without_quotes(" 'rank + 1' "), without_quotes("d['a'];")
    ('rank + 1', "d['a']")
    """
    text = expression.strip().removesuffix(";").rstrip()
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted and text[0] not in text[1:-1] else text
