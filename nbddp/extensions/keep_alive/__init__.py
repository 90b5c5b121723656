"""``%%ddp --keep-alive 8h``: local ranks outlive the kernel, and another kernel takes them back."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import argument, option
from nbddp.wire.options.option_values import MAX_SECONDS, option_type, positive_int

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration(text: str) -> float:
    return float(text[:-1]) * _UNITS.get(text[-1:], float("nan"))


duration = option_type(
    "a time like 90s, 30m, 8h or 2d", _duration, lambda value: 0 < value <= MAX_SECONDS
)


class KeepAliveOptions(Frozen):
    """The options of a start."""

    keep_alive: float | None = option(
        "--keep-alive TIME",
        "start ranks that outlive the kernel for this time, such as 8h; `%%ddp rejoin` takes them "
        "back",
        None,
        duration,
    )


class KeepAliveArguments(Command, example="keep-alive 8h", before="fault debug"):
    """Let the next ranks outlive the kernel for a time; `%ddp stop` ends this."""

    time: float = argument("time", "a time like 90s, 30m, 8h or 2d", duration)
    nproc: int | None = option(
        "--nproc N", "how many ranks (default: as before)", None, positive_int
    )


class RejoinArguments(Command, example="rejoin", before="fault debug"):
    """Take back ranks that were kept alive, with their variables and their running cell."""

    run: str | None = option(
        "run", "the name of their run, a part of it, or its path", None, nargs="?"
    )


EXTENSION = Extension(
    name="keep_alive",
    needs=("nodes", "runs"),
    start_options=KeepAliveOptions,
    commands=(KeepAliveArguments, RejoinArguments),
    notebook="nbddp.extensions.keep_alive.notebook:KeepAlive",
    offers={"kept ranks": "nbddp.extensions.keep_alive.kept:ranks_of_agents"},
)
