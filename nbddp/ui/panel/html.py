"""A snapshot as HTML, piece by piece. Whatever ranks or users named or wrote is escaped here."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape as escape_tags

from nbddp.charts.palette import rank_class, rank_color
from nbddp.errors import say_place
from nbddp.formatting import format_bytes
from nbddp.lifecycle.states import GroupState
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.record.timeline import Happening
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.ansi import strip
from nbddp.ui.gpus import say_gpu, say_whole_gpu
from nbddp.ui.panel.bare import STRONG, card_style, dot, ink
from nbddp.ui.words import (
    say_awaited,
    say_bar,
    say_cpu,
    say_event,
    say_facts,
    say_lag,
    say_refused,
    say_seconds,
    say_step,
)

MAX_EVENTS = 6  # the newest are listed, all are on the line
MAX_ROWS = 32  # ranks in the table; a bigger group shows those that matter
_DOTS = {
    GroupState.OFF: "nbddp-off",
    GroupState.IDLE: "nbddp-ok",
    GroupState.BROKEN: "nbddp-bad",
    GroupState.INTERRUPTING: "nbddp-warn",
    GroupState.STOPPING: "nbddp-warn",
}
_TITLE = re.compile(r"\S+ #\d+(?: of group (?:\[[^]]*\]|'[^']*'|\S+))?")  # of a collective
_BAD_EVENTS = {"failure", "exit", "start failed", "not healed"}
_WARN_EVENTS = {"interrupt", "restart asked", "stop asked", "kill asked", "no progress", "fault"}


def escape(text: str) -> str:
    """Text for a page: no tags, and nothing that no message to a page can hold."""
    return escape_tags(strip(text))


def svg_source(picture: str) -> str:
    """An SVG picture as the source of an image: a page that takes SVG away shows that."""
    return f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"


def state_line(snapshot: Snapshot) -> str:
    """What the group does, for how long, and what kind of group it is; it fits into a line."""
    kind = _DOTS.get(snapshot.state, "")
    mood = ' class="nbddp-running"' if snapshot.state.is_busy else ""
    elapsed = f" · {say_seconds(snapshot.seconds)}" if snapshot.state.is_busy else ""
    state = f"{escape(snapshot.state.value)}{elapsed}"
    facts = " · ".join(map(escape, [*say_facts(snapshot), *filter(None, [snapshot.run])]))
    return (
        f"<span{mood}>{dot(kind)}"
        f'<span class="nbddp-state" style="{STRONG}">{state}</span> '
        f'<span class="nbddp-muted">· {facts}</span></span>'
    )


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


def alarm(snapshot: Snapshot) -> str:
    """The hang card, and a word on forged messages; nothing while all is well."""
    hang = (
        f'<div class="nbddp" role="alert">{card(escape(snapshot.alarm))}</div>'
        if snapshot.alarm
        else ""
    )
    return hang + (note(say_refused(snapshot.refused)) if snapshot.refused else "")


def late(snapshot: Snapshot) -> str:
    """The rank that the others wait for; nothing if there is none."""
    if snapshot.awaited is None:
        return ""
    said = escape(say_awaited(snapshot.awaited))
    return f'<div class="nbddp"><span class="nbddp-waits" style="{ink("warn")}">{said}</span></div>'


# ---- the table of ranks

Cell = Callable[[RankSnapshot], str]


def rank_table(ranks: Sequence[RankSnapshot], *, curves: Mapping[str, Cell] | None = None) -> str:
    """One row for each rank; columns that are empty all the way down are left out.

    ``curves`` draws what stands before the numbers, as HTML, by the column's title.
    """
    shown, drawn = _most_telling(ranks), curves or {}
    cells = [
        (title, [_joined(drawn.get(title, _empty)(each), say(each)) for each in shown])
        for title, say in COLUMNS
    ]
    cells = [(title, column) for title, column in cells if any(column)]
    head = "".join(f'<th scope="col">{title}</th>' for title, _ in cells)
    rows = zip(*(column for _, column in cells), strict=True)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    left_out = len(ranks) - len(shown)
    room = "" if any(each.bars for each in shown) else " nbddp-roomy"
    more = f'<div class="nbddp-muted">and {left_out} more ranks</div>' if left_out else ""
    return (
        f'<table class="nbddp-ranks{room}" aria-label="ranks"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{more}"
    )


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _empty(_each: RankSnapshot) -> str:
    return ""


def _most_telling(ranks: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """All that fit: those with trouble first, then those that wait, in order of rank."""
    chosen = sorted(
        ranks,
        key=lambda each: (not each.is_cause, each.is_well, each.state != "waiting", each.rank),
    )
    return sorted(chosen[:MAX_ROWS], key=lambda each: each.rank)


def _rank(each: RankSnapshot) -> str:
    """Its number, and a mark where it is slow, with the reason where the mouse rests."""
    number = (
        f'<span class="nbddp-chip {rank_class(each.rank)}"'
        f' style="color:{rank_color(each.rank)}">{each.rank}</span>'
    )
    if each.lag is None:
        return number
    why = escape(say_lag(each.lag))
    return (
        f'{number} <span class="nbddp-waits" style="{ink("warn")}" role="img" title="{why}"'
        f' aria-label="{why}">↓ slow</span>'
    )


def _state(each: RankSnapshot) -> str:
    if not each.is_well:
        mood = "nbddp-wrong" if each.is_cause else "nbddp-waits"
        style, state = ink("bad" if each.is_cause else "warn"), escape(each.state)
        return f'<span class="{mood}" style="{style}" title="{state}">{state}</span>'
    if each.state.startswith("waiting"):
        return f'<span class="nbddp-waits" style="{ink("warn")}">{escape(each.state)}</span>'
    return escape(each.state)


def _line(each: RankSnapshot) -> str:
    if not each.line:
        return ""
    stay = f'<span class="nbddp-muted">{say_seconds(each.seconds)}</span> ' if each.seconds else ""
    code = f"<code>{escape(each.code)}</code>" if each.code else ""
    title = escape(f"{say_place(each.line, each.file)}: {each.code}")
    return f'<span class="nbddp-code" title="{title}">{escape(each.place)} {stay}{code}</span>'


def _collective(each: RankSnapshot) -> str:
    """Its name, number and group; the shape too where that is what the rank waits in."""
    title = _TITLE.match(each.collective)
    short = title.group() if title else each.collective
    shown = each.collective if each.state == "waiting" else short
    return f'<span title="{escape(each.collective)}">{escape(shown)}</span>' if shown else ""


def _progress(each: RankSnapshot) -> str:
    return "<br>".join(_bar(bar, each) for bar in each.bars)


def _bar(bar: LoopProgress, each: RankSnapshot) -> str:
    share = min(1.0, bar.done / bar.total) if bar.total else 0.0
    filled = f'<span style="width:{share:.1%};background:{rank_color(each.rank)}"></span>'
    drawn = f'<span class="nbddp-bar {rank_class(each.rank)}" aria-hidden="true">{filled}</span>'
    said = escape(say_bar(bar, is_short=True, goes_on=each.goes_on))
    title = escape(say_bar(bar, goes_on=each.goes_on))
    return f'<span title="{title}">{drawn if bar.total else ""}{said}</span>'


def _gpu(each: RankSnapshot) -> str:
    """Short, with all that is known of it where the mouse rests."""
    shown = escape(" · ".join(say_gpu(each)))
    return f'<span title="{escape(say_whole_gpu(each))}">{shown}</span>' if shown else ""


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("rank", _rank),
    ("node", lambda each: escape(each.node)),
    ("state", _state),
    ("line", _line),
    ("collective", _collective),
    ("step", lambda each: escape(say_step(each))),
    ("progress", _progress),
    ("CPU", say_cpu),
    ("memory", lambda each: format_bytes(each.memory) if each.memory else ""),
    ("GPU", _gpu),
)


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


def table_html(titles: Sequence[str], rows: Iterable[Sequence[str]], *, label: str) -> str:
    """A table whose rows begin with what they are of; ``label`` says what it is to who listens."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(each)}</td>" for each in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<table class="nbddp-ranks" aria-label="{escape(label)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
