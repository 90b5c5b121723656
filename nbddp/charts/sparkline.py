"""Sparklines: as SVG for pages, as block characters for text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from nbddp.charts.palette import ALERT, INK, rank_class, rank_color

HUGE = 1e300  # the difference of larger values overflows
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_BLOCKS = 16
HEIGHT = 16  # CSS pixels


def sparkline(
    values: Sequence[float],
    label: str,
    *,
    color: int | None = None,
    low: float | None = None,
    width: int = 96,
    is_static: bool = True,
) -> str:
    """Return a sparkline as HTML; empty for fewer than two values.

    Args:
        values: a value that is not finite becomes a gap with a red mark.
        label: the tooltip, also read by screen readers. It must be escaped already.
        color: an index into the palette; None for grey.
        low: the value at the bottom; None for the lowest value.
        width: in CSS pixels.
        is_static: also embed an image, for pages that remove SVG.
    """
    finite = [value for value in values if abs(value) < HUGE]
    if len(values) < 2 or not finite:
        return ""
    bottom = min(finite) if low is None else low
    span = (max(finite) - bottom) or 1.0
    step = (width - 4) / (len(values) - 1)
    line, marks, begin = "", "", "M"
    for at, value in enumerate(values):
        x = 2 + at * step
        if abs(value) < HUGE:
            y = HEIGHT - 2 - (value - bottom) / span * (HEIGHT - 4)
            line += f"{begin}{x:.1f},{y:.1f}"
            begin = "L"
        else:
            marks, begin = f"{marks}M{x - 1:.1f} 1h2", "M"
    size = f'width="{width}" height="{HEIGHT}"'
    drawn = f'<path d="{line}" fill="none" stroke="currentColor" stroke-width="1.5"></path>'
    if marks:
        drawn += f'<path d="{marks}" stroke="{ALERT}" stroke-width="2"></path>'
    kind, css_color = ("", INK) if color is None else (rank_class(color), rank_color(color))
    shown = (
        f'<svg class="{kind}" style="color:{css_color}" role="img" aria-label="{label}" {size}>'
        f"{drawn}</svg>"
    )
    if is_static:
        drawn = drawn.replace("currentColor", css_color)
        picture = svg_source(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{drawn}</svg>')
        shown += f'<img alt="{label}" {size} src="{picture}">'
    return f'<span title="{label}">{shown}</span>'


def svg_source(picture: str) -> str:
    """Return an SVG picture as the ``src`` of an image, for pages that remove SVG."""
    return f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"


def block_characters(values: Sequence[float]) -> str:
    """Return a curve in block characters, with a dot for each value that is not finite.

    >>> block_characters([1.0, 2.0, float("nan"), 8.0])
    '▁▂·█'
    """
    if len(values) > MAX_BLOCKS:
        last = len(values) - 1
        values = [values[round(at * last / (MAX_BLOCKS - 1))] for at in range(MAX_BLOCKS)]
    finite = [value for value in values if abs(value) < HUGE]
    if not finite:
        return "·" * len(values)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        BLOCKS[min(7, int((value - low) / span * 8))] if abs(value) < HUGE else "·"
        for value in values
    )
