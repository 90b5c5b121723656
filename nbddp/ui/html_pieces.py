"""Pieces of HTML: the style sheet, escaped text, cards, notes, and the event line of a cell.

Important styles are also inline. Some pages remove the style sheet, such as GitHub, and JupyterLab
for a notebook that is not trusted. On other pages the colours of the sheet win: they follow the
page's theme.
"""

from __future__ import annotations

from html import escape as escape_tags
from importlib.resources import files

from nbddp.record.snapshot import Snapshot
from nbddp.ui.ansi import strip
from nbddp.ui.wording import describe_events

MAX_CHARTS = 12  # unless the user chooses metrics
MAX_EVENTS = 6  # in the list; the line has a mark for every event
COLORS = {"ok": "#2e9e44", "bad": "#d83434", "warn": "#d9822b", "busy": "#2196f3", "off": "#888888"}
STRONG = "font-weight:600"
CARD_HEIGHT = 600  # pixels at most: a message may have thousands of lines
STYLE_SHEET = (
    f"<style>\n{files('nbddp.ui').joinpath('panel.css').read_text(encoding='utf-8')}</style>"
)


def escape(text: str) -> str:
    """Escape a text for HTML, and remove characters that a message to a page cannot hold."""
    return escape_tags(strip(text))


def card(text: str, *, is_error: bool = False) -> str:
    """Return a card with a message; ``text`` must be HTML already."""
    kind, label, color = "", "notice", COLORS["warn"]
    if is_error:
        kind, label, color = " nbddp-error", "failure", COLORS["bad"]
    # an element with a tabindex can be scrolled with the keyboard
    attributes = f'tabindex="0" role="region" aria-label="{label}"'
    style = (
        f"border-left:3px solid {color};padding:5px 10px;margin:5px 0;"
        f"max-height:{CARD_HEIGHT}px;overflow-y:auto"
    )
    return f'<div class="nbddp-card{kind}" {attributes} style="{style}"><pre>{text}</pre></div>'


def muted(text: str) -> str:
    """Return a muted line; empty for an empty text."""
    return f'<div class="nbddp nbddp-muted">{escape(text)}</div>' if text else ""


def dot(kind: str) -> str:
    """Return a dot in a colour of ``COLORS``."""
    return (
        f'<span class="nbddp-dot nbddp-{kind}" style="display:inline-block;width:8px;height:8px;'
        f'border-radius:4px;margin-right:6px;background-color:{COLORS[kind]}"></span>'
    )


def text_color(kind: str) -> str:
    """Return the inline style for text in a colour of ``COLORS``."""
    return f"color:{COLORS[kind]}"


def event_log(snapshot: Snapshot) -> str:
    """Return a line with a mark for each event since the cell began, and a list of the newest.

    A single event has no line: that would look like a slider.
    """
    shown = describe_events(snapshot)
    if not shown:
        return ""
    marks = ""
    for event, _, text in shown:
        place = (event.time - snapshot.began) / max(snapshot.seconds, 1e-3)
        style = f"left:{min(1.0, max(0.0, place)):.1%}"
        kind = f"nbddp-{event.mood}" if event.mood else ""
        marks += f'<span class="{kind}" style="{style}" title="{escape(text)}"></span>'
    rows = "".join(
        f'<li><span class="nbddp-at">{at}</span> {escape(text)}</li>'
        for _, at, text in shown[-MAX_EVENTS:]
    )
    left_out = max(0, len(shown) - MAX_EVENTS)
    more = f'<li class="nbddp-muted">{left_out} earlier</li>' if left_out else ""
    line = f'<div class="nbddp-line" aria-hidden="true">{marks}</div>' if len(shown) > 1 else ""
    return f'{line}<ul class="nbddp-events">{more}{rows}</ul>'
