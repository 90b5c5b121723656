"""A list of runs as a table that stays in the notebook."""

from __future__ import annotations

from collections.abc import Sequence

from nbddp.archive.find import short_names
from nbddp.archive.run_list import Listing
from nbddp.archive.summary import Summary
from nbddp.record.metrics import Pairs
from nbddp.ui.panel.bare import dot
from nbddp.ui.panel.html import escape, svg_source
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.runs import SHOWN, can_be_drawn, cells_of, curve_of, head_of, notes

WIDE, HIGH = 96, 18  # CSS pixels of a small curve
INK = "#7b7b7b"  # has the same contrast to white as to #111
LOST = "#dd4444"  # where numbers were not finite
DOTS = {"ok": "nbddp-ok", "failed": "nbddp-bad", "running": "", "empty": "nbddp-off"}


def runs_html(listing: Listing, *, most: int = SHOWN) -> str:
    """The list, and below it what has to be said of it."""
    shown = listing.runs[:most]
    said = "".join(
        f'<div class="nbddp-muted">{escape(each)}</div>'
        for each in notes(listing, most=most, is_page=True)
    )
    return f'{SHEET}<div class="nbddp">{_table(listing, shown) if shown else ""}{said}</div>'


def _table(listing: Listing, shown: Sequence[Summary]) -> str:
    titles = [*head_of(listing), listing.metrics[0] if listing.metrics else ""]
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    names = short_names([run.name for run in shown])
    body = "".join(_row(listing, run, name) for run, name in zip(shown, names, strict=True))
    return (
        f'<table class="nbddp-ranks" aria-label="runs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def run_name(whole: str, short: str) -> str:
    """A run's name in a table; all of it where one points.

    >>> run_name("20260102-030405-a", "a")
    '<code title="20260102-030405-a">a</code>'
    """
    return f'<code title="{escape(whole)}">{escape(short)}</code>'


def _row(listing: Listing, run: Summary, name: str) -> str:
    _, *middle, outcome = cells_of(listing, run)
    cells = "".join(map(_cell, middle))
    mark = dot(DOTS.get(run.outcome, "nbddp-warn"))
    said = escape(outcome)
    return (
        f"<tr><td>{run_name(run.name, name)}</td>{cells}"
        f'<td title="{said}">{mark}{said}</td>'
        f"<td>{small_curve(curve_of(listing, run), _alt(listing, run))}</td></tr>"
    )


def _cell(text: str) -> str:
    is_lost = text in ("nan", "inf", "-inf")
    said = (
        f'<strong class="nbddp-wrong" style="color:{LOST}">{text}</strong>'
        if is_lost
        else escape(text)
    )
    return f"<td>{said}</td>"


def _alt(listing: Listing, run: Summary) -> str:
    name = listing.metrics[0] if listing.metrics else ""
    return f"{name} of {run.name}, at last {run.last[name]:.4g}" if name in run.last else name


def small_curve(pairs: Pairs, said: str) -> str:
    """A band from the lowest to the highest of each stretch; twice, for pages that drop SVG."""
    body = _drawn(pairs)
    if not body:
        return ""
    said, size = escape(said), f'width="{WIDE}" height="{HIGH}"'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{body}</svg>'
    return (
        f'<span title="{said}"><svg role="img" aria-label="{said}" {size}>{body}</svg>'
        f'<img alt="{said}" {size} src="{svg_source(picture)}"></span>'
    )


def _drawn(pairs: Pairs) -> str:
    known = [end for pair in pairs if can_be_drawn(pair) for end in pair]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    step = (WIDE - 4) / max(1, len(pairs) - 1)

    def place(index: int, value: float) -> str:
        return f"{2 + index * step:.1f} {HIGH - 2 - (value - low) / span * (HIGH - 4):.1f}"

    drawn = ""
    for stretch in _stretches(pairs):
        there = [place(index, pairs[index][1]) for index in stretch]
        back = [place(index, pairs[index][0]) for index in reversed(stretch)]
        drawn += f"M{'L'.join([*there, *back])}z"
    lost = [index for index, pair in enumerate(pairs) if not can_be_drawn(pair)]
    marks = "".join(f"M{1 + index * step:.1f} 1h{max(2.0, step):.1f}" for index in lost)
    # its outline is what shows where lowest and highest are one
    return (
        f'<path d="{drawn}" fill="{INK}" stroke="{INK}" stroke-width="1.2"'
        ' stroke-linejoin="round"></path>'
    ) + (f'<path d="{marks}" stroke="{LOST}" stroke-width="2"></path>' if marks else "")


def _stretches(pairs: Pairs) -> list[list[int]]:
    """The indices of neighbours that are all numbers."""
    found: list[list[int]] = [[]]
    for index, pair in enumerate(pairs):
        if can_be_drawn(pair):
            found[-1].append(index)
        elif found[-1]:
            found.append([])
    return [each for each in found if each]
