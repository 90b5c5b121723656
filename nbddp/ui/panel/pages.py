"""Rows of HTML that grow at the end: only the newest page is ever sent again.

A page of ipywidgets draws anew whatever stands behind a child that is taken out. So pages stand in
books: a book that is too old loses its pages at once and stays behind, empty, and no other is
touched. What the reader has selected stays selected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from nbddp.ui.panel.loghtml import block
from nbddp.ui.panel.pieces import Plain, close
from nbddp.ui.panel.pieces import html as place

PAGE_ROWS = 100  # a page that has so many is full
PAGE_SECONDS = 1.0  # as is one that is so old: what somebody reads is not drawn again
BOOK_PAGES = 20
MAX_ROWS = 2000  # the oldest book goes when there are so many without it
MAX_PAGES = 200  # or so many pages, where rows come one by one
MAX_EMPTY = 300  # empty books that stay behind, before all are put in order


class Pages:
    """Shows rows in ``root``; ``on_new`` is given every widget that is made."""

    def __init__(self, on_new: Callable[[widgets.Widget], None]) -> None:
        self._on_new = on_new
        self.root = _box(())
        self._books: list[_Book] = []
        self._open: _OpenPage | None = None

    @property
    def lines(self) -> int:
        """How many lines are told of."""
        return sum(book.lines for book in self._books)

    def add(self, rows: Sequence[str], lines: int) -> None:
        """Put rows at the end, which tell of so many lines; the oldest go."""
        if not rows:
            return
        if self._open is None or self._open.is_full:
            self._open = _OpenPage(self._put(_html(rows)), [*rows], time.monotonic())
        else:
            self._open.rows += rows
            self._open.page.value = _html(self._open.rows)
        self._books[-1].rows += len(rows)
        self._books[-1].lines += lines
        self._drop()

    def clear(self) -> None:
        """Take all rows away."""
        boxes, self.root.children = self.root.children, ()
        for book in self._books:
            book.empty()
        for box in boxes:
            close(box)
        self._books, self._open = [], None

    def last(self) -> Plain:
        """A page without rows, after all others: where it is drawn, which is counted, all are."""
        return self._put("", _view_count=0)

    def _put(self, html: str, **options: int) -> Plain:
        page = place(html, **options)
        if self._books and len(self._books[-1].pages) < BOOK_PAGES:
            self._books[-1].add(page)
        else:
            book = _Book(_box((page,)))
            self._books.append(book)
            self.root.children = (*self.root.children, book.box)
            self._on_new(book.box)
        self._on_new(page)
        return page

    def _drop(self) -> None:
        rows = sum(book.rows for book in self._books)
        pages = sum(len(book.pages) for book in self._books)
        for oldest in self._books[:-1]:
            rows, pages = rows - oldest.rows, pages - len(oldest.pages)
            if rows < MAX_ROWS and pages < MAX_PAGES:
                break
            oldest.empty()
            self._books.remove(oldest)
        if len(self.root.children) - len(self._books) > MAX_EMPTY:
            self._sweep()

    def _sweep(self) -> None:
        before = self.root.children
        self.root.children = tuple(book.box for book in self._books)
        for box in set(before) - set(self.root.children):
            close(box)


@dataclass(slots=True)
class _OpenPage:
    """The newest page, which is sent again when it gets more rows."""

    page: Plain
    rows: list[str]
    begun_at: float

    @property
    def is_full(self) -> bool:
        """Whether the next row begins another."""
        return len(self.rows) >= PAGE_ROWS or time.monotonic() > self.begun_at + PAGE_SECONDS


class _Book:
    """Some pages, which go together."""

    def __init__(self, box: widgets.VBox) -> None:
        self.box = box
        self.rows = self.lines = 0

    @property
    def pages(self) -> tuple[Plain, ...]:
        """Its pages."""
        return tuple(self.box.children)

    def add(self, page: Plain) -> None:
        """One page more."""
        self.box.children = (*self.box.children, page)

    def empty(self) -> None:
        """Take its pages away."""
        pages, self.box.children = self.pages, ()
        for page in pages:
            close(page)


def _box(children: Sequence[widgets.Widget]) -> widgets.VBox:
    return widgets.VBox(children, layout=_layout())


def _layout() -> widgets.Layout:
    """A widget's own: a page that is loading gets new widgets before those that were there.

    One that has the layout of an older one cannot be made there, and takes the panel with it.
    """
    return widgets.Layout(margin="0", overflow="visible", flex="0 0 auto")


def _html(rows: Sequence[str]) -> str:
    return f'<div class="nbddp">{block(rows)}</div>'
