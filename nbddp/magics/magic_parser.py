"""The parser class of ``%ddp`` and ``%%ddp``: an argument parser for one line of a notebook."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from IPython.core.error import UsageError

_Formatter = partial(RawDescriptionHelpFormatter, max_help_position=28, width=100)


class MagicParser(ArgumentParser):
    """A parser that reports an error as one line in the notebook, and has no ``--help``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(add_help=False, formatter_class=_Formatter, **options)
        self.color = False  # Python 3.14 colors the help in a terminal

    def add(self, names: str, what: str, read: Callable[[str], Any] = str, **more: Any) -> None:
        """Add an option or argument.

        Args:
            names: as in the help: ``--nproc N``. An option without a value is a flag.
            what: the help text.
            read: converts the value.
            more: further arguments of ``add_argument``.
        """
        flags = [each for each in names.split() if each.startswith("-")]
        values = names.split()[len(flags) :]
        if flags and not values and "choices" not in more:
            self.add_argument(*flags, action="store_true", help=what)
            return
        if flags:
            more["metavar"] = "".join(values) or None
        self.add_argument(*(flags or values), type=read, help=what, **more)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError. If an argument is missing, show an example line."""
        if self.epilog and "required" in message:
            message = f"{message}; {self.epilog}"
        raise UsageError(message)

    def options(self) -> list[str]:
        """Return the options to list, each by its first name."""
        shown = [each for each in self._actions if each.help is not SUPPRESS]
        return [name for each in shown for name in each.option_strings[:1]]
