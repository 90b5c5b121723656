"""Options that are written once, for all magics that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Magic = Callable[..., Any]


def with_arguments(function: Magic, arguments: Sequence[Callable[[Magic], Magic]]) -> Magic:
    """The magic that takes these of IPython's arguments, in their order."""
    for decorate in reversed(arguments):
        function = decorate(function)
    return function
