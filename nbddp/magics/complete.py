"""Tab: options of the magics, and names that live in the ranks."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from nbddp.errors import RequestError
from nbddp.record.runs import runs_below

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.magics.auto import AutoMode
    from nbddp.magics.steered import SteeredGroup

PATIENCE = 0.2  # seconds that typing may be held up
_NOTHING = SimpleMatcherResult(completions=[])


class Completer:
    """Asks the parsers for options and rank 0 for names; silent while a cell runs."""

    def __init__(
        self, group: SteeredGroup, auto: AutoMode, parsers: Mapping[str, ArgumentParser]
    ) -> None:
        self._group = group
        self._auto = auto
        self._parsers = parsers
        self._matcher: Any = None

    def install(self, shell: InteractiveShell) -> None:
        """Have IPython's completer ask us too."""

        @context_matcher()  # type: ignore[untyped-decorator, unused-ignore]
        def nbddp_matcher(context: CompletionContext) -> SimpleMatcherResult:
            return self.match(context)

        self._matcher = nbddp_matcher
        shell.Completer.custom_matchers.append(nbddp_matcher)

    def remove(self, shell: InteractiveShell) -> None:
        """Leave IPython's completer as it was."""
        shell.Completer.custom_matchers.remove(self._matcher)

    def match(self, context: CompletionContext) -> SimpleMatcherResult:
        """What fits where the cursor is."""
        lines = context.full_text.split("\n")
        row = context.cursor_line
        if lines[row].lstrip().startswith(("%ddp ", "%%ddp ")):
            return _result(self._options(context.line_with_cursor, context.token), context.token)
        in_ddp_cell = row > 0 and lines[0].startswith("%%ddp")
        in_auto_cell = self._auto.is_on and not lines[0].startswith("%%")
        if not (in_ddp_cell or in_auto_cell) or lines[row].lstrip().startswith("%"):
            return _NOTHING
        return self._names("\n".join(lines[:row]), context)

    def _options(self, line: str, token: str) -> list[str]:
        words = line.split()
        if words[0] == "%%ddp":
            return _flags(self._parsers["%%ddp"], words, token)
        chosen = words[1] if len(words) > 1 and words[1] != token else ""
        if chosen == "show" and not token.startswith("-") and "--cell" not in words[-2:]:
            return [each.name for each in runs_below(Path.cwd()) if each.name.startswith(token)]
        if chosen in self._parsers:
            return _flags(self._parsers[chosen], words, token)
        return [name for name in self._parsers if name != "%%ddp" and name.startswith(token)]

    def _names(self, before: str, context: CompletionContext) -> SimpleMatcherResult:
        line = context.line_with_cursor[: context.cursor_position]
        if not self._group.is_live or not line.strip():
            return _NOTHING
        code = f"{before}\n{line}" if before else line
        try:
            text, matches = self._group.complete(code, len(code), timeout=PATIENCE)
        except RequestError:  # it ended, or became busy, this very moment
            return _NOTHING
        return _result(matches, text)


def _flags(parser: ArgumentParser, words: list[str], token: str) -> list[str]:
    previous = words[-2] if words[-1] == token and len(words) > 1 else words[-1]
    for action in parser._actions:
        if previous in action.option_strings and action.nargs != 0:
            return [str(choice) for choice in action.choices or () if str(choice).startswith(token)]
    shown = [action for action in parser._actions if action.help is not SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings[:1]]
    return [flag for flag in flags if flag.startswith(token) and flag not in words[:-1]]


def _result(matches: list[str], fragment: str) -> SimpleMatcherResult:
    return SimpleMatcherResult(
        completions=[SimpleCompletion(text=match, type="nbddp") for match in matches],
        matched_fragment=fragment,
        suppress=bool(matches),
    )
