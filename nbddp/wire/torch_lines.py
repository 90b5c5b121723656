"""Lines of torch's C++ code in the log of a rank that say nothing about the cell."""

from __future__ import annotations

import re

# the lines that Gloo prints for each new group, in one write: torch 2.9 and 2.10
_GLOO_PREFIX = "[Gloo] Rank "  # ten times faster to find than the whole pattern
_GLOO_LINES = re.compile(
    rf"^{re.escape(_GLOO_PREFIX)}\d+ is connected to \d+ peer ranks\. "
    r"Expected number of connected peer ranks is : \d+\n",
    re.MULTILINE,
)
# the trace that torch's store client prints when its connection ends, as in an interrupt
_STORE_PREFIX = "Exception raised from "
_WARNING_MARK = "] [c10d] "
_WARNING_LINE = rf"^(?:\[rank\d+\]:)?\[W\d{{4}} [^\n]*{re.escape(_WARNING_MARK)}[^\n]*"
_STORE_TRACE = re.compile(
    rf"{_WARNING_LINE}\n{_STORE_PREFIX}[^\n]*\n(?:(?:frame #|<omitting)[^\n]*\n)*\n?",
    re.MULTILINE,
)
# a reader may see one write in parts, which end between two pages of the file
_PART_OF_TRACE = re.compile(
    rf"{_WARNING_LINE}(?:\n(?:{_STORE_PREFIX}|frame #|<omitting)[^\n]*)*\Z".encode(), re.MULTILINE
)


def without_torch_lines(text: str) -> str:
    """Return a text without these lines."""
    if _GLOO_PREFIX in text:
        text = _GLOO_LINES.sub("", text)
    if _STORE_PREFIX in text:
        text = _STORE_TRACE.sub("", text)
    return text


def part_of_trace(data: bytes) -> int:
    """Return the length of an unfinished trace at the end of what was read of a log."""
    part = _PART_OF_TRACE.search(data) if _WARNING_MARK.encode() in data else None
    return len(data) - part.start() if part else 0
