"""Wrap functions of libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function of a module or class, and return the original.

    ``wrapper`` gets the original function, then the arguments of each call.
    """
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    wrapped.__code__ = wrapped.__code__.replace(co_name=name)  # the name that a hang card shows
    setattr(owner, name, functools.wraps(original)(wrapped))
    return original
