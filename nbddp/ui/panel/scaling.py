"""A cell on several world sizes: a picture and a table that stay in the notebook."""

from __future__ import annotations

from base64 import b64encode

from nbddp.archive.scaling import Scaling
from nbddp.charts.figure import draw_scaling, png_of
from nbddp.ui.panel.html import escape
from nbddp.ui.panel.style import SHEET
from nbddp.ui.text.scaling import head_of, notes, rows_of, scaling_text


def scaling_bundle(scaling: Scaling, *, has_page: bool) -> tuple[dict[str, str], dict[str, object]]:
    """What is published, by MIME type, and its metadata.

    ``has_page``: whether a page shows it, or a notebook is executed without one.
    """
    text = scaling_text(scaling)
    if not scaling.sizes:
        return {"text/plain": text}, {}
    png, width = png_of(draw_scaling(scaling))
    picture = b64encode(png).decode()
    if has_page:
        return {"text/html": scaling_html(scaling, picture, width), "text/plain": text}, {}
    return {"image/png": picture, "text/plain": text}, {"image/png": {"width": width}}


def scaling_html(scaling: Scaling, picture: str, width: int) -> str:
    """The picture, and below it what it is drawn from."""
    said = escape(_said(scaling))
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in head_of(scaling))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>"
        for row in rows_of(scaling)
    )
    below = "".join(f"<div>{escape(each)}</div>" for each in notes(scaling))
    return (
        f'{SHEET}<div class="nbddp"><div class="nbddp-charts">'
        f'<img src="data:image/png;base64,{picture}" style="max-width:100%;width:{width}px"'
        f' alt="{said}"></div>'
        f'<table class="nbddp-ranks" aria-label="world sizes"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table><div class="nbddp-muted">{below}</div></div>'
    )


def _said(scaling: Scaling) -> str:
    values = [f"{size.ranks} ranks {scaling.speed_up(size):.2f}" for size in scaling.sizes]
    return f"speed-up by ranks: {', '.join(values)}; the numbers stand below"
