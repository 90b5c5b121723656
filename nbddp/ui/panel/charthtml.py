"""A chart as a part of a page: its name, a key for each line, the picture, and tips over it.

A page that takes styles and SVG away still shows the name, the keys and the same chart as an image.
What is written over the drawing stands in attributes, which such a page drops without a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from nbddp.archive.comparing import say_last
from nbddp.charts.palette import rank_class, rank_color
from nbddp.record.metrics import Curve
from nbddp.ui.charts.drawing import ALERT, MANY_RANKS, VERY_MANY, Chart, draw
from nbddp.ui.charts.frame import HEIGHT, WIDTH, Scale
from nbddp.ui.charts.svg import Label, SvgSheet
from nbddp.ui.charts.tips import Tip, tips
from nbddp.ui.panel.html import escape, svg_source

INLINE = (
    f"display:inline-block;vertical-align:top;width:{WIDTH}px;max-width:100%;margin:0 10px 8px 0"
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart as HTML, the ranks that have a line in it, and all of it in words.

    Attributes:
        is_value: whether it is only a number: there was no second one to draw a line to.
    """

    name: str
    html: str
    ranks: tuple[int, ...]
    said: str = ""
    is_value: bool = False


SHEET = f"""<style>
.nbddp-chart {{ position: relative; line-height: 16px; }}
.nbddp-name {{ display: flex; gap: 0 7px; align-items: baseline; font-size: 13px;
  line-height: 18px; }}
.nbddp-name > span:first-child {{ overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }}
.nbddp-fact {{ margin-left: auto; font-size: 11px; white-space: nowrap; }}
.nbddp-key {{ cursor: pointer; padding: 0 2px; white-space: nowrap; }}
.nbddp-image, .nbddp-other, .nbddp-smooth {{ display: none !important; }}
.nbddp-plot {{ position: relative; width: {WIDTH}px; height: {HEIGHT}px; }}
.nbddp-plot svg {{ display: block; overflow: visible; }}
.nbddp-plot s, .nbddp-tip {{ position: absolute; text-decoration: none; font-style: normal; }}
.nbddp-plot s::before {{ content: attr(data-t); position: absolute; bottom: -2px; left: 0;
  font-size: 10px; line-height: 12px; white-space: nowrap; font-variant-numeric: tabular-nums; }}
.nbddp-plot s.nbddp-right::before {{ left: auto; right: 0; }}
.nbddp-plot s.nbddp-center::before {{ transform: translateX(-50%); }}
.nbddp-tip {{ top: 6px; bottom: 24px; }}
.nbddp-tip:hover::before {{ content: ""; position: absolute; top: 0; bottom: 0; left: var(--at);
  border-left: 1px solid currentColor; opacity: .6; }}
.nbddp-tip:hover::after {{ content: attr(data-t); position: absolute; z-index: 3; top: 2px;
  left: calc(var(--at) + 7px); padding: 2px 7px; white-space: pre; pointer-events: none;
  font-size: 11px; line-height: 14px; font-variant-numeric: tabular-nums; border-radius: 3px;
  border: 1px solid #8888; color: var(--jp-ui-font-color1, var(--vscode-editor-foreground,
  CanvasText)); background: var(--jp-layout-color1, var(--vscode-editor-background, Canvas)); }}
.nbddp-tip.nbddp-l:hover::after {{ left: auto; right: calc(100% - var(--at) + 7px); }}
.nbddp-switch[hidden] {{ display: inline-block; appearance: none; -webkit-appearance: none;
  width: auto; height: auto; margin: 0 8px 4px 0; padding: 0 7px; border: 1px solid #8888;
  border-radius: 3px; background: none; cursor: pointer; color: inherit; }}
.nbddp-switch::before {{ content: attr(aria-label); position: static; font-size: 11px;
  line-height: 18px; color: var(--jp-ui-font-color1, inherit); }}
.nbddp-switch:checked {{ background: #8885; }}
.nbddp-rescale:checked ~ .nbddp-chart .nbddp-other {{ display: block !important; }}
.nbddp-rescale:checked ~ .nbddp-chart :is(.nbddp-first, .nbddp-scale) {{ display: none; }}
.nbddp-smoothing:checked ~ .nbddp-chart .nbddp-smooth,
.nbddp-is-smooth .nbddp-smooth {{ display: inline !important; }}
.nbddp-smoothing:checked ~ .nbddp-chart :is(.nbddp-mean, .nbddp-rank),
.nbddp-is-smooth :is(.nbddp-mean, .nbddp-rank) {{ opacity: .3; }}
.nbddp-key:is(:hover, :focus) ~ .nbddp-plot :is(.nbddp-mean, .nbddp-smooth, .nbddp-rank),
.nbddp-only .nbddp-plot :is(.nbddp-mean, .nbddp-smooth, .nbddp-rank) {{ opacity: .15; }}
.nbddp-chart:has(.nbddp-key:is(:hover, :focus)) :is(.nbddp-mean, .nbddp-smooth, .nbddp-rank)
  {{ opacity: .15; }}
.nbddp-end {{ flex-basis: 100%; height: 0; }}
</style>"""


def _switches() -> str:
    """What stands before charts that are kept, and turns them without a kernel."""
    return "".join(
        f'<input type="checkbox" hidden="hidden" class="nbddp-switch nbddp-{kind}"'
        f' aria-label="{said}">'
        for kind, said in (("rescale", "log or linear"), ("smoothing", "smooth"))
    )


def highlighting(ranks: Iterable[int]) -> str:
    """The rules by which the line of a rank stands out while its key is pointed at or has focus."""
    return "".join(map(_stands_out, ranks))


def _stands_out(rank: int) -> str:
    line = f".nbddp-rank.k{rank}"
    rules = ""
    for where in (
        f".nbddp-key.k{rank}:is(:hover, :focus) ~ .nbddp-plot",
        f".nbddp-only.k{rank} .nbddp-plot",
        f".nbddp-chart:has(.nbddp-key.k{rank}:is(:hover, :focus)) .nbddp-plot",
    ):
        rules += f"{where} {line} {{ opacity: 1; }} "
        rules += f"{where} {line} path[stroke] {{ opacity: 1; stroke-width: 20; }}\n"
    return rules


def charts_html(charts: Sequence[Drawn]) -> str:
    """Charts for a page that stays as it is, with what turns them."""
    if not charts:
        return ""
    ranks = sorted({rank for each in charts for rank in each.ranks})
    sheet = f"{SHEET}<style>{highlighting(ranks)}</style>"
    shown = "".join(each.html for each in charts)
    switches = "" if all(each.is_value for each in charts) else _switches()
    end_of_row = '<span class="nbddp-end"></span>'
    return f'{sheet}<div class="nbddp-charts">{switches}{end_of_row}{shown}</div>'


def live_chart(name: str, curves: Mapping[int, Curve], scale: Scale = Scale.AUTO) -> Drawn:
    """A chart for a page that is told when there is another."""
    chart = Chart.of(name, curves, scale)
    return Drawn(name, _box(chart, _plot(chart)), tuple(chart.thin))


def kept_chart(name: str, curves: Mapping[int, Curve], scale: Scale = Scale.AUTO) -> Drawn:
    """A chart for a page that stays as it is: with its other scale too, if it may have one.

    Of what was reported once there is the number alone.
    """
    chart = Chart.of(name, curves, scale)
    if chart.lines and all(len(curve.steps) <= 1 for curve in curves.values()):
        return Drawn(name, _value(chart), (), _say(chart), is_value=True)
    if not chart.frame.may_be_log:
        plots = _plot(chart, is_kept=True)
        return Drawn(name, _box(chart, plots), tuple(chart.thin), _say(chart))
    plots = _plot(chart, kind="nbddp-first", is_kept=True)
    other = Chart.of(name, curves, Scale.LINEAR if chart.frame.is_log else Scale.LOG)
    plots += _plot(other, kind="nbddp-other")
    return Drawn(name, _box(chart, plots), tuple(chart.thin), _say(chart))


def _value(chart: Chart) -> str:
    values = {rank: float(line.values[-1]) for rank, line in chart.lines.items()}
    return f'<div class="nbddp-chart" style="{INLINE}">{_head(chart, say_last(values))}</div>'


def _box(chart: Chart, plots: str) -> str:
    return f'<div class="nbddp-chart" style="{INLINE}">{_head(chart)}{_keys(chart)}{plots}</div>'


def _head(chart: Chart, value: str = "") -> str:
    is_bad = chart.value is not None and not isfinite(chart.value)
    color = f' style="color:{ALERT}"' if is_bad else ""
    facts = "".join(map(_fact, chart.facts))
    name = escape(chart.name)
    return (
        f'<div class="nbddp-name" title="{name}"><span>{name}</span>'
        f" <strong{color}>{value or chart.said_value}</strong>{facts}</div>"
    )


def _fact(fact: str) -> str:
    is_scale = fact.endswith("scale")
    color = "" if is_scale else f' style="color:{ALERT}"'
    kind = " nbddp-scale" if is_scale else ""
    return f' <span class="nbddp-fact{kind}"{color}>{escape(fact)}</span>'


def _keys(chart: Chart) -> str:
    """What each line is; the line of a rank stands out while its key is pointed at."""
    color = f"color:{chart.color}" if len(chart.lines) == 1 else ""
    first = f'<span style="font-size:11px;{color}"><strong>━ {chart.said_lines}</strong></span> '
    if len(chart.lines) <= 1:
        return first if chart.lines else ""
    if len(chart.lines) <= MANY_RANKS:
        return first + "".join(_key(rank, f"━ {rank}") for rank in chart.lines)
    if len(chart.lines) > VERY_MANY:
        apart = "".join(_key(rank, f"━ {rank}") for rank in chart.thin)
        others = "the others" if chart.thin else "all"
        band = f'<span title="from the lowest to the highest">▒ {others}</span>'
        return f'{first}<span style="font-size:11px">{band}</span> {apart}'
    keys = "".join(_key(rank, str(rank)) for rank in chart.lines)
    band = "the band goes from the lowest to the highest; point at a rank to see its line"
    return (
        f'{first}<details style="font-size:11px"><summary>ranks</summary>'
        f"<div>{band}</div>{keys}</details>"
    )


def _key(rank: int, text: str) -> str:
    return (
        f'<span class="nbddp-key k{rank} {rank_class(rank)}" tabindex="0" title="rank {rank}"'
        f' style="font-size:11px;color:{rank_color(rank)}">{text}</span> '
    )


# ---- the picture


def _plot(chart: Chart, *, kind: str = "", is_kept: bool = False) -> str:
    sheet = SvgSheet()
    draw(sheet, chart)
    said = escape(_say(chart))
    image = image_of(sheet, escape(chart.name), said) if is_kept else ""
    ticks = "".join(map(tick, sheet.labels))
    if kind == "nbddp-other":
        scale = "log scale" if chart.frame.is_log else "linear scale"
        ticks += tick(Label(WIDTH - 8, 10, scale, "right"))
    return (
        f'<div class="nbddp-plot {kind}">{image}{sheet.inline(said)}{ticks}'
        f"{''.join(map(tip, tips(chart)))}</div>"
    )


def image_of(sheet: SvgSheet, alt: str, said: str) -> str:
    """The same for a page that takes SVG away, where it shows."""
    return (
        f'<img class="nbddp-image" alt="{alt}" title="{said}" width="{WIDTH}" height="{HEIGHT}"'
        f' src="{svg_source(sheet.picture())}">'
    )


def _say(chart: Chart) -> str:
    """The chart in words."""
    if chart.strong is None:
        return f"{chart.name}: no values"
    steps = f"{chart.frame.unit} {chart.strong.steps[-1]:.0f}"
    return f"{chart.name}: {chart.said_value} at {steps}, {chart.said_lines}"


def tick(label: Label) -> str:
    """A few letters beside an axis."""
    place = f"left:{label.x:.0f}px;top:{label.y:.0f}px"
    return f'<s class="nbddp-{label.align}" style="{place}" data-t="{escape(label.text)}"></s>'


def tip(tip: Tip) -> str:
    """A column over the picture, which tells when it is pointed at."""
    side = " nbddp-l" if tip.left > WIDTH / 2 else ""
    box = f"left:{tip.left:.1f}px;width:{tip.width:.1f}px;--at:{tip.at:.1f}px"
    return f'<i class="nbddp-tip{side}" style="{box}" data-t="{escape(tip.text)}"></i>'
