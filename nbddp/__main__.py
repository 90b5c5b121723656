"""``nbddp COMMAND`` in a terminal: the commands of extensions, which need no notebook."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import fields
from inspect import getdoc
from io import TextIOWrapper
from pathlib import Path

from nbddp.errors import NbddpError, as_request_error
from nbddp.extension.installed import command_name, installed, load, owner_of_command
from nbddp.extension.manifest import Command
from nbddp.wire.options.option import add_option

INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C has ended
DEFAULT = "status"
_Kind = tuple[type[Command], str, ArgumentParser]


def main(words: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code.

    Args:
        words: the command with its arguments; None for those of this process.
    """
    words = [*(sys.argv[1:] if words is None else words)] or [DEFAULT]
    parser, kinds = command_parser()
    if words[0] not in kinds and not (kinds and words[0].startswith("-")):
        owner = owner_of_command(words[0], is_of_terminal=True)
        advice = f"the commands are: {', '.join(kinds)}"
        return _fail(
            f"there is no `nbddp {words[0]}`; "
            + (f"the extension {owner} is not installed" if owner else advice)
        )
    parsed = vars(parser.parse_args(words)).items()
    given = {name: value for name, value in parsed if value is not None}
    kind, target, _ = kinds[words[0]]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not know all characters
    try:
        with as_request_error("the current folder cannot be used", "; change to another"):
            Path.cwd()
        getattr(load(target)(), words[0])(kind(**given))
        sys.stdout.flush()
    except NbddpError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def command_parser() -> tuple[ArgumentParser, dict[str, _Kind]]:
    """Return the parser, and each command with the target of its class and its own parser."""
    parser = ArgumentParser(prog="nbddp", description="Look at the runs of nbddp.")
    parsers, kinds = parser.add_subparsers(metavar="COMMAND"), dict[str, _Kind]()
    for extension in installed().values():
        for kind in extension.terminal_commands:
            about = (getdoc(kind) or "").replace("%", "%%")
            name = command_name(kind)
            command = parsers.add_parser(name, help=about, description=about)
            for item in fields(kind):
                add_option(command, item)
            kinds[name] = kind, extension.terminal, command
    return parser, kinds


def _fail(text: str) -> int:
    sys.stderr.write(f"nbddp: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
