"""Render reports as text or as HTML."""

from __future__ import annotations

import re
import textwrap
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence

from nbddp.charts.palette import rank_class, rank_color
from nbddp.ui.ansi import to_html
from nbddp.ui.html_pieces import STRONG, STYLE_SHEET, card, dot, escape, text_color
from nbddp.ui.report.blocks import (
    Block,
    Card,
    Cell,
    Code,
    Details,
    Dot,
    Markup,
    Mood,
    Picture,
    Report,
    Table,
    Text,
)
from nbddp.ui.wording import align_columns

WIDTH = 92  # characters in a line of a folded paragraph
_CLASSES = {
    Mood.MUTED: "nbddp-muted",
    Mood.DIM: "nbddp-dim",
    Mood.WARN: "nbddp-waits",
    Mood.BAD: "nbddp-wrong",
}
_STYLES = {
    Mood.STRONG: STRONG,
    Mood.DIM: "opacity:.5",
    Mood.WARN: text_color("warn"),
    Mood.BAD: text_color("bad"),
}


# ---- text


def render_text(report: Report) -> str:
    """Render a report for a terminal."""
    return "\n".join([str(report.title), *text_lines(report.blocks)])


def text_lines(blocks: Sequence[Block], *, width: int = 0) -> Iterator[str]:
    """Render blocks as lines, with paragraphs wrapped to ``width`` unless it is 0."""
    before = ":"  # no empty line between a caption and its table
    for block in blocks:
        if not (lines := _lines(block, width)):
            continue
        if isinstance(block, (Table, Card, Code, Picture)) and not before.endswith(":"):
            yield ""
        yield from lines
        before = lines[-1]


def _lines(block: Block, width: int) -> list[str]:
    match block:
        case Table(head=head, rows=rows):
            texts = [[str(cell) for cell in row] for row in rows]
            return align_columns([head, *texts]) if texts else []
        case Text(text=text) if width:
            return textwrap.wrap(text, width)
        case Details(title=title, blocks=blocks):
            body = "\n".join(text_lines(blocks, width=width or WIDTH))
            return [str(title), *textwrap.indent(body, "  ").split("\n")]
        case _:
            return block.text.split("\n") if block.text else []


# ---- HTML


def render_html(report: Report) -> str:
    """Render a report for a page, with its style sheet.

    The keyboard can focus the report, to scroll a wide table.
    """
    cell = Cell(report.title) if isinstance(report.title, str) else report.title
    title = f"<div>{title_html(cell, role='status')}</div>" if cell.text else ""
    region = f'tabindex="0" role="region" aria-label="{escape(cell.text) or "cell"}"'
    return f'{STYLE_SHEET}<div class="nbddp" {region}>{title}{blocks_html(report.blocks)}</div>'


def blocks_html(blocks: Iterable[Block]) -> str:
    """Render blocks as HTML."""
    return "".join(map(_html, blocks))


def _html(block: Block) -> str:
    match block:
        case Table():
            return _table(block) if block.rows else ""
        case Text(text=text, mood=mood):
            return f"<div{_mood_attributes(mood)}>{_prose(text)}</div>" if text else ""
        case Code():
            return f'<div class="jp-RenderedText"><pre>{_code(block)}</pre></div>'
        case Card(text=text, is_error=is_error):
            return card(to_html(text), is_error=is_error) if text else ""
        case Picture():
            return block.html() if block.html else _png(block)
        case Markup(html=html):
            return html()
        case Details():
            return _details(block)


def _details(details: Details) -> str:
    title = details.title
    summary = _prose(title) if isinstance(title, str) else title_html(title)
    opening = f"<details{' open' if details.is_open else ''}>"
    return f"{opening}<summary>{summary}</summary>{blocks_html(details.blocks)}</details>"


def _mood_attributes(mood: Mood) -> str:
    kind, style = _CLASSES.get(mood, ""), _STYLES.get(mood, "")
    return (f' class="{kind}"' if kind else "") + (f' style="{style}"' if style else "")


def title_html(cell: Cell, *, role: str = "") -> str:
    """Render a title, with a pulsing dot if it is busy. ``role`` is for screen readers."""
    if cell.html:
        return cell.html
    first, _, rest = cell.text.partition(" · ")
    mark = dot(cell.dot.value) if cell.dot else ""
    if cell.dot is Dot.BUSY:
        mark = f'<span class="nbddp-running">{mark}</span>'
    role_html = f' role="{role}"' if role else ""
    # each fact in its own element: a line that is too long breaks between facts, not in a name
    facts = " ".join(f"<span>· {_prose(fact)}</span>" for fact in rest.split(" · ") if fact)
    muted = f' <span class="nbddp-muted nbddp-facts">{facts}</span>' if rest else ""
    state = f'<span class="nbddp-state"{role_html} style="{STRONG}">{_prose(first)}</span>'
    return f"{mark}{state}{muted}"


def _table(table: Table) -> str:
    # a long name may break after "_"
    names = [escape(each).replace("_", "_<wbr>") for each in table.head]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<table class="nbddp-ranks" aria-label="{escape(table.label)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    shown = cell.html or escape(cell.text)
    if cell.rank is not None:
        color = f"color:{rank_color(cell.rank)}"
        shown = f'<span class="nbddp-chip {rank_class(cell.rank)}" style="{color}">{shown}</span>'
    if cell.mood is not Mood.PLAIN:
        shown = f"<span{_mood_attributes(cell.mood)}>{shown}</span>"
    mark = dot(cell.dot.value) if cell.dot else ""
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    return f"<td{title}>{mark}{shown}</td>"


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _code(code: Code) -> str:
    if not code.is_diff:
        return escape(code.text)
    kinds = {"+": "nbddp-add", "-": "nbddp-del"}
    return "\n".join(
        f'<span class="{kinds.get(line[:1], "nbddp-muted")}">{escape(line)}</span>'
        for line in code.text.splitlines()
    )


def _png(picture: Picture) -> str:
    png, width = picture.draw()
    return (
        f'<div class="nbddp-charts"><img src="data:image/png;base64,{b64encode(png).decode()}"'
        f' style="max-width:100%;width:{width}px" alt="{escape(picture.alt)}"></div>'
    )
