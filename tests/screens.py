"""A screen that records its content."""

from typing import Any

from nbddp.ui.frontend import StreamTarget

Rich = tuple[Any, Any, str, bool]  # data, metadata, the id of the display, whether it is an update


class RecordingScreen(StreamTarget):
    """Keeps shown texts and rich outputs in order; ``visible`` is their number at the flush."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[str | Rich] = []
        self.visible = self.flushes = 0

    def write(self, text: str) -> None:
        self.outputs.append(text)

    def flush(self) -> None:
        self.visible = len(self.outputs)
        self.flushes += 1

    def display(self, data: Any, metadata: Any, *, display_id: str, is_update: bool) -> None:
        self.outputs.append((data, metadata, display_id, is_update))

    @property
    def shown(self) -> list[str | Rich]:
        found: list[str | Rich] = []
        for output in self.outputs:
            if found and isinstance(found[-1], str) and isinstance(output, str):
                found[-1] += output
            else:
                found.append(output)
        return found

    @property
    def text(self) -> str:
        return "".join(each for each in self.outputs if isinstance(each, str))
