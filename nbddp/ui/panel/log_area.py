"""The log of the panel: new lines are appended, and the user can filter by rank or word."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from nbddp.formatting import plural
from nbddp.record.log_reader import log_name
from nbddp.ui.ansi import strip
from nbddp.ui.html_pieces import muted
from nbddp.ui.log_lines import LogBuffer, LogLine, html_rows, log_block, note_row
from nbddp.ui.panel.plain_widgets import PlainWidget, box, close, html, toggle

MAX_TABS = 8  # more ranks are in a dropdown list
ALL = -1  # instead of a rank: the merged log of all ranks
MAX_BATCH = 500  # lines appended at a time; of more lines, the newest are shown
MAX_ROWS = 2000  # lines of a cell in memory, for a change of the filter

PAGE_ROWS = 100  # a page with this many rows is full
PAGE_SECONDS = 1.0  # a page of this age is full: text that the user reads is not redrawn
MAX_PAGES = 200  # with more pages, the older half is removed
MAX_PAGE_ROWS = 10_000  # the same for rows, because a flood fills long pages


class LogArea:
    """Shows the lines of a cell in ``root``. One thread draws it, another one handles input."""

    def __init__(self, ranks: Sequence[int]) -> None:
        kind = widgets.ToggleButtons if len(ranks) <= MAX_TABS else widgets.Dropdown
        options = [("all", ALL), *((f"rank {rank}", rank) for rank in ranks)]
        self._choice = kind(options=options, value=ALL)
        layout = {"flex": "1 1 90px", "min_width": "90px", "max_width": "150px"}
        self._search = widgets.Text(placeholder="lines with ...", layout=layout)
        self._times = toggle("Times", "Show the time of each line", "clock-o")
        self._pause = toggle("Hold", "Pause the log: add and remove no lines", "pause")
        self._match_count, self._earlier_note = html(), html()
        self._unfinished, self._path = html(), html()
        self._pages = LogPages()
        self._rank: int | None = None
        self._word = ""
        self._reset_counts(0)
        self._times.observe(self._show_times, "value")
        controls = [self._choice, self._search, self._times, self._pause, self._match_count]
        lines = widgets.VBox([self._earlier_note, self._pages.root, self._unfinished])
        choice = box(widgets.HBox, controls, "nbddp-choice")
        scroll = box(widgets.Box, [lines], "nbddp-scroll")
        self.root = box(widgets.VBox, [choice, scroll, self._path], "nbddp-logs")

    @property
    def user_choice(self) -> tuple[object, ...]:
        """The chosen rank, the search word, and whether the log is paused."""
        return self._choice.value, self._search.value, self._pause.value

    def draw(self, buffer: LogBuffer, folder: str = "") -> None:
        """Show new lines; ``folder`` is the folder of the log files."""
        choice, word = int(self._choice.value), self._search.value.strip().casefold()
        rank = None if choice == ALL else choice
        if (rank, word) != (self._rank, self._word):
            self._rank, self._word = rank, word
            self._pages.remove()
            self._reset_counts(max(0, buffer.total(self._rank) - MAX_ROWS))
        elif self._pause.value:
            return
        self._append_new_lines(buffer)
        self._update_notes(buffer, log_path(folder, self._rank))

    def _reset_counts(self, skipped: int) -> None:
        self._seen_lines = skipped  # all lines until now, including skipped ones
        self._searched_lines = self._matched_lines = 0

    def _append_new_lines(self, buffer: LogBuffer) -> None:
        total = buffer.total(self._rank)
        new = buffer.newest(total - self._seen_lines, self._rank)
        dropped = total - self._seen_lines - len(new)  # a flood drops lines before they are shown
        self._seen_lines = total
        matching = self._filter(new)
        shown = matching[-MAX_BATCH:]
        # lines before the first shown ones are not a gap, but earlier lines
        gap = len(matching) - len(shown) + dropped if self._searched_lines else 0
        self._searched_lines += len(new)
        self._matched_lines += len(matching)
        rows = [note_row(f"… {gap:,} more lines came too fast to show")] if gap else []
        self._pages.add([*rows, *html_rows(shown, has_times=True)], len(shown) + gap)

    def _filter(self, lines: Sequence[LogLine]) -> list[LogLine]:
        word = self._word
        return [line for line in lines if not word or word in strip(line.text).casefold()]

    def _update_notes(self, buffer: LogBuffer, path: str) -> None:
        rows = html_rows(self._filter(buffer.unfinished(self._rank)))
        # the tabindex lets the keyboard scroll the log
        attributes = 'class="nbddp" tabindex="0" role="region" aria-label="log"'
        self._unfinished.value = f"<div {attributes}>{log_block(rows) if rows else ''}</div>"
        count = f"{self._matched_lines:,} of {self._searched_lines:,} lines"
        self._match_count.value = muted(count) if self._word else ""
        shown = self._searched_lines if self._word else self._pages.line_count
        earlier = self._seen_lines - shown
        note = describe_earlier(earlier, path, was_searched=not self._word)
        self._earlier_note.value = _in_panel(log_block([note_row(note)])) if note else ""
        self._path.value = muted(path)

    def _show_times(self, _change: object) -> None:
        set_class = self.root.add_class if self._times.value else self.root.remove_class
        set_class("nbddp-timed")


class LogPages:
    """Rows of HTML in pages. New rows go to the newest page, and only that page is sent again.

    A front end redraws all children after a removed child, and the user's text selection is lost.
    So pages are removed rarely, and many at once.
    """

    def __init__(self) -> None:
        # A layout of its own, because a reloaded page creates the newest widgets first. A widget
        # that shares the layout of an older one cannot be created there, and breaks the panel.
        layout = {"margin": "0", "overflow": "visible", "flex": "0 0 auto"}
        self.root = widgets.VBox((), layout=layout)
        self._pages: list[_Page] = []
        self._rows: list[str] = []  # of the newest page
        self._full_at = 0.0

    @property
    def line_count(self) -> int:
        """The number of lines that the pages stand for."""
        return sum(page.line_count for page in self._pages)

    def add(self, rows: Sequence[str], lines: int) -> None:
        """Append rows that stand for this many lines."""
        if not rows:
            return
        now = time.monotonic()
        if not self._pages or len(self._rows) >= PAGE_ROWS or now > self._full_at:
            self._pages.append(_Page(html(_in_panel(log_block(rows)))))
            self.root.children = (*self.root.children, self._pages[-1].html)
            self._rows, self._full_at = [*rows], now + PAGE_SECONDS
        else:
            self._rows += rows
            self._pages[-1].html.value = _in_panel(log_block(self._rows))
        self._pages[-1].row_count += len(rows)
        self._pages[-1].line_count += lines
        row_count = sum(page.row_count for page in self._pages)
        if len(self._pages) > MAX_PAGES or row_count > MAX_PAGE_ROWS:
            self.remove(len(self._pages) // 2)

    def remove(self, count: int | None = None) -> None:
        """Remove the oldest pages, or all pages."""
        removed = self._pages[:count]
        del self._pages[:count]
        self.root.children = [page.html for page in self._pages]
        for page in removed:
            close(page.html)


@dataclass(slots=True)
class _Page:
    html: PlainWidget
    row_count: int = 0
    line_count: int = 0


def log_path(folder: str, rank: int | None) -> str:
    """Return the log file of a rank, or a pattern for all ranks.

    >>> log_path("runs/a", 1), log_path("runs/a", None)
    ('runs/a/rank1.log', 'runs/a/rank*.log')
    """
    name = "rank*.log" if rank is None else log_name(rank)
    return f"{folder}/{name}" if folder else name


def describe_earlier(count: int, path: str, *, was_searched: bool = True) -> str:
    """Return a note on lines that are not shown; empty if there are none.

    >>> describe_earlier(1234, "rank1.log"), describe_earlier(1, "rank*.log", was_searched=False)
    ('1,234 earlier lines in rank1.log', '1 earlier line not searched, in rank*.log')
    """
    if not count:
        return ""
    lines = plural(count, "earlier line")
    return f"{lines} in {path}" if was_searched else f"{lines} not searched, in {path}"


def _in_panel(inner: str) -> str:
    return f'<div class="nbddp">{inner}</div>'
