"""A snapshot as HTML, piece by piece. Whatever ranks or users named or wrote is escaped here."""

from __future__ import annotations

from html import escape as escape_tags

from nbddp.record.snapshot import Snapshot
from nbddp.record.timeline import Happening
from nbddp.ui.ansi import strip
from nbddp.ui.panel.bare import card_style
from nbddp.ui.words import (
    say_event,
    say_seconds,
)

MAX_EVENTS = 6  # the newest are listed, all are on the line
_BAD_EVENTS = {"failure", "exit", "start failed", "not healed"}
_WARN_EVENTS = {"interrupt", "restart asked", "stop asked", "kill asked", "no progress", "fault"}


def escape(text: str) -> str:
    """Text for a page: no tags, and nothing that no message to a page can hold."""
    return escape_tags(strip(text))


def card(text: str, *, is_error: bool = False) -> str:
    """A few lines that nobody should miss; ``text`` is HTML already."""
    kind = " nbddp-error" if is_error else ""
    style = card_style(is_error=is_error)
    # whoever has no mouse scrolls it with the keyboard
    said = f'tabindex="0" role="region" aria-label="{"failure" if is_error else "notice"}"'
    return f'<div class="nbddp-card{kind}" {said} style="{style}"><pre>{text}</pre></div>'


def note(text: str) -> str:
    """A word in passing."""
    return f'<div class="nbddp nbddp-muted">{escape(text)}</div>'


# ---- the time line


def time_line(snapshot: Snapshot) -> str:
    """What happened since the cell began: marks on a line, and the newest in words."""
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
