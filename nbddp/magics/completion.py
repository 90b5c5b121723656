"""Complete (Tab) and explain (Shift+Tab) commands, options, values and variables of ranks."""

from __future__ import annotations

import builtins
import keyword
import re
from argparse import REMAINDER, Action
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core import completer as completers
from IPython.core.interactiveshell import InteractiveShell

from nbddp.errors import RequestError
from nbddp.group.rank_group import RankGroup
from nbddp.lifecycle.group_state import GroupState
from nbddp.magics.auto_mode import AutoMode
from nbddp.magics.magic_parser import MagicParser
from nbddp.magics.parser import CELL, COMMANDS
from nbddp.record.replay_log import SET_IN_EACH_RANK
from nbddp.sigint import wait_for_all
from nbddp.wire.messages import JsonDict
from nbddp.wire.request_messages import Complete, Inspect

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult

# a name at the end that is no attribute, module or file
_BEGUN_NAME = re.compile(r"""(?!\s*(?:from|import)\b)(?:[^'"]*[^'"\w.])?([^\W\d]\w*)""")
TAB_TIMEOUT = 0.2  # seconds that a completion may delay typing
HELP_TIMEOUT = 1.0  # seconds that a page may wait for Shift+Tab


class Match(NamedTuple):
    """A completion and its kind, such as ``option``."""

    text: str
    kind: str


# the completions, and the text before the cursor that they replace
Matches = tuple[list[Match], str]
Completer = Callable[[str, int, int], Matches]


class Completion:
    """Answers Tab and Shift+Tab from the parsers, and for variables from the lowest rank."""

    def __init__(self, group: RankGroup, auto: AutoMode) -> None:
        self._group = group
        self._auto = auto
        self._matcher: Any = None
        self._original_inspect: Any = None

    def install(self, shell: InteractiveShell) -> None:
        """Extend IPython's completer, and the inspect requests of a kernel if there is one."""
        has_context = hasattr(completers, "context_matcher")
        self._matcher = _matcher(self.complete) if has_context else _line_matcher(self, shell)
        shell.Completer.custom_matchers.append(self._matcher)
        kernel: Any = getattr(shell, "kernel", None)
        if hasattr(kernel, "do_inspect"):
            self._original_inspect = kernel.do_inspect
            kernel.do_inspect = self._do_inspect

    def remove(self, shell: InteractiveShell) -> None:
        """Restore the completer and the kernel, unless another extension replaced ours."""
        shell.Completer.custom_matchers.remove(self._matcher)
        kernel: Any = getattr(shell, "kernel", None)
        if getattr(kernel, "do_inspect", None) == self._do_inspect:
            del kernel.do_inspect  # this restores the method of the class

    def complete(self, text: str, row: int, column: int) -> Matches:
        """Return the completions at a position in a cell."""
        lines = text.split("\n")
        line = lines[row][:column]
        if _is_magic(line):
            return self._complete_magic(line)
        if not self._is_for_ranks(text, row) or line.lstrip().startswith("%"):
            return [], ""
        return self._complete_name("\n".join([*lines[:row], line]), line)

    def explain(self, code: str, cursor: int, detail: int = 0) -> str:
        """Return the help for a position in a cell; empty where only the kernel can answer."""
        row = code[:cursor].count("\n")
        if self._is_for_ranks(code, row):
            request = Inspect(code=code, cursor=cursor, detail=detail)
            answer = self._ask_rank(request, HELP_TIMEOUT)
            return str(answer.get("text", ""))
        line = code.split("\n")[row]
        if not _is_magic(line):
            return ""
        magic, command, *_ = (*line.split(), "")
        parser = CELL if magic == CELL.prog else COMMANDS.get(command)
        return "" if parser is None else parser.format_help()

    def _do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, *more: Any) -> Any:
        text = self.explain(code, cursor_pos, detail_level)
        if not text:
            return self._original_inspect(code, cursor_pos, detail_level, *more)
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    def _is_for_ranks(self, text: str, row: int) -> bool:
        first = text.partition("\n")[0]
        is_in_cell = row > 0 and first.startswith(CELL.prog)
        return is_in_cell or (self._auto.is_on and not first.startswith("%%"))

    def _complete_name(self, code: str, line: str) -> Matches:
        if not line.strip():
            return [], ""
        answer = self._ask_rank(Complete(code=code, cursor=len(code)), TAB_TIMEOUT)
        if not answer:
            return _names_of_any_rank(line)
        return [Match(each, "name") for each in answer.get("matches", ())], answer.get("text", "")

    def _ask_rank(self, request: Complete | Inspect, seconds: float) -> JsonDict:
        """Return the answer of the lowest rank; empty if it is busy, late or gone."""
        session = self._group.session
        if session.life.state is not GroupState.IDLE:
            return {}
        with suppress(RequestError):  # the group ended or became busy in the meantime
            answer = session.send_request(0, session.numbered(request))
            wait_for_all([answer], seconds)
            return answer.result().content if answer.done() else {}
        return {}

    def _complete_magic(self, line: str) -> Matches:
        before, _, word = line.rpartition(" ")
        flag, equals, value = word.partition("=")
        if equals:  # complete the value in --rank=0
            before, word = f"{before} {flag}", value
        magic, *words = before.split()
        found = [Match(each, "command") for each in COMMANDS]
        if magic == CELL.prog or words:
            parser = CELL if magic == CELL.prog else COMMANDS.get(words.pop(0))
            found = self._complete_command(parser, words, word) if parser else []
        return [each for each in found if each.text.startswith(word)], word

    def _complete_command(
        self, parser: MagicParser[Any], words: list[str], word: str
    ) -> list[Match]:
        options = parser._option_string_actions.items()
        takes_value = {name: each for name, each in options if each.nargs != 0}
        if words and words[-1] in takes_value:
            return self._possible_values(parser, takes_value[words[-1]], word)
        free = [
            text
            for before, text in zip(["", *words], words, strict=False)
            if not text.startswith("-") and before not in takes_value
        ]
        arguments = [each for each in parser._actions if not each.option_strings]
        if arguments and arguments[-1].nargs in ("*", "+"):
            arguments += [arguments[-1]] * len(free)
        following = arguments[len(free)] if len(free) < len(arguments) else None
        if following is not None and following.nargs == REMAINDER:
            return []  # only the script knows its arguments
        values = []
        if following is not None and not word.startswith("-"):
            values = self._possible_values(parser, following, word)
        return values or [Match(each, "option") for each in parser.options() if each not in words]

    def _possible_values(self, parser: MagicParser[Any], action: Action, word: str) -> list[Match]:
        """Return the possible values of an option or argument, if they can be listed."""
        if action.choices is not None:
            return [Match(str(each), "value") for each in action.choices]
        declared = parser.declared[action.dest].metadata
        match declared.get("complete"):
            case "rank":
                return [Match(str(rank), "rank") for rank in self._group.life.all_ranks]
            case "ranks":
                begin, comma, _ = word.rpartition(",")
                ranks = {str(rank) for rank in self._group.life.all_ranks} - {*begin.split(",")}
                return [Match(f"{begin}{comma}{rank}", "rank") for rank in sorted(ranks, key=int)]
            case "command":
                return [Match(each, "command") for each in COMMANDS]
            case "expression":
                return self._complete_name(word, word)[0]
            case function if callable(function):
                kind = declared["names"].split()[-1].lower()
                return [Match(each, kind) for each in function()]
        return []


def _names_of_any_rank(line: str) -> Matches:
    """Complete a name while no rank answers. The kernel completes attributes, modules and files."""
    match = _BEGUN_NAME.fullmatch(line)
    if match is None:
        return [], ""
    begun = match[1]
    names = sorted({*SET_IN_EACH_RANK, *dir(builtins), *keyword.kwlist})
    # the beginning itself hides the names of the kernel, which the ranks do not have
    found = [each for each in names if each.startswith(begun)] or [begun]
    return [Match(each, "name") for each in found], begun


def _is_magic(line: str) -> bool:
    return line.lstrip().startswith(("%ddp ", "%%ddp "))


def _matcher(complete: Completer) -> Any:
    """Return a matcher for IPython 8 and later, which pass the whole cell."""

    @completers.context_matcher()  # type: ignore[untyped-decorator, unused-ignore]
    def nbddp_matcher(context: CompletionContext) -> SimpleMatcherResult:
        found, fragment = complete(context.full_text, context.cursor_line, context.cursor_position)
        return completers.SimpleMatcherResult(
            completions=[completers.SimpleCompletion(each.text, type=each.kind) for each in found],
            matched_fragment=fragment,
            suppress=bool(found),
        )

    return nbddp_matcher


def _line_matcher(completion: Completion, shell: InteractiveShell) -> Callable[[str], list[str]]:
    """Return a matcher for IPython 7. It gets only one line, so it completes no variables."""

    def nbddp_matcher(token: str) -> list[str]:
        line: str = shell.Completer.line_buffer
        found, begun = completion.complete(line, 0, len(shell.Completer.text_until_cursor))
        extra = max(0, len(begun) - len(token))  # IPython replaces only the token
        return [each.text[extra:] for each in found]

    return nbddp_matcher
