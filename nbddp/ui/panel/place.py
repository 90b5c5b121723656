"""Where a panel stands among a cell's outputs: what comes there takes the place of what was.

A page does not tell when it clears an output, and then drops all that would replace it. A panel
knows whether a page shows it; of what stands there before the panel nobody knows. So that is not
replaced but taken away, and what comes next is an output of its own: it is shown either way.
"""

from __future__ import annotations

import uuid

from IPython.display import publish_display_data

from nbddp.wire.messages import JsonDict

# its room goes too, by a rule of the style sheet
EMPTY: JsonDict = {"text/html": '<div class="nbddp-fallback"></div>', "text/plain": ""}


class Place:
    """One for all attempts at a cell.

    Attributes:
        is_taken: something was published here.
        is_followed: something stands below that belongs there, such as a figure of a rank.
    """

    def __init__(self) -> None:
        self.is_taken = self.is_followed = False
        self._may_be_lost = False
        self._display_id = _new_id()

    def begin(self, html: str, text: str) -> None:
        """Show what stands here until more is known; the style sheet is in ``html``."""
        self._publish({"text/html": f'<div class="nbddp-soon">{html}</div>', "text/plain": text})
        self._may_be_lost = True

    def replace(self, bundle: JsonDict) -> None:
        """Show what will stay, or will tell when it is gone.

        The style sheet hides it as long as what was here first is not gone: so both change in the
        same moment.
        """
        if not self._may_be_lost or self.is_followed:
            self._publish(bundle)
            return
        before, self._display_id, self.is_taken = self._display_id, _new_id(), False
        self._publish(bundle)
        publish_display_data(EMPTY, transient={"display_id": before}, update=True)
        self._may_be_lost = False

    def empty(self) -> None:
        """Take back what was shown here."""
        self._publish({"text/html": "", "text/plain": ""})

    def distrust(self) -> None:
        """No page has told that it shows what was put here."""
        self._may_be_lost = True

    def forget(self) -> None:
        """The output was cleared: there is nothing to be replaced."""
        self.is_taken = self.is_followed = self._may_be_lost = False

    def _publish(self, bundle: JsonDict) -> None:
        is_update, self.is_taken = self.is_taken, True
        publish_display_data(bundle, transient={"display_id": self._display_id}, update=is_update)


def _new_id() -> str:
    return f"nbddp-{uuid.uuid4().hex}"
