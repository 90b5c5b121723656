"""Errors of a worker group in a script: they name its methods instead of magics."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from nbddp.errors import CellFailedError, NbddpError

T = TypeVar("T")

_METHODS = (
    (r"`%ddp start` or a `%%ddp` cell", "`group.start()`"),
    (r"`%ddp (start|restart|stop|interrupt|heal)`", r"`group.\1()`"),
    (r"`%ddp kill (\d+)`", r"`group.kill(\1)`"),
    (r"`%ddp heal --rerun`", "`group.heal(rerun=True)`"),
    (r"`%ddp heal --from R`", "`group.heal(donor=R)`"),
    (r"`%ddp run`", "`group.run_script()`"),
    (r"`%%ddp --ranks ([\d,]+)`", r"`group.run(..., ranks=[\1])`"),
)


def name_methods(text: str) -> str:
    """Replace the magics in a text by the methods that do the same, where there is one.

    >>> name_methods("rank 1 is gone; `%ddp heal` replaces it, `%ddp restart --replay` ...")
    'rank 1 is gone; `group.heal()` replaces it, `%ddp restart --replay` ...'
    """
    for magic, method in _METHODS:
        text = re.sub(magic, method, text)
    return text


def with_method_names(kind: type[T]) -> type[T]:
    """Make the public methods of a class raise errors that name methods."""
    for name, method in [*vars(kind).items()]:
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, _with_method_names(method))
    return kind


def _with_method_names(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except NbddpError as error:
            error.args = (name_methods(str(error)),)
            if isinstance(error, CellFailedError):
                error.set_report(name_methods(error.report))
            raise

    return call
