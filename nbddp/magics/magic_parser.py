"""The parser class of ``%ddp`` and ``%%ddp``: an argument parser for one line of a notebook."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import Field, fields
from functools import partial
from inspect import getdoc
from typing import Any, Generic, NoReturn, TypeVar

from IPython.core.error import UsageError

from nbddp.extension.installed import own_backends
from nbddp.wire.frozen import Frozen
from nbddp.wire.group_spec import StartOptions
from nbddp.wire.options.option import add_option

T = TypeVar("T", bound=Frozen)
_Formatter = partial(RawDescriptionHelpFormatter, max_help_position=28, width=100)


class MagicParser(ArgumentParser, Generic[T]):
    """A parser that reports an error as one line in the notebook, and has no ``--help``.

    Args:
        kind: the dataclass whose fields are the options and arguments, and whose docstring
            describes the command. If it has a field "start", the line may also have the options
            with which ranks start.
        extensions: dataclasses with more options. What the line has of them becomes the field
            "extensions".
        options: those of an ``ArgumentParser``.

    Attributes:
        declared: the fields that declare its options and arguments, by name.
    """

    def __init__(
        self, kind: type[T], extensions: Sequence[type[Frozen]] = (), **options: Any
    ) -> None:
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
        self._extensions = extensions
        self.declared = {each.name: each for each in _declared(kind, extensions)}
        for option in self.declared.values():
            add_option(self, option)
        for action in self._actions:
            if action.dest == "backend":
                action.choices = (*(action.choices or ()), *own_backends())

    def build(self, parsed: Namespace) -> T:
        """Return what was parsed as the dataclass of this parser."""
        given = vars(parsed)
        for option in self.declared.values():
            if option.name in given and "repeat" in option.metadata:
                given[option.name] = option.metadata["repeat"](given[option.name])
        if "start" in self.kind.__dataclass_fields__:
            names = [item.name for item in fields(StartOptions) if item.name in given]
            given["start"] = {name: given.pop(name) for name in names}
        for more in self._extensions:
            names = [item.name for item in fields(more) if item.name in given]
            if names:
                options = more(**{name: given.pop(name) for name in names})
                given["extensions"] = {**given.get("extensions", {}), more: options}
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


def _declared(kind: type[Frozen], extensions: Sequence[type[Frozen]]) -> list[Field[Any]]:
    """Return the fields that declare options and arguments, in the order of the help."""
    start = fields(StartOptions) if "start" in kind.__dataclass_fields__ else ()
    ordered = [item for item in (*start, *fields(kind)) if "names" in item.metadata]
    placed = [item for item in ordered if "before" in item.metadata]
    declared = [item for item in ordered if item not in placed]
    for item in (*placed, *(item for options in extensions for item in fields(options))):
        names = [each.name for each in declared]
        declared.insert(place_before(item.metadata.get("before", ""), names), item)
    return declared


def place_before(following: str, names: Sequence[str]) -> int:
    """Return the place in front of the first of these names that exists, or else the end.

    >>> place_before("publish no_wait", ["heal", "no_wait"])
    1
    """
    return next((names.index(name) for name in following.split() if name in names), len(names))
