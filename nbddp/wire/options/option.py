"""An option is a field of a dataclass, which parser, help, Tab completion and the wire read."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser
from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, TypeVar

T = TypeVar("T")
_NOT_OF_ARGPARSE = ("names", "what", "read", "repeat", "complete", "needs", "excludes", "before")


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


def add_option(parser: ArgumentParser, item: Field[Any]) -> None:
    """Add the option or argument that a field declares to a parser."""
    declared = item.metadata
    more = {name: value for name, value in declared.items() if name not in _NOT_OF_ARGPARSE}
    names = declared["names"].split()
    flags = [each for each in names if each.startswith("-")]
    values = names[len(flags) :]
    more |= {"help": declared["what"]} | ({"dest": item.name} if flags else {})
    if flags and not values and "choices" not in more:
        parser.add_argument(*flags, action="store_true", **more)
        return
    if flags:
        more["metavar"] = "".join(values) or None
    if "repeat" in declared:
        more["action"] = "append"
    action = parser.add_argument(*(flags or values), type=declared["read"], **more)
    action.required = action.required and action.nargs != REMAINDER  # Python 3.11 differs
