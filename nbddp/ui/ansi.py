r"""What a rank printed, as HTML that is safe in any page, or as plain text.

Everything is escaped. SGR sequences (colours, bold and the like) are drawn, in the classes that
JupyterLab, nbconvert and GitHub know; all other escape sequences and control characters are left
out, but for newline and tab. What could make text read as something else is shown as U+FFFD:
direction overrides, separators that break lines, half characters.
"""

# Our own, as nbconvert's ansi2html takes 1.1 s to import and 0.5 s for 400 kB of escapes, draws
# neither italics nor 38:2::r:g:b, and leaves OSC, charsets and backspaces in the page.

from __future__ import annotations

import re
from collections import deque
from html import escape

_ESCAPE = re.compile(
    r"""\x1b(?:
            \[ ([0-9;:]*) m                             # SGR, drawn
          | \[ [0-?]* [ -/]* [@-~]?                     # any other CSI; it may have been cut off
          | [\]PX^_] [^\x07\x1b\n]* (?:\x07|\x1b\\)     # OSC and its kin, with what they hold
          | [ -/]* [0-~]?                               # charsets and so on, or nothing but ESC
        )
      | [\x00-\x08\x0b-\x1f\x7f-\x9f]""",
    re.VERBOSE,
)
_DISGUISE = re.compile(r"[\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_Color = int | tuple[int, int, int]  # one of the 16, or red, green and blue

_MAX_FIELDS = 64  # of one sequence; terminals take 16 to 32
_HUES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_NAMES = (*_HUES, *(f"{hue}-intense" for hue in _HUES))
_GROUNDS = {"fg": "color", "bg": "background-color"}
_EXTENDED = {38: "fg", 48: "bg", 58: ""}  # 58 colours the underline: read, not drawn
_COLORS: dict[int, tuple[str, _Color | None]] = {
    **{30 + hue: ("fg", hue) for hue in range(8)},
    **{40 + hue: ("bg", hue) for hue in range(8)},
    **{90 + hue: ("fg", 8 + hue) for hue in range(8)},
    **{100 + hue: ("bg", 8 + hue) for hue in range(8)},
    39: ("fg", None),
    49: ("bg", None),
}
_ON = {1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike", 21: "underline"}
_OFF = {22: {"bold", "dim"}, 23: {"italic"}, 24: {"underline"}, 27: {"inverse"}, 29: {"strike"}}


def to_html(text: str) -> str:
    r"""Draw it with spans; a style that is left on ends with the text.

    >>> to_html("\x1b[31m<b>\x1b[m & \x1b]0;title\x07co")
    '<span class="ansi-red-fg">&lt;b&gt;</span> &amp; co'
    """
    if text.isprintable():
        return escape(text)
    first, *rest = _ESCAPE.split(_unmask(text))
    drawn, pen, tag = [escape(first)], _Pen(), ""
    for order, piece in zip(rest[::2], rest[1::2], strict=True):
        if order is not None:
            pen.obey(order)
        if piece:
            before, tag = tag, pen.span()
            if tag != before:
                drawn.append(f"</span>{tag}" if before else tag)
            drawn.append(escape(piece))
    return "".join(drawn) + ("</span>" if tag else "")


def strip(text: str) -> str:
    r"""Leave the words only: what is to be read in the HTML.

    >>> strip("\x1b[31m<b>\x1b[m & \x1b]0;title\x07co")
    '<b> & co'
    """
    return text if text.isprintable() else _ESCAPE.sub("", _unmask(text))


def _unmask(text: str) -> str:
    return text if text.isascii() else _DISGUISE.sub("\ufffd", text)


class _Pen:
    """How text is drawn after the SGR sequences so far."""

    def __init__(self) -> None:
        self._colors: dict[str, _Color | None] = {}
        self._marks: set[str] = set()

    def obey(self, order: str) -> None:
        """Take what stands between ``ESC [`` and ``m``."""
        fields = deque(order.split(";", _MAX_FIELDS)[:_MAX_FIELDS])
        while fields:
            code, *more = map(_number, fields.popleft().split(":"))
            if code in _EXTENDED:
                color = _extended(more or _take_color(fields))
                if color is not None:
                    self._colors[_EXTENDED[code]] = color
            else:
                self._switch(24 if (code, more) == (4, [0]) else code)

    def span(self) -> str:
        """The tag for it; empty where it is drawn like the page around it."""
        classes, styles = self._grounds()
        classes += [f"ansi-{mark}" for mark in ("bold", "underline") if mark in self._marks]
        if "dim" in self._marks:
            styles.append("opacity: 0.6")
        if "italic" in self._marks:
            styles.append("font-style: italic")
        if "strike" in self._marks:
            under = "underline " if "underline" in self._marks else ""
            styles.append(f"text-decoration: {under}line-through")
        attributes = f' class="{" ".join(classes)}"' if classes else ""
        attributes += f' style="{"; ".join(styles)}"' if styles else ""
        return f"<span{attributes}>" if attributes else ""

    def _switch(self, code: int) -> None:
        if code == 0:
            self._colors.clear()
            self._marks.clear()
        elif code in _COLORS:
            ground, self._colors[ground] = _COLORS[code]
        elif code in _ON:
            self._marks.add(_ON[code])
        else:
            self._marks -= _OFF.get(code, set())

    def _grounds(self) -> tuple[list[str], list[str]]:
        """Classes and styles of both colours, bold ones bright, as JupyterLab has them."""
        front, back = self._colors.get("fg"), self._colors.get("bg")
        if "bold" in self._marks and isinstance(front, int):
            front = front % 8 + 8
        is_inverse = "inverse" in self._marks
        colors = (back, front) if is_inverse else (front, back)
        classes, styles = [], []
        for ground, color in zip(_GROUNDS, colors, strict=True):
            if isinstance(color, int):
                classes.append(f"ansi-{_NAMES[color]}-{ground}")
            elif color is not None:
                styles.append(f"{_GROUNDS[ground]}: rgb({color[0]},{color[1]},{color[2]})")
            elif is_inverse:
                classes.append(f"ansi-default-inverse-{ground}")
        return classes, styles


def _number(field: str) -> int:
    """Read a field; one that no code can be is -1."""
    return int(field or "0") if len(field) <= 3 and ":" not in field else -1


def _take_color(fields: deque[str]) -> list[int]:
    """Take what belongs to a 38 written with semicolons: all there is, if it is no known form."""
    length = {"5": 2, "2": 4}.get(fields[0] if fields else "", len(fields))
    return [_number(fields.popleft()) for _ in range(min(length, len(fields)))]


def _extended(codes: list[int]) -> _Color | None:
    if codes[:1] == [2] and len(codes) > 4:
        del codes[1]  # the colour space, which only the form with colons has
    if not all(0 <= code < 256 for code in codes):
        return None
    match codes:
        case [5, number, *_]:
            return _indexed(number)
        case [2, red, green, blue, *_]:
            return red, green, blue
        case _:
            return None


def _indexed(number: int) -> _Color:
    """One of the 256: the 16, a cube of 6 x 6 x 6, and 24 greys."""
    if number < 16:
        return number
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return grey, grey, grey
    red, green, blue = ((number - 16) // step % 6 for step in (36, 6, 1))
    return _level(red), _level(green), _level(blue)


def _level(sixth: int) -> int:
    return 55 + 40 * sixth if sixth else 0
