"""The end of a log file."""

from __future__ import annotations

from pathlib import Path

from nbddp.ui.lines import LineAssembler

_BYTES_PER_LINE = 4096
_MAX_BYTES = 64 << 20


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, progress bars folded, with a word on what comes before."""
    size = path.stat().st_size
    begin = max(0, size - min(lines * _BYTES_PER_LINE, _MAX_BYTES))
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    assembler = LineAssembler(path.name)
    found = [*assembler.add(text), *assembler.flush()]
    if begin == 0 and len(found) <= lines:
        return "\n".join(found)
    return "\n".join([f"... earlier lines in {path}", *found[-lines:]])
