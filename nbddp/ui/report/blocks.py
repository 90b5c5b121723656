"""The content of a view: a title and blocks, which are rendered as text or as HTML.

A block without content is not shown: a table without rows, a paragraph or a card without text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Mood(Enum):
    """How a text stands out."""

    PLAIN = ""
    MUTED = "muted"
    STRONG = "strong"
    WARN = "warn"
    BAD = "bad"


class Dot(Enum):
    """The coloured dot before a text."""

    OK = "ok"
    BAD = "bad"
    WARN = "warn"
    BUSY = "busy"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, or a title.

    Attributes:
        text: what is shown. In a title, the part after the first " · " is muted.
        rank: give the text the colour of this rank.
        title: the tooltip.
        html: what a page shows instead of the text. It must be escaped already.
    """

    text: str
    mood: Mood = Mood.PLAIN
    dot: Dot | None = None
    rank: int | None = None
    title: str = ""
    html: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title for each column; ``label`` describes it to a screen reader."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    label: str

    def without_empty_columns(self) -> Table:
        """Leave out the columns in which no row has a text."""
        used = [
            place for place in range(len(self.head)) if any(str(row[place]) for row in self.rows)
        ]
        rows = [[row[place] for place in used] for row in self.rows]
        return replace(self, head=[self.head[place] for place in used], rows=rows)


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. A page shows the parts between backticks as code."""

    text: str
    mood: Mood = Mood.PLAIN


def note(text: str) -> Text:
    """Return a muted paragraph."""
    return Text(text, Mood.MUTED)


@dataclass(frozen=True, slots=True)
class Code:
    """Preformatted text; the lines of a diff are coloured."""

    text: str
    is_diff: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """A preformatted message that nobody should miss. It may have ANSI colours."""

    text: str
    is_error: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture.

    Attributes:
        draw: return a PNG and its width in CSS pixels. It may load matplotlib.
        alt: what the picture shows, in words.
        text: what is shown where there are no pictures.
        html: draw the picture for a page; None if a page shows the PNG.
    """

    draw: Callable[[], tuple[bytes, int]]
    alt: str
    text: str = ""
    html: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Markup:
    """Something that has an HTML form of its own, such as a log."""

    html: Callable[[], str]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that a page folds under a title; a `Cell` as title stands out."""

    title: str | Cell
    blocks: Sequence[Block]
    is_open: bool = False


Block = Table | Text | Code | Card | Picture | Markup | Details


@dataclass(frozen=True, slots=True)
class Report:
    """What a view shows."""

    title: str | Cell
    blocks: Sequence[Block] = ()

    @property
    def picture(self) -> Picture | None:
        """The first picture, if there is one."""
        return next((block for block in self.blocks if isinstance(block, Picture)), None)
