"""A placeholder for an object that a heal did not copy to a replacement."""

from __future__ import annotations

from typing import Any, NoReturn


class Placeholder:
    """Stands for an object that was not carried. Every use raises an error that says so.

    With a lock that never blocks, or an empty queue, the user's code would fail without a reason.
    """

    def __init__(self, what: str, way_out: str = "make it again") -> None:
        vars(self).update(_what=what, _way_out=way_out)

    def __repr__(self) -> str:
        """Return a description of the replaced object."""
        return f"<{self._describe()}>"

    def _describe(self) -> str:
        what = vars(self).get("_what", "an object")
        way_out = vars(self).get("_way_out", "make it again")
        return f"{what} that the heal did not copy to this rank: {way_out}"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error. Lookups by Python itself, such as ``__len__``, get the usual message."""
        raise AttributeError(name if name[:2] == "__" else self._describe())

    def _raise_error(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._describe())

    __call__ = __enter__ = __iter__ = __next__ = __len__ = __bool__ = _raise_error
    __getitem__ = __setitem__ = __contains__ = __setattr__ = _raise_error

    def __exit__(self, *_: object) -> None:
        """Exist, so that ``with`` calls ``__enter__`` and does not raise its own error first."""
