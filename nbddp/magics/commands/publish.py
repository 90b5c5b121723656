"""``%ddp publish`` and ``--publish``: a run for trackio, W&B, TensorBoard or MLflow."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.archive.find import find_run
from nbddp.archive.summary import summarize
from nbddp.errors import RequestError
from nbddp.publish.publication import Publication
from nbddp.publish.publisher import name_there
from nbddp.publish.tracker import Target, require, target

if TYPE_CHECKING:
    from nbddp.controller.session import Session
    from nbddp.magics.notebook_state import Desk

METAVAR = "TRACKER"


def installed_target(text: str) -> Target:
    """Where to publish; refused at once where the tracker's package is missing."""
    try:
        found = target(text)
        require(found.kind)
    except RequestError as error:
        raise ArgumentTypeError(str(error)) from None
    return found


def publish_run(desk: Desk, args: Namespace) -> None:
    """Publish a run that is over; begin to, if it is this notebook's and goes on.

    Raises:
        RequestError: there is no such run, it is published already, or the tracker refuses it.
    """
    current = desk.current_run
    path = find_run(args.run, Path.cwd(), current=current)
    if current is not None and path.resolve() == current.resolve():
        desk.publishing.begin(desk.group.scripts.active, args.tracker, is_again=args.again)
        return
    if summarize(path).is_live:
        raise RequestError(
            f"run {path.name} goes on in another kernel: publish it from there, or when it is over"
        )
    name = name_there(path, args.tracker.kind, is_again=args.again)
    done = Publication(args.tracker, path, name, is_live=False).wait()
    desk.views.say(
        f"nbddp: {done['steps']} steps published to {args.tracker.kind}: {done['where']}"
    )


class Publishing:
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
            session.call(session.time_line.say, text)
            return
        self._say(f"nbddp: {text}")


def _folder(session: Session) -> Path | None:
    folder = session.time_line.folder
    return None if folder is None else folder.path
