"""What a notebook publishes while its run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.errors import RequestError
from nbddp.publish.publication import Publication
from nbddp.publish.publisher import name_in_tracker
from nbddp.publish.tracker import Target

if TYPE_CHECKING:
    from nbddp.controller.session import Session


class LivePublishing:
    """What this notebook publishes while it goes on: each run once to each tracker.

    Args:
        print_line: tells the user something between two cells.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._publications: dict[tuple[Path, str], Publication] = {}

    def follow(self, session: Session, targets: Iterable[Target]) -> None:
        """Publish the run that goes on from its beginning to its end; what is asked twice, once.

        A tracker that cannot be had is said: the cell runs.
        """
        for each in targets:
            folder = _folder(session)
            if folder is not None and (folder, each.kind) not in self._publications:
                try:
                    self.start(session, each, is_again=False)
                except RequestError as error:
                    self._print_line(f"nbddp: {error}")

    def start(self, session: Session, to: Target, *, is_again: bool) -> None:
        """Begin to publish the run that goes on.

        Raises:
            RequestError: it is published already, or nothing can be started.
        """
        folder = _folder(session)
        if folder is None:
            raise RequestError("no run goes on")
        previous = self._publications.get((folder, to.kind))
        if previous is not None and not previous.has_ended:
            raise RequestError(f"run {folder.name} is being published to {to.kind}")
        name = name_in_tracker(folder, to.kind, is_again=is_again)
        publication = Publication(to, folder, name, is_live=True)
        self._publications[folder, to.kind] = publication
        publication.follow(
            lambda text: self._notify(session, text), lambda: _folder(session) == folder
        )

    def _notify(self, session: Session, text: str) -> None:
        """In the cell that runs, or the next one; without ranks, here and now."""
        with suppress(RequestError):
            session.call(session.event_log.notify, text)
            return
        self._print_line(f"nbddp: {text}")


def _folder(session: Session) -> Path | None:
    folder = session.event_log.folder
    return None if folder is None else folder.path
