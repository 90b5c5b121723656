"""The content of a report: a title and blocks, to render as text or as HTML.

Blocks without content are not shown, such as tables without rows and paragraphs without text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Mood(Enum):
    """The emphasis of a text."""

    PLAIN = ""
    MUTED = "muted"
    DIM = "dim"
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
        text: the content. In a title, the part after the first " · " is muted.
        rank: the rank whose colour the text has.
        title: the tooltip.
        html: what a page shows instead of the text; escaped already.
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
    """A table with a title for each column; ``label`` is the description for screen readers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    label: str

    def without_empty_columns(self) -> Table:
        """Return the table without the columns in which all cells are empty."""
        places = range(len(self.head))
        used = [place for place in places if any(str(row[place]) for row in self.rows)]
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
    """An important preformatted message, possibly with ANSI colours."""

    text: str
    is_error: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture.

    Attributes:
        draw: returns a PNG and its width in CSS pixels; it may load matplotlib.
        alt: a description of the picture.
        text: the text form, for output without pictures.
        html: returns the picture as HTML; None if a page shows the PNG.
    """

    draw: Callable[[], tuple[bytes, int]]
    alt: str
    text: str = ""
    html: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Markup:
    """Content with its own HTML, such as a log."""

    html: Callable[[], str]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that a page folds under a title, which stands out if it is a `Cell`."""

    title: str | Cell
    blocks: Sequence[Block]
    is_open: bool = False


Block = Table | Text | Code | Card | Picture | Markup | Details


@dataclass(frozen=True, slots=True)
class Report:
    """A title with blocks."""

    title: str | Cell
    blocks: Sequence[Block] = ()

    @property
    def picture(self) -> Picture | None:
        """The first picture, if there is one."""
        return next((block for block in self.blocks if isinstance(block, Picture)), None)
