"""Parse HTML as a browser does, and provide hostile names and texts of ranks and users."""

import re
from html.parser import HTMLParser

from hypothesis import strategies as st

from nbddp.ui.ansi import strip

_TAGS = {"br", "code", "details", "div", "img", "li", "pre", "small", "span", "style", "summary"}
_TAGS |= {"table", "tbody", "td", "th", "thead", "tr", "ul"}
_TAGS |= {"circle", "g", "i", "input", "path", "s", "strong", "svg"}
_VOID = {"br", "img", "input"}
_ATTRIBUTES = {"alt", "class", "height", "open", "scope", "src", "style", "title", "type", "width"}
_ATTRIBUTES |= {"aria-hidden", "aria-label", "data-t", "hidden", "role", "tabindex", "viewbox"}
_DRAWN = {"cx", "cy", "d", "fill", "opacity", "r", "stroke", "stroke-linejoin", "stroke-width"}
_CLASSES = re.compile(r"((nbddp|ansi|jp|k\d)[-\w]*\s*)*")
_STYLE = re.compile(r"[-\w\s:;.%#(),]*")
_PICTURE = re.compile(r"data:image/svg\+xml;base64,[A-Za-z0-9+/]*=*")


class Page(HTMLParser):
    """The text of some HTML; tags and attributes that nbddp does not use are refused.

    Attributes:
        text: the visible text, without the style sheet.
        all_text: the visible text and the tooltips.
        tags: every tag with its attributes, in order.
        by_tag: the text inside each tag of a kind.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        html.encode()  # a message to a page is UTF-8
        self.text = ""
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.by_tag: dict[str, list[str]] = {}
        self._open: list[tuple[str, int]] = []
        self._hints: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []
        self.all_text = "\n".join([self.text, *self._hints])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS
        by_name = {name: value or "" for name, value in attrs}
        is_drawn = tag in ("circle", "g", "path")
        assert set(by_name) <= (_DRAWN | {"class"} if is_drawn else _ATTRIBUTES)
        assert len(by_name) == len(attrs)
        assert _CLASSES.fullmatch(by_name.get("class", "")), by_name
        assert _STYLE.fullmatch(by_name.get("style", "")), by_name
        assert "url" not in by_name.get("style", "")
        assert _PICTURE.fullmatch(by_name["src"]) if tag == "img" else "src" not in by_name
        self.tags.append((tag, by_name))
        self._hints += [by_name[name] for name in ("title", "alt") if name in by_name]
        if tag not in _VOID:
            self._open.append((tag, len(self.text)))

    def handle_endtag(self, tag: str) -> None:
        opened, at = self._open.pop()
        assert opened == tag
        self.by_tag.setdefault(tag, []).append(self.text[at:])

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1][0] != "style":
            self.text += data

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("circle", "path"), attrs
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"neither a tag nor text: {data}")

    handle_decl = unknown_decl = handle_pi = handle_comment  # type: ignore[assignment]

    def holds(self, text: str) -> bool:
        """Return whether all words of this text are visible or in a tooltip."""
        return strip(text) in self.all_text

    def values(self, name: str) -> list[str]:
        return [known[name] for _, known in self.tags if name in known]


TEXT = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="<>&\"'=/ -!;#x\x1b[1m\r\n\0", max_size=20),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '"><img src=x onerror=alert(1)>',
            "' onmouseover='alert(1)",
            "javascript:alert(1)",
            "</span></div></details></td></table>",
            "</style></pre></script><b>",
            "<!--",
            "]]><![CDATA[",
            "<?php ?>",
            "&lt;b&gt; &#60;b&#62; &amp",
            "url(javascript:1)",
            "\x1b[31m<b>\x1b[m",
            "half \ud800 a letter",
            "\u202egpj.exe",
        ]
    ),
)


def titles(table: Page) -> list[str]:
    return table.by_tag["th"]


def cells(table: Page) -> list[list[str]]:
    width = len(titles(table))
    found = table.by_tag.get("td", [])
    return [found[at : at + width] for at in range(0, len(found), width)]


def column(table: Page, word: str) -> list[str]:
    """Return the texts of the column whose title contains this word."""
    [place] = [at for at, title in enumerate(titles(table)) if word in title]
    return [row[place] for row in cells(table)]


def readable(html: str) -> str:
    """Return HTML for a snapshot: one block per line, without style sheets, charts and images."""
    html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    html = re.sub(r'(<div class="nbddp-plot[^>]*>).*?(?=</div>)', r"\1...", html, flags=re.DOTALL)
    html = re.sub(r'(base64,)[^"]+', r"\1...", html)
    html = re.sub(r"(<svg[^>]*>).*?(?=</svg>)", r"\1...", html, flags=re.DOTALL)
    return re.sub(
        r"(?=<(?:details|div|img|input|li|pre|summary|svg|table|t[dhr]|ul)\b)", "\n", html
    )
