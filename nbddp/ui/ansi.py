r"""Convert rank output to HTML that is safe in any page, or to plain text.

Everything is escaped. Colours, bold, italic, underline and inverse become CSS classes that
JupyterLab, nbconvert and GitHub know. All other escape sequences and control characters are
removed, except newline and tab. Characters that can disguise text become U+FFFD: direction
overrides, line and paragraph separators, and lone surrogates.
"""

# nbconvert's ansi2html is not used: it takes 1.1 s to import and 0.5 s for 400 kB of escapes, draws
# no italics, and leaves OSC, charsets and backspaces in the page.

from __future__ import annotations

import re
from html import escape

from nbddp.charts.palette import cube_rgb

_ESCAPE = re.compile(
    r"""\x1b(?:
            \[ ([0-9;]*) m                              # SGR: converted
          | \[ [0-?]* [ -/]* [@-~]?                     # any other CSI, even if it was cut off
          | [\]PX^_] [^\x07\x1b\n]* (?:\x07|\x1b\\)     # OSC, DCS, PM, APC and SOS, with their text
          | [ -/]* [0-~]?                               # charsets and so on, or a lone ESC
        )
      | [\x00-\x08\x0b-\x1f\x7f-\x9f]""",
    re.VERBOSE,
)
_DISGUISE = re.compile(r"[\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_Color = int | str  # the index of one of 16 colours, or "rgb(red,green,blue)"

# IPython's colour of keywords, as in the output of `??`. Its contrast to a dark page is 4.0;
# panel.css gives the other green 4.5 on light and on dark pages.
_PYGMENTS_GREEN, _INTENSE_GREEN = 28, 10
_MAX_CODES = 64  # in one sequence; terminals accept 16 to 32
_HUES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_NAMES = (*_HUES, *(f"{hue}-intense" for hue in _HUES))
_ON = {1: "bold", 3: "italic", 4: "underline", 7: "inverse"}
_OFF = {22: "bold", 23: "italic", 24: "underline", 27: "inverse"}


def to_html(text: str) -> str:
    r"""Return the text as HTML with a span for each style.

    >>> to_html("\x1b[31m<b>\x1b[m & \x1b]0;title\x07co")
    '<span class="ansi-red-fg">&lt;b&gt;</span> &amp; co'
    """
    if text.isprintable():
        return escape(text)
    first, *rest = _ESCAPE.split(_unmask(text))
    drawn, style, tag = [escape(first)], _Style(), ""
    for sequence, piece in zip(rest[::2], rest[1::2], strict=True):
        if sequence is not None:
            style.apply(sequence)
        if piece:
            before, tag = tag, style.tag()
            if tag != before:
                drawn.append(f"</span>{tag}" if before else tag)
            drawn.append(escape(piece))
    return "".join(drawn) + ("</span>" if tag else "")


def strip(text: str) -> str:
    r"""Return the text without escape sequences: the words that the HTML shows.

    >>> strip("\x1b[31m<b>\x1b[m & \x1b]0;title\x07co")
    '<b> & co'
    """
    return text if text.isprintable() else _ESCAPE.sub("", _unmask(text))


def _unmask(text: str) -> str:
    return text if text.isascii() else _DISGUISE.sub("\ufffd", text)


class _Style:
    """The text style after the SGR sequences that were applied."""

    def __init__(self) -> None:
        self._colors: dict[int, _Color | None] = {}  # 38: text, 48: background, 58: underline
        self._marks: set[str] = set()

    def apply(self, sequence: str) -> None:
        """Apply the codes between ``ESC [`` and ``m``."""
        fields = sequence.split(";", _MAX_CODES)[:_MAX_CODES]
        codes = [int(field or "0") if len(field) <= 3 else -1 for field in fields]
        while codes:
            match codes:
                case [38 | 48 | 58 as target, 5, index, *codes]:
                    if 0 <= index < 256:
                        self._colors[target] = _indexed(index)
                case [38 | 48 | 58 as target, 2, red, green, blue, *codes]:
                    if all(0 <= part < 256 for part in (red, green, blue)):
                        self._colors[target] = _rgb(red, green, blue)
                case [38 | 48 | 58, *_]:  # unknown: it could have any number of codes
                    return
                case [code, *codes]:
                    self._switch(code)

    def tag(self) -> str:
        """Return the opening tag; empty for text without a style."""
        front, back = self._colors.get(38), self._colors.get(48)
        if "bold" in self._marks and isinstance(front, int):
            front = front % 8 + 8  # the bright colour, as in JupyterLab
        is_inverse = "inverse" in self._marks
        if is_inverse:
            front, back = back, front
        classes, styles = [], []
        for ground, name, color in (("fg", "color", front), ("bg", "background-color", back)):
            if isinstance(color, int):
                classes.append(f"ansi-{_NAMES[color]}-{ground}")
            elif color is not None:
                styles.append(f"{name}: {color}")
            elif is_inverse:
                classes.append(f"ansi-default-inverse-{ground}")
        classes += [f"ansi-{mark}" for mark in ("bold", "underline") if mark in self._marks]
        if "italic" in self._marks:
            styles.append("font-style: italic")
        attributes = f' class="{" ".join(classes)}"' if classes else ""
        attributes += f' style="{"; ".join(styles)}"' if styles else ""
        return f"<span{attributes}>" if attributes else ""

    def _switch(self, code: int) -> None:
        tens, hue = divmod(code, 10)
        if code == 0:
            self._colors.clear()
            self._marks.clear()
        elif tens in (3, 4, 9, 10) and hue < 8:
            self._colors[38 if tens in (3, 9) else 48] = hue if tens < 9 else hue + 8
        elif code in (39, 49):
            self._colors[code - 1] = None
        elif code in _ON:
            self._marks.add(_ON[code])
        else:
            self._marks.discard(_OFF.get(code, ""))


def _indexed(number: int) -> _Color:
    """Return one of the 256 colours: 16 named ones, a cube of 6 x 6 x 6, and 24 greys."""
    if number == _PYGMENTS_GREEN:
        return _INTENSE_GREEN
    if number < 16:
        return number
    if number >= 232:
        return _rgb(*[8 + 10 * (number - 232)] * 3)
    return _rgb(*cube_rgb(number))


def _rgb(red: int, green: int, blue: int) -> str:
    return f"rgb({red},{green},{blue})"
