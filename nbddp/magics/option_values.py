"""Types of options: each converts a text, or raises an error that names what it expected."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from nbddp.wire.trace_messages import Steps

YEAR = 365 * 86400
ALL = (-1,)  # ranks, however many there are
MAX_STEP = 10**12
MAX_NUMBER = 9999  # a typing error must not make a list of a billion
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_GPU_NAME = re.compile(r"(GPU|MIG)-[\w/-]+")  # as nvidia-smi -L shows them
_PICTURES = (".pdf", ".png", ".svg")


def whole_number(least: int, most: int = MAX_STEP) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            end = "" if most == MAX_STEP else f" to {most}"
            raise ArgumentTypeError(f"expected a whole number from {least}{end}, got {text!r}")
        return int(text)

    return read


count = whole_number(0)
positive_int = whole_number(1)
port_number = whole_number(1, 65535)


def seconds(text: str) -> float:
    """Read a time above 0 in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= YEAR:
        raise ArgumentTypeError(f"expected seconds above 0 and up to a year, got {text!r}")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Read numbers and ranges: ``0,2`` or ``0-3``."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        is_range = low.isdecimal() and (high.isdecimal() if dash else True)
        if not is_range or not int(low) <= int(high or low) <= MAX_NUMBER:
            raise ArgumentTypeError(f"expected numbers like 0,2 or 0-3, got {text!r}")
        found += range(int(low), int(high or low) + 1)
    return tuple(dict.fromkeys(found))


def numbers_or_all(text: str) -> tuple[int, ...]:
    """Read numbers and ranges, or ``all``."""
    return ALL if text == "all" else numbers(text)


def step_range(text: str) -> Steps:
    """Read steps with both ends included: ``10:15``, or a single step."""
    low, colon, high = text.partition(":")
    high = high if colon else low
    is_whole = _WHOLE.fullmatch(low) and _WHOLE.fullmatch(high)
    if not is_whole or not 0 <= int(low) <= int(high) < MAX_STEP:
        raise ArgumentTypeError(
            f"expected a step like 10, or steps from the first to the last like 10:15, got {text!r}"
        )
    return Steps(first=int(low), last=int(high))


def gpus(text: str) -> tuple[int | str, ...]:
    """Read GPUs as CUDA names them: numbers and ranges, or UUIDs and MIG devices, but not both."""
    parts = tuple(dict.fromkeys(text.split(",")))
    if all(_GPU_NAME.fullmatch(part) for part in parts):
        return parts
    try:
        return numbers(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"expected GPUs like 0,2 or 0-3, or names like GPU-8f2a or MIG-3b1c, got {text!r}"
        ) from None


def names(text: str) -> tuple[str, ...]:
    """Read Python names with commas between them."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(part.isidentifier() for part in found):
        raise ArgumentTypeError(f"expected names like a,b, got {text!r}")
    return found


def variable(text: str) -> tuple[str, str]:
    """Read an environment variable: ``K=V``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def node_range(text: str) -> tuple[int, int]:
    """Read a number of nodes as torchrun does: ``2`` or ``2:4``."""
    least, colon, most = text.partition(":")
    try:
        found = positive_int(least), positive_int(most if colon else least)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"expected N or MIN:MAX, got {text!r}") from None
    if found[0] > found[1]:
        raise ArgumentTypeError(f"expected MIN:MAX with MIN up to MAX, got {text!r}")
    return found


def picture_file(text: str) -> Path:
    """Read the file in which a figure is saved."""
    path = Path(text).expanduser()
    if path.suffix.lower() not in _PICTURES:
        raise ArgumentTypeError(f"expected a file like figure.pdf, .png or .svg, got {text!r}")
    return path
