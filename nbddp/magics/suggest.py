"""What fits in the line of a magic: options, and the values that one of them can have."""

from __future__ import annotations

import shlex
from argparse import REMAINDER, SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nbddp.checks.book import BOOK
from nbddp.publish.kinds import KINDS as TRACKERS
from nbddp.train.kinds import KINDS, MEANINGS


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A word that fits, and what it is, in a word: pages have room for no more beside it."""

    text: str
    kind: str = "value"


Values = Callable[[], Iterable[Suggestion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What only the notebook knows; each is asked when its turn comes.

    Attributes:
        ranks: of the worker group.
        runs: that can be shown.
        cells: of the run of this name, or of the last one.
        names: that live in the ranks and begin like this.
        scripts: whose path begins like this, and folders on the way to one.
    """

    ranks: Values
    runs: Values
    cells: Callable[[str], Iterable[Suggestion]]
    names: Callable[[str], Iterable[Suggestion]]
    scripts: Callable[[str], Iterable[Suggestion]]


@dataclass(frozen=True, slots=True)
class MagicLine:
    """The words of a magic's line before the cursor, and the parser that will read them."""

    parser: ArgumentParser
    words: list[str] = field(default_factory=list)  # those that are ended, without the magic's own

    @property
    def option(self) -> Action | None:
        """The option whose value comes next, if the last word is one that has a value."""
        last = self.words[-1] if self.words else ""
        for action in self.parser._actions:
            if last in action.option_strings and action.nargs != 0:
                return action
        return None

    @property
    def positional(self) -> Action | None:
        """The argument without a name that comes next; the last one may take several words."""
        free = [each for each in self.parser._actions if not each.option_strings]
        given = len(list(self._free_words()))
        if given < len(free):
            return free[given]
        return free[-1] if free and free[-1].nargs in ("*", "+") else None

    def first_given(self) -> str:
        """The first word that is no option's."""
        return next(iter(self._free_words()), "")

    def _free_words(self) -> Iterable[str]:
        takes = {
            flag
            for action in self.parser._actions
            for flag in action.option_strings
            if action.nargs != 0
        }
        is_value = False
        for word in self.words:
            if not is_value and not word.startswith("-"):
                yield word
            is_value = word in takes


def read_line(line: str, parsers: Mapping[str, ArgumentParser]) -> MagicLine | None:
    """The line of a ``%%ddp`` cell or a ``%ddp`` command, or None: no command is chosen yet.

    Args:
        line: up to the word that is looked at, without it.
        parsers: by command, and for ``%%ddp``.
    """
    words = _words(line)
    if words[:1] == ["%%ddp"]:
        return MagicLine(parsers["%%ddp"], words[1:])
    if len(words) > 1 and words[1] in parsers:
        return MagicLine(parsers[words[1]], words[2:])
    return None


def suggestions(
    line: str, word: str, parsers: Mapping[str, ArgumentParser], live: Live
) -> list[Suggestion]:
    """What fits in the place of ``word``, which stands behind ``line``."""
    asked = read_line(line, parsers)
    if asked is None:
        found = commands(parsers) if len(_words(line)) == 1 else []
    else:
        found = _values_or_options(asked, word, parsers, live)
    return [each for each in found if each.text.startswith(word)]


def commands(parsers: Mapping[str, ArgumentParser]) -> list[Suggestion]:
    """The commands of ``%ddp``."""
    return [Suggestion(name, "command") for name in parsers if name != "%%ddp"]


def _values_or_options(
    asked: MagicLine, word: str, parsers: Mapping[str, ArgumentParser], live: Live
) -> list[Suggestion]:
    if asked.positional is not None and asked.positional.nargs == REMAINDER:
        return []  # what a script takes, it alone knows
    if asked.option is not None:
        return _values(asked.option, asked, word, parsers, live)
    options = [
        Suggestion(action.option_strings[0], "option")
        for action in asked.parser._actions
        if action.option_strings
        and action.help is not SUPPRESS
        and not set(action.option_strings) & set(asked.words)
    ]
    if word.startswith("-") or asked.positional is None:
        return options
    return _values(asked.positional, asked, word, parsers, live) or options


def _values(
    action: Action,
    asked: MagicLine,
    word: str,
    parsers: Mapping[str, ArgumentParser],
    live: Live,
) -> list[Suggestion]:
    """What an option or argument can be, as far as it can be listed."""
    if action.choices is not None:
        return [Suggestion(str(each)) for each in action.choices]
    by_name: dict[str, Values] = {
        "rank": live.ranks,
        "ranks": lambda: _more_ranks(word, live.ranks()),
        "kind": lambda: [Suggestion(each, "fault") for each in KINDS],
        "run": live.runs,
        "tracker": lambda: [Suggestion(each, "tracker") for each in TRACKERS],
        "publish": lambda: [Suggestion(each, "tracker") for each in TRACKERS],
        "cell": lambda: live.cells(asked.first_given()),
        "command": lambda: commands(parsers),
        "expression": lambda: live.names(word),
        "script": lambda: live.scripts(word),
        "explain": lambda: [Suggestion(each, "rule") for each in BOOK],
    }
    return list(by_name.get(action.dest, list)())


def _more_ranks(word: str, ranks: Iterable[Suggestion]) -> list[Suggestion]:
    """Ranks behind those that stand in a list already: 0,2,..."""
    begin, comma, _ = word.rpartition(",")
    named = begin.split(",")
    return [
        Suggestion(f"{begin}{comma}{each.text}", each.kind)
        for each in ranks
        if each.text not in named
    ]


def explain(line: str, word: str, parsers: Mapping[str, ArgumentParser]) -> str:
    """What a word of a magic's line means; empty if there is nothing to say of it.

    Args:
        line: what stands before the word.
        word: the whole of it.
        parsers: by command, and for ``%%ddp``.
    """
    asked = read_line(line, parsers)
    if asked is None:
        return usage(parsers[word]) if word in parsers else ""
    for action in asked.parser._actions:
        if word in action.option_strings:
            return f"{_spelled(action)}\n\n{action.help}"
    is_kind = asked.positional is not None and asked.positional.dest == "kind"
    if is_kind and word in KINDS:
        return f"{word}: {MEANINGS[word]}"
    return usage(asked.parser)


def _spelled(action: Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or _choices(action)}"
    return f"{', '.join(action.option_strings)}{value}"


def _choices(action: Action) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def usage(parser: ArgumentParser) -> str:
    """All that a magic's parser knows, to be read."""
    return parser.format_help().replace("::", "").strip()


def _words(line: str) -> list[str]:
    """As the shell would have them; a quote that is still open hides nothing."""
    try:
        return shlex.split(line, posix=False)
    except ValueError:
        return line.split()
