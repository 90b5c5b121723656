"""The last log lines of each rank in one cell, as HTML or as text; equal values shown once."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import islice

from nbddp.charts.palette import rank_class, rank_color
from nbddp.formatting import format_ranks
from nbddp.record.log_reader import MAX_PANEL_LINE, LineAssembler, log_name
from nbddp.ui.ansi import strip, to_html
from nbddp.ui.wording import format_rank_tag
from nbddp.wire.messages import JsonDict


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log.

    Attributes:
        ranks: the ranks that wrote it; empty for a notice of nbddp.
        text: the line with its escape sequences.
        mark: a word before the ranks, such as ``Out``.
        at: the ``time.time()`` of its arrival; 0 if unknown.
    """

    ranks: tuple[int, ...]
    text: str
    mark: str = ""
    at: float = field(default=0.0, compare=False)


# A tuple is cheaper than a LogLine: most lines of a flood are dropped before they are shown.
_Row = tuple[tuple[int, ...], str, float]


class LogBuffer:
    r"""Keeps the last lines of each rank, and of all ranks in the order of arrival.

    The unfinished line of a rank, such as a progress bar, counts as its last line. The buffer is
    not thread-safe: one thread writes and reads.

    >>> buffer = LogBuffer(max_lines=2)
    >>> buffer.write(1, "a\nb\nc\n\r10%"), buffer.write(1, "\r20%")
    (None, None)
    >>> [line.text for line in buffer.lines(1)], buffer.dropped_count(1)
    (['b', 'c', '20%'], 1)

    Args:
        max_lines: the number of lines to keep for each rank.
        max_merged: the number of lines to keep for all ranks together; default ``max_lines``.

    Attributes:
        version: a number that changes with every new line.
    """

    def __init__(self, *, max_lines: int = 500, max_merged: int | None = None) -> None:
        self._kept: defaultdict[int | None, deque[_Row]] = defaultdict(
            lambda: deque(maxlen=max_lines), {None: deque(maxlen=max_merged or max_lines)}
        )
        self._totals: Counter[int | None] = Counter()
        self._assemblers: dict[int, LineAssembler] = {}
        self._warnings = RepeatedWarnings()
        self.version = 0

    def write(self, rank: int, text: str) -> None:
        """Add a piece of a rank's output, which may end within a line."""
        if text:
            if rank not in self._assemblers:
                self._assemblers[rank] = LineAssembler(log_name(rank), max_line=MAX_PANEL_LINE)
            self._append((rank,), self._assemblers[rank].add(text))

    def write_notice(self, text: str) -> None:
        """Add a notice of nbddp, of one line or more."""
        self._append((), text.rstrip("\n").split("\n"))

    def flush(self, rank: int | None = None) -> None:
        """End the unfinished line of one rank, or of all ranks."""
        for writer in self._writers(rank):
            self._append((writer,), self._assemblers[writer].flush())

    def note_repeated_warnings(self) -> None:
        """Add a notice of the ranks whose warnings are left out of the log of all ranks."""
        if note := self._warnings.note():
            self.write_notice(note)

    def lines(self, rank: int | None = None) -> list[LogLine]:
        """Return the last lines of one rank or of all ranks, then the unfinished lines."""
        return self.newest(len(self._kept[rank]), rank) + self.unfinished(rank)

    def dropped_count(self, rank: int | None = None) -> int:
        """Return how many lines of one rank, or of all ranks, were dropped."""
        return self._totals[rank] - len(self._kept[rank])

    def total(self, rank: int | None = None) -> int:
        """Return how many finished lines one rank, or all ranks, have written."""
        return self._totals[rank]

    def newest(self, count: int, rank: int | None = None) -> list[LogLine]:
        """Return the last ``count`` finished lines of one rank, or of all ranks."""
        kept = islice(reversed(self._kept[rank]), count)
        return [LogLine(ranks, text, at=at) for ranks, text, at in kept][::-1]

    def unfinished(self, rank: int | None = None) -> list[LogLine]:
        """Return the unfinished line of one rank, or of each rank."""
        partial = ((each, self._assemblers[each].partial) for each in self._writers(rank))
        return [LogLine((each,), text) for each, text in partial if text]

    def _writers(self, rank: int | None) -> list[int]:
        return [each for each in sorted(self._assemblers) if rank in (None, each)]

    def _append(self, ranks: tuple[int, ...], lines: Sequence[str]) -> None:
        at = time.time()
        for tail in (*ranks, None):
            if tail is None and ranks:
                lines = self._warnings.without_repeats(ranks[0], lines)
            self._kept[tail].extend((ranks, line, at) for line in lines)
            self._totals[tail] += len(lines)
        self.version += 1


def split_text_and_rich(
    results: Mapping[int, JsonDict],
) -> tuple[list[LogLine], list[tuple[list[int], JsonDict]]]:
    """Return text values as log lines, and rich values with their ranks. Equal values are joined.

    >>> one, two = {"data": {"text/plain": "1"}}, {"data": {"text/plain": "2"}}
    >>> [(line.ranks, line.text) for line in split_text_and_rich({0: one, 1: two, 2: one})[0]]
    [((0, 2), '1'), ((1,), '2')]
    """
    groups: list[tuple[list[int], JsonDict]] = []
    for rank, bundle in results.items():
        same = [ranks for ranks, known in groups if known == bundle]
        if same:
            same[0].append(rank)
        elif bundle["data"]:
            groups.append(([rank], bundle))
    texts = [
        LogLine(tuple(ranks), str(bundle["data"]["text/plain"]), mark="Out")
        for ranks, bundle in groups
        if set(bundle["data"]) == {"text/plain"}
    ]
    return texts, [group for group in groups if set(group[1]["data"]) != {"text/plain"}]


# Inline, because a page that does not trust the notebook removes the style sheet. Reversed flex
# keeps the end in view. 260 pixels are 15 rows of 17, a border above and padding below.
_SCROLL_STYLE = (
    "box-sizing:border-box;max-height:260px;overflow-y:auto;display:flex;"
    "flex-direction:column-reverse;border-top:1px solid #8883"
)


def log_html(lines: Sequence[LogLine], *, earlier: str = "") -> str:
    """Return lines as HTML, readable also on a page that removes all styles.

    Args:
        lines: the lines from top to bottom.
        earlier: a note on earlier lines, shown as the first line.
    """
    rows = [note_row(earlier)] if earlier else []
    return log_block([*rows, *html_rows(lines)])


def scroll_box(html: str) -> str:
    """Return a scrolling box, at most as high as the panel's log, with the end in view."""
    # the tabindex lets the keyboard scroll it
    attributes = 'tabindex="0" role="region" aria-label="log"'
    return f'<div class="nbddp-kept" {attributes} style="{_SCROLL_STYLE}"><div>{html}</div></div>'


def html_rows(lines: Sequence[LogLine], *, has_times: bool = False) -> list[str]:
    """Return each line as HTML, optionally after its time, which a page shows on demand."""
    tag = cache(_html_tag)  # hundreds of lines share a few tags
    rows = []
    for line, text in _rows(lines):
        shown = "" if text is None else to_html(text)
        if line is not None and line.ranks:
            shown = tag(line.ranks, line.mark) + (f" {shown}" if text is not None else "")
        elif line is not None:
            shown = _span("said", f"nbddp: {text}")
        rows.append((_clock(line.at) if has_times and line is not None else "") + shown)
    return rows


def log_block(rows: Sequence[str]) -> str:
    """Join rows of HTML to a block."""
    # JupyterLab has colours for the classes of to_html only inside jp-RenderedText
    return '<div class="jp-RenderedText"><pre class="nbddp-log">' + "\n".join(rows) + "</pre></div>"


def note_row(text: str) -> str:
    """Return a row with a note between the lines, such as how many are left out."""
    return _span("earlier", text)


def log_text(lines: Sequence[LogLine], *, earlier: str = "") -> str:
    """Return lines as plain text, without a newline at the end."""
    rows = [strip(earlier)] if earlier else []
    for line, text in _rows(lines):
        tag = None
        if line is not None:
            tag = format_rank_tag(line.ranks, line.mark) if line.ranks else "nbddp:"
        rows.append(strip(" ".join(each for each in (tag, text) if each is not None)))
    return "\n".join(rows)


def _rows(lines: Sequence[LogLine]) -> Iterator[tuple[LogLine | None, str | None]]:
    """Yield each row of text, with its line if the row starts with the tag.

    A value of several rows has its tag in a row above, so that its columns stay aligned.
    """
    for line in lines:
        texts = line.text.split("\n")
        has_own_row = line.ranks and line.mark and len(texts) > 1
        if has_own_row:
            yield line, None
        for text in texts:
            yield None if has_own_row else line, text


def _clock(at: float) -> str:
    clock = datetime.fromtimestamp(at).isoformat(timespec="milliseconds")[11:21]
    return f'<span class="nbddp-time">{clock} </span>' if at else ""


def _html_tag(ranks: tuple[int, ...], mark: str) -> str:
    color = rank_color(ranks[0])
    kind = f"nbddp-tag {rank_class(ranks[0])}"
    text = to_html(format_rank_tag(ranks, mark))
    return f'<span class="{kind}" style="color:{color}">{text}</span>'


def _span(kind: str, text: str) -> str:
    return f'<span class="nbddp-{kind}">{to_html(text)}</span>'


# ---- warnings that several ranks print

# as Python writes them ("file.py:3: UserWarning: text"), and torch's C++ code
_WARNING = re.compile(
    r"^(?:\[rank\d+\]:\[W[^]]*\] |(?:<[^>]+>|Cell In\[\d+\]|/[^:]*|\S+\.py):\d+: \w*)Warning: (.*)"
)
MAX_REST = 4  # lines of a warning below its first


@dataclass
class _Warning:
    """The rank that printed a warning first, and the lines below its first line.

    The line of the code, which is indented, ends a warning.
    """

    rank: int
    rest: list[str] = field(default_factory=list)


class RepeatedWarnings:
    """Leaves out warnings that another rank has printed in the same cell.

    >>> warnings = RepeatedWarnings()
    >>> printed = ["a.py:3: UserWarning: slow", "  load(x)", "done"]
    >>> warnings.without_repeats(0, printed) == printed
    True
    >>> warnings.without_repeats(1, printed)
    ['done']
    >>> warnings.note()
    'warnings of rank 1 that another rank had printed are only in the logs'
    """

    def __init__(self) -> None:
        self._shown: dict[str, _Warning] = {}
        self._repeating_ranks: set[int] = set()
        # the warning that a rank's next line can belong to, and the number of this line in it
        self._current: dict[int, tuple[_Warning, int]] = {}

    def without_repeats(self, rank: int, lines: Sequence[str]) -> Sequence[str]:
        """Return the lines of a rank that are shown."""
        if not (rank in self._current or any("Warning: " in line for line in lines)):
            return lines
        return [line for line in lines if not self._is_repeat(rank, line)]

    def _is_repeat(self, rank: int, line: str) -> bool:
        found = _WARNING.search(line)
        if found is None:
            return self._is_rest_of_repeat(rank, line)
        is_python = not line.startswith("[rank")
        warning = self._shown.setdefault(line if is_python else found[1], _Warning(rank))
        if is_python:
            self._current[rank] = warning, 0
        if warning.rank == rank:
            return False
        self._repeating_ranks.add(rank)
        return True

    def _is_rest_of_repeat(self, rank: int, line: str) -> bool:
        """Return whether a line belongs to the repeated warning above it."""
        if rank not in self._current:
            return False
        warning, number = self._current.pop(rank)
        is_first, rest = warning.rank == rank, warning.rest
        is_repeat = not is_first and rest[number:][:1] == [line] and rest[-1].startswith("  ")
        if is_first:
            rest[number:] = [line]
        if (is_first or is_repeat) and not line.startswith("  ") and number + 1 < MAX_REST:
            self._current[rank] = warning, number + 1
        return is_repeat

    def note(self) -> str:
        """Return a line that tells which ranks repeated warnings; empty if none did."""
        if not self._repeating_ranks:
            return ""
        ranks = format_ranks(sorted(self._repeating_ranks))
        return f"warnings of {ranks} that another rank had printed are only in the logs"
