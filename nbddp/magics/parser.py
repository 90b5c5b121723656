"""The commands of ``%ddp``, the options of ``%%ddp``, and their parser."""

from __future__ import annotations

import io
import re
import shlex
from argparse import REMAINDER, Namespace
from collections.abc import Container, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from IPython.core.error import UsageError

from nbddp.extension.installed import (
    command_name,
    installed,
    owner_of_command,
    without_conflicts,
)
from nbddp.extension.manifest import Command, Extension
from nbddp.magics import command_arguments
from nbddp.magics.command_arguments import LineArguments, PullArguments, StartArguments
from nbddp.magics.magic_parser import MagicParser, T, place_before
from nbddp.magics.run_arguments import CellArguments, RunArguments
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option_values import without_quotes

MAX_LISTED = 10  # options in an error
MIN_SIMILARITY = 0.7  # of a misspelled word to the suggested one

_MEMBERS = vars(command_arguments).values()
_KINDS = [each for each in _MEMBERS if isinstance(each, type) and issubclass(each, Command)]
_KINDS.remove(Command)
CORE = Extension(name="nbddp", commands=tuple(_KINDS), cell_options=CellArguments)
# without extensions of other packages that have a command or an option of the core
_EXTENSIONS = [*without_conflicts([CORE, *installed().values()]).values()]
_EXTENSIONS.remove(CORE)
OPTIONS = [extension.options for extension in _EXTENSIONS if extension.options]
_ONLY_OF_CELLS = [extension.cell_options for extension in _EXTENSIONS if extension.cell_options]
_OF_STARTS = [extension.start_options for extension in _EXTENSIONS if extension.start_options]
CELL = MagicParser(CellArguments, OPTIONS + _ONLY_OF_CELLS + _OF_STARTS, prog="%%ddp")
LINE = MagicParser(
    LineArguments,
    prog="%ddp",
    epilog="`%ddp help COMMAND` shows its options, `%%ddp?` those of a cell.",
)
COMMANDS: dict[str, MagicParser[Any]] = {}
_PARSERS = LINE.add_subparsers(title="commands", metavar="COMMAND ARGUMENTS")


def _kinds() -> list[type[Command]]:
    """Return the commands of the core and of the extensions, in the order of the help."""
    kinds = [*_KINDS]
    for extension in _EXTENSIONS:
        for kind in extension.commands:
            kinds.insert(place_before(kind.before, [*map(command_name, kinds)]), kind)
    return kinds


def _extensions_of(kind: type[Command]) -> list[type[Frozen]]:
    if issubclass(kind, RunArguments):
        return OPTIONS
    return _OF_STARTS if issubclass(kind, StartArguments) else []


for kind in _kinds():
    command = command_name(kind)
    COMMANDS[command] = _PARSERS.add_parser(
        command,
        kind=kind,
        extensions=_extensions_of(kind),
        help=(kind.__doc__ or "").replace("%", "%%"),
        epilog=f"for example `%ddp {kind.example}`" if kind.example != command else None,
    )


def command_parser(name: str) -> MagicParser[Any]:
    """Return the parser of a command.

    Raises:
        UsageError: the command does not exist; the message suggests one.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    if owner := owner_of_command(name):
        meant = f"the extension {owner} is not installed"
    elif flag := _cell_option(name):
        meant = _point_to_cell(flag)
    elif close := get_close_matches(name, COMMANDS, n=1, cutoff=MIN_SIMILARITY):
        meant = f"did you mean `%ddp {close[0]}`?"
    else:
        meant = f"the commands are: {', '.join(COMMANDS)}"
    raise UsageError(f"there is no `%ddp {name}`; {meant}")


def help_text(name: str | None) -> str:
    """Return the help of a command or of a cell option. Without a name, list all commands.

    Raises:
        UsageError: the command does not exist.
    """
    flag = _cell_option(name or "")
    if name is None or name in COMMANDS or not flag:
        return (LINE if name is None else command_parser(name)).format_help()
    formatter = CELL._get_formatter()
    formatter.start_section("an option of %%ddp")
    formatter.add_arguments([each for each in CELL._actions if flag in each.option_strings])
    formatter.end_section()
    return formatter.format_help()


def _cell_option(name: str) -> str:
    flag = f"--{name.lstrip('-')}"
    return flag if flag in CELL.options() else ""


def _point_to_cell(flag: str) -> str:
    name = flag.removeprefix("--")
    return f"`{flag}` is an option of a cell: `%%ddp {flag}`; `%ddp help {name}` explains it"


def parse_line(parser: MagicParser[T], line: str) -> T:
    """Parse the line of a command, or of ``%%ddp``.

    Raises:
        UsageError: the line is wrong; the message says in one line what to write instead.
    """
    if parser.kind is PullArguments:
        parsed = _parse_pull(parser, _without_comment(line, escaped_quotes="'\""))
    else:
        parsed = _parse_words(parser, _split(line))
    if "line" in parser.kind.__dataclass_fields__:
        parsed.line = line
    _check_combinations(parser, vars(parsed))
    return parser.build(parsed)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(_without_comment(line, escaped_quotes='"'))
    except ValueError as error:
        raise UsageError(
            f"{error} in {line!r}; put text that contains a quotation mark into quotation marks of "
            'the other kind: "it\'s the best"'
        ) from None


def _without_comment(line: str, *, escaped_quotes: str) -> str:
    """Cut the line at the first unquoted word ``#``; ``a#1`` and ``#1`` are no comments.

    Args:
        line: the line of a command.
        escaped_quotes: inside these quotation marks a backslash escapes: ``"`` in a shell, both in
            Python.
    """
    text = io.StringIO(line)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escapedquotes = True, "", escaped_quotes
    start = 0
    with suppress(ValueError):  # an open quotation mark: shlex.split reports it
        while lexer.get_token() is not None:
            end = text.tell()
            if line[start:end].strip() == "#":
                return line[:start]
            start = end
    return line


def _check_combinations(parser: MagicParser[Any], given: Container[str]) -> None:
    for item in parser.declared.values():
        if item.name not in given:
            continue
        needed = item.metadata.get("needs", ())
        if needed and not any(each in given for each in needed):
            raise UsageError(f"{_flag(item.name)} needs {' or '.join(map(_flag, needed))}")
        for other, instead in item.metadata.get("excludes", {}).items():
            if other in given:
                flags = f"{_flag(item.name)} and {_flag(other)}"
                raise UsageError(f"{flags} cannot be combined: {instead}")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _parse_pull(parser: MagicParser[Any], line: str) -> Namespace:
    """Parse the line of ``%ddp pull``, and leave quotes and spaces of the expression to Python."""
    option = re.search(r"(?:^|\s)--rank[\s=]+(\S+)", line)
    expression = without_quotes(line.replace(option.group(), " ", 1) if option else line)
    placeholder = ["x"] if expression else []
    args = _parse_words(parser, [*placeholder, *(("--rank", option[1]) if option else ())])
    args.expression = expression
    return args


def _parse_words(parser: MagicParser[Any], words: Sequence[str]) -> Namespace:
    if any(each.nargs == REMAINDER for each in parser._actions):
        args, unknown = parser.parse_known_args(words)
    else:  # also accepts an optional argument after an option
        args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        options, word = parser.options(), re.sub("^-+", "--", unknown[0].partition("=")[0])
        # also "-np", and torchrun's "--nproc_per_node"
        close = [each for each in options if each.startswith(word) or word.startswith(each)]
        close = close or get_close_matches(word, options, n=1, cutoff=MIN_SIMILARITY)
        listing = f"the options are: {', '.join(options)}"
        if len(options) > MAX_LISTED:
            source = "%%ddp?" if parser.prog == CELL.prog else f"%ddp help {parser.prog.split()[1]}"
            listing = f"`{source}` lists the options"
        advice = f"did you mean {' or '.join(close)}?" if close else listing
        if word.startswith("-") and (flag := _cell_option(word)):
            hint = _point_to_cell(flag)
        elif unknown[0].startswith("-"):
            hint = advice if options else "the command has no options"
        elif options:
            hint = f"put a value with spaces into quotes; {advice}"
        else:
            hint = parser.epilog or "the command has no arguments"
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    return args
