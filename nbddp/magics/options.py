"""What may be written behind ``%%ddp`` and ``%ddp``, and what it means."""

from __future__ import annotations

import ast
import re
import shlex
from argparse import REMAINDER, SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, cast

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument

from nbddp.controller.spec import BACKENDS, GroupSpec
from nbddp.errors import RequestError, say_ranks
from nbddp.magics.arguments import with_arguments
from nbddp.magics.publish import METAVAR, installed_target
from nbddp.wire.trace_messages import Steps

YEAR = 365 * 86400
ALL = (-1,)  # ranks, however many there are
MAX_STEP = 10**12
MAX_NUMBER = 9999  # a typing error must not make a list of a billion
_SIGNED = re.compile(r"-\d")
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_GPU_NAME = re.compile(r"(GPU|MIG)-[\w/-]+")  # as nvidia-smi -L shows them

_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_SWEPT = re.compile(
    r"""(?P<before>--sweep(\s+|=))"""
    r"""(?P<swept>\w+=(?P<values>([^\s'"\\]|'[^']*'|"[^"]*")+))(?=\s|$)"""
)

_START = ("nproc", "backend", "gpus", "timeout", "env", "threads", "name", "grace")


def positive_int(text: str) -> int:
    """A whole number above 0, or what was wrong with it."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return int(text)


def rank_number(text: str) -> int:
    """A rank: a whole number from 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a rank like 0, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0 in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= YEAR:
        raise ArgumentTypeError(f"expected seconds above 0 and up to a year, got {text!r}")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Numbers and ranges: ``0,2`` or ``0-3``."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        is_range = low.isdecimal() and (high.isdecimal() if dash else True)
        if not is_range or not int(low) <= int(high or low) <= MAX_NUMBER:
            raise ArgumentTypeError(f"expected numbers like 0,2 or 0-3, got {text!r}")
        found += range(int(low), int(high or low) + 1)
    return tuple(dict.fromkeys(found))


def step_range(text: str) -> Steps:
    """Steps, both ends included: ``10:15``, or one."""
    low, colon, high = text.partition(":")
    high = high if colon else low
    what = "" if _WHOLE.fullmatch(low) and _WHOLE.fullmatch(high) else "these are no whole numbers"
    if not low or not high:
        what = "both ends are wanted"
    elif not what and int(low) > int(high):
        what = "the first step comes after the last"
    elif not what and not 0 <= int(low) <= int(high) < MAX_STEP:
        what = "steps are counted from 0" if int(low) < 0 else "no step has such a number"
    if what:
        raise ArgumentTypeError(f"expected steps like 10:15, or one like 10, got {text!r}: {what}")
    return Steps(first=int(low), last=int(high))


def some_or_all(text: str) -> tuple[int, ...]:
    """Numbers and ranges, or ``all``."""
    return ALL if text == "all" else numbers(text)


def gpus(text: str) -> tuple[int | str, ...]:
    """GPUs as CUDA names them: numbers and ranges, or UUIDs and MIG devices, but not both."""
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
    """Python names with commas between them."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(part.isidentifier() for part in found):
        raise ArgumentTypeError(f"expected names like a,b, got {text!r}")
    return found


def variable(text: str) -> tuple[str, str]:
    """An environment variable as ``K=V``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def start_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how a group is started, spelled as torchrun's where it has them."""
    return with_arguments(function, _START_ARGUMENTS)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of whatever the ranks run, a cell or a script."""
    return with_arguments(function, _RUN_ARGUMENTS)


_START_ARGUMENTS = (
    argument(
        "--nproc",
        "--nproc-per-node",
        type=positive_int,
        metavar="N",
        help="ranks on this machine (default: 2)",
    ),
    argument(
        "--backend",
        choices=BACKENDS,
        help="collectives: auto takes nccl when there is a GPU for every rank, else gloo",
    ),
    argument(
        "--gpus",
        type=gpus,
        metavar="0,1",
        help="GPUs that the ranks may use: numbers, UUIDs or MIG devices",
    ),
    argument("--name", metavar="NAME", help="part of the run folder's name"),
    argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="after this long a collective gives up (default: 1800)",
    ),
    argument(
        "--env",
        type=variable,
        action="append",
        metavar="K=V",
        help="environment variable for the ranks; may be repeated",
    ),
    argument(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        help="what does not obey an interrupt or stop for this long is killed (default: 5)",
    ),
    argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads per rank for torch's operators (default: cores / ranks)",
    ),
)


_RUN_ARGUMENTS = (
    argument("--ranks", type=numbers, metavar="0,2", help="run it on these ranks only"),
    argument("--fresh", action="store_true", help="restart the ranks first: empty namespaces"),
    argument(
        "--max-restarts",
        type=count,
        default=0,
        metavar="N",
        help="after a failure, restart the ranks up to N times, replay the cells that had gone "
        "well, and run this one again (default: 0)",
    ),
    argument(
        "--heal",
        type=count,
        default=0,
        metavar="N",
        help="after a rank's death, and before any restart, up to N times: put a new rank in its "
        "place with the names of one that lives, and run this cell again (default: 0)",
    ),
    argument(
        "--elastic",
        action="store_true",
        help="when a node comes, restart with its ranks too, replay the cells that had gone well, "
        "and run this one again (see `%%ddp nodes`)",
    ),
    argument(
        "--break-ranks",
        type=some_or_all,
        metavar="0,2",
        help="whom breakpoint() stops: these ranks, or all (default: the first that comes to one)",
    ),
    argument(
        "--trace",
        type=step_range,
        metavar="A:B",
        help="trace these steps by torch's profiler, on all ranks (see `%%ddp trace`)",
    ),
    argument(
        "--publish",
        type=installed_target,
        action="append",
        metavar=METAVAR,
        help="send the run to trackio, wandb, tensorboard or mlflow, from here to its end; with a "
        "project or folder: wandb:digits; may be repeated",
    ),
    argument("--no-wait", action="store_true", help="return at once; `%%ddp wait` waits"),
    argument("--quiet", action="store_true", help="show only the values of the last line"),
)


def asked_spec(args: Namespace, base: GroupSpec) -> GroupSpec:
    """The spec with what was written on the line in place of what was there."""
    changes = {name: getattr(args, name) for name in _START if getattr(args, name) is not None}
    if "env" in changes:
        changes["env"] = dict(base.env) | dict(changes["env"])
    return replace(base, **changes)


def check_unchanged(asked: GroupSpec, current: GroupSpec, *, gone: Sequence[int] = ()) -> None:
    """Refuse options that only a new start could bring about; say first which ranks are gone.

    Raises:
        RequestError: which differ, and how to restart.
    """
    changed = [
        field.name
        for field in fields(GroupSpec)
        if field.name in _START and getattr(asked, field.name) != getattr(current, field.name)
    ]
    if changed:
        said = ", ".join(f"{name} {_shown(getattr(current, name))}" for name in changed)
        flags = " ".join(f"--{name} {_shown(getattr(asked, name))}" for name in changed)
        first = f"{say_ranks(gone)} of the group died; " if gone else ""
        raise RequestError(
            f"{first}the worker group runs with {said}; `%ddp restart {flags}` restarts it with "
            "the new options (its names are lost), and so does --fresh in the cell"
        )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " --env ".join(shlex.quote(f"{key}={text}") for key, text in value.items()) or "none"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return shlex.quote(str(value)) if value not in (None, "") else "none"


def parse(function: Any, line: str) -> Namespace:
    """Parse a magic's line.

    Raises:
        UsageError: in one line, what is wrong and what is allowed.
    """
    line = re.sub(r"(^|\s)#\s.*$", "", line)  # "# ..." is a comment, "a#1" not
    try:
        words = shlex.split(_SWEPT.sub(_keep_quotes, line))
    except ValueError as error:
        raise UsageError(
            f"{error} in {line!r}; what has a quotation mark in it stands between others: "
            '"it\'s the best"'
        ) from None
    words = _with_signs(function.parser, words)
    args, unknown = function.parser.parse_known_args(words)
    if unknown and not _takes_rest(function.parser) and not unknown[0].startswith("-"):
        # argparse takes one that may be missing for missing where an option stands before it
        args, unknown = function.parser.parse_known_intermixed_args(words)
    if unknown and any(word.startswith("--sweep") for word in words):
        raise UsageError(
            f"unrecognized arguments: {' '.join(unknown)}; values that have spaces stand in "
            'quotes, all of them: --sweep "opt=adam, sgd"'
        )
    if unknown:
        shown = [action for action in function.parser._actions if action.help is not SUPPRESS]
        known = ", ".join(name for each in shown for name in each.option_strings[:1]) or "none"
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; the options are: {known}")
    return cast(Namespace, args)


def _keep_quotes(found: re.Match[str]) -> str:
    """Quotes in what Python reads are Python's: ``'a, b','c'``; around all values, a shell's."""
    values = found["values"]
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        ast.literal_eval(f"[{values}]")
        if not _QUOTED.fullmatch(values):
            return found["before"] + shlex.quote(found["swept"])
    return found[0]


def _takes_rest(parser: ArgumentParser) -> bool:
    """Whether all that follows is a script's."""
    return any(each.nargs == REMAINDER for each in parser._actions)


def _with_signs(parser: ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words, a negative value tied to its option: argparse takes it for another option."""
    options = {name: each for each in parser._actions for name in each.option_strings}
    takes_rest = _takes_rest(parser)
    found: list[str] = []
    for place, word in enumerate(words):
        before = options.get(found[-1]) if found else None
        if before is not None and before.nargs is None and _SIGNED.match(word):
            found[-1] += f"={word}"
        elif takes_rest and not word.startswith("-") and (before is None or before.nargs == 0):
            return [*found, *words[place:]]  # all from here on is a script's
        else:
            found.append(word)
    return found
