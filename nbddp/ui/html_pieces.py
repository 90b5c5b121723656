"""Pieces of HTML: the style sheet, escaped text, cards, notes, and the events of a cell on a line.

Looks that matter are also inline styles. They stay where a page drops the style sheet, as GitHub
does, and JupyterLab in a notebook that is not trusted. Where the sheet is there, its own colours,
which follow the page's theme, come first.
"""

from __future__ import annotations

from html import escape as escape_tags
from importlib.resources import files

from nbddp.record.snapshot import Snapshot
from nbddp.record.timeline import Happening
from nbddp.ui.ansi import strip
from nbddp.ui.words import say_event, say_seconds

MAX_EVENTS = 6  # the newest are listed, all are on the line
_BAD_EVENTS = {"failure", "exit", "start failed", "not healed"}
_WARN_EVENTS = {"interrupt", "restart asked", "stop asked", "kill asked", "no progress", "fault"}


def escape(text: str) -> str:
    """Escape a text, and remove what a message to a page cannot hold."""
    return escape_tags(strip(text))


def card(text: str, *, is_error: bool = False) -> str:
    """Return a card with a message; ``text`` is HTML already."""
    kind = " nbddp-error" if is_error else ""
    style = card_style(is_error=is_error)
    # the keyboard can scroll it
    said = f'tabindex="0" role="region" aria-label="{"failure" if is_error else "notice"}"'
    return f'<div class="nbddp-card{kind}" {said} style="{style}"><pre>{text}</pre></div>'


def note(text: str) -> str:
    """Return a muted line."""
    return f'<div class="nbddp nbddp-muted">{escape(text)}</div>'


# ---- the time line


def time_line(snapshot: Snapshot) -> str:
    """Draw the events since the cell began as marks on a line, and list the newest."""
    said = [(event, say_event(event)) for event in snapshot.events]
    shown = [(event, text) for event, text in said if text]
    if not shown:
        return ""
    marks = "".join(_mark(event, text, snapshot) for event, text in shown)
    rows = "".join(_event(event, text, snapshot) for event, text in shown[-MAX_EVENTS:])
    left_out = max(0, len(shown) - MAX_EVENTS)
    more = f'<li class="nbddp-muted">{left_out} earlier</li>' if left_out else ""
    line = f'<div class="nbddp-line" aria-hidden="true">{marks}</div>'
    return f'{line}<ul class="nbddp-events">{more}{rows}</ul>'


def _mark(event: Happening, text: str, snapshot: Snapshot) -> str:
    span = max(snapshot.seconds, 1e-3)
    place = min(1.0, max(0.0, (event.at - snapshot.began) / span))
    return f'<span class="{_kind(event)}" style="left:{place:.1%}" title="{escape(text)}"></span>'


def _event(event: Happening, text: str, snapshot: Snapshot) -> str:
    at = say_seconds(max(0.0, event.at - snapshot.began))
    return f'<li><span class="nbddp-at">{at}</span> {escape(text)}</li>'


def _kind(event: Happening) -> str:
    if event.kind in _BAD_EVENTS:
        return "nbddp-bad"
    return "nbddp-warn" if event.kind in _WARN_EVENTS else ""


COLORS = {"ok": "#2e9e44", "bad": "#d83434", "warn": "#d9822b", "busy": "#2196f3", "off": "#888888"}
STRONG = "font-weight:600"
CARD_HEIGHT = 600  # pixels at most: a message may have thousands of lines


def color_of(kind: str) -> str:
    """The colour of one of the sheet's kinds; where it has none, something goes on.

    >>> color_of("nbddp-bad"), color_of("")
    ('#d83434', '#2196f3')
    """
    return COLORS.get(kind.removeprefix("nbddp-"), COLORS["busy"])


def dot(kind: str) -> str:
    """A dot that says how it is."""
    return (
        f'<span class="nbddp-dot {kind}" style="display:inline-block;width:8px;height:8px;'
        f'border-radius:4px;margin-right:6px;background-color:{color_of(kind)}"></span>'
    )


def card_style(*, is_error: bool) -> str:
    """Of a few lines that nobody should miss."""
    color = COLORS["bad" if is_error else "warn"]
    scrolls = f"max-height:{CARD_HEIGHT}px;overflow-y:auto"
    return f"border-left:3px solid {color};padding:5px 10px;margin:5px 0;{scrolls}"


def ink(kind: str) -> str:
    """Of words that say that something is wrong, or waits."""
    return f"color:{COLORS[kind]}"


SHEET = f"<style>\n{files('nbddp.ui').joinpath('panel.css').read_text(encoding='utf-8')}</style>"
