"""Options of ``%%ddp`` that run a cell several times."""

from __future__ import annotations

import ast
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from typing import Any

from nbddp.archive.scaling import LEAST
from nbddp.archive.sweep_grid import Swept
from nbddp.errors import RequestError
from nbddp.magics.option_values import numbers


def swept(text: str) -> Swept:
    """Parse a name and its values: ``lr=0.1,0.01``.

    >>> swept("lr=0.1,1e-2"), swept("model=cnn,mlp"), swept("size=(1, 2),(3, 4)")
    (('lr', (0.1, 0.01)), ('model', ('cnn', 'mlp')), ('size', ((1, 2), (3, 4))))
    """
    name, _, values = text.partition("=")
    parts = _values(values) if values.strip() else ()
    if not name or not parts:
        raise ArgumentTypeError(f"expected a name and values like lr=0.1,0.01, got {text!r}")
    return name, tuple({repr(value): value for value in parts}.values())


def _values(text: str) -> tuple[Any, ...]:
    """Read values as Python; else split at commas and read each part as Python or text."""
    read = _read(f"[{text}]")
    if isinstance(read, list):
        return tuple(read)
    return tuple(_read(part.strip()) for part in text.split(",") if part.strip())


def _read(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def world_sizes(text: str) -> tuple[int, ...]:
    """Parse world sizes.

    >>> world_sizes("1,2,4"), world_sizes("2-4")
    ((1, 2, 4), (2, 3, 4))
    """
    found: tuple[int, ...] = ()
    with suppress(ArgumentTypeError):
        found = numbers(text)
    if 0 in found or len(found) < 2:
        raise ArgumentTypeError(f"expected two or more numbers of ranks like 1,2,4, got {text!r}")
    return found


def rounds(text: str) -> int:
    """Parse a number of rounds: a median needs three."""
    if not text.isdecimal() or int(text) < LEAST:
        raise ArgumentTypeError(f"expected a whole number from {LEAST}, got {text!r}")
    return int(text)


def check_trials(args: Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        RequestError: two of them do not.
    """
    is_sweep = bool(args.sweep or args.repeat)
    for name, has_what, what in (
        ("start_over", is_sweep, "--sweep, or --repeat"),
        ("weak", args.scale, "--scale"),
        ("rounds", args.scale, "--scale"),
    ):
        if getattr(args, name) and not has_what:
            raise RequestError(f"--{name.replace('_', '-')} goes with {what}")
    if not is_sweep and not args.scale:
        return
    if is_sweep and args.scale:
        raise RequestError("--scale and a sweep do not go together: one after the other")
    what = "--scale" if args.scale else "a sweep"
    for name in (*_INSTEAD, *(("nproc", "ranks", "elastic") if args.scale else ())):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            instead = _INSTEAD.get(name, "it says itself how many ranks there are")
            raise RequestError(f"{flag} and {what} do not go together: {instead}")


_INSTEAD = {
    "no_wait": "it runs until all is done, and a stop ends it",
    "out": "`nbddp.log` puts numbers into each run, `nbddp.runs()` has them",
    "timeline": "run one of them alone",
    "trace": "run one of them alone",
}
