"""``%ddp publish`` and ``--publish``: send a run to trackio, W&B, TensorBoard or MLflow."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.archive.find import find_run
from nbddp.archive.summary import summarize
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.publish.publication import Publication
from nbddp.publish.publisher import name_in_tracker
from nbddp.publish.tracker import Target, parse_target, require_package

if TYPE_CHECKING:
    from nbddp.magics.notebook_state import NotebookState

METAVAR = "TRACKER"


def installed_target(text: str) -> Target:
    """Read where to publish; refuse a tracker whose package is missing."""
    try:
        found = parse_target(text)
        require_package(found.kind)
    except RequestError as error:
        raise ArgumentTypeError(str(error)) from None
    return found


def publish_run(notebook: NotebookState, args: Namespace) -> None:
    """Publish a finished run, or start to publish the current run of this notebook.

    Raises:
        RequestError: the run does not exist, it is already published, or the tracker refuses it.
    """
    current = notebook.current_run
    path = find_run(args.run, Path.cwd(), current=current)
    if current is not None and path.resolve() == current.resolve():
        notebook.publishing.start(
            notebook.group.scripts.active_session, args.tracker, is_again=args.again
        )
        return
    if summarize(path).is_live:
        raise RequestError(
            f"run {path.name} is going on in another kernel: publish it there, or when it has ended"
        )
    name = name_in_tracker(path, args.tracker.kind, is_again=args.again)
    done = Publication(args.tracker, path, name, is_live=False).wait()
    notebook.presenter.print_line(
        f"nbddp: {plural(done['steps'], 'step')} published to {args.tracker.kind}: {done['where']}"
    )


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
        for each in targets:
            folder = _folder(session)
            if folder is not None and (folder, each.kind) not in self._publications:
                try:
                    self.start(session, each, is_again=False)
                except RequestError as error:
                    self._print_line(f"nbddp: {error}")

    def start(self, session: Session, to: Target, *, is_again: bool) -> None:
        """Start to publish the current run.

        Raises:
            RequestError: no run is going on, it is already published, or the publisher cannot
                start.
        """
        folder = _folder(session)
        if folder is None:
            raise RequestError("no run is going on")
        previous = self._publications.get((folder, to.kind))
        if previous is not None and not previous.has_ended:
            raise RequestError(f"run {folder.name} is already being published to {to.kind}")
        name = name_in_tracker(folder, to.kind, is_again=is_again)
        publication = Publication(to, folder, name, is_live=True)
        self._publications[folder, to.kind] = publication
        publication.follow(
            lambda text: self._notify(session, text), lambda: _folder(session) == folder
        )

    def _notify(self, session: Session, text: str) -> None:
        """Print a line in the running or next cell; without ranks, print it at once."""
        with suppress(RequestError):
            session.call(session.event_log.notify, text)
            return
        self._print_line(f"nbddp: {text}")


def _folder(session: Session) -> Path | None:
    folder = session.event_log.folder
    return None if folder is None else folder.path
