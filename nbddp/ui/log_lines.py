"""The last lines that ranks wrote in one cell, as HTML or as text; equal values once."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from nbddp.charts.palette import rank_class, rank_color
from nbddp.record.log_reader import MAX_PANEL_LINE, LineAssembler, log_name
from nbddp.ui.ansi import strip, to_html
from nbddp.ui.wording import format_rank_tag
from nbddp.wire.messages import JsonDict


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line as it is shown.

    Attributes:
        ranks: whose it is; empty for nbddp's own words.
        text: as it was written, escape sequences included.
        mark: a word before the ranks, like ``Out``.
        at: when it came, as ``time.time()`` has it; 0 where that is not known.
    """

    ranks: tuple[int, ...]
    text: str
    mark: str = ""
    at: float = field(default=0.0, compare=False)


# not yet a LogLine: of a flood, most are gone before they are ever shown
_Row = tuple[tuple[int, ...], str, float]


class LogBuffer:
    r"""Keeps the last lines of every rank, and of all together in the order they came.

    What a rank has begun and not ended, like a progress bar, is its last line for the time
    being. One thread writes and reads: nothing here is locked.

    >>> buffer = LogBuffer(max_lines=2)
    >>> buffer.write(1, "a\nb\nc\n\r10%"), buffer.write(1, "\r20%")
    (None, None)
    >>> [line.text for line in buffer.lines(1)], buffer.dropped_count(1)
    (['b', 'c', '20%'], 1)

    Args:
        max_lines: that are kept of each rank.
        max_merged: and of all together; as many if it is not said.

    Attributes:
        version: another number whenever there is something new to see.
    """

    def __init__(self, *, max_lines: int = 500, max_merged: int | None = None) -> None:
        self._kept: defaultdict[int | None, deque[_Row]] = defaultdict(
            lambda: deque(maxlen=max_lines), {None: deque(maxlen=max_merged or max_lines)}
        )
        self._totals: Counter[int | None] = Counter()
        self._assemblers: dict[int, LineAssembler] = {}
        self.version = 0

    def write(self, rank: int, text: str) -> None:
        """Take a piece of a rank's output, cut anywhere."""
        if text:
            if rank not in self._assemblers:
                self._assemblers[rank] = LineAssembler(log_name(rank), max_line=MAX_PANEL_LINE)
            self._append((rank,), self._assemblers[rank].add(text))

    def write_notice(self, text: str) -> None:
        """Take words of nbddp's own, in one line or several."""
        self._append((), text.rstrip("\n").split("\n"))

    def flush(self, rank: int | None = None) -> None:
        """Make a line of what has no end yet, of one rank or of all: no more of it will come."""
        for each in self._writers(rank):
            self._append((each,), self._assemblers[each].flush())

    def lines(self, rank: int | None = None) -> list[LogLine]:
        """Return the last lines of one rank, or of all as they came, then the unended ones."""
        return self.newest(len(self._kept[rank]), rank) + self.unfinished(rank)

    def dropped_count(self, rank: int | None = None) -> int:
        """Return how many lines of one rank, or of all, were there and are not kept."""
        return self._totals[rank] - len(self._kept[rank])

    def total(self, rank: int | None = None) -> int:
        """Return how many lines of one rank, or of all, have been ended."""
        return self._totals[rank]

    def newest(self, count: int, rank: int | None = None) -> list[LogLine]:
        """Return the last ``count`` kept lines that were ended, of one rank or of all."""
        kept = islice(reversed(self._kept[rank]), count)
        return [LogLine(ranks, text, at=at) for ranks, text, at in kept][::-1]

    def unfinished(self, rank: int | None = None) -> list[LogLine]:
        """Return what one rank, or each, is writing now."""
        partial = ((each, self._assemblers[each].partial) for each in self._writers(rank))
        return [LogLine((each,), text) for each, text in partial if text]

    def _writers(self, rank: int | None) -> list[int]:
        return [each for each in sorted(self._assemblers) if rank in (None, each)]

    def _append(self, ranks: tuple[int, ...], lines: Sequence[str]) -> None:
        at = time.time()
        for tail in (*ranks, None):
            self._kept[tail].extend((ranks, line, at) for line in lines)
            self._totals[tail] += len(lines)
        self.version += 1


def group_ranks_by_value(results: Mapping[int, JsonDict]) -> list[tuple[list[int], JsonDict]]:
    """Group ranks by what they show, in order of the lowest rank.

    >>> one, two = {"data": {"text/plain": "1"}}, {"data": {"text/plain": "2"}}
    >>> [ranks for ranks, _ in group_ranks_by_value({0: one, 1: two, 2: one})]
    [[0, 2], [1]]
    """
    groups: list[tuple[list[int], JsonDict]] = []
    for rank, bundle in results.items():
        for ranks, known in groups:
            if known == bundle:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], bundle))
    return groups


def split_text_and_rich(
    results: Mapping[int, JsonDict],
) -> tuple[list[LogLine], list[tuple[list[int], JsonDict]]]:
    """Values that are text, as lines of the log, and those that want a display of their own."""
    lines: list[LogLine] = []
    rich: list[tuple[list[int], JsonDict]] = []
    for ranks, bundle in group_ranks_by_value(results):
        if set(bundle["data"]) == {"text/plain"}:
            lines.append(LogLine(tuple(ranks), str(bundle["data"]["text/plain"]), mark="Out"))
        elif bundle["data"]:
            rich.append((ranks, bundle))
    return lines, rich


# inline, as a page that does not trust the notebook drops the style sheet; the end is in view
# 260 pixels are 15 whole rows of 17, a border above and padding below
_SCROLL_STYLE = (
    "box-sizing:border-box;max-height:260px;overflow-y:auto;display:flex;"
    "flex-direction:column-reverse;border-top:1px solid #8883"
)


def log_html(lines: Sequence[LogLine], *, earlier: str = "") -> str:
    """Lines as HTML, which reads as plain text where a page strips all styles.

    Args:
        lines: from top to bottom.
        earlier: what to say, in a first line, of lines that are not there any more.
    """
    rows = [note_row(earlier)] if earlier else []
    return log_block([*rows, *html_rows(lines)])


def scroll_box(html: str) -> str:
    """As high as the panel's log at most, with its end in view."""
    # whoever has no mouse scrolls it with the keyboard
    attributes = 'tabindex="0" role="region" aria-label="log"'
    return f'<div class="nbddp-kept" {attributes} style="{_SCROLL_STYLE}"><div>{html}</div></div>'


def html_rows(lines: Sequence[LogLine], *, has_times: bool = False) -> list[str]:
    """Each line as HTML; with the time when it came in front, which a page shows on demand."""
    tag = cache(_html_tag)  # a few tags stand before hundreds of lines
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
    """Rows of HTML as one block."""
    # JupyterLab colours the classes of to_html inside jp-RenderedText only
    return '<div class="jp-RenderedText"><pre class="nbddp-log">' + "\n".join(rows) + "</pre></div>"


def note_row(text: str) -> str:
    """A word of ours between the lines, such as how many are left out."""
    return _span("earlier", text)


def log_text(lines: Sequence[LogLine], *, earlier: str = "") -> str:
    """The same as plain text, with no newline at the end."""
    rows = [strip(earlier)] if earlier else []
    for line, text in _rows(lines):
        tag = (
            None
            if line is None
            else format_rank_tag(line.ranks, line.mark)
            if line.ranks
            else "nbddp:"
        )
        rows.append(strip(" ".join(each for each in (tag, text) if each is not None)))
    return "\n".join(rows)


def _rows(lines: Sequence[LogLine]) -> Iterator[tuple[LogLine | None, str | None]]:
    """Yield each row of text, with the line if its tag precedes the text.

    A value of several rows has its tag in a row above: its columns stay aligned.
    """
    for line in lines:
        texts = line.text.split("\n")
        has_own_row = line.ranks and line.mark and len(texts) > 1
        if has_own_row:
            yield line, None
        for text in texts:
            yield None if has_own_row else line, text


def _clock(at: float) -> str:
    if not at:
        return ""
    clock = f"{_format_second(int(at))}.{int(at % 1 * 10)}"
    return f'<span class="nbddp-time">{clock} </span>'


@cache
def _format_second(at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _html_tag(ranks: tuple[int, ...], mark: str) -> str:
    color = rank_color(ranks[0])
    kind = f"nbddp-tag {rank_class(ranks[0])}"
    return (
        f'<span class="{kind}" style="color:{color}">{to_html(format_rank_tag(ranks, mark))}</span>'
    )


def _span(kind: str, text: str) -> str:
    return f'<span class="nbddp-{kind}">{to_html(text)}</span>'
