"""Find dead links, anchors and pictures in a site: ``python tools/dead_links.py FOLDER``."""

from __future__ import annotations

import os
import sys
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
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in TARGETS and value is not None:
                self.targets.append(value)


def dead_links(folder: Path) -> list[str]:
    """Return ``page: target`` for each target in the folder that does not exist.

    Links to other sites are not checked, and neither is the page for missing pages.
    """
    paths = [path for path in sorted(folder.rglob("*.html")) if path.name != "404.html"]
    pages = {path: _Page(path.read_text("utf-8")) for path in paths}
    return [
        f"{path.relative_to(folder)}: {target}"
        for path, page in pages.items()
        for target in dict.fromkeys(page.targets)
        if not _target_exists(path, target, pages)
    ]


def _target_exists(page: Path, target: str, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    path = page.parent / unquote(parts.path) if parts.path else page
    path = Path(os.path.normpath(path / "index.html" if path.is_dir() else path))
    if not path.is_file():
        return False
    return path not in pages or not parts.fragment or unquote(parts.fragment) in pages[path].anchors


if __name__ == "__main__":
    dead = dead_links(Path(sys.argv[1]))
    sys.exit("\n".join(f"dead link: {each}" for each in dead) or 0)
