"""Tab: options of the magics, and names that live in the ranks."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core import completer as completers

from nbddp.errors import RequestError
from nbddp.record.runs import runs_below

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.magics.auto import AutoMode
    from nbddp.magics.steered import SteeredGroup

PATIENCE = 0.2  # seconds that typing may be held up

Fitting = tuple[list[str], str]  # what fits, and the text before the cursor that it replaces
Fits = Callable[[str, int, int, str], Fitting]


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
        has_context = hasattr(completers, "context_matcher")
        self._matcher = _matcher(self.fits) if has_context else _line_matcher(self.fits, shell)
        shell.Completer.custom_matchers.append(self._matcher)

    def remove(self, shell: InteractiveShell) -> None:
        """Leave IPython's completer as it was."""
        shell.Completer.custom_matchers.remove(self._matcher)

    def fits(self, text: str, row: int, column: int, token: str) -> Fitting:
        """What fits in a cell's ``text`` at a place, where ``token`` stands before the cursor."""
        lines = text.split("\n")
        line = lines[row]
        if line.lstrip().startswith(("%ddp ", "%%ddp ")):
            return self._options(line, token), token
        in_ddp_cell = row > 0 and lines[0].startswith("%%ddp")
        in_auto_cell = self._auto.is_on and not lines[0].startswith("%%")
        if not (in_ddp_cell or in_auto_cell) or line.lstrip().startswith("%"):
            return [], token
        return self._names("\n".join(lines[:row]), line[:column])

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

    def _names(self, before: str, line: str) -> Fitting:
        if not self._group.is_live or not line.strip():
            return [], ""
        code = f"{before}\n{line}" if before else line
        try:
            text, matches = self._group.complete(code, len(code), timeout=PATIENCE)
        except RequestError:  # it ended, or became busy, this very moment
            return [], ""
        return matches, text


def _matcher(fits: Fits) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """Ask with all that IPython 8 tells."""

    @completers.context_matcher()  # type: ignore[untyped-decorator, unused-ignore]
    def nbddp_matcher(context: CompletionContext) -> SimpleMatcherResult:
        matches, fragment = fits(
            context.full_text, context.cursor_line, context.cursor_position, context.token
        )
        return completers.SimpleMatcherResult(
            completions=[completers.SimpleCompletion(text=each, type="nbddp") for each in matches],
            matched_fragment=fragment,
            suppress=bool(matches),
        )

    found: Callable[[CompletionContext], SimpleMatcherResult] = nbddp_matcher
    return found


def _line_matcher(fits: Fits, shell: InteractiveShell) -> Callable[[str], list[str]]:
    """IPython 7 tells of no line but the one that the cursor is in: no names of ranks there."""

    def nbddp_matcher(token: str) -> list[str]:
        line: str = shell.Completer.line_buffer
        return fits(line, 0, len(shell.Completer.text_until_cursor), token)[0]

    return nbddp_matcher


def _flags(parser: ArgumentParser, words: list[str], token: str) -> list[str]:
    previous = words[-2] if words[-1] == token and len(words) > 1 else words[-1]
    for action in parser._actions:
        if previous in action.option_strings and action.nargs != 0:
            return [str(choice) for choice in action.choices or () if str(choice).startswith(token)]
    shown = [action for action in parser._actions if action.help is not SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings[:1]]
    return [flag for flag in flags if flag.startswith(token) and flag not in words[:-1]]
