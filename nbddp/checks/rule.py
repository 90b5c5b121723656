"""A rule: what it finds, why that is wrong, how to mend it, and an example of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A place where a rule has found something.

    Attributes:
        line: as the editor shows it, 0 for none in particular.
        text: what is so there, in one sentence.
    """

    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule has found, as the user reads it."""

    rule: str
    line: int
    text: str
    why: str
    fix: str
    notebook: str
    is_fact: bool = False

    @property
    def headline(self) -> str:
        """It in one line.

        >>> Finding(rule="ND101", line=3, text="It hangs.", why="", fix="", notebook="").headline
        'ND101 line 3: It hangs.'
        """
        place = f" line {self.line}" if self.line else ""
        return f"{self.rule}{place}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[T]):
    """One mistake, and who finds it.

    Attributes:
        id: ``ND1xx`` looks at code alone, ``ND2xx`` at what the ranks say.
        title: the mistake, in a few words.
        why: what becomes of it.
        fix: how to mend it.
        notebook: where it is taught.
        find: yields the places, in order.
        bad: an example in which it finds something.
        good: one like it in which it finds nothing.
        is_fact: it tells what is so, and not that it is wrong: said only to who asks.
    """

    id: str
    title: str
    why: str
    fix: str
    notebook: str
    find: Callable[[T], Iterable[Found]]
    bad: T
    good: T
    is_fact: bool = False

    def findings(self, subject: T) -> Iterator[Finding]:
        """What it finds there."""
        for each in self.find(subject):
            yield Finding(
                rule=self.id,
                line=each.line,
                text=each.text,
                why=self.why,
                fix=self.fix,
                notebook=self.notebook,
                is_fact=self.is_fact,
            )
