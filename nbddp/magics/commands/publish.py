"""``%ddp publish``: send a run to a tracker."""

from __future__ import annotations

from pathlib import Path

from nbddp.errors import RequestError
from nbddp.extensions.publish.publication import Publication
from nbddp.extensions.publish.publisher import name_in_tracker
from nbddp.extensions.publish.tracker import describe_place
from nbddp.extensions.runs.find import find_run
from nbddp.extensions.runs.summary import summarize
from nbddp.formatting import plural
from nbddp.magics.command_arguments import PublishArguments
from nbddp.magics.notebook_state import NotebookState


def publish_run(notebook: NotebookState, args: PublishArguments) -> None:
    """Publish a finished run, or start to publish the current run of this notebook.

    Raises:
        RequestError: the run does not exist, it is already published, or the tracker refuses it.
    """
    current = notebook.current_run
    path = find_run(args.run, Path.cwd(), current=current)
    if current is not None and path.resolve() == current.resolve():
        session = notebook.group.scripts.active_session
        name = notebook.publishing.start(
            session, current, args.tracker, is_again=args.again, is_told=True
        )
        notebook.presenter.print_line(
            f"nbddp: this run is being published to {args.tracker.kind}, from its beginning to its "
            f"end: {describe_place(args.tracker, name)}"
        )
        return
    if summarize(path).is_live:
        raise RequestError(
            f"run {path.name} is going on in another kernel: publish it there, or when it has ended"
        )
    name = name_in_tracker(path, args.tracker.kind, is_again=args.again)
    done = Publication(args.tracker, path, name).wait()
    published = f"{plural(done['steps'], 'step')} published to {args.tracker.kind}"
    notebook.presenter.print_line(f"nbddp: {published}: {done['where']}")
