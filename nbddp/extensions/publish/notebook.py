"""Publish runs from a notebook: with ``%ddp publish``, or from their start with ``--publish``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.extensions.publish import PublishArguments, PublishOptions
from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.publisher import name_in_tracker
from nbddp.extensions.publish.tracker import (
    Target,
    describe_place,
    parse_target,
    require_package,
)
from nbddp.extensions.runs.find import find_run
from nbddp.extensions.runs.summary import summarize
from nbddp.formatting import plural
from nbddp.group.notebook_half import CellToRun, Notebook, NotebookHalf


def installed_target(text: str) -> Target:
    """Read where to publish; refuse a tracker whose package is missing."""
    try:
        found = parse_target(text)
        require_package(found.kind)
    except RequestError as error:
        raise ArgumentTypeError(str(error)) from None
    return found


class Publishing(NotebookHalf):
    """Publishes each run of a notebook once to each tracker."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__(notebook)
        self._publications: dict[tuple[Path, str], Publication] = {}

    def before_cell(self, cell: CellToRun) -> None:
        """Publish the current run from its start to its end, once for each target.

        If a tracker is not available, print the reason: the cell still runs.
        """
        folder = self.notebook.current_run
        for target in cell.options(PublishOptions).publish:
            if folder is not None and (folder, target.kind) not in self._publications:
                try:
                    self._start(folder, target, is_again=False)
                except RequestError as error:
                    self.notebook.print_line(f"nbddp: {error}")

    def publish(self, args: PublishArguments) -> None:
        """Publish a finished run, or start to publish the current run of this notebook.

        Raises:
            RequestError: the run does not exist, it is already published, or the tracker refuses
                it.
        """
        current = self.notebook.current_run
        path = find_run(args.run, Path.cwd(), current=current)
        if current is not None and path.resolve() == current.resolve():
            name = self._start(current, args.tracker, is_again=args.again, is_told=True)
            self.notebook.print_line(
                f"nbddp: this run is being published to {args.tracker.kind}, from its beginning to "
                f"its end: {describe_place(args.tracker, name)}"
            )
            return
        if summarize(path).is_live:
            raise RequestError(
                f"run {path.name} is going on in another kernel: publish it there, or when it has "
                "ended"
            )
        name = name_in_tracker(path, args.tracker.kind, is_again=args.again)
        done = Publication(args.tracker, path, name).wait()
        published = f"{plural(done['steps'], 'step')} published to {args.tracker.kind}"
        self.notebook.print_line(f"nbddp: {published}: {done['where']}")

    def _start(self, folder: Path, to: Target, *, is_again: bool, is_told: bool = False) -> str:
        """Start to publish the current run; return the name of the run in the tracker.

        Args:
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
        notify = self.notebook.notifier()
        if is_told and to.kind != "wandb":
            notify = _except_place(notify, to.kind)
        self._publications[folder, to.kind] = Publication(to, folder, name, notify)
        return name


def _except_place(notify: Callable[[str], None], kind: str) -> Callable[[str], None]:
    """Return a function that passes each text on but the place in the tracker."""

    def notify_other(text: str) -> None:
        if not text.startswith(f"published to {kind}: "):
            notify(text)

    return notify_other
