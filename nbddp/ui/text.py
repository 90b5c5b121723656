"""A cell as plain text: for a terminal, nbclient, papermill, and scripts."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from nbddp.controller.cell import CellHandle, CellResult, Displayed, Notice, Said, Wrote
from nbddp.errors import say_ranks
from nbddp.ui.lines import LineAssembler
from nbddp.ui.values import agreeing
from nbddp.wire.messages import Display, JsonDict

FLUSH_PERIOD = 0.02  # seconds; ipykernel sends what is printed every 200 ms unless flushed
# of the 256 colours, eight that can be told apart on white and on black
_COLORS = (32, 166, 35, 133, 37, 168, 136, 69)


class Screen(Protocol):
    """Where a view puts things."""

    def write(self, text: str) -> None:
        """Put text at the end."""

    def flush(self) -> None:
        """Make it visible now."""

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Show a MIME bundle."""


class TextView:
    """Prints what ranks write, a line at a time, with the rank in front."""

    def __init__(self, screen: Screen, *, is_quiet: bool = False, has_color: bool = False) -> None:
        self._screen = screen
        self._is_quiet = is_quiet
        self._has_color = has_color
        self._lines: defaultdict[int, LineAssembler] = defaultdict(LineAssembler)
        self._next_flush = 0.0

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell from its beginning to its end."""
        self.follow(handle)
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        self.finish(handle.result)
        return handle.result

    def follow(self, handle: CellHandle) -> None:
        """Show what a cell says until it ends; may be called again after an interrupt."""
        for notice in handle.notices():
            self._show_notice(notice)
            if not handle.has_notices() or time.monotonic() > self._next_flush:
                self._screen.flush()
                self._next_flush = time.monotonic() + FLUSH_PERIOD

    def finish(self, result: CellResult) -> None:
        """Show what is left and the values."""
        for rank, lines in sorted(self._lines.items()):
            self._write_lines([rank], lines.flush())
        for ranks, bundle in agreeing(result.results):
            self._show_value(ranks, bundle)
        self._screen.flush()

    def complain(self, report: str) -> None:
        """Show why a cell failed that nobody waits for."""
        self._screen.write(f"{report}\n")
        self._screen.flush()

    def _show_notice(self, notice: Notice) -> None:
        match notice:
            case Said(text=text):
                self._screen.write(f"nbddp: {text}\n")
            case Wrote(rank=rank, text=text) if not self._is_quiet:
                self._write_lines([rank], self._lines[rank].add(text))
            case Displayed(rank=rank, message=message) if not self._is_quiet:
                self._show_display(rank, message)

    def _show_display(self, rank: int, message: Display) -> None:
        self._write_lines([rank], self._lines[rank].flush())  # it was printed before
        if not message.display_id and set(message.data) == {"text/plain"}:
            self._write_lines([rank], str(message.data["text/plain"]).split("\n"))
            return
        if not message.is_update:
            self._caption([rank])
        self._screen.display(
            message.data,
            message.metadata,
            display_id=message.display_id and f"nbddp-{rank}-{message.display_id}",
            is_update=message.is_update,
        )

    def _show_value(self, ranks: Sequence[int], bundle: JsonDict) -> None:
        data, metadata = bundle["data"], bundle["metadata"]
        if set(data) == {"text/plain"}:
            self._write_lines(ranks, str(data["text/plain"]).split("\n"), mark="Out ")
        elif data:
            self._caption(ranks)
            self._screen.display(data, metadata, display_id="", is_update=False)

    def _caption(self, ranks: Sequence[int]) -> None:
        self._screen.write(f"{self._tag(ranks)}\n")
        self._screen.flush()

    def _write_lines(self, ranks: Sequence[int], lines: Sequence[str], mark: str = "") -> None:
        if lines:
            tag = self._tag(ranks, mark)
            self._screen.write("".join(f"{tag} {line}\n" for line in lines))

    def _tag(self, ranks: Sequence[int], mark: str = "") -> str:
        text = f"{mark}[{say_ranks(ranks)}]"
        if not self._has_color:
            return text
        return f"\x1b[38;5;{_COLORS[ranks[0] % len(_COLORS)]}m{text}\x1b[0m"


class StreamScreen:
    """A screen that is a text stream: rich things are shown as their text."""

    def write(self, text: str) -> None:
        """Print."""
        sys.stdout.write(text)

    def flush(self) -> None:
        """Print now: ipykernel would hold it for 200 ms."""
        sys.stdout.flush()

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Print the text/plain form, if there is one and it is new."""
        del metadata, display_id  # for screens that can show more
        if not is_update and "text/plain" in data:
            sys.stdout.write(f"{data['text/plain']}\n")
