"""The parser class of ``%ddp`` and ``%%ddp``: an argument parser for one line of a notebook."""

from __future__ import annotations

from argparse import REMAINDER, SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import partial
from inspect import getdoc
from typing import Any, Generic, NoReturn, TypeVar

from IPython.core.error import UsageError

from nbddp.wire.frozen import Frozen
from nbddp.wire.group_spec import StartOptions

T = TypeVar("T", bound=Frozen)
_NOT_OF_ARGPARSE = ("names", "what", "read", "repeat", "complete", "needs", "excludes", "before")
_Formatter = partial(RawDescriptionHelpFormatter, max_help_position=28, width=100)


class MagicParser(ArgumentParser, Generic[T]):
    """A parser that reports an error as one line in the notebook, and has no ``--help``.

    Args:
        kind: the dataclass whose fields are the options and arguments, and whose docstring
            describes the command. If it has a field "start", the line may also have the options
            with which ranks start.
        options: those of an ``ArgumentParser``.

    Attributes:
        complete: what Tab offers for each option and argument, by the name of its field.
    """

    def __init__(self, kind: type[T], **options: Any) -> None:
        super().__init__(
            description=getdoc(kind),
            add_help=False,
            formatter_class=_Formatter,
            argument_default=SUPPRESS,
            allow_abbrev=False,  # a later option could make a beginning ambiguous
            **options,
        )
        self.color = False  # Python 3.14 colors the help in a terminal
        self.kind = kind
        self._declared = _declared(kind)
        self.complete = {each.name: each.metadata.get("complete", "") for each in self._declared}
        for option in self._declared:
            self._add(option.name, option.metadata)

    def _add(self, field_name: str, declared: Mapping[str, Any]) -> None:
        more = {name: value for name, value in declared.items() if name not in _NOT_OF_ARGPARSE}
        names = declared["names"].split()
        flags = [each for each in names if each.startswith("-")]
        values = names[len(flags) :]
        more |= {"help": declared["what"]} | ({"dest": field_name} if flags else {})
        if flags and not values and "choices" not in more:
            self.add_argument(*flags, action="store_true", **more)
            return
        if flags:
            more["metavar"] = "".join(values) or None
        if "repeat" in declared:
            more["action"] = "append"
        action = self.add_argument(*(flags or values), type=declared["read"], **more)
        action.required = action.required and action.nargs != REMAINDER  # Python 3.11 differs

    def build(self, parsed: Namespace) -> T:
        """Return what was parsed as the dataclass of this parser."""
        given = vars(parsed)
        for option in self._declared:
            if option.name in given and "repeat" in option.metadata:
                given[option.name] = option.metadata["repeat"](given[option.name])
        if "start" in self.kind.__dataclass_fields__:
            names = [item.name for item in fields(StartOptions) if item.name in given]
            given["start"] = {name: given.pop(name) for name in names}
        return self.kind(**given)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError. If an argument is missing, show an example line."""
        if self.epilog and "required" in message:
            message = f"{message}; {self.epilog}"
        raise UsageError(message)

    def options(self) -> list[str]:
        """Return the options to list, each by its first name."""
        shown = [each for each in self._actions if each.help is not SUPPRESS]
        return [name for each in shown for name in each.option_strings[:1]]


def _declared(kind: type[Frozen]) -> list[Field[Any]]:
    """Return the fields that declare options and arguments, in the order of the help."""
    start = fields(StartOptions) if "start" in kind.__dataclass_fields__ else ()
    declared = [item for item in (*start, *fields(kind)) if "names" in item.metadata]
    for item in [each for each in declared if "before" in each.metadata]:
        declared.remove(item)
        names = [each.name for each in declared]
        declared.insert(names.index(item.metadata["before"]), item)
    return declared
