"""A rank has no keyboard: what would wait for one says so, and what to do instead."""

from __future__ import annotations

import builtins
import getpass
import sys
from collections.abc import Callable
from typing import NoReturn

_ASK_THERE = "ask in a cell of the notebook's own and send the answer with `%ddp push NAME`"
_LOOK_SO = "print what you want to see, or fetch it with `%ddp pull NAME`"


def refuse_typing() -> None:
    """Make ``input()`` and its like say why they cannot work, instead of failing on no stdin."""
    builtins.input = _refusing("input()", _ASK_THERE)
    getpass.getpass = _refusing("getpass()", _ASK_THERE)
    sys.breakpointhook = _refusing("breakpoint()", _LOOK_SO)


def refuse_debugger() -> NoReturn:
    """Say why there is no ``%debug``."""
    __tracebackhide__ = True
    _refusing("%debug", _LOOK_SO)()


def _refusing(what: str, way_out: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        __tracebackhide__ = True
        raise RuntimeError(f"{what} is not supported: a rank has no keyboard; {way_out}")

    return refuse
