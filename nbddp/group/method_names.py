"""Messages of a worker group in a script: they name its methods instead of magics."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar

from nbddp.errors import CellFailedError, NbddpError
from nbddp.extension.installed import installed, load

T = TypeVar("T")


def _name_ranks(found: re.Match[str]) -> str:
    ends = [part.partition("-") for part in found[1].split(",")]
    ranks = [f"*range({low}, {int(high) + 1})" if high else low for low, _, high in ends]
    return f"`group.run(..., ranks=[{', '.join(ranks)}])`"


_METHODS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"`%ddp start` or a `%%ddp` cell", "`group.start()`"),
    (r"`%ddp (start|restart|stop|interrupt|heal)`", r"`group.\1()`"),
    (r"`%ddp kill (\d+)`", r"`group.kill(\1)`"),
    (r"`%ddp heal --rerun`", "`group.heal(rerun=True)`"),
    (r"`%ddp heal --from R`", "`group.heal(donor=R)`"),
    (r"`%ddp run`", "`group.run_script()`"),
    (r"`%%ddp --ranks ([\d,-]+)`", _name_ranks),
    (r"`%%ddp --shard-copies (\d+)`", r"`group.run(..., shard_copies=\1)`"),
    # no method runs the earlier cells again
    (r" Next time use `%ddp restart --replay`: it runs such cells by itself\.", ""),
    (
        r"`%ddp restart --replay` (?:restarts all ranks and )?(?:runs|replays) [^.;,]*",
        "`group.restart()` restarts all ranks",
    ),
    (r"`%ddp restart --replay`", "`group.restart()`"),
)


def name_methods(text: str) -> str:
    """Replace the magics in a text by the methods that do the same, where there is one.

    >>> name_methods("`%ddp heal` replaces it, `%%ddp --ranks 0,2-3` uses the others")
    '`group.heal()` replaces it, `group.run(..., ranks=[0, *range(2, 4)])` uses the others'
    """
    for magic, method in _METHODS:
        text = re.sub(magic, method, text)
    return text


class ExtensionMethod:
    """A method that an extension adds to a class; its module is imported at the first use.

    Args:
        target: a function whose first argument is the object.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    @functools.cached_property
    def __func__(self) -> Callable[..., Any]:
        """The function, as that of a ``staticmethod``."""
        return _with_method_names(load(self._target))

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        return self.__func__ if instance is None else MethodType(self.__func__, instance)


def with_method_names(kind: type[T]) -> type[T]:
    """Add the methods of extensions; make all public methods raise errors that name methods."""
    for name, method in [*vars(kind).items()]:
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, _with_method_names(method))
    for extension in installed().values():
        for name, target in extension.group_methods.items():
            setattr(kind, name, ExtensionMethod(target))
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
