"""Find dead links, anchors and pictures in a folder of pages."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

TARGETS = {"href", "src", "srcset"}


class _Page(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in TARGETS and value is not None:
                self.targets.append(value)


def dead_links(folder: Path) -> list[str]:
    """Return ``page: target`` for each target in the folder that does not exist.

    Links to other sites are not checked.
    """
    pages = {path.name: _Page(path.read_text("utf-8")) for path in sorted(folder.glob("*.html"))}
    return [
        f"{name}: {target}"
        for name, page in pages.items()
        for target in dict.fromkeys(page.targets)
        if not _target_exists(folder, name, target, pages)
    ]


def _target_exists(folder: Path, name: str, target: str, pages: dict[str, _Page]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    path = unquote(parts.path) or name
    if not (folder / path).is_file():
        return False
    return not parts.fragment or unquote(parts.fragment) in pages[path].anchors
