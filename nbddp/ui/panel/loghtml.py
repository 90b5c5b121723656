"""Lines that ranks wrote, as HTML or as plain text, with their ranks in front."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache

from nbddp.charts.palette import rank_class, rank_color
from nbddp.ui.ansi import strip, to_html
from nbddp.ui.tails import Line
from nbddp.ui.words import say_tag

# inline, as a page that does not trust the notebook drops the style sheet; the end is in view
# 260 pixels are 15 whole rows of 17, a border above and padding below
_SCROLLS = (
    "box-sizing:border-box;max-height:260px;overflow-y:auto;display:flex;"
    "flex-direction:column-reverse;border-top:1px solid #8883"
)


def log_html(lines: Sequence[Line], *, earlier: str = "") -> str:
    """Lines as HTML, which reads as plain text where a page strips all styles.

    Args:
        lines: from top to bottom.
        earlier: what to say, in a first line, of lines that are not there any more.
    """
    rows = [aside(earlier)] if earlier else []
    return block([*rows, *html_rows(lines)])


def scrolled(html: str) -> str:
    """As high as the panel's log at most, with its end in view."""
    # whoever has no mouse scrolls it with the keyboard
    said = 'tabindex="0" role="region" aria-label="log"'
    return f'<div class="nbddp-kept" {said} style="{_SCROLLS}"><div>{html}</div></div>'


def html_rows(lines: Sequence[Line], *, has_times: bool = False) -> list[str]:
    """Each line as HTML; with the time when it came in front, which a page shows on demand."""
    tag = cache(_html_tag)  # a few tags stand before hundreds of lines
    rows = []
    for line, text in _rows(lines):
        shown = "" if text is None else to_html(text)
        if line is not None and line.ranks:
            shown = tag(line.ranks, line.mark) + (f" {shown}" if text is not None else "")
        elif line is not None:
            shown = _span("said", f"nbddp: {text}")
        rows.append((_clock(line.at) if has_times and line is not None else "") + shown)
    return rows


def block(rows: Sequence[str]) -> str:
    """Rows of HTML as one block."""
    # JupyterLab colours the classes of to_html inside jp-RenderedText only
    return '<div class="jp-RenderedText"><pre class="nbddp-log">' + "\n".join(rows) + "</pre></div>"


def aside(text: str) -> str:
    """A word of ours between the lines, such as how many are left out."""
    return _span("earlier", text)


def log_text(lines: Sequence[Line], *, earlier: str = "") -> str:
    """The same as plain text, with no newline at the end."""
    rows = [strip(earlier)] if earlier else []
    for line, text in _rows(lines):
        tag = None if line is None else say_tag(line.ranks, line.mark) if line.ranks else "nbddp:"
        rows.append(strip(" ".join(each for each in (tag, text) if each is not None)))
    return "\n".join(rows)


def _rows(lines: Sequence[Line]) -> Iterator[tuple[Line | None, str | None]]:
    """Yield each row of text, with the line if its tag precedes the text.

    A value of several rows has its tag in a row above: its columns stay aligned.
    """
    for line in lines:
        texts = line.text.split("\n")
        has_own_row = line.ranks and line.mark and len(texts) > 1
        if has_own_row:
            yield line, None
        for text in texts:
            yield None if has_own_row else line, text


def _clock(at: float) -> str:
    if not at:
        return ""
    said = f"{_second(int(at))}.{int(at % 1 * 10)}"
    return f'<span class="nbddp-time">{said} </span>'


@cache
def _second(at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _html_tag(ranks: tuple[int, ...], mark: str) -> str:
    if not ranks:
        return ""
    color = rank_color(ranks[0])
    kind = f"nbddp-tag {rank_class(ranks[0])}"
    return f'<span class="{kind}" style="color:{color}">{to_html(say_tag(ranks, mark))}</span>'


def _span(kind: str, text: str) -> str:
    return f'<span class="nbddp-{kind}">{to_html(text)}</span>'
