"""Every byte of a rank's log reaches the cell once: by mail while it lives, from the file after."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nbddp.wire.messages import Output

CHUNK_BYTES = 1 << 20


class LogReader:
    """Knows how far the log of one rank has been shown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch(0o600)
        self._shown = path.stat().st_size  # an earlier attempt's output

    def accept(self, output: Output) -> str:
        """The text of a mailed piece, or nothing if the file was read beyond it already."""
        if output.start < self._shown:
            return ""
        self._shown = output.end
        return output.text

    def rest(self) -> Iterator[str]:
        """What a rank that is gone wrote and could not mail any more."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._shown)
            while data := file.read(CHUNK_BYTES):
                self._shown += len(data)
                yield decode(data)
        if last := decode(b"", final=True):
            yield last
