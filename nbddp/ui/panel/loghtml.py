"""Lines that ranks wrote, as one block of HTML or of plain text, with their ranks in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from nbddp.ui.ansi import strip, to_html
from nbddp.ui.palette import rank_color
from nbddp.ui.tails import Line
from nbddp.ui.words import say_tag


def log_html(lines: Sequence[Line], *, earlier: str = "") -> str:
    """Lines as HTML, which reads as plain text where a page strips all styles.

    Args:
        lines: from top to bottom.
        earlier: what to say, in a first line, of lines that are not there any more.
    """
    tag = cache(_html_tag)  # a few tags stand before hundreds of lines
    rows = [_span("earlier", earlier)] if earlier else []
    for ranks, mark, text in _rows(lines):
        rows.append(
            f"{tag(ranks, mark)} {to_html(text)}" if ranks else _span("said", f"nbddp: {text}")
        )
    # JupyterLab colours the classes of to_html inside jp-RenderedText only
    return '<div class="jp-RenderedText"><pre class="nbddp-log">' + "\n".join(rows) + "</pre></div>"


def log_text(lines: Sequence[Line], *, earlier: str = "") -> str:
    """The same as plain text, with no newline at the end."""
    rows = [strip(earlier)] if earlier else []
    for ranks, mark, text in _rows(lines):
        rows.append(strip(f"{say_tag(ranks, mark) if ranks else 'nbddp:'} {text}"))
    return "\n".join(rows)


def _rows(lines: Sequence[Line]) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """Ranks, mark and text of every row: a value's text may have several."""
    for line in lines:
        for text in line.text.split("\n"):
            yield line.ranks, line.mark, text


def _html_tag(ranks: tuple[int, ...], mark: str) -> str:
    color = rank_color(ranks[0])
    return f'<span class="nbddp-tag" style="color:{color}">{to_html(say_tag(ranks, mark))}</span>'


def _span(kind: str, text: str) -> str:
    return f'<span class="nbddp-{kind}">{to_html(text)}</span>'
