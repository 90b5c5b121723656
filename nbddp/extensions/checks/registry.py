"""The rules by their ids: a function that finds a mistake, and its texts in ``rules.md``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_SECTION = re.compile(
    r"^## (?P<id>ND\d+): (?P<title>[^\n]+)\n\n(?P<why>.+?)\n\n\*\*Fix:\*\* (?P<fix>.+?)\n\n"
    r"Notebook: `(?P<notebook>[^`]+)`\n(?P<programs>.*?)(?=^## |\Z)",
    re.MULTILINE | re.DOTALL,
)
_PROGRAM = re.compile(r"^```python (wrong|right).*\n((?:.*\n)*?)```$", re.MULTILINE)
TEXT = Path(__file__).with_name("rules.md").read_text()


# a result of a rule: a node of the code, a name or a line (0 for no line), and a sentence about it
Hit = tuple[ast.AST | str | int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A result of a rule, as the user sees it."""

    rule: str
    line: int
    text: str
    why: str
    fix: str
    is_fact: bool = False

    @property
    def headline(self) -> str:
        """The finding in one line.

        >>> Finding(rule="ND101", line=3, text="It hangs.", why="", fix="").headline
        'ND101 line 3: It hangs.'
        """
        location = f" line {self.line}" if self.line else ""
        return f"{self.rule}{location}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One mistake, and the function that finds it.

    Attributes:
        id: ``ND1xx`` for rules over code only, ``ND2xx`` for rules over the facts of ranks.
        title: the mistake, in a few words.
        why: the consequence of the mistake.
        fix: the correction.
        notebook: the notebook that explains it.
        programs: ``wrong`` is a program with the mistake, ``right`` one without it.
        find: yields for each mistake its location (line, code or variable) and a sentence.
        is_fact: whether it reports a fact and not a mistake; it is shown only on request.
    """

    id: str
    title: str
    why: str
    fix: str
    notebook: str
    programs: dict[str, str]
    find: Callable[[Any], Iterable[Hit]]
    is_fact: bool

    def findings(self, subject: Any) -> Iterator[Finding]:
        """Yield the findings in a :class:`CellSource` or in :class:`GroupFacts`."""
        texts = {"rule": self.id, "why": self.why, "fix": self.fix}
        for location, text in self.find(subject):
            line = location if isinstance(location, int) else subject.line(location)
            yield Finding(line=line, text=text, is_fact=self.is_fact, **texts)


F = TypeVar("F", bound=Callable[[Any], Iterable[Hit]])

RULES: dict[str, Rule] = {}


def rule(id: str, *, is_fact: bool = False) -> Callable[[F], F]:  # noqa: A002 - the word that users see
    """Register the decorated function as the one that finds this mistake."""

    def register(find: F) -> F:
        RULES[id] = Rule(id=id, find=find, is_fact=is_fact, **_TEXTS[id])
        return find

    return register


def _read_texts() -> dict[str, dict[str, Any]]:
    """Return the texts of each rule, by its id."""
    found: dict[str, dict[str, Any]] = {}
    for section in _SECTION.finditer(TEXT):
        texts: dict[str, Any] = {
            name: " ".join(section[name].split()) for name in ("title", "why", "fix", "notebook")
        }
        found[section["id"]] = texts | {"programs": dict(_PROGRAM.findall(section["programs"]))}
    return found


_TEXTS = _read_texts()
