"""Pieces of HTML: escaped text, cards, notes, and the events of a cell on a line."""

from __future__ import annotations

from html import escape as escape_tags

from nbddp.record.snapshot import Snapshot
from nbddp.record.timeline import Happening
from nbddp.ui.ansi import strip
from nbddp.ui.panel.bare import card_style
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
