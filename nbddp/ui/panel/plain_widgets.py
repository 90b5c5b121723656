"""Create and close the small widgets of a panel: HTML, boxes and toggle buttons."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets


class PlainWidget(widgets.HTML):
    """HTML without layout and style, which would be two more widgets.

    A busy log creates several of these a second. The style sheet gives them their look. Front ends
    accept widgets without layout and style (ipywidgets issue 1620).
    """

    layout = style = None


def html(value: str = "") -> PlainWidget:
    """Return a widget for HTML, without margins."""
    return PlainWidget(value, _dom_classes=("nbddp-html",))


def box(kind: type[widgets.Box], children: Sequence[widgets.Widget], name: str) -> widgets.Box:
    """Return a box with a CSS class."""
    return kind(children, _dom_classes=(name,))


def toggle(label: str, tooltip: str, icon: str = "") -> widgets.ToggleButton:
    """Return a toggle button."""
    return widgets.ToggleButton(description=label, tooltip=tooltip, icon=icon)


def mime_bundle(shown: widgets.Widget) -> dict[str, object]:
    """Return the MIME bundle that shows a widget; ipywidgets 8 returns the same, 7 has none."""
    view = {"version_major": 2, "version_minor": 0, "model_id": shown.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}


def close(widget: widgets.Widget) -> None:
    """Remove a widget and its children from the page and from the kernel's memory."""
    for child in getattr(widget, "children", ()):
        close(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, widgets.Widget):
            part.close()
    widget.close()
