"""Tab: what fits in the line of a magic, and names that live in the ranks."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core import completer as completers

from nbddp.archive.find import find_run, runs_below
from nbddp.errors import RequestError
from nbddp.magics.suggest import Live, Suggestion, explain, suggestions
from nbddp.record.finished import RecordedRun

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.magics.auto import AutoMode
    from nbddp.magics.steered import SteeredGroup

PATIENCE = 0.2  # seconds that typing may be held up

Fitting = tuple[list[Suggestion], str]  # what fits, and the text before the cursor it replaces
Fits = Callable[[str, int, int, str], Fitting]


class Completer:
    """Asks the parsers for options and rank 0 for names; silent while a cell runs."""

    def __init__(
        self, group: SteeredGroup, auto: AutoMode, parsers: Mapping[str, ArgumentParser]
    ) -> None:
        self._group = group
        self._auto = auto
        self._parsers = parsers
        self._live = Live(
            ranks=self._ranks,
            runs=_runs,
            cells=_cells,
            names=lambda word: self._names("", word)[0],
            scripts=_scripts,
        )
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
        line = lines[row][:column]
        if _is_magic(line):
            return self._in_magic(line, token)
        if not self.is_for_ranks(text, row) or line.lstrip().startswith("%"):
            return _of_the_kit(token), token
        return self._names("\n".join(lines[:row]), line)

    def is_for_ranks(self, text: str, row: int) -> bool:
        """Whether a row of a cell is code that the ranks will run."""
        first = text.partition("\n")[0]
        return (row > 0 and first.startswith("%%ddp")) or (
            self._auto.is_on and not first.startswith("%%")
        )

    def explain(self, text: str, row: int, column: int) -> str:
        """What the word of a magic's line means that the cursor is in; empty for other lines."""
        line = text.split("\n")[row]
        if not _is_magic(line):
            return ""
        begin = line.rfind(" ", 0, column) + 1
        word = line[begin:].partition(" ")[0].partition("=")[0]
        return explain(line[:begin], word, self._parsers)

    def _in_magic(self, line: str, token: str) -> Fitting:
        """Of an option with its value, ``--rank=0``, the value is what fits."""
        begin, _, word = line.rpartition(" ")
        flag, equals, value = word.partition("=")
        if equals:
            begin, word = f"{begin} {flag}", value
        return suggestions(begin, word, self._parsers, self._live), word if word else token

    def _ranks(self) -> Iterable[Suggestion]:
        return [Suggestion(str(rank), "rank") for rank in self._group.life.everybody]

    def _names(self, before: str, line: str) -> Fitting:
        if not self._group.is_live or not line.strip():
            return [], ""
        code = f"{before}\n{line}" if before else line
        try:
            text, matches = self._group.complete(code, len(code), timeout=PATIENCE)
        except RequestError:  # it ended, or became busy, this very moment
            return [], ""
        return [Suggestion(each, "name") for each in matches], text


def _is_magic(line: str) -> bool:
    return line.lstrip().startswith(("%ddp ", "%%ddp "))


def _of_the_kit(token: str) -> list[Suggestion]:
    """Names of the kit; Python's own completer would add every module that was imported."""
    name, dot, _ = token.rpartition(".")
    module = sys.modules.get({"nbddp": "nbddp", "nbddp.faults": "nbddp.train.faults"}.get(name, ""))
    if not dot or module is None:
        return []
    found = [f"{name}.{each}" for each in dir(module)]
    return [Suggestion(each, "name") for each in found if each.startswith(token)]


def _runs() -> Iterable[Suggestion]:
    """The newest first."""
    return [Suggestion(each.name, "run") for each in runs_below(Path.cwd())]


def _cells(run: str) -> Iterable[Suggestion]:
    try:
        cells = RecordedRun(find_run(run, Path.cwd())).cells
    except RequestError:
        return []
    return [Suggestion(str(each.number), "cell") for each in cells]


def _scripts(word: str) -> Iterable[Suggestion]:
    """Python files and folders, in the folder that the word names."""
    folder, _, _ = word.rpartition("/")
    begin = f"{folder}/" if "/" in word else ""
    found = sorted(Path(begin).expanduser().glob("[!.]*"))
    files = [Suggestion(f"{begin}{each.name}", "script") for each in found if each.suffix == ".py"]
    return files + [Suggestion(f"{begin}{each.name}/", "folder") for each in found if each.is_dir()]


def _matcher(fits: Fits) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """Ask with all that IPython 8 tells."""

    @completers.context_matcher()  # type: ignore[untyped-decorator, unused-ignore]
    def nbddp_matcher(context: CompletionContext) -> SimpleMatcherResult:
        matches, fragment = fits(
            context.full_text, context.cursor_line, context.cursor_position, context.token
        )
        return completers.SimpleMatcherResult(
            completions=[_as_shown(each) for each in matches],
            matched_fragment=fragment,
            suppress=bool(matches),
        )

    found: Callable[[CompletionContext], SimpleMatcherResult] = nbddp_matcher
    return found


def _as_shown(each: Suggestion) -> completers.SimpleCompletion:
    """As IPython hands it to a page."""
    return completers.SimpleCompletion(text=each.text, type=each.kind)


def _line_matcher(fits: Fits, shell: InteractiveShell) -> Callable[[str], list[str]]:
    """IPython 7 tells of no line but the one that the cursor is in: no names of ranks there."""

    def nbddp_matcher(token: str) -> list[str]:
        line: str = shell.Completer.line_buffer
        found, begun = fits(line, 0, len(shell.Completer.text_until_cursor), token)
        extra = max(0, len(begun) - len(token))  # it replaces the token alone
        return [each.text[extra:] for each in found]

    return nbddp_matcher
