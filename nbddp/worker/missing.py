"""What stands in an object for a part of it that could not be carried to a new rank."""

from __future__ import annotations

from types import BuiltinMethodType, ModuleType
from typing import Any, NoReturn

from nbddp.worker.headline import text_of

_PROTOCOL = 5


class NotCarried:
    """Says so, whatever is done with it: a lock that lets everybody in would be worse."""

    def __init__(self, what: str) -> None:
        vars(self)["_what"] = what

    def __repr__(self) -> str:
        """What it stands for."""
        return f"<{self._say()}>"

    def _say(self) -> str:
        what = vars(self).get("_what", "an object")
        return f"{what} of another rank, which could not be carried here: make it again"

    def __getattr__(self, name: str) -> NoReturn:
        """It has nothing; what Python itself asks for, it has as little as any object."""
        raise AttributeError(name if name[:2] == "__" else self._say())

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._say())

    __call__ = __enter__ = __iter__ = __next__ = __len__ = __bool__ = _refuse
    __getitem__ = __setitem__ = __contains__ = __setattr__ = _refuse

    def __exit__(self, *_: object) -> None:
        """Only that Python goes as far as to enter it."""


def why_missing(part: Any, reducers: Any) -> str:
    """Why a part of an object cannot be pickled; nothing if it says it can."""
    if isinstance(part, BuiltinMethodType):
        owner = part.__self__
        return "" if isinstance(owner, (ModuleType, type)) else why_missing(owner, reducers)
    reduce = reducers.get(type(part))
    try:
        reduce(part) if reduce else part.__reduce_ex__(_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - whatever an object's own code says; it is told
        return said_by(error) or type(error).__name__
    return ""


def said_by(error: BaseException) -> str:
    """What an exception says, also where it was given its words and what goes into them apart.

    >>> said_by(NotImplementedError("{} cannot be pickled", "_Iter"))
    '_Iter cannot be pickled'
    """
    words, *values = error.args or ("",)
    if values and isinstance(words, str) and words.count("{}") == len(values):
        return words.format(*values)
    return text_of(error)
