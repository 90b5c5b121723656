"""What may be written behind ``%%ddp`` to run a cell several times."""

from __future__ import annotations

import ast
import keyword
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from nbddp.archive.sweeps import SEED, Swept
from nbddp.errors import RequestError
from nbddp.magics.option_values import numbers
from nbddp.record.names import SET_IN_EACH_RANK

MAX_SEED = 2**32 - 1  # NumPy's


def swept(text: str) -> Swept:
    """A name and its values: ``lr=0.1,0.01``.

    >>> swept("lr=0.1,1e-2"), swept("model=cnn,mlp"), swept("size=(1, 2),(3, 4)")
    (('lr', (0.1, 0.01)), ('model', ('cnn', 'mlp')), ('size', ((1, 2), (3, 4))))
    """
    name, equals, values = text.partition("=")
    parts = _values(values) if values.strip() else ()
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    if not equals or not is_name or not parts:
        raise ArgumentTypeError(f"expected a name and values like lr=0.1,0.01, got {text!r}")
    if name in SET_IN_EACH_RANK:
        raise ArgumentTypeError(f"{name} is set by nbddp in each rank; sweep another name")
    if name == SEED:
        _check_seeds(parts)
    by_repr = {repr(value): value for value in parts}
    return name, tuple(by_repr.values())


def _check_seeds(seeds: Iterable[Any]) -> None:
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
            raise ArgumentTypeError(
                f"expected whole numbers from 0 to {MAX_SEED} for seed, which seeds torch, NumPy "
                f"and random, got {seed!r}"
            )


def _values(text: str) -> tuple[Any, ...]:
    """As Python reads them; what it cannot read is text."""
    try:
        read = ast.literal_eval(f"[{text}]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return tuple(_value(part.strip()) for part in _parts(text) if part.strip())
    return tuple(read)


def _parts(text: str) -> list[str]:
    """Split at the commas that stand in no brackets.

    >>> _parts("adam,(0.9, 0.99),f(1,2)"), _parts("(a,b")  # no bracket closes the second
    (['adam', '(0.9, 0.99)', 'f(1,2)'], ['(a', 'b'])
    """
    parts: list[str] = []
    depth = 0
    for part in text.split(","):
        parts[-1:] = [f"{parts[-1]},{part}"] if depth else [*parts[-1:], part]
        depth += sum(map(part.count, "([{")) - sum(map(part.count, ")]}"))
        if depth < 0:
            break
    return text.split(",") if depth else parts


def _value(text: str) -> Any:
    if text in ("true", "false"):
        raise ArgumentTypeError(
            f"{text} would be a text, which counts as true: write {text.title()}, or {text!r} in "
            "quotes for the text"
        )
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def world_sizes(text: str) -> tuple[int, ...]:
    """How many ranks, each number once.

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
    """How often: a median needs three."""
    if not text.isdecimal() or int(text) < LEAST:
        raise ArgumentTypeError(f"expected a whole number from {LEAST}, got {text!r}")
    return int(text)


def check_trials(args: Namespace) -> None:
    """See to it that what runs a cell several times fits together with the rest.

    Raises:
        RequestError: what does not.
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


LEAST = 3

_INSTEAD = {
    "no_wait": "it runs until all is done, and a stop ends it",
    "out": "`nbddp.log` puts numbers into each run, `nbddp.runs()` has them",
    "timeline": "run one of them alone",
    "trace": "run one of them alone",
}
