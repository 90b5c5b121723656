"""What a notebook publishes while its run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.errors import RequestError
from nbddp.publish.publication import Publication
from nbddp.publish.publisher import name_there
from nbddp.publish.tracker import Target

if TYPE_CHECKING:
    from nbddp.controller.session import Session


class LivePublishing:
    """What this notebook publishes while it goes on: each run once to each tracker.

    Args:
        say: tells the user something between two cells.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._begun: dict[tuple[Path, str], Publication] = {}

    def follow(self, session: Session, targets: Iterable[Target]) -> None:
        """Publish the run that goes on from its beginning to its end; what is asked twice, once.

        A tracker that cannot be had is said: the cell runs.
        """
        for each in targets:
            folder = _folder(session)
            if folder is not None and (folder, each.kind) not in self._begun:
                try:
                    self.begin(session, each, is_again=False)
                except RequestError as error:
                    self._say(f"nbddp: {error}")

    def begin(self, session: Session, to: Target, *, is_again: bool) -> None:
        """Begin to publish the run that goes on.

        Raises:
            RequestError: it is published already, or nothing can be started.
        """
        folder = _folder(session)
        if folder is None:
            raise RequestError("no run goes on")
        before = self._begun.get((folder, to.kind))
        if before is not None and not before.is_over:
            raise RequestError(f"run {folder.name} is being published to {to.kind}")
        name = name_there(folder, to.kind, is_again=is_again)
        publication = Publication(to, folder, name, is_live=True)
        self._begun[folder, to.kind] = publication
        publication.follow(
            lambda text: self._tell(session, text), lambda: _folder(session) == folder
        )

    def _tell(self, session: Session, text: str) -> None:
        """In the cell that runs, or the next one; without ranks, here and now."""
        with suppress(RequestError):
            session.call(session.event_log.say, text)
            return
        self._say(f"nbddp: {text}")


def _folder(session: Session) -> Path | None:
    folder = session.event_log.folder
    return None if folder is None else folder.path
