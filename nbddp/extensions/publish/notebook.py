"""``--publish``: publish the runs of a notebook from their start to their end."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.publisher import name_in_tracker
from nbddp.extensions.publish.tracker import Target, parse_target, require_package

METAVAR = "TRACKER"


def installed_target(text: str) -> Target:
    """Read where to publish; refuse a tracker whose package is missing."""
    try:
        found = parse_target(text)
        require_package(found.kind)
    except RequestError as error:
        raise ArgumentTypeError(str(error)) from None
    return found


class LivePublishing:
    """Publishes each run of a notebook once to each tracker.

    Args:
        print_line: prints a line for the user between two cells.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._publications: dict[tuple[Path, str], Publication] = {}

    def follow(self, session: Session, targets: Iterable[Target]) -> None:
        """Publish the current run from its start to its end, once for each target.

        If a tracker is not available, print the reason: the cell still runs.
        """
        folder = session.event_log.folder
        for target in targets:
            if folder is not None and (folder, target.kind) not in self._publications:
                try:
                    self.start(session, folder, target, is_again=False)
                except RequestError as error:
                    self._print_line(f"nbddp: {error}")

    def start(
        self, session: Session, folder: Path, to: Target, *, is_again: bool, is_told: bool = False
    ) -> str:
        """Start to publish the current run of a session; return the name of the run in the tracker.

        Args:
            session: the session.
            folder: the folder of the run.
            to: the tracker.
            is_again: whether a run that was published before may be published as another run.
            is_told: whether the user knows the place. Then only W&B's address is reported later.

        Raises:
            RequestError: the run is already published, or the publisher cannot start.
        """
        previous = self._publications.get((folder, to.kind))
        if previous is not None and not previous.result.done():
            raise RequestError(f"run {folder.name} is already being published to {to.kind}")
        name = name_in_tracker(folder, to.kind, is_again=is_again)
        hidden = f"published to {to.kind}: " if is_told and to.kind != "wandb" else None
        notify = partial(self._notify, session, hidden)
        self._publications[folder, to.kind] = Publication(to, folder, name, notify)
        return name

    def _notify(self, session: Session, hidden: str | None, text: str) -> None:
        """Print a line in the running or next cell; without ranks, print it at once."""
        if hidden is not None and text.startswith(hidden):
            return
        with suppress(RequestError):
            session.call(session.event_log.notify, text)
            return
        self._print_line(f"nbddp: {text}")
