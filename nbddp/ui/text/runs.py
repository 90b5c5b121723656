"""A list of runs as plain text."""

from __future__ import annotations

import time
from typing import Any

from nbddp.archive.run_list import Listing, say_left_out
from nbddp.archive.summary import Summary
from nbddp.charts.sparkline import block_characters
from nbddp.formatting import format_bytes, plural
from nbddp.record.metrics import Pairs
from nbddp.ui.words import aligned, say_rate, say_seconds

SHOWN = 50  # runs, unless more are asked for
LONGEST = 28  # characters of a name, a setting or a note


def runs_text(listing: Listing, *, most: int = SHOWN) -> str:
    """The list, or what there is instead of one."""
    shown = listing.runs[:most]
    lines = aligned([[*head_of(listing), "curve"], *(_row(listing, run) for run in shown)])
    return "\n".join([*(lines if shown else []), *notes(listing, most=most)])


def head_of(listing: Listing) -> list[str]:
    """The titles of the columns, but for the curve."""
    numbers = [*listing.settings, *listing.metrics]
    return ["run", "when", "ranks", *numbers, "steps", "pace", "outcome"]


def cells_of(listing: Listing, run: Summary) -> list[str]:
    """What stands in them."""
    settings = [say_value(run.config.get(name)) for name in listing.settings]
    last = [f"{run.last[name]:.4g}" if name in run.last else "" for name in listing.metrics]
    steps = "" if run.steps is None else f"{run.steps:,}"
    ranks = str(run.ranks or "")
    return [
        run.name,
        say_when(run.began),
        ranks,
        *settings,
        *last,
        steps,
        say_pace(run),
        say_outcome(run),
    ]


def _row(listing: Listing, run: Summary) -> list[str]:
    return [
        *(each[:60] for each in cells_of(listing, run)),
        block_characters(curve_of(listing, run)),
    ]


def curve_of(listing: Listing, run: Summary) -> list[float]:
    """The one that the list shows: of the first metric that has a column."""
    return middles(run.curves.get(listing.metrics[0], ()) if listing.metrics else ())


def middles(pairs: Pairs) -> list[float]:
    """The middle between the lowest and the highest value of each stretch of a curve."""
    return [sum(pair) / 2 for pair in pairs]


def notes(listing: Listing, *, most: int, is_page: bool = False) -> list[str]:
    """What has to be said below the list; on a page the curve has a title."""
    curve = "" if is_page else _curve(listing)
    said = [_say_total(listing), _say_more(listing, most), curve]
    return [*filter(None, [*said, say_left_out(listing.left_out)])]


def _curve(listing: Listing) -> str:
    return f"the curve is of {listing.metrics[0]}" if listing.metrics else ""


def _say_total(listing: Listing) -> str:
    if not listing.total:
        return "there is no run here yet: a `%%ddp` cell makes one"
    few = f"{len(listing.runs)} of " if len(listing.runs) < listing.total else ""
    return f"{few}{plural(listing.total, 'run')}, {format_bytes(listing.size)}"


def _say_more(listing: Listing, most: int) -> str:
    more = len(listing.runs) - most
    return f"{more} more: `%ddp runs -n {len(listing.runs)}` shows them" if more > 0 else ""


def say_when(began: float) -> str:
    """Month, day and minute."""
    return time.strftime("%m-%d %H:%M", time.localtime(began)) if began else ""


def say_value(value: Any) -> str:
    """A setting, or a metric's last value, in a few characters.

    >>> [say_value(each) for each in (0.1, 12345.678, True, None, "x" * 40, float("nan"))]
    ['0.1', '12345.7', 'True', '', 'xxxxxxxxxxxxxxxxxxxxxxxxxxx…', 'nan']
    """
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def say_pace(run: Summary) -> str:
    """Steps a second, and samples where the batch is known."""
    steps = say_rate(run.steps_per_second or 0.0)
    samples = run.samples_per_second
    return f"{steps}, {samples:,.0f} samples/s" if steps and samples else steps


def say_outcome(run: Summary) -> str:
    """How it ended, what failures cost it, and what the user has said of it."""
    said_by_why = run.outcome == "interrupted"  # "ranks 0-1 interrupted, line 3"
    how = run.why if said_by_why else ": ".join(filter(None, [run.outcome, run.why]))
    lost = f"{say_seconds(run.seconds_lost)} lost to failures" if run.seconds_lost else ""
    is_idle = run.is_live and run.outcome != "running"
    said = [how[:90], lost, "not stopped" if is_idle else "", run.note]
    return " · ".join(filter(None, said))
