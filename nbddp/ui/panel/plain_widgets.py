"""What the panel, its log, its charts and the buttons after it are put together from."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets


class PlainWidget(widgets.HTML):
    """HTML that has neither a layout nor a style of its own, which would be two widgets more.

    A talkative log needs several a second. What they look like is in the style sheet; a front end
    copes with widgets without these two (ipywidgets issue 1620).
    """

    layout = style = None


def html(value: str = "") -> PlainWidget:
    """A place for HTML, with no room around it."""
    return PlainWidget(value, _dom_classes=("nbddp-html",))


def box(kind: type[widgets.Box], children: Sequence[widgets.Widget], name: str) -> widgets.Box:
    """A box that the style sheet knows by its name."""
    return kind(children, _dom_classes=(name,))


def toggle(label: str, tooltip: str, icon: str = "") -> widgets.ToggleButton:
    """A button that stays pressed."""
    return widgets.ToggleButton(description=label, tooltip=tooltip, icon=icon)


def mime_bundle(shown: widgets.Widget) -> dict[str, object]:
    """What a page shows a widget by; ipywidgets 7 has no bundles, and 8 makes the same."""
    view = {"version_major": 2, "version_minor": 0, "model_id": shown.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}


def close(widget: widgets.Widget) -> None:
    """Take a widget, and all that is in it, off the page and out of the kernel's memory."""
    for child in getattr(widget, "children", ()):
        close(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, widgets.Widget):
            part.close()
    widget.close()
