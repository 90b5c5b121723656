"""A screen that records its content."""

from __future__ import annotations

from typing import Any

Rich = tuple[Any, Any, str, bool]  # data, metadata, the id of the display, whether it is an update


class KeptScreen:
    """A recording screen for the views of a cell.

    Attributes:
        things: shown texts and rich outputs, in order.
        visible: number of things at the last flush; ``flushes`` counts the flushes.
    """

    def __init__(self) -> None:
        self.things: list[str | Rich] = []
        self.visible = self.flushes = 0

    def write(self, text: str) -> None:
        self.things.append(text)

    def flush(self) -> None:
        self.visible = len(self.things)
        self.flushes += 1

    def display(self, data: Any, metadata: Any, *, display_id: str, is_update: bool) -> None:
        self.things.append((data, metadata, display_id, is_update))

    @property
    def shown(self) -> list[str | Rich]:
        """The same, with text in one piece between two things that are rich."""
        found: list[str | Rich] = []
        for thing in self.things:
            if found and isinstance(found[-1], str) and isinstance(thing, str):
                found[-1] += thing
            else:
                found.append(thing)
        return found

    @property
    def text(self) -> str:
        return "".join(each for each in self.things if isinstance(each, str))
