"""An option is a field of a dataclass, which parser, help, Tab completion and the wire read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def option(names: str, what: str, default: T, read: Callable[[str], Any] = str, **more: Any) -> T:
    """Declare an option, or an argument that may be missing, as a field of a frozen dataclass.

    Args:
        names: as in the help: ``--grace SECONDS``. Without dashes it is an argument.
        what: the help text. ``{default}`` in it becomes the default.
        default: the value if the option is missing.
        read: converts the text of the value.
        more: arguments of ``add_argument``, and

            * ``repeat``: the type that collects the values of an option that may be repeated
            * ``complete``: what Tab offers: a kind of values in ``magics/completion.py``, or a
              function that returns the values
            * ``needs``: fields of which one must be given, too
            * ``excludes``: fields that must not be given, and for each what to do instead
            * ``before``: the field in front of which the help shows the option; if it may be
              missing, a second one
    """
    default_value: Any = {"default_factory": dict} if default == {} else {"default": default}
    about = {"names": names, "what": what.format(default=default), "read": read, **more}
    declared: T = field(**default_value, metadata=about)
    return declared


def flag(names: str, what: str, **more: Any) -> bool:
    """Declare an option without a value; see :func:`option`."""
    return option(names, what, default=False, **more)


def argument(names: str, what: str, read: Callable[[str], Any] = str, **more: Any) -> Any:
    """Declare an argument that must be given; see :func:`option`."""
    return field(metadata={"names": names, "what": what, "read": read, **more})
